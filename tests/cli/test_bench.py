"""`mesh-cp bench`: measured bytes are those of the cost model, bad input starts no rank, nonsense is refused.

No test looks at a time: what a bench of 64 tokens takes says nothing.
"""

import io
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import active_children

import psutil
import pytest
import torch
from cli_checks import assert_refused
from rich.console import Console

from megatron_mesh_cp.cli import bench, bench_ranks
from megatron_mesh_cp.cli.bench_ranks import Job, Measured, Result, run_job
from megatron_mesh_cp.cli.gloo_ranks import RanksError
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.cost import AttentionShape, mesh_bytes
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.simulate import simulate
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import costs_for

JOB = Job(
    ranks=4,
    tiles=(TileShape(1, 4), TileShape(2, 2)),
    seq_len=4096,
    heads=8,
    kv_heads=8,
    head_dim=64,
    batch=1,
    dtype=torch.float32,
    causal=True,
    exchange="direct",
    kernel="auto",
    repeats=1,
    limit=60.0,
)
SANE = Measured(seconds=1.0, cpu=2.0, error=1e-6, waited=0.1, bytes_forward=1000, bytes_backward=2000)


def bytes_of(tile: list[int], direction: Direction, shape: AttentionShape) -> int:
    return sum(mesh_bytes(TileShape(*tile), direction, shape).values())


@pytest.mark.parametrize(
    "more",
    [[], ["--full", "--exchange", "shift", "--kernel", "reference", "--cluster", "cpu-gloo"]],
    ids=["causal", "full, planned for a cluster"],
)
def test_json_holds_measured_bytes_and_errors_and_stdout_nothing_else(more):
    argv = "--ranks 4 --tiles 1x4,2x2 --seq-len 64 --heads 4 --kv-heads 2 --head-dim 8 --batch 2 --repeats 1 --json"
    command = [sys.executable, "-m", "megatron_mesh_cp.cli.main", "bench", *argv.split(), "--dtype", "float64", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1

    assert [row["tile"] for row in said["rows"]] == [[1, 4], [2, 2]]
    shape = AttentionShape(64 // 4, 2, 4, 2, 8, 8, item_bytes=8, stat_bytes=8)
    for row in said["rows"]:
        assert row["bytes_forward"] == bytes_of(row["tile"], Direction.FORWARD, shape)
        assert row["bytes_backward"] == bytes_of(row["tile"], Direction.BACKWARD, shape)
        assert 0 <= row["max_error"] < 1e-12
        assert row["seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["cpu_ratio"] == pytest.approx(row["cpu_seconds"] / said["single"]["cpu_seconds"])
        assert row["wait_seconds"] >= 0
    assert said["rows"][0]["reduction"] == 0
    assert said["single"]["seconds"] > 0
    assert (said["ranks"], said["seq_len"], said["dtype"], said["causal"]) == (4, 64, "float64", not more)
    assert (said["heads"], said["kv_heads"], said["head_dim"], said["batch"]) == (4, 2, 8, 2)


def test_the_simulated_time_is_beside_the_measured_one(capsys, monkeypatch):
    exact = replace(SANE, error=0.0)
    jobs: list[Job] = []
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: jobs.append(job) or Result(exact, (exact, exact)))
    argv = ["bench", "--cluster", "h100-ndr", "--dtype", "float64", "--full"]
    assert main([*argv, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cluster"] == "h100-ndr"
    shape = AttentionShape(1024, 1, 8, 8, 64, item_bytes=8, stat_bytes=8)
    cluster = load_cluster("h100-ndr")
    for row, costs in zip(said["rows"], jobs[0].costs, strict=True):
        tile = TileShape(*row["tile"])
        assert costs == {d: costs_for(cluster, shape, tile, d, causal=False) for d in Direction}
        plans = [make_plan(tile, d, "direct", costs[d]) for d in Direction]
        want = [simulate(plan, cluster, shape, causal=False).seconds for plan in plans]
        assert row["predicted_seconds"] == pytest.approx(sum(want))
    assert main(argv) == 0
    assert "simulated" in capsys.readouterr().out
    assert main(["bench", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cluster"] is None
    assert {row["predicted_seconds"] for row in said["rows"]} == {None}


def test_tokens_may_be_in_thousands(monkeypatch, capsys):
    jobs: list[Job] = []
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: jobs.append(job) or Result(SANE, (SANE, SANE)))
    assert main(["bench", "--seq-len", "2k", "--json"]) == 0
    assert main(["bench", "--json"]) == 0
    assert [job.seq_len for job in jobs] == [2048, 4096]


@pytest.mark.parametrize("option", ["--trace", "--cluster"])
def test_empty_names_are_refused(option, monkeypatch, capsys):
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: pytest.fail("a rank would have started"))
    assert main(["bench", option, ""]) == 2
    assert capsys.readouterr().err.startswith(f"mesh-cp: error: {option} ")


def test_the_table_names_every_tile_and_the_single_process(capsys):
    argv = "--ranks 2 --tiles 2x1,1x2 --seq-len 64 --heads 2 --head-dim 8 --dtype bfloat16 --repeats 1"
    assert main(["bench", *argv.split()]) == 0
    out = capsys.readouterr().out
    for word in ("2x1", "1x2", "single", "bfloat16", "causal", "64 tokens"):
        assert word in out


def test_one_rank_is_a_tile_too(capsys):
    """A tile of one rank sends nothing, and that is no nonsense."""
    argv = "--ranks 1 --tiles 1x1 --seq-len 64 --heads 2 --head-dim 8 --repeats 1 --json"
    assert main(["bench", *argv.split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["bytes_forward"], row["bytes_backward"], row["reduction"]) == (0, 0, None)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--ranks 4 --tiles 1x4,2x4", ["--ranks 4", "--tiles 2x4 = 8", "try"]),
        ("--tiles 2by2", ["--tiles '2by2'", "AxB"]),
        ("--tiles 1x4,1x4", ["--tiles", "1x4 is there 2 times"]),
        ("--tiles ,", ["--tiles", "AxB"]),
        ("--seq-len 100", ["--seq-len 100", "--ranks 4", "= 8", "96 or 104"]),
        ("--heads 8 --kv-heads 3", ["--heads 8", "--kv-heads 3", "1, 2, 4, 8"]),
        ("--kernel te", ["--kernel te", "runs on CUDA tensors"]),
        ("--kernel magic", ["--kernel 'magic'", "sdpa"]),
        ("--exchange post", ["post", "direct"]),
        ("--exchange auto", ["mesh-cp: error: --exchange 'auto'", "direct, shift"]),
        ("--ranks 257 --tiles 1x257", ["--ranks 257", "256"]),
        ("--heads abc", ["--heads abc: must be a positive whole number"]),
        ("--seq-len 4g", ["--seq-len 4g", "128k"]),
        ("--dtype int8", ["--dtype", "int8"]),
        ("--ranks 0", ["--ranks 0"]),
        ("--repeats 0", ["--repeats 0"]),
        ("--head-dim -1", ["--head-dim -1"]),
        ("--time-limit 0", ["--time-limit 0"]),
        ("--time-limit nan", ["--time-limit nan"]),
        ("--cluster h100-ndx", ["--cluster h100-ndx", "did you mean h100-ndr"]),
        ("--colour", ["--colour"]),
    ],
)
def test_rejects_bad_input_before_a_rank_starts(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: pytest.fail("a rank would have started"))
    assert main(["bench", *argv.split(), "--json"]) == 2
    assert_refused(capsys, says)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (replace(SANE, bytes_forward=0), "communication was off"),
        (replace(SANE, bytes_backward=0), "communication was off"),
        (replace(SANE, seconds=1e-6), "TFLOP/s a core can do"),
        (replace(SANE, seconds=0.0), "TFLOP/s a core can do"),
        (replace(SANE, error=math.nan), "the attention is wrong"),
        (replace(SANE, error=0.7), "the attention is wrong"),
    ],
)
def test_refuses_results_that_cannot_be_true(measured, says, capsys, monkeypatch):
    """Guards Megatron-Bridge PR 2665, where a bench without communication reported 1937 TFLOP/s."""
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: Result(SANE, (SANE, measured)))
    assert main(["bench", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "tile 2x2" in err
    assert says in err


def test_tflops_are_those_of_the_attention():
    # forward 4 s^2 h d, backward 2.5 times that: 14 * 4096^2 * 8 * 64 = 120 GFLOP without a mask
    assert bench.tflops(replace(JOB, causal=False), 1.0) == pytest.approx(0.120, rel=0.01)
    assert bench.tflops(JOB, 1.0) == pytest.approx(0.060, rel=0.01)


def test_reduction_is_against_the_measured_ring_only():
    less = replace(SANE, bytes_forward=600, bytes_backward=900)
    with_ring = bench._row(JOB, TileShape(2, 2), less, SANE, SANE)
    without = bench._row(JOB, TileShape(2, 2), less, SANE, None)
    assert (with_ring["reduction"], without["reduction"]) == (0.5, None)
    settings = {"ranks": 4, "cores": 2, "seq_len": 64, "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64}
    settings |= {"dtype": "float32", "causal": True, "exchange": "direct", "repeats": 3}
    single = {"seconds": 1.0, "cpu_seconds": 1.0, "max_error": 0.0}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bench.table([with_ring], single, settings))
    assert "-50.0%" in console.export_text()


def test_a_rank_that_fails_is_named_and_none_is_left():
    """A kernel that no rank can build stands for any failure in a rank; the check before the start is skipped."""
    before = set(active_children())
    with pytest.raises(RanksError, match=r"(?s)rank \d failed.*kernel te: it runs on CUDA tensors"):
        run_job(replace(JOB, seq_len=64, kernel="te"))
    assert set(active_children()) <= before


def test_ranks_that_hang_end_at_the_time_limit(capsys):
    before = set(active_children())
    assert main(["bench", "--seq-len", "4096", "--repeats", "500", "--time-limit", "6"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--time-limit 6 s" in err
    assert set(active_children()) <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_rank(number):
    command = [sys.executable, "-m", "megatron_mesh_cp.cli.main", "bench", "--seq-len", "4096", "--repeats", "500"]
    # A job in the background of a script, as CI may be, ignores SIGINT, and its children would too.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while len(family.children(recursive=True)) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        children = family.children(recursive=True)  # four ranks, the fork server and its resource tracker
        assert len(children) >= 6
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "--join: this process is not one of a world"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "--join: MASTER_ADDR, MASTER_PORT not set"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "MASTER_ADDR": "h"}, "--join: MASTER_PORT not set"),
    ],
)
def test_join_without_a_world_says_what_is_missing(environ, says):
    from megatron_mesh_cp.cli.gloo_ranks import find_place

    with pytest.raises(ValueError) as error:
        find_place(environ)
    assert says in str(error.value)


@pytest.mark.timeout(120)
def test_ranks_that_torchrun_has_started_join_and_the_first_one_prints(tmp_path):
    from launch import free_port

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    bench = ["-m", "megatron_mesh_cp.cli.main", "bench", "--join", "--seq-len", "128", "--heads", "2", "--repeats", "1"]
    done = subprocess.run([*command, *bench, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ranks"], result["joined"]) == (2, True)
    assert [row["tile"] for row in result["rows"]] == [[1, 2]]
    assert all(row["bytes_forward"] > 0 and row["max_error"] < 1e-3 for row in result["rows"])
