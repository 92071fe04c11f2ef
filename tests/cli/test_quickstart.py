"""The quick start's own parts: reading logs, the table, the plot, and run folders that never collide."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from megatron_mesh_cp.cli import quickstart
from megatron_mesh_cp.cli.main import build_parser, main
from megatron_mesh_cp.cli.quickstart import Run, next_run_folder
from megatron_mesh_cp.cli.run_log import RunLog, parse_log, worth_showing
from megatron_mesh_cp.cli.run_report import common_iteration, comparison, plot_losses
from megatron_mesh_cp.megatron.text_data import build_text_dataset

LOG = """\
  lr_decay_iters .................................. 200
[mesh-cp] Mesh-Attention is on: CP 4, tile 2x2; forward 1.01 MiB + backward 1.77 MiB
 [2026-11-30 18:01:33.8] iteration        1/      20 | consumed samples:            4 | elapsed time per \
iteration (ms): 849.2 | learning rate: 4.0E-04 | lm loss: 5.610292E+00 | loss scale: 1.0 |
[mesh-cp] comm iteration 10 | bytes per rank and layer: forward 1056768 backward 1851392 | \
a ring would send: forward 1572864 backward 3145728 | waited 3007.5 ms
 [2026-11-30 18:01:40.3] iteration       10/      20 | consumed samples:           40 | lm loss: nan |
 validation loss at iteration 20 on validation set | lm loss value: 3.152366E+00 | lm loss PPL: 2.3E+01 |
 validation loss at iteration 20 on test set | lm loss value: 3.033182E+00 | lm loss PPL: 2.0E+01 |
"""


def test_losses_and_measured_bytes_are_read_from_a_log():
    log = parse_log(LOG)
    assert log.losses[1] == 5.610292
    assert str(log.losses[10]) == "nan"
    assert list(log.losses) == [1, 10]
    assert log.validation == {20: 3.152366}
    assert (log.bytes_forward, log.bytes_backward, log.bytes_total) == (1056768, 1851392, 2908160)


@pytest.mark.parametrize(
    "line",
    [
        "[mesh-cp] comm iteration 10 | bytes per rank and layer (ring: forward 1): forward 7 backward 9",
        "[mesh-cp] comm | bytes forward=7, backward: 9 (ring: forward 1 backward 2) | waited 3 ms",
        "[rank 0] [mesh-cp] comm iteration 5: bytes, forward 7; bytes, backward 9",
    ],
)
def test_the_run_is_told_from_the_ring_it_is_compared_with(line):
    assert (parse_log(line).bytes_forward, parse_log(line).bytes_backward) == (7, 9)


def test_a_log_without_communication_counts_none():
    log = parse_log("[mesh-cp] Mesh-Attention is on: forward 1.01 MiB\n iteration 1/ 2 | lm loss: 1.0E+00 |")
    assert log.bytes_total is None
    assert log.losses == {1: 1.0}


def test_screen_shows_receipt_losses_and_errors_only():
    shown = [line for line in LOG.splitlines() if worth_showing(line)]
    assert shown == LOG.splitlines()[1:-1]
    assert worth_showing("[rank 0] ValueError: --save x: the folder is in use")
    assert not worth_showing("  log_interval .................................... 10")


@pytest.fixture
def logs():
    return {
        Run("mesh", "2x2", (), 4): RunLog({1: 5.6, 10: 4.0, 20: 3.123456, 30: 2.5}, {30: 2.6}, 600, 1400),
        Run("ring", "1x4", (), 4): RunLog({1: 5.6, 10: 4.0, 20: 3.123457}, {}, 1000, 3000),
        Run("CP=1", "-", (), 1): RunLog({1: 5.6, 10: 4.0, 20: 3.123458}),
    }


def printed(table) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_table_compares_at_the_last_common_iteration_and_against_the_measured_ring(logs):
    assert common_iteration(list(logs.values())) == 20
    text = printed(comparison(logs))
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "loss at 20" in text
    for words in ("2x2", "3.123456", "2.500000 at 30", "600", "1,400", "-50.0%"):
        assert words in rows["mesh"]
    for words in ("1x4", "3.123457", "1,000", "3,000"):
        assert words in rows["ring"]
    assert "%" not in rows["ring"] + rows["CP=1"]
    assert "3.123458" in rows["CP=1"]


def test_table_fits_80_columns_with_real_sizes(logs):
    big = {run: RunLog(log.losses, {}, 10_056_768, 18_851_392) for run, log in logs.items()}
    assert "…" not in printed(comparison(big))
    assert "18,851,392" in printed(comparison(big))


def test_plot_is_written_as_png(logs, tmp_path):
    path = plot_losses(logs, tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    "more",
    ["", "  --mesh-exchange: shift\n  --mesh-cluster: cpu-gloo\n  --mesh-memory-limit: 1GB\n"],
    ids=["as shipped", "every mesh flag"],
)
def test_the_flags_of_all_three_runs_are_accepted(tmp_path, more):
    """Mesh, ring, and CP=1 with stock attention, where a mesh flag that does nothing is refused."""
    prefix = tmp_path / "data" / "text"
    build_text_dataset(prefix, max_bytes=300_000, progress=False)
    config = tmp_path / "recipe.yaml"
    config.write_text((quickstart.CHECKOUT / "configs" / "quickstart.yaml").read_text().rstrip() + "\n" + more)
    argv = ["quickstart", "--output", str(tmp_path), "--config", str(config)]
    args = build_parser("quickstart").parse_args(argv)
    launches = quickstart._plan(args, {**os.environ, "MESH_CP_DATA": str(prefix)}, tmp_path / "run")
    algos = [launch.args.context_parallel_algo for launch in launches.values()]
    assert algos == ["mesh", "mesh", "megatron"]
    assert [launch.ranks for launch in launches.values()] == [4, 4, 1]


def test_a_run_folder_is_always_new(tmp_path):
    assert next_run_folder(tmp_path).name == "run-001"
    for name in ("run-001", "run-007", "run-x", "data"):
        (tmp_path / name).mkdir()
    assert next_run_folder(tmp_path).name == "run-008"
    assert next_run_folder(tmp_path / "none").name == "run-001"


def test_names_a_recipe_that_is_not_there(tmp_path, capsys):
    assert main(["quickstart", "--output", str(tmp_path / "out"), "--config", str(tmp_path / "no.yaml")]) == 2
    err = capsys.readouterr().err
    assert "no.yaml" in err
    assert "--config" in err
    assert not Path(tmp_path / "out").exists()
