"""The picture of `mesh-cp compare`: bytes and time over the context-parallel size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.options import Setting
from megatron_mesh_cp.cli.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Line style and colour of an algorithm; the styles let curves on top of each other be told apart.
_ALGORITHMS = {
    "ring": ("#000000", "o", "-"),
    "double-ring": ("#7f7f7f", "s", "--"),
    "burst": ("#8c564b", "v", ":"),
    "ulysses": ("#e69f00", "^", "-"),
    "usp": ("#56b4e9", "D", "-"),
    "attention2d": ("#cc79a7", "P", "--"),
    "startrail": ("#009e73", "X", "-."),
    "mesh": ("#d62728", "o", "-"),
}


def draw_scaling(path: Path, settings: Sequence[Setting], rows: Sequence[dict]) -> None:
    """Bytes and time of every algorithm over the context-parallel size, a row of panels for each sequence length."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    lengths = sorted({row["seq_len"] for row in rows})
    sizes = sorted({row["cp"] for row in rows})
    figure = new_figure(12.5, 1.3 + 3.9 * len(lengths))
    axes = figure.subplots(len(lengths), 2, squeeze=False)
    algorithms = list(dict.fromkeys(row["algo"] for row in rows))
    handles = {}
    for pair, length in zip(axes, lengths, strict=True):
        for ax, key, scale, unit in ((pair[0], "bytes", 2**-30, "sent by a rank, GiB"), (pair[1], "time_ms", 1, "ms")):
            for algo in algorithms:
                points = [
                    (row["cp"], scale * row[key])
                    for row in rows
                    if row["algo"] == algo and row["seq_len"] == length and row[key]
                ]
                if not points:
                    continue
                colour, marker, line = _ALGORITHMS[algo]
                ours = algo == "mesh"
                (handles[algo],) = ax.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    linewidth=2.4 if ours else 1.4,
                    markersize=6 if ours else 5,
                    zorder=4 if ours else 3,
                    label=algo,
                )
            what = "bytes" if key == "bytes" else "time, forward + backward"
            ax.set_title(f"{length:,} tokens: {what}", fontsize=11)
            if not ax.lines:  # one rank has nobody to send to; a logarithmic axis cannot show 0
                ax.set_axis_off()
                ax.text(0.5, 0.5, "one rank sends nothing", transform=ax.transAxes, ha="center", va="center")
                continue
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.xaxis.set_major_locator(FixedLocator(sizes))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            _minor_labels(ax, NullFormatter())
            ax.grid(which="both", color="#e3e3e3", linewidth=0.6)
            ax.set_axisbelow(True)
            ax.set_xlabel("context-parallel size")
            ax.set_ylabel(unit)
    figure.suptitle(f"{settings[0].model()}\non {settings[0].machine()}", fontsize=12)
    names = [algo for algo in algorithms if algo in handles]
    figure.legend([handles[a] for a in names], names, loc="outside right center", fontsize=10, frameon=False)
    save_figure(figure, path)


def _minor_labels(ax: Axes, none) -> None:
    """Label 2 and 5 of each decade where an axis spans less than two decades, which the decades alone leave bare."""
    from matplotlib.ticker import LogLocator

    low, high = ax.get_ylim()
    if high / low < 100:
        ax.yaxis.set_minor_locator(LogLocator(base=10, subs=(2, 5)))
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    else:
        ax.yaxis.set_minor_formatter(none)
