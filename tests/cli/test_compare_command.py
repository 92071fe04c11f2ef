"""`mesh-cp compare`: rows are the peers' and the planner's figures; what cannot run says why."""

import json

import pytest
from cli_checks import assert_refused

from megatron_mesh_cp.cli import compare
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.cost import AttentionShape, mesh_bytes, total_bytes
from megatron_mesh_cp.peers import compare_peers
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import decide

BASE = "--cp 16 --heads 8 --kv-heads 2 --head-dim 64 --seq-len 8k"
SHAPE = AttentionShape(512, 1, 8, 2, 64)


def said(capsys, argv: str) -> dict:
    assert main(["compare", *argv.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    return json.loads(out)


def by_algo(rows: list[dict]) -> dict[str, dict]:
    return {row["algo"]: row for row in rows}


def test_rows_are_the_peers_and_mesh(capsys):
    cluster = load_cluster("h100-ndr")
    rows = by_algo(said(capsys, BASE)["rows"])
    for peer in compare_peers(16, SHAPE, cluster):
        row = rows[peer.algo]
        assert row["impossible"] == (peer.impossible or None)
        if peer.impossible:
            assert [row[key] for key in ("bytes", "time_ms", "speedup", "reduction", "peak_bytes")] == [None] * 5
            continue
        assert row["bytes"] == peer.bytes_forward + peer.bytes_backward
        assert row["time_ms"] == pytest.approx(1e3 * (peer.seconds_forward + peer.seconds_backward))
        assert (row["wait_share"], row["peak_bytes"]) == (peer.wait_share, peer.peak_bytes)
        assert row["speedup"] == pytest.approx(rows["ring"]["time_ms"] / row["time_ms"])
        assert row["reduction"] == pytest.approx(1 - row["bytes"] / rows["ring"]["bytes"])
    assert list(rows)[-1] == "mesh"
    want = decide(16, SHAPE, cluster)
    mesh = rows["mesh"]
    assert mesh["bytes"] == total_bytes(want.forward.tile, SHAPE, want.backward.tile)
    assert mesh["time_ms"] == pytest.approx(1e3 * (want.forward.seconds + want.backward.seconds))
    assert mesh["peak_bytes"] == max(want.forward.peak_bytes, want.backward.peak_bytes)
    waited = want.forward.wait + want.backward.wait
    assert mesh["wait_share"] == pytest.approx(1e3 * waited / mesh["time_ms"])


def test_bytes_are_those_of_the_cost_model(capsys):
    rows = by_algo(said(capsys, BASE + " --tile 4x4")["rows"])
    assert rows["ring"]["bytes"] == rows["double-ring"]["bytes"] == total_bytes(TileShape(1, 16), SHAPE)
    assert rows["mesh"]["bytes"] == total_bytes(TileShape(4, 4), SHAPE)
    assert rows["mesh"]["note"].startswith("4x4 ")
    assert rows["burst"]["bytes_forward"] == rows["ring"]["bytes_forward"]
    assert rows["burst"]["bytes_backward"] == sum(mesh_bytes(TileShape(16, 1), Direction.BACKWARD, SHAPE).values())


def test_what_cannot_run_says_why(capsys):
    """2 KV heads cannot be split over 16 ranks."""
    row = by_algo(said(capsys, BASE)["rows"])["ulysses"]
    assert "2 KV heads" in row["impossible"]
    assert main(["compare", *BASE.split()]) == 0
    assert "ulysses cannot run at CP 16: 2 KV heads" in capsys.readouterr().out


def test_lists_give_every_pair_and_a_summary(capsys):
    argv = "--cp 8,4 --heads 8 --head-dim 64 --seq-len 8k,4k"
    got = said(capsys, argv)
    pairs = list(dict.fromkeys((row["cp"], row["seq_len"]) for row in got["rows"]))
    assert pairs == [(4, 4096), (4, 8192), (8, 4096), (8, 8192)]
    mesh = [row for row in got["rows"] if row["algo"] == "mesh"]
    for name in ("speedup", "reduction"):
        values = [row[name] for row in mesh]
        assert got["summary"][f"{name}_mean"] == pytest.approx(sum(values) / 4)
        assert got["summary"][f"{name}_largest"] == max(values)
    assert got["summary"]["settings"] == 4
    assert main(["compare", *argv.split()]) == 0
    out = capsys.readouterr().out
    assert "CP 4, 4,096 tokens" in out
    assert "Mesh against the ring in 4 settings" in out
    assert f"up to {got['summary']['speedup_largest']:.2f}x" in out


def test_one_rank_is_compared_too(capsys):
    rows = by_algo(said(capsys, "--cp 1 --heads 8 --seq-len 4k")["rows"])
    assert (rows["mesh"]["bytes"], rows["mesh"]["reduction"], rows["ring"]["bytes"]) == (0, 0.0, 0)


@pytest.mark.parametrize(("name", "starts"), [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.svg", b"<?xml")])
def test_draws_the_scaling_curve(name, starts, tmp_path, capsys):
    said(capsys, f"--cp 4,8 --heads 8 --head-dim 64 --seq-len 4k,8k --plot {tmp_path / name}")
    assert (tmp_path / name).read_bytes().startswith(starts)


def test_the_curve_has_every_algorithm_that_can_run(tmp_path, capsys, monkeypatch):
    from megatron_mesh_cp.cli import plots_scaling

    figures = []
    monkeypatch.setattr(plots_scaling, "save_figure", lambda figure, path: figures.append(figure))
    rows = said(capsys, f"--cp 4,8 --heads 8 --kv-heads 4 --head-dim 64 --seq-len 4k --plot {tmp_path / 'a.png'}")[
        "rows"
    ]
    sent, time = figures[0].axes
    for ax, key, scale in ((sent, "bytes", 2**-30), (time, "time_ms", 1)):
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in ax.lines}
        for row in rows:
            if row["impossible"]:
                assert row["cp"] not in drawn.get(row["algo"], {})
            else:
                assert drawn[row["algo"]][row["cp"]] == pytest.approx(scale * row[key])


def test_one_rank_has_no_curve_of_bytes(tmp_path, capsys, monkeypatch):
    from megatron_mesh_cp.cli import plots_scaling

    figures = []
    monkeypatch.setattr(plots_scaling, "save_figure", lambda figure, path: figures.append(figure))
    said(capsys, f"--cp 1 --heads 8 --seq-len 4k --plot {tmp_path / 'a.png'}")
    sent, time = figures[0].axes
    assert [text.get_text() for text in sent.texts] == ["one rank sends nothing"]
    assert (sent.axison, time.axison, len(time.lines) > 0) == (False, True, True)


def test_an_empty_name_of_a_picture_is_refused(capsys):
    assert main(["compare", *BASE.split(), "--plot", ""]) == 2
    assert capsys.readouterr().err.startswith("mesh-cp: error: --plot '': ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--cp 4,0", ["--cp 0", "positive"]),
        ("--cp 4,,8", ["--cp 4,,8", "empty entry"]),
        ("--cp 8,", ["--cp 8,:", "empty entry"]),
        ("--cp 4,8192", ["--cp 8192", "4096"]),
        ("--heads many", ["--heads many: must be a positive whole number"]),
        ("--cp 4,8,4", ["--cp 4,8,4", "2 times"]),
        ("--seq-len 4k,4096", ["--seq-len 4k,4096", "2 times"]),
        ("--cp 4,24", ["--seq-len 8192", "--cp 24", "try"]),
        ("--kv-heads 3", ["--kv-heads 3"]),
        ("--tp 3", ["--heads 8", "--tp 3", "1, 2"]),
        ("--cluster h100-ndx", ["did you mean h100-ndr"]),
        ("--plot a.jpeg", ["--plot a.jpeg", ".png"]),
        ("--plot no/such/a.png", ["--plot no/such/a.png"]),
    ],
)
def test_rejects_bad_input_before_any_work(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(compare, "compare_peers", lambda *a, **k: pytest.fail("work has begun"))
    assert main(["compare", *BASE.split(), *argv.split(), "--json"]) == 2
    assert_refused(capsys, says)


@pytest.mark.parametrize("argv", ["--tile 4x8", "--memory-limit 1KB"])
def test_rejects_what_mesh_cannot_do(argv, capsys):
    assert main(["compare", *BASE.split(), *argv.split()]) == 2
    assert argv.split()[0] in capsys.readouterr().err
