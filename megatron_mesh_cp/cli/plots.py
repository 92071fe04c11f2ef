"""The pictures of a plan: assignment matrix and step chart; matplotlib is imported only where one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.options import Setting
from megatron_mesh_cp.cli.report import limit, milliseconds, share, size
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.trace import lanes
from megatron_mesh_cp.tune import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from megatron_mesh_cp.simulate import Span, Timeline
    from megatron_mesh_cp.tune import Candidate

_INK = "#202020"
_ROW, _COLUMN = "#c2410c", "#0369a1"  # marks of the row group and of the column group
# Okabe and Ito's palette, told apart by the colour-blind: the first word of a span's label -> colour.
_PAYLOADS = {
    "Q": ("#56b4e9", "Q"),
    "QDO": ("#56b4e9", "Q, dO, lse, delta"),
    "O": ("#e69f00", "O, lse"),
    "DQ": ("#e69f00", "dQ"),
    "KV": ("#009e73", "K, V"),
    "DKV": ("#cc79a7", "dK, dV"),
}
_BLOCK, _DIAGONAL, _WAIT = "#c9ccd1", "#8b9099", "#d62728"
_LANE_HEIGHT = 0.8


def draw_plan(path: Path, setting: Setting, decision: Decision, found: tuple[Timeline, Timeline], rank: int) -> None:
    """Assignment matrix, and the step charts of forward and backward of one rank, as one picture."""
    both = (decision.forward, decision.backward)
    charts = [lanes(timeline.spans[rank]) for timeline in found]
    rows = [max(3, len(chart)) for chart in charts]
    matrices = [both[0].tile] if both[0].tile == both[1].tile else [c.tile for c in both]
    heights = [1.0 + 0.42 * count for count in rows]
    figure = new_figure(13.5, 6.2 + sum(heights) + 1.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=(6.2, sum(heights)))
    figure.suptitle(
        f"CP {setting.cp}, {setting.seq_len:,} tokens, {setting.model()}\non {setting.machine()}", fontsize=12
    )
    axes = top.subplots(1, 2)
    for ax, tile, name in zip(axes, matrices, ("forward", "backward"), strict=False):
        what = "Assignment matrix" + ("" if len(matrices) == 1 else f", {name}")
        draw_matrix(ax, tile, rank, what)
    if len(matrices) == 2:
        top.supxlabel(
            f"Star: own block ({rank}, {rank}). Black: the tile of CP rank {rank}. Orange and blue: its row group and "
            "its column group, as strips their chunks.",
            fontsize=9,
        )
    else:
        _notes(axes[1], both[0].tile, rank, setting, both)
    below = bottom.subplots(2, 1, height_ratios=heights)
    for ax, candidate, timeline, chart in zip(below, both, found, charts, strict=True):
        draw_steps(ax, candidate, timeline, chart, rank)
    save_figure(figure, path)


def draw_matrix(ax: Axes, tile: TileShape, rank: int, what: str) -> None:
    """Which rank computes which block: coloured by rank, with the tile of one rank and its groups marked."""
    import numpy as np
    from matplotlib.patches import Rectangle

    n = tile.size
    stride = tile.levels[0]
    i, j = np.indices((n, n))
    if tile.transposed:
        i, j = j, i
    owner = i // stride * stride + j % stride  # TileShape.owner, for all blocks at once
    rows, columns = tile.row_group(rank), tile.column_group(rank)
    colours = _rank_colours(tile)[owner]
    mine = np.zeros((n, n), dtype=bool)
    mine[np.ix_(rows, columns)] = True
    colours[~mine] = 0.45 * colours[~mine] + 0.55  # the other ranks' blocks step back
    colours[mine] = 0.75 * colours[mine] + 0.12
    ax.imshow(colours, interpolation="nearest", extent=(-0.5, n - 0.5, n - 0.5, -0.5))
    width = max(0.4, min(1.8, 60 / n))
    for x in rows:
        for y in columns:
            ax.add_patch(Rectangle((y - 0.5, x - 0.5), 1, 1, fill=False, edgecolor=_INK, linewidth=width))
    point = 6.0 * 55 / n  # of a cell's side, in points
    for group, colour in ((rows, _ROW), (columns, _COLUMN)):
        others = [member for member in group if member != rank]
        if not others:  # a line without points has no extent, which the layout takes for one without end
            continue
        side = max(2.5, point)  # a square that can be seen, also where a cell is smaller than that
        look = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": max(1.2, width)}
        ax.plot(others, others, linestyle="none", marker="s", markersize=side, clip_on=False, **look)
    star = max(9, min(20, 0.75 * point))
    ax.plot(rank, rank, marker="*", color="white", markeredgecolor=_INK, markersize=star, clip_on=False, zorder=5)
    if point >= 15:
        for x in range(n):
            for y in range(n):
                if (x, y) != (rank, rank):
                    ax.text(
                        *(y, x, str(owner[x, y])), ha="center", va="center", fontsize=min(11, 0.45 * point), color=_INK
                    )
    # Strips outside the matrix: the chunks that the tile reads.
    for member in rows:
        ax.add_patch(
            Rectangle((-0.026, 1 - (member + 1) / n), 0.018, 1 / n, transform=ax.transAxes, clip_on=False, color=_ROW)
        )
    for member in columns:
        ax.add_patch(Rectangle((member / n, 1.008), 1 / n, 0.018, transform=ax.transAxes, clip_on=False, color=_COLUMN))
    step = max(1, n // 16)
    ticks = range(0, n, step)
    ax.set_xticks(ticks, [str(t) for t in ticks], fontsize=8)
    ax.set_yticks(ticks, [str(t) for t in ticks], fontsize=8)
    ax.tick_params(length=0, pad=3)
    ax.tick_params(axis="y", pad=12)
    ax.set_xlabel("KV chunk")
    ax.set_ylabel("Q chunk")
    ax.set_title(f"{what}: tile {tile} ({tile.a} Q x {tile.b} KV chunks a rank), CP rank {rank}", fontsize=11, pad=14)


def draw_steps(
    ax: Axes, candidate: Candidate, timeline: Timeline, chart: Mapping[str, Sequence[Span]], rank: int
) -> None:
    """What one rank does over time, simulated: a lane for each channel and way, and its blocks and waits."""
    from matplotlib.patches import Patch

    scale, unit = _unit(timeline.seconds)
    merged = {name: list(spans) for name, spans in chart.items()}
    # Computing and waiting take turns, so they share a lane.
    waits = merged.pop("wait", [])
    merged["compute"] = [*merged.get("compute", []), *waits]
    labels: dict[str, str] = {}
    ax.set_xlim(0, scale * timeline.seconds * 1.005)
    ax.set_ylim(len(merged) - 0.5, -0.5)
    per_unit = ax.get_window_extent().width / (scale * timeline.seconds * 1.005 or 1.0)
    for lane, spans in enumerate(merged.values()):
        for span in spans:
            colour, meaning, text = _look(span)
            hatch = "////" if span.lane == "wait" else None
            start, length = scale * span.start, scale * (span.end - span.start)
            edge = "white" if per_unit * length > 4 else colour
            ax.barh(
                *(lane, length, _LANE_HEIGHT, start),
                color="white" if hatch else colour,
                edgecolor=_WAIT if hatch else edge,
                hatch=hatch,
                linewidth=0.5,
            )
            labels[meaning] = _WAIT if hatch else colour
            if text and per_unit * length > 5.2 * len(text) + 3:
                ax.text(start + length / 2, lane, text, ha="center", va="center", fontsize=7, color=_INK)
    ax.set_yticks(range(len(merged)), [_lane_title(name) for name in merged], fontsize=9)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel(f"simulated time, {unit}")
    handles: list[Patch] = [
        Patch(facecolor="white" if name == "waiting" else colour, edgecolor=colour, label=name)
        for name, colour in labels.items()
    ]
    for handle in handles:
        if handle.get_label() == "waiting":
            handle.set_hatch("////")
    if candidate.bound is not None:
        bound = ax.axvline(scale * candidate.bound, color=_INK, linestyle=":", linewidth=1.4, label="lower bound")
        handles.append(bound)
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )
    ax.set_title(
        f"{candidate.direction.value.capitalize()}: CP rank {rank}, tile {candidate.tile}, {candidate.exchange} "
        f"exchange, {milliseconds(timeline.seconds)} ms",
        fontsize=11,
        loc="left",
        pad=24,
    )


def _notes(ax: Axes, tile: TileShape, rank: int, setting: Setting, both: Sequence[Candidate]) -> None:
    """What the marks of the matrix mean, and the figures of the plan."""
    ax.axis("off")
    lines = [
        ("*", _INK, f"own block ({rank}, {rank}): own Q and own K, V"),
        ("#", _INK, f"tile of CP rank {rank}: {tile.a} x {tile.b} = {tile.size} block{'s' if tile.size > 1 else ''}"),
        ("#", _ROW, f"row group, exchanges Q and O:\n{_ranks(tile.row_group(rank))}"),
        ("#", _COLUMN, f"column group, exchanges K and V:\n{_ranks(tile.column_group(rank))}"),
    ]
    y = 0.93
    for mark, colour, text in lines:
        ax.plot(
            *(0.03, y),
            marker="*" if mark == "*" else "s",
            color="white",
            markeredgecolor=colour,
            markeredgewidth=1.8 if mark == "#" else 1,
            markersize=14 if mark == "*" else 11,
        )
        ax.text(0.08, y, text, va="center", fontsize=10, color=colour)
        y -= 0.075 + 0.04 * text.count("\n")
    ax.text(0.0, y - 0.02, "Squares on the diagonal: the members of the groups; strips: their chunks.", fontsize=9)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    figures = [["", "forward", "backward"]]
    figures.append(["exchange", *(c.exchange for c in both)])
    figures.append(["sent", *(size(c.bytes) for c in both)])
    figures.append(["time, ms", *(milliseconds(c.seconds) for c in both)])
    figures.append(["bound, ms", *(milliseconds(c.bound) for c in both)])
    figures.append(["waiting", *(share(c.wait, c.seconds) for c in both)])
    figures.append(["peak", *(limit(c.peak_bytes) for c in both)])
    table = ax.table(figures, bbox=(0.0, 0.02, 0.8, 0.36), edges="horizontal", cellLoc="right")
    table.auto_set_font_size(False)
    table.set_fontsize(10)


def _ranks(ranks: Sequence[int], most: int = 12) -> str:
    if len(ranks) == 1:
        return f"{ranks[0]} alone"
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: most - 4]))}, ... {ranks[-1]} ({len(ranks)} ranks)"


def _rank_colours(tile: TileShape):
    """RGB of each rank, [n, 3]: the hue says which consecutive group, the brightness which place in it."""
    import numpy as np
    from matplotlib import colormaps

    stride, groups = tile.levels
    rank = np.arange(tile.size)
    if groups == 1:  # nothing but places: let the hue say them
        stride, groups = 1, tile.size
    hue = np.asarray(colormaps["hsv"]((rank // stride) / groups * 0.92))[:, :3]
    hue = 0.75 * hue + 0.15
    white = 0.65 * (rank % stride) / max(1, stride - 1)
    return hue * (1 - white[:, None]) + white[:, None]


def _look(span: Span) -> tuple[str, str, str]:
    """Colour, what it stands for in the legend, and the text that goes into a bar."""
    if span.lane == "wait":
        return _WAIT, "waiting", ""
    if span.lane == "compute":
        q, kv = span.label.removeprefix("block (").removesuffix(")").split(", ")
        text = f"{q},{kv}"
        return (_DIAGONAL, "own block", text) if q == kv else (_BLOCK, "block (Q, KV)", text)
    payload, chunk, *_ = span.label.split()
    colour, meaning = _PAYLOADS[payload]
    return colour, meaning, chunk


def _lane_title(name: str) -> str:
    channel, *rest = name.split()
    if channel == "compute":
        return "compute"
    return f"{channel} channel, {' '.join(rest)}"


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, drawn without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write it in the format that the name ends in."""
    figure.savefig(path, dpi=130, facecolor="white")
