"""`mesh-cp tune`: the ranking is ordered and holds the simulator's figures; the choice is the planner's."""

import json

import pytest
from cli_checks import assert_refused

from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.cost import AttentionShape, mesh_bytes
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.simulate import simulate
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import decide, evaluate

BASE = "--cp 16 --heads 8 --kv-heads 2 --head-dim 64 --seq-len 8k"
SHAPE = AttentionShape(512, 1, 8, 2, 64)


def said(capsys, argv: str) -> dict:
    assert main(["tune", *argv.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    return json.loads(out)


def tile_of(row: dict) -> TileShape:
    return TileShape(*row["tile"], transposed=row["placement"] == "column")


def test_every_tile_placement_and_exchange_is_ranked(capsys):
    got = said(capsys, BASE + " --top 1000")
    for direction in Direction:
        rows = got["ranking"][direction.value]
        assert len(rows) == got["candidates"][direction.value] == 16  # 5 tiles, 3 of them in two placements, 2 patterns
        assert {tile_of(row) for row in rows} == {
            *(TileShape(a, 16 // a) for a in (1, 2, 4, 8, 16)),
            *(TileShape(a, 16 // a, transposed=True) for a in (2, 4, 8)),
        }
        fastest = min(row["time_ms"] for row in rows)
        assert rows[0]["time_ms"] <= 1.011 * fastest
        later = [row["time_ms"] for row in rows if row["time_ms"] > 1.011 * fastest]
        assert later == sorted(later)
        for row in rows:
            assert row["bytes"] == sum(mesh_bytes(tile_of(row), direction, SHAPE).values())
            assert row["peak_bytes"] > 0
            assert row["fits"] is True


def test_figures_are_those_of_the_simulator(capsys):
    got = said(capsys, BASE + " --top 1000 --exchange shift --full")
    row, *_ = rows = got["ranking"]["backward"]
    assert [row["exchange"] for row in rows] == ["shift"] * 8
    cluster = load_cluster("h100-ndr")
    candidate = evaluate(tile_of(row), Direction.BACKWARD, "shift", SHAPE, cluster, causal=False)
    timeline = simulate(candidate.plan, cluster, SHAPE, causal=False)
    assert row["time_ms"] == pytest.approx(1e3 * timeline.seconds)
    assert row["wait_ms"] == pytest.approx(1e3 * timeline.wait)
    assert row["bound_ms"] == pytest.approx(1e3 * candidate.bound)


@pytest.mark.parametrize("more", ["", "--tile-backward auto", "--tp 2 --cluster h800-hdr"])
def test_the_choice_is_the_planners_with_its_reason(more, capsys):
    """With one KV head for each query head, the backward alone would take another tile than both together."""
    got = said(capsys, f"--cp 16 --heads 8 --head-dim 64 --seq-len 8k {more}")["decision"]
    tp, name = (2, "h800-hdr") if "--tp" in more else (1, "h100-ndr")
    shape = AttentionShape(512, 1, 8 // tp, 8 // tp, 64)
    want = decide(16, shape, load_cluster(name), backward="auto" if "auto" in more else "same", tp=tp)
    for direction, candidate in (("forward", want.forward), ("backward", want.backward)):
        assert (tile_of(got[direction]), got[direction]["exchange"]) == (candidate.tile, candidate.exchange)
    assert (want.forward.tile == want.backward.tile) == ("auto" not in more)
    assert got["why"] == want.why
    assert got["time_ms"] == pytest.approx(got["forward"]["time_ms"] + got["backward"]["time_ms"])


def test_a_memory_limit_marks_what_does_not_fit_and_the_choice_fits(capsys):
    free = said(capsys, BASE + " --top 1000")
    peaks = sorted(row["peak_bytes"] for row in free["ranking"]["backward"])
    limit = peaks[len(peaks) // 2]
    got = said(capsys, f"{BASE} --top 1000 --memory-limit {limit}B")
    assert got["memory_limit"] == limit
    for rows in got["ranking"].values():
        assert all(row["fits"] == (row["peak_bytes"] <= limit) for row in rows)
    assert not all(row["fits"] for row in got["ranking"]["backward"])
    assert got["decision"]["forward"]["fits"]
    assert got["decision"]["backward"]["fits"]


def test_the_table_shows_the_best_and_the_choice(capsys):
    assert main(["tune", *BASE.split(), "--top", "2", "--memory-limit", "20GB"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where nobody looks
    for word in ("Forward, the best 2 of 16", "Backward, the best 2 of 16", "fits", "*", "Choice: forward ", "Why: "):
        assert word in out
    assert "h100-ndr" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--memory-limit 1KB", ["--memory-limit 1KB", "no tile fits", "smallest need", "would do"]),
        ("--memory-limit much", ["--memory-limit 'much'", "20GB"]),
        ("--top 0", ["--top 0", "at least 1"]),
        ("--top all", ["--top all: must be a positive whole number"]),
        ("--memory-limit 1KB --exchange direct", ["--memory-limit 1KB with --exchange direct: it needs "]),
        ("--cp 8192", ["--cp 8192", "4096"]),
        ("--cp 0", ["--cp 0"]),
        ("--cp 16,32", ["--cp 16,32"]),
        ("--cp 3", ["--seq-len 8192", "--cp 3", "try"]),
        ("--tile-backward 4x4", ["--tile-backward", "4x4"]),
        ("--tp 16", ["--heads 8", "--tp 16"]),
        ("--cluster dgx", ["--cluster dgx", "known are"]),
        ("--exchange post", ["--exchange", "post"]),
    ],
)
def test_rejects_bad_input(argv, says, capsys):
    assert main(["tune", *BASE.split(), *argv.split(), "--json"]) == 2
    assert_refused(capsys, says)
