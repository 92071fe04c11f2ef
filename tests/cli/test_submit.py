"""`mesh-cp submit`: a mistake is told before the queue, a dry run writes nothing, no run's file is overwritten."""

import os
import re
from pathlib import Path

import pytest

from megatron_mesh_cp.cli.main import main

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
CPU = ["--nodes", "4", "--gpus-per-node", "0", "--nproc-per-node", "1"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A working folder, a data set as far as the launcher looks, and an sbatch that notes what it is given."""
    for end in (".bin", ".idx"):
        (tmp_path / f"text{end}").touch()
    monkeypatch.setenv("MESH_CP_DATA", str(tmp_path / "text"))
    monkeypatch.delenv("RUN_DIR", raising=False)
    for folder in ("cwd", "bin"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    sbatch = tmp_path / "bin" / "sbatch"
    lines = (
        "#!/bin/bash",
        f'echo "$@" >>{tmp_path}/asked',
        f"[[ ! -e {tmp_path}/closed ]] || exec bash {tmp_path}/closed",
        'echo "17;cluster"',
    )
    sbatch.write_text("\n".join(lines) + "\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    return tmp_path


def submit(*words) -> int:
    return main(["submit", str(CONFIG), *map(str, words)])


def test_a_dry_run_prints_the_job_file_and_writes_nothing(site, capsys):
    more = ["--time", "8:00:00", "--account", "physics", "--sbatch=--qos=high", "--dry-run", "--lr", "1e-2"]
    assert submit(*CPU, *more) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --time=8:00:00",
        "#SBATCH --account=physics",
        "#SBATCH --qos=high",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
        f"#SBATCH --output={Path.cwd()}/runs/quickstart-001/logs/job-%j.log",
        f"export RUN_DIR={Path.cwd()}/runs/quickstart-001",
        "export NPROC_PER_NODE=1",
    ):
        assert line in lines
    assert not any("gpus" in line for line in lines)
    assert re.fullmatch(r"exec bash \S+/scripts/slurm/pretrain.sbatch \S+/configs/quickstart.yaml --lr 1e-2", lines[-1])
    assert "ok: 4 ranks on 4 nodes x 1" in said.err
    assert not any(Path.cwd().iterdir())
    assert not (site / "asked").exists()


def test_submits_a_new_file_in_a_new_folder_each_time(site, capsys):
    for number in (1, 2):
        assert submit(*CPU) == 0
        file = Path.cwd() / "runs" / f"quickstart-00{number}" / "quickstart.sbatch"
        assert f"submitted job 17: {file}" in capsys.readouterr().out
        assert file.exists()
        assert (file.parent / "logs").is_dir()  # SLURM does not make the folder of a log
    assert (site / "asked").read_text().count("--parsable") == 2


def test_paths_with_spaces_and_percent_signs_are_quoted(site, capsys):
    assert submit(*CPU, "--run-dir", "a 50% run", "--dry-run") == 0
    out = capsys.readouterr().out
    assert f"#SBATCH '--output={Path.cwd()}/a 50%% run/logs/job-%j.log'" in out
    assert f"export RUN_DIR='{Path.cwd()}/a 50% run'" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "4"], "--nnodes 4 x --nproc-per-node 8 = 32 ranks but RANKS: 4"),
        (["--nodes", "0"], "--nodes 0"),
        (["--nodes", "4", "--gpus-per-node", "0"], "--gpus-per-node 0 without --nproc-per-node"),
        ([*CPU, "--seq-lenght", "512"], "unknown flag --seq-lenght; did you mean --seq-length?"),
        ([*CPU, "--node", "2"], "unknown flag --node"),
        ([*CPU, "--job-name", "a/b"], "--job-name 'a/b'"),
        ([*CPU, "--container-mounts", "/x:/x"], "without --container"),
        ([*CPU, "--data-path", "/nope"], "--data-path /nope"),
        ([], "--nodes"),
    ],
)
def test_rejects_what_is_wrong_before_the_queue(site, capsys, words, says):
    assert submit(*words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not any(Path.cwd().iterdir())
    assert not (site / "asked").exists()


def test_without_sbatch_nothing_is_written(site, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(site / "cwd"))
    assert submit(*CPU) == 2
    assert "no sbatch on PATH" in capsys.readouterr().err
    assert not any(Path.cwd().iterdir())


def test_a_job_that_sbatch_refuses_leaves_nothing_behind(site, capsys):
    (site / "closed").write_text('echo "sbatch: error: invalid partition" >&2; exit 1')
    assert submit(*CPU, "--run-dir", "run") == 2
    assert "sbatch refuses the job: sbatch: error: invalid partition" in capsys.readouterr().err
    assert not any(Path.cwd().iterdir())


def test_a_folder_in_use_is_taken_only_to_resume_the_run_in_it(site, capsys):
    kept = Path("run", "checkpoints")
    assert submit(*CPU, "--run-dir", "run", "--save", kept, "--save-interval", "10") == 0
    (kept / "iter_0000010").mkdir(parents=True)
    (kept / "latest_checkpointed_iteration.txt").write_text("10")
    first = Path("run", "quickstart.sbatch").read_text()
    capsys.readouterr()
    for flags in ([], ["--save", "else", "--load", "else", "--save-interval", "10"]):
        assert submit(*CPU, "--run-dir", "run", *flags) == 2
        assert "run: the folder is in use" in capsys.readouterr().err
    assert submit(*CPU, "--run-dir", "run", "--save", kept, "--load", kept, "--save-interval", "10") == 0
    assert Path("run", "quickstart.sbatch").read_text() == first
    assert "--load" in Path("run", "quickstart-2.sbatch").read_text()
