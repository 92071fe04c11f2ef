"""Training as SLURM jobs on four nodes: the losses of one machine, also when it is told to end or loses a node."""

from __future__ import annotations

import re
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
SCRIPT = HOME / "scripts" / "slurm" / "pretrain.sbatch"
SMOKE = HOME / "scripts" / "slurm" / "smoke.sbatch"
_STARTS_WITHIN = 240  # seconds until a start prints its first iteration: 3 Pythons on each of 4 nodes, on 2 cores


def same_losses(got, reference, since: int = 1) -> None:
    """A start from iteration `since` repeats the reference. Its second line, if it resumes, holds the mean of two."""
    want = {line[0]: line for line in reference}
    assert [line[0] for line in got] == list(range(since, since + len(got)))
    for place, line in enumerate(got):
        if since == 1 or place != 1:
            assert line == want[line[0]]


def job_log(folder: Path, job: str) -> str:
    """What the script of a job has said; the name before the number is the job's, or `job` where `submit` gave it."""
    logs = (folder / f"{name}-{job}.log" for name in ("job", "mesh-cp", "mesh-cp-smoke"))
    return "".join(log.read_text() for log in logs if log.exists())


def submitted(cluster, inputs, folder: Path, *words: str) -> str:
    """`mesh-cp submit` on the hub; the job id."""
    command = [f"{inputs['MESH_CP_VENV']}/bin/python", "-m", "megatron_mesh_cp.cli.main", "submit", inputs["RECIPE"]]
    size = ["--nodes", "4", "--gpus-per-node", "0", "--nproc-per-node", "1", "--run-dir", folder / "run"]
    done = cluster.run(*command, *size, *words, cwd=folder, env={**inputs, "PYTHONPATH": str(HOME)}, timeout=120)
    assert done.returncode == 0, done.stderr
    return re.search(r"submitted job (\d+)", done.stdout)[1]


def test_a_job_told_to_end_saves_and_goes_on_as_if_nothing_had_been(cluster, inputs, reference, starts, tmp_path):
    job = submitted(cluster, inputs, tmp_path)
    run = tmp_path / "run"
    assert (run / "recipe.sbatch").exists()
    cluster.wait_for(lambda: starts(run).reached(0) >= 2, _STARTS_WITHIN, "iterations of the first start")
    cluster.run("scancel", "-b", "-s", "USR1", job)
    ended = cluster.ended(job, _STARTS_WITHIN)
    said, logged = job_log(run / "logs", job), starts(run)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert "Signal" not in said.replace("SIGUSR1", "")
    for rank, texts in logged.texts.items():
        assert [text.split("\n")[0].split(", 20")[0] for text in texts] == [
            f"=== job {job}, start {start}, node {rank} (n{rank + 1})" for start in (0, 1)
        ]
        assert "SIGUSR1: the ranks are told to save and end" in texts[0]

    first, second = logged.iterations
    last = first[-1][0]
    assert 2 <= last < reference[-1][0]
    assert f"ended early: iteration {last} of" in said
    assert f"--resume: --load {run}/checkpoints" in logged.texts[0][1]
    same_losses(first, reference)
    same_losses(second, reference, since=last + 1)
    assert second[-1] == reference[-1]


def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint(cluster, inputs, reference, starts, tmp_path):
    job = cluster.submit("-N4", SCRIPT, inputs["RECIPE"], cwd=tmp_path, env=inputs)
    run = tmp_path / "runs" / f"mesh-cp-{job}"
    cluster.wait_for(lambda: starts(run).reached(0) >= 9, _STARTS_WITHIN, "iterations of the first start")
    cluster.power_off("n3")
    try:
        cluster.wait_for(lambda: "waiting for SLURM to notice" in job_log(tmp_path, job), 60, "the word of the script")
        cluster.wait_for(lambda: cluster.job(job).get("Restarts") == "1", 60, "the job to be back in the queue")
    finally:
        cluster.power_on("n3")
    ended = cluster.ended(job, _STARTS_WITHIN)
    said, logged = job_log(tmp_path, job), starts(run)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert re.search(r"no answer from n3: waiting for SLURM", said)
    first, second = logged.iterations
    assert first[-1][0] < reference[-1][0]
    same_losses(first, reference)
    assert second[0][0] in (9, 17)  # after a checkpoint
    same_losses(second, reference, since=second[0][0])
    assert second[-1] == reference[-1]


def test_a_wrong_job_fails_at_once_with_the_reason_in_its_log(cluster, inputs, tmp_path):
    wrong = {
        "unknown flag --seq-lenght; did you mean --seq-length?": (["--seq-lenght", "64"], {}),
        "--nnodes 1 x --nproc-per-node 3 = 3 ranks is not divisible by": ([], {"NPROC_PER_NODE": "3"}),
        f"--data-path {tmp_path}/nothing: no file {tmp_path}/nothing.bin": (["--data-path", f"{tmp_path}/nothing"], {}),
        "MESH_CP_HOME=/nowhere holds no scripts/slurm/job.sh": ([], {"MESH_CP_HOME": "/nowhere"}),
        "MASTER_PORT=6818 is taken on n": ([], {"MASTER_PORT": "6818"}),  # slurmd's own
        "MASTER_PORT=http: must be a port number": ([], {"MASTER_PORT": "http"}),
    }
    other = cluster.submit("--hold", "-N1", "--wrap", "true", cwd=tmp_path)  # one that is not over
    (tmp_path / "used" / "logs").mkdir(parents=True)
    (tmp_path / "used" / "logs" / "job-id").write_text(other)
    wrong[f"job {other} uses RUN_DIR={tmp_path}/used and is not over"] = ([], {"RUN_DIR": f"{tmp_path}/used"})
    jobs = {
        cluster.submit(
            "-N1", SCRIPT, inputs["RECIPE"], *flags, cwd=tmp_path, env={"NPROC_PER_NODE": "4", **inputs, **env}
        ): reason
        for reason, (flags, env) in wrong.items()
    }
    for job, reason in jobs.items():
        ended = cluster.ended(job, 120)
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
        assert reason in job_log(tmp_path, job)
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "used" / "logs" / "job-id").read_text() == other
    cluster.run("scancel", other)


def test_smoke_passes_on_all_nodes_and_names_a_broken_one(cluster, inputs, tmp_path):
    job = cluster.submit("-N4", SMOKE, cwd=tmp_path, env=inputs)
    ended = cluster.ended(job, 240)
    said = job_log(tmp_path, job)
    assert ended["JobState"] == "COMPLETED", said
    for name in cluster.names:
        assert re.search(rf"  doctor, {name}: {name}: \d+ ok", said)
    assert re.search(r"^ *2x2 ", said, re.MULTILINE)
    assert "attention across 4 nodes: passed" in said
    assert "all passed" in said

    broken = tmp_path / "venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text(
        f'#!/bin/bash\n[[ $(hostname) != n3 ]] || {{ echo "no torch here" >&2; exit 1; }}\n'
        f'exec {inputs["MESH_CP_VENV"]}/bin/python "$@"\n'
    )
    broken.chmod(0o755)
    job = cluster.submit("-N4", SMOKE, cwd=tmp_path, env={**inputs, "MESH_CP_VENV": str(tmp_path / "venv")})
    ended = cluster.ended(job, 240)
    said = job_log(tmp_path, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert "doctor, n3: no torch here" in said
    assert "mesh-cp: error: failed: doctor on n3\n" in said
