"""What the network bench says: rows of measurement and prediction, a table, conclusions, JSON, a picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.report import console, new_table, size
from megatron_mesh_cp.peers import travelling_plan
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.simulate import simulate
from megatron_mesh_cp.tune import costs_for

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_mesh_cp.cluster import Cluster

    from .measure import Measured

__all__ = ["Findings", "Row", "as_json", "conclusions", "console", "plot", "table"]

# arXiv 2512.20968: on 256 GPUs waiting for communication is down by up to this part.
PUBLISHED_LESS_WAITING = 0.749
DEFAULT_TOKENS = 16  # of a rank: so few that communication dominates
# Largest believable error (see Problem.error), far above what rounding makes of it.
_MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


class Refused(RuntimeError):
    """A result that cannot be true."""


@dataclass(frozen=True)
class Row:
    """One algorithm on one network, forward + backward.

    algo: "ring" (tile 1xN), "mesh", or "te-p2p", which has no tile; rate: as typed, of each host's link; bytes: handed
    to torch.distributed by one rank, the largest over ranks; wait_share: part of the time in which a rank waits for
    transfers, the mean over ranks (predicted: of the slowest rank); predicted_*: by the simulator, from the links and
    blocks as timed on this network; max_error: see Problem.error.
    """

    algo: str
    tile: list[int] | None
    transposed: bool
    exchange: str
    hosts: int
    ranks: int
    rate: str
    kv_heads: int
    seq_len: int
    seconds: float
    bytes: int
    wait_share: float
    predicted_seconds: float
    predicted_wait_share: float
    max_error: float

    @classmethod
    def of(cls, one: Measured, cluster: Cluster, hosts: int, rate: str) -> Row:
        """Raises Refused for a result that cannot be true."""
        problem = one.problem
        dtype = str(problem.dtype).removeprefix("torch.")
        name = "te-p2p" if one.tile is None else "ring" if one.tile.a == 1 else "mesh"
        if one.bytes < 1 or not one.error <= _MAX_ERROR[dtype]:
            raise Refused(
                f"{name} {one.tile or ''}: {one.bytes} bytes sent, largest error {one.error:.3g} against fp64: the "
                "result is refused; please report it with the command"
            )
        seconds = waited = 0.0
        for direction in Direction:
            if one.tile is None:
                plan = travelling_plan(problem.ranks, direction)
            else:
                how = {"exchange": one.exchange, "causal": problem.causal}
                costs = costs_for(cluster, problem.shape, one.tile, direction, **how)
                plan = make_plan(one.tile, direction, one.exchange, costs)
            timeline = simulate(plan, cluster, problem.shape, causal=problem.causal)
            seconds += timeline.seconds
            waited += timeline.wait
        return cls(
            algo=name,
            tile=None if one.tile is None else [one.tile.a, one.tile.b],
            transposed=one.tile is not None and one.tile.transposed,
            exchange=one.exchange,
            hosts=hosts,
            ranks=problem.ranks,
            rate=rate,
            kv_heads=problem.kv_heads,
            seq_len=problem.seq_len,
            seconds=one.seconds,
            bytes=one.bytes,
            wait_share=one.waited / one.seconds,
            predicted_seconds=seconds,
            predicted_wait_share=waited / seconds,
            max_error=one.error,
        )

    @property
    def cell(self) -> tuple:
        """What must be equal for two rows to be compared."""
        return self.hosts, self.ranks, self.rate, self.kv_heads

    @property
    def label(self) -> str:
        tile = "" if self.tile is None else " {}x{}".format(*self.tile) + "t" * self.transposed
        return f"{self.algo}{tile}" + ("" if self.algo == "te-p2p" else f" {self.exchange}")

    @property
    def error(self) -> float:
        """Of the simulator: (predicted - measured) / measured."""
        return self.predicted_seconds / self.seconds - 1


@dataclass(frozen=True)
class Findings:
    """All rows of a run."""

    rows: Sequence[Row]

    def cells(self) -> Iterator[list[Row]]:
        """Rows that ran the same attention on the same network."""
        for cell in dict.fromkeys(row.cell for row in self.rows):
            yield [row for row in self.rows if row.cell == cell]

    def ring_of(self, row: Row) -> Row | None:
        """The fastest of our rings that was measured beside a row."""
        rings = [other for other in self.rows if other.cell == row.cell and other.algo == "ring"]
        return min(rings, key=lambda ring: ring.seconds, default=None)

    @property
    def mean_error(self) -> float:
        return sum(abs(row.error) for row in self.rows) / len(self.rows)

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: abs(row.error))


def table(found: Findings, args: argparse.Namespace) -> Table:
    """The rows for people."""
    left, right = ("hosts", "rate", "KV", "algorithm"), ("sent", "seconds", "vs ring", "predicted", "off by")
    out = new_table(
        f"Attention forward + backward, gloo ranks on hosts with links of {args.rate}, {args.ranks_per_host} a host\n"
        f"{args.seq_len or f'{DEFAULT_TOKENS} a rank'} tokens, batch {args.batch}, "
        f"{args.heads} heads x {args.head_dim}, {args.dtype}, {'no mask' if args.full else 'causal'}; "
        f"median of {args.repeats}",
        dict.fromkeys(left, "left") | dict.fromkeys((*right, "waits", "pred.", "error"), "right"),
        "KV: heads; sent: bytes that one rank handed to torch.distributed; vs ring: times as fast as our ring\n"
        "predicted: by the simulator, from links and blocks as timed on this network\n"
        "waits: part of its time that a rank waits for transfers, the mean over ranks; pred.: of the slowest rank\n"
        "error: largest difference from fp64, as a part of the largest value",
    )
    for row in found.rows:
        ring = found.ring_of(row)
        out.add_row(
            str(row.hosts),
            row.rate,
            str(row.kv_heads),
            row.label,
            size(row.bytes),
            f"{row.seconds:.3f}",
            f"{ring.seconds / row.seconds:.2f}" if ring else "-",
            f"{row.predicted_seconds:.3f}",
            f"{row.error:+.1%}",
            f"{row.wait_share:.0%}",
            f"{row.predicted_wait_share:.0%}",
            f"{row.max_error:.0e}",
        )
    return out


def conclusions(found: Findings) -> Iterator[str]:
    """Lines for people below the table."""
    for rows in found.cells():
        ring, best = found.ring_of(rows[0]), min(rows, key=lambda row: row.seconds)
        where = f"{best.hosts} hosts, {best.rate}, {best.kv_heads} KV heads: {best.label} is the fastest"
        if ring is None or ring is best:
            yield where
            continue
        waited, waits = ring.wait_share * ring.seconds, best.wait_share * best.seconds
        yield (
            f"{where}, {ring.seconds / best.seconds:.2f} times as fast as our ring; a rank waits {waits:.2f} s instead "
            f"of {waited:.2f} s, {1 - waits / waited:.1%} less (published for 256: up to {PUBLISHED_LESS_WAITING:.1%})"
        )
        for peer in (row for row in rows if row.algo == "te-p2p" and row is not best):
            yield f"  and {peer.seconds / best.seconds:.2f} times as fast as Transformer Engine's own ring"
    yield (
        f"simulator: off by {found.mean_error:.1%} on average over {len(found.rows)} cells, at most "
        f"{abs(found.worst.error):.1%} ({found.worst.label}, {found.worst.hosts} hosts, {found.worst.rate}, "
        f"{found.worst.kv_heads} KV heads)"
    )


def as_json(found: Findings, args: argparse.Namespace) -> dict:
    """One object; seconds and bytes."""
    settings = ("ranks_per_host", "heads", "head_dim", "batch", "dtype", "repeats")
    return {
        "rows": [{**asdict(row), "error": row.error} for row in found.rows],
        "simulator": {
            "cells": len(found.rows),
            "mean_error": found.mean_error,
            "worst_error": abs(found.worst.error),
        },
        **{name: getattr(args, name) for name in settings},
        "causal": not args.full,
    }


def plot(found: Findings, args: argparse.Namespace, path: Path) -> None:
    """Seconds of every row, the waiting part light, and a mark where the simulator expects it."""
    from megatron_mesh_cp.cli.plots import new_figure, save_figure

    cells = list(found.cells())
    figure = new_figure(11, 1.4 + 0.42 * len(found.rows) + 0.5 * len(cells))
    axes = figure.subplots(len(cells), 1, squeeze=False, height_ratios=[len(rows) + 1 for rows in cells])[:, 0]
    for ax, rows in zip(axes, cells, strict=True):
        names = [row.label for row in rows]
        places = range(len(rows))
        busy = [row.seconds * (1 - row.wait_share) for row in rows]
        waits = [row.seconds * row.wait_share for row in rows]
        colours = ["#d62728" if row.algo == "mesh" else "#555555" for row in rows]
        ax.barh(places, busy, color=colours, height=0.6)
        ax.barh(places, waits, left=busy, color=colours, alpha=0.35, height=0.6)
        ax.scatter([row.predicted_seconds for row in rows], places, marker="|", s=260, color="black", zorder=4)
        ring = found.ring_of(rows[0])
        for place, row in zip(places, rows, strict=True):
            ratio = f"  {row.seconds:.2f} s" + (f", {ring.seconds / row.seconds:.2f}x" if ring else "")
            ax.text(max(row.seconds, row.predicted_seconds), place, ratio, va="center", fontsize=9)
        ax.set_yticks(list(places), names)
        ax.invert_yaxis()
        ax.set_xlim(0, 1.2 * max(max(row.seconds, row.predicted_seconds) for row in rows))
        first = rows[0]
        ax.set_title(
            f"{first.hosts} hosts x {first.ranks // first.hosts} ranks at {first.rate}, "
            f"{args.heads} / {first.kv_heads} heads of {args.head_dim}",
            fontsize=10,
            loc="left",
        )
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "seconds, forward + backward (light: waiting for transfers; black mark: simulated; x: against our ring)"
    )
    save_figure(figure, path)
