"""`mesh-cp calibrate`: what it writes loads as a cluster, bad input starts no rank, no file is lost.

No test looks at a time: what 16 tokens take says nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from cli_checks import assert_refused

from megatron_mesh_cp.cli import calibrate, calibrate_ranks
from megatron_mesh_cp.cli.calibrate import cluster_text, fit_link, rates
from megatron_mesh_cp.cli.calibrate_ranks import Job, Result
from megatron_mesh_cp.cli.gloo_ranks import RanksError
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cluster import load_cluster, parse_cluster

KINDS = ("forward_full", "forward_causal", "backward_full", "backward_causal")
JOB = Job(ranks=4, heads=8, head_dim=64, lengths=(128, 256), dtype=torch.float32, repeats=3, limit=60.0)
# 100 us and 2 GB/s; 10 and 20 GFLOP/s forward, half of that backward, half of either under a mask.
FORWARD = (4 * 128**2 * 512 / 10e9, 4 * 256**2 * 512 / 20e9)
RESULT = Result(
    messages={size: 100e-6 + size / 2e9 for size in calibrate_ranks.MESSAGES},
    calls={
        ("forward", "full"): FORWARD,
        ("forward", "causal"): FORWARD,
        ("backward", "full"): tuple(5 * x for x in FORWARD),
        ("backward", "causal"): tuple(5 * x for x in FORWARD),
    },
)


def test_a_small_run_writes_a_cluster_that_loads_and_prints_json_alone(tmp_path):
    path = tmp_path / "here.yaml"
    argv = "--ranks 2 --heads 2 --head-dim 8 --lengths 16,8 --dtype bfloat16 --repeats 2 --json"
    command = [sys.executable, "-m", "megatron_mesh_cp.cli.main", "calibrate", *argv.split(), "--output", str(path)]
    for _ in range(3):  # a machine that is busy at the wrong moments is told so, and may measure again
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if "measure again" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1

    cluster = load_cluster(str(path))
    assert (cluster.name, said["cluster"], said["file"]) == ("here", "here", str(path))
    assert cluster.kernel.lengths == (8, 16)
    assert said["kernel"]["lengths"] == [8, 16]
    for kind in KINDS:
        assert getattr(cluster.kernel, kind) == pytest.approx(said["kernel"][kind], rel=0.01)
        assert min(said["kernel"][kind]) > 0
    for link in (cluster.intra, cluster.inter):
        assert (link.bandwidth, link.latency) == pytest.approx((said["bandwidth"], said["latency"]), rel=0.01)
    assert [row["bytes"] for row in said["messages"]] == list(calibrate_ranks.MESSAGES)
    assert all(row["seconds"] > 0 for row in said["messages"])
    assert (said["ranks"], said["heads"], said["head_dim"], said["dtype"]) == (2, 2, 8, "bfloat16")
    source = yaml.safe_load(path.read_text())["kernel"]["source"]
    assert "--ranks 2 --heads 2 --head-dim 8 --lengths 8,16 --dtype bfloat16 --repeats 2`" in source


@pytest.fixture
def measured(monkeypatch):
    """`mesh-cp calibrate` with RESULT for what the ranks measure."""
    monkeypatch.setattr(calibrate_ranks, "run_job", lambda job: RESULT)


def test_the_table_shows_the_fit_and_every_length(measured, tmp_path, capsys):
    path = tmp_path / "new.yaml"
    argv = ["--output", str(path), "--lengths", "128,256", "--name", "mine"]
    assert main(["calibrate", *argv]) == 0
    out = capsys.readouterr().out
    for word in ("latency 100 us", "bandwidth 2 GB/s", "4 gloo ranks", "4194304", "128", "20", "backward causal"):
        assert word in out
    assert str(path) in out
    assert load_cluster(str(path)).name == "mine"


def test_slow_links_and_fast_kernels_are_readable_too():
    slow = replace(RESULT, messages={size: 2880e-6 + size / 2e6 for size in calibrate_ranks.MESSAGES})
    heading, table = calibrate.link_table(JOB, slow)
    assert "latency 2880 us, bandwidth 0.002 GB/s" in heading
    assert all(float(cell) > 0 for cell in table.columns[3].cells)
    fast = replace(RESULT, calls={kind: tuple(x / 123 for x in calls) for kind, calls in RESULT.calls.items()})
    assert "1230" in list(calibrate.kernel_table(JOB, fast)[1].columns[1].cells)


def test_an_existing_file_is_kept_unless_forced(measured, tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("precious")
    argv = ["calibrate", "--output", str(path), "--lengths", "128,256"]
    assert main(argv) == 2
    assert path.read_text() == "precious"
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--output {path}: is there already" in err
    assert "--force" in err
    assert main([*argv, "--force"]) == 0
    assert load_cluster(str(path)).name == "old"


def test_a_file_that_appears_meanwhile_is_kept_too(tmp_path, monkeypatch, capsys):
    path = tmp_path / "late.yaml"

    def run_job(job):
        path.write_text("precious")
        return RESULT

    monkeypatch.setattr(calibrate_ranks, "run_job", run_job)
    assert main(["calibrate", "--output", str(path), "--lengths", "128,256"]) == 2
    assert path.read_text() == "precious"
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", ["--output"]),
        ("--output gone/new.yaml", ["--output gone/new.yaml", "directory that is there"]),
        ("--output .", ["--output .", "must end in .yaml or .yml"]),
        ("--output -", ["--output -:", "must end in .yaml or .yml"]),
        ("--output new.json", ["--output new.json", "must end in .yaml or .yml"]),
        ("--output ./gone//new.yml", ["--output ./gone//new.yml", "directory that is there"]),
        ("--output new.yaml --ranks 257", ["--ranks 257", "256"]),
        ("--output new.yaml --ranks two", ["--ranks two: must be a positive whole number"]),
        ("--output new.yaml --ranks 1", ["--ranks 1", "at least 2"]),
        ("--output new.yaml --heads 0", ["--heads 0"]),
        ("--output new.yaml --head-dim -1", ["--head-dim -1"]),
        ("--output new.yaml --repeats 0", ["--repeats 0"]),
        ("--output new.yaml --time-limit nan", ["--time-limit nan"]),
        ("--output new.yaml --lengths 128,0", ["--lengths '128,0'", "128,256,512"]),
        ("--output new.yaml --lengths 1k", ["--lengths '1k'"]),
        ("--output new.yaml --lengths ,", ["--lengths ','"]),
        ("--output new.yaml --dtype int8", ["--dtype", "int8"]),
        ("--output new.yaml --colour", ["--colour"]),
    ],
)
def test_rejects_bad_input_before_a_rank_starts(argv, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate_ranks, "run_job", lambda job: pytest.fail("a rank would have started"))
    assert main(["calibrate", *argv.split(), "--json"]) == 2
    assert_refused(capsys, says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (replace(RESULT, calls={k: (1e-9, 1e-9) for k in RESULT.calls}), "above peak_tflops 1"),
        (replace(RESULT, messages={4096: 0.02, 4194304: 0.01}), "measure again"),
    ],
)
def test_writes_nothing_that_cannot_be_true(result, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate_ranks, "run_job", lambda job: result)
    assert main(["calibrate", "--output", str(tmp_path / "new.yaml"), "--lengths", "128,256"]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_fail_are_told_and_write_nothing(tmp_path, monkeypatch, capsys):
    def run_job(job):
        raise RanksError("rank 1 failed")

    monkeypatch.setattr(calibrate_ranks, "run_job", run_job)
    assert main(["calibrate", "--output", str(tmp_path / "new.yaml")]) == 1
    assert capsys.readouterr().err == "mesh-cp: calibrate: rank 1 failed\n"
    assert list(tmp_path.iterdir()) == []


def test_the_fit_finds_latency_and_bandwidth_and_bends_to_no_single_size():
    assert fit_link(RESULT.messages) == pytest.approx((100e-6, 2e9))
    noisy = {size: seconds * (1.1 if k % 2 else 0.9) for k, (size, seconds) in enumerate(RESULT.messages.items())}
    latency, bandwidth = fit_link(noisy)
    assert latency == pytest.approx(100e-6, rel=0.15)
    assert bandwidth == pytest.approx(2e9, rel=0.2)


def test_rates_are_flops_of_the_live_area_over_seconds():
    by_kind = rates(JOB, RESULT)
    assert by_kind["forward_full"] == pytest.approx([10e9, 20e9])
    assert by_kind["forward_causal"] == pytest.approx([5e9, 10e9])
    assert by_kind["backward_full"] == pytest.approx([5e9, 10e9])
    assert by_kind["backward_causal"] == pytest.approx([2.5e9, 5e9])


def test_the_file_says_how_it_was_measured_and_keeps_small_rates_numbers():
    tiny = replace(RESULT, calls={k: tuple(x * 1e6 for x in v) for k, v in RESULT.calls.items()})
    text = cluster_text("100", JOB, tiny)
    cluster = parse_cluster(text)  # 1e-08 would be a text in YAML
    assert cluster.name == "100"
    assert cluster.kernel.forward_full == pytest.approx((10e3, 20e3))
    assert cluster.gpus_per_node >= JOB.ranks
    assert cluster.intra == cluster.inter
    value = yaml.safe_load(text)
    for source in (value["links"]["intra"]["source"], value["kernel"]["source"]):
        assert "measured on 20" in source
        assert "`mesh-cp calibrate --ranks 4 --heads 8 --head-dim 64 --lengths 128,256 --dtype float32" in source
        assert f"on {calibrate.cores()} cores" in source
    assert value["links"]["inter"]["source"].startswith("derived: as intra")
