"""Traces: the schema that Perfetto reads, and the spans of the simulator in it."""

import json
from itertools import pairwise

import pytest

from megatron_mesh_cp.cli import bench_ranks
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.cost import AttentionShape
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.simulate import Span, simulate
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.trace import Run, chrome_trace, lanes
from megatron_mesh_cp.tune import evaluate


def traced(tmp_path, capsys, argv: str) -> tuple[list[dict], dict]:
    path = tmp_path / "trace.json"
    assert main(["plan", *argv.split(), "--trace", str(path), "--json"]) == 0
    return json.loads(path.read_text())["traceEvents"], json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("exchange", ["direct", "shift"])
def test_events_have_the_form_that_perfetto_reads(exchange, tmp_path, capsys):
    argv = f"--cp 16 --tile 4x4 --heads 8 --seq-len 64k --exchange {exchange} --rank 9"
    events, plan = traced(tmp_path, capsys, argv)
    metadata = [e for e in events if e["ph"] == "M"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(metadata) + len(spans) == len(events)
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert names == {rank: f"CP rank {rank}" for rank in range(8, 16)}  # the node of rank 9
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    for event in spans:
        assert {"name", "ph", "ts", "dur", "pid", "tid"} <= set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert threads[event["pid"], event["tid"]].split()[0] == event["cat"].split(",")[0]
    assert {name.split(" 2")[0] for name in threads.values()} == {
        *("row in", "row out", "column in", "column out", "compute", "wait")
    }
    by_thread: dict[tuple[int, int], list[dict]] = {}
    for event in spans:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for found in by_thread.values():  # one after the other, else the viewer drops some
        found.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(found))
    last = max(e["ts"] + e["dur"] for e in spans)
    assert last == pytest.approx(1e3 * plan["time_ms"]["total"], rel=0.02)


def test_the_spans_are_those_of_the_simulator_forward_then_backward(tmp_path, capsys):
    argv = "--cp 4 --tile 2x2 --heads 8 --head-dim 64 --seq-len 4k --exchange direct --trace-ranks 3,1"
    events, _ = traced(tmp_path, capsys, argv)
    cluster, shape = load_cluster("h100-ndr"), AttentionShape(1024, 1, 8, 8, 64)
    want, start = [], 0.0
    for direction in Direction:
        candidate = evaluate(TileShape(2, 2), direction, "direct", shape, cluster)
        timeline = simulate(candidate.plan, cluster, shape, spans_of=(1, 3))
        want += [
            (1e6 * (start + s.start), 1e6 * (s.end - s.start), r, s.label) for r in (1, 3) for s in timeline.spans[r]
        ]
        start += timeline.seconds
    got = [(e["ts"], e["dur"], e["pid"], e["name"]) for e in events if e["ph"] == "X"]
    assert sorted(got) == sorted(want)
    assert {e["args"]["run"] for e in events if e["ph"] == "X"} == {"forward 2x2", "backward 2x2"}
    blocks = [e for e in events if e["name"].startswith("block")]
    assert len(blocks) == 2 * 2 * 4  # ranks, directions, blocks of a tile


def test_a_bench_traces_what_its_ranks_did(tmp_path, capsys):
    path = tmp_path / "bench.json"
    argv = "--ranks 4 --tiles 1x4,2x2,4x1 --seq-len 256 --heads 2 --head-dim 8 --repeats 2 --json"
    assert main(["bench", *argv.split(), "--trace", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"CP rank {rank}" for rank in range(4)}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["cat"].split(",")[0] for e in spans} == {"row", "column", "compute", "wait"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    runs = [[e for e in spans if e["args"]["run"] == f"tile {tile}"] for tile in ("1x4", "2x2", "4x1")]
    assert sum(map(len, runs)) == len(spans)
    end = 0.0
    for run in runs:
        assert min(e["ts"] for e in run) == pytest.approx(end)  # one tile after the other
        end = max(e["ts"] + e["dur"] for e in run)
        blocks = [(e["pid"], e["name"]) for e in run if e["name"].startswith("block")]
        assert len(blocks) == 2 * 16  # one repeat, forward and backward, 4 x 4 blocks
        assert len(set(blocks)) == 16
    assert not any(e["cat"].startswith("row") for e in runs[0])  # a ring has no row channel
    # The spans of all ranks are of one clock: they last no longer than the runs, of which these may be slow ones.
    assert end < 1e6 * 50 * sum(row["seconds"] for row in said["rows"])


@pytest.mark.parametrize("name", ["a.txt", "no/such/a.json"])
def test_a_bench_refuses_a_place_for_its_trace_before_a_rank_starts(name, capsys, monkeypatch):
    monkeypatch.setattr(bench_ranks, "run_job", lambda job: pytest.fail("a rank would have started"))
    assert main(["bench", "--trace", name]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"--trace {name}" in err


def test_transfers_side_by_side_get_lanes_of_their_own():
    spans = [
        Span("row", 0.0, 2.0, "Q 1 <- 1"),
        Span("row", 0.0, 1.0, "Q 0 -> 1"),
        Span("row", 1.0, 3.0, "Q 2 <- 2"),
        Span("row", 2.0, 4.0, "Q 3 <- 3"),
        Span("wait", 0.5, 1.0, "Q 1 <- 1"),
        Span("compute", 0.0, 0.5, "block (0, 0)"),
    ]
    found = lanes(spans)
    assert list(found) == ["row in", "row in 2", "row out", "compute", "wait"]
    assert [s.label for s in found["row in"]] == ["Q 1 <- 1", "Q 3 <- 3"]
    assert [s.label for s in found["row in 2"]] == ["Q 2 <- 2"]


def test_rounding_does_not_make_a_second_lane():
    third = 0.1 + 0.2  # a little more than 0.3
    assert list(lanes([Span("compute", 0.0, third, "a"), Span("compute", 0.3, 0.6, "b")])) == ["compute"]


def test_a_trace_of_nothing_is_a_trace():
    assert chrome_trace([Run("none", 0.0, {})])["traceEvents"] == []
