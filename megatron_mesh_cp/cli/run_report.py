"""Sets the runs of a quick start side by side: a table and a plot of their losses."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megatron_mesh_cp.cli.run_log import RunLog

if TYPE_CHECKING:
    from megatron_mesh_cp.cli.quickstart import Run


def common_iteration(logs: Sequence[RunLog]) -> int | None:
    """The last iteration for which every run has a loss."""
    return max(set.intersection(*(set(log.losses) for log in logs)), default=None)


def comparison(logs: Mapping["Run", RunLog]) -> Table:
    """One row a run. Bytes are measured: what a rank handed to torch.distributed, not a formula."""
    common = common_iteration(list(logs.values()))
    ring = next((log.bytes_total for run, log in logs.items() if run.name == "ring"), None)
    table = Table(
        title="Bytes sent: measured, per rank, layer and microbatch",
        title_justify="left",
    )
    table.add_column("run")
    for title in ("tile", f"loss at {common}", "last loss", "forward", "backward", "vs ring"):
        table.add_column(title, justify="right")
    for run, log in logs.items():
        last = max(log.losses, default=None)
        total = log.bytes_total
        table.add_row(
            run.name,
            run.tile,
            _loss(log.losses.get(common)),
            f"{_loss(log.losses.get(last))} at {last}",
            _bytes(log.bytes_forward),
            _bytes(log.bytes_backward),
            f"{total / ring - 1:+.1%}" if total and ring and run.name != "ring" else "-",
        )
    return table


def plot_losses(logs: Mapping["Run", RunLog], path: Path) -> Path:
    """Draw the loss of every run over its iterations into a PNG; returns its path."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # Megatron makes the root logger talkative
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.subplots()
    # The curves lie on each other where the runs agree: the first is a line, the others are open marks on it.
    marks = {"linestyle": "none", "fillstyle": "none"}
    styles = (
        {"marker": ".", "linewidth": 2},
        {"marker": "s", "markersize": 8, **marks},
        {"marker": "o", "markersize": 13, **marks},
    )
    for (run, log), style in zip(logs.items(), styles, strict=True):
        label = run.name if run.tile == "-" else f"{run.name}, tile {run.tile} on {run.ranks} ranks"
        axes.plot(list(log.losses), list(log.losses.values()), label=label, **style)
        if log.validation:
            points = list(log.validation), list(log.validation.values())
            axes.plot(*points, "*", markersize=14, label=f"{run.name}, validation set")
    axes.set(xlabel="iteration", ylabel="lm loss (nats per byte)", title="Quick start: loss on Python source text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
