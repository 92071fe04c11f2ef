"""`mesh-cp tune`: all tiles of a context-parallel size on a cluster, ranked, and the choice with its reason."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.memory import memory_error
from megatron_mesh_cp.cli.options import (
    Setting,
    Whole,
    add_setting_options,
    check_device_memory,
    parse_bytes,
    read_setting,
)
from megatron_mesh_cp.cli.report import console, limit, milliseconds, new_table, progress_bar, share, size
from megatron_mesh_cp.plan import EXCHANGES, Direction
from megatron_mesh_cp.tune import Candidate, Decision, MemoryLimitError, decide, rank_candidates

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(subparsers) -> None:
    """Add `tune` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "tune",
        help="rank all tiles on a cluster and choose one",
        description="Plan and simulate every tile with both placements and both exchange patterns, forward and "
        "backward, rank them by time, and choose.",
    )
    add_setting_options(parser)
    parser.add_argument(
        "--tile-backward", choices=("same", "auto"), default="same", help="may the backward have its own (%(default)s)"
    )
    parser.add_argument("--exchange", choices=(*EXCHANGES, "auto"), default="auto", help="(%(default)s)")
    parser.add_argument("--memory-limit", metavar="SIZE", help="of the chunks and results a rank holds, such as 20GB")
    parser.add_argument("--top", action=Whole, default=10, metavar="K", help="how many to list (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Rank and choose; 0. Raises ValueError for bad input, and where nothing fits the memory limit."""
    setting = read_setting(args)
    most = None if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    exchanges = EXCHANGES if args.exchange == "auto" else (args.exchange,)
    ranked: dict[Direction, list[Candidate]] = {}
    for direction in Direction:
        with progress_bar(f"tiles, {direction.value}") as progress:
            ranked[direction] = rank_candidates(
                setting.cp,
                setting.shape,
                direction,
                setting.cluster,
                tp=setting.tp,
                causal=setting.causal,
                exchanges=exchanges,
                progress=progress,
            )
    try:
        decision = decide(
            setting.cp,
            setting.shape,
            setting.cluster,
            backward=args.tile_backward,
            exchange=args.exchange,
            tp=setting.tp,
            causal=setting.causal,
            memory_limit=most,
        )
    except MemoryLimitError:
        raise memory_error(args.memory_limit, setting, "auto", args.tile_backward, args.exchange) from None
    if args.json:
        print(json.dumps(as_json(setting, ranked, decision, most, args.top), allow_nan=False))
        return 0
    out = console()
    out.print(f"Tiles for CP {setting.cp}, {setting.seq_len:,} tokens: {setting.model()}", soft_wrap=True)
    out.print(f"On {setting.machine()}\n", soft_wrap=True)
    for direction, chosen in ((Direction.FORWARD, decision.forward), (Direction.BACKWARD, decision.backward)):
        out.print(table(direction, ranked[direction], chosen, most, args.top))
    print(f"Choice: forward {_words(decision.forward)}; backward {_words(decision.backward)}.")
    print(f"Why: {decision.why}")
    peak = max(decision.forward.peak_bytes, decision.backward.peak_bytes)
    if check_device_memory(peak, setting.cluster):
        print(f"Warning: the choice does not fit; its peak of {check_device_memory(peak, setting.cluster)}.")
    return 0


def as_json(
    setting: Setting, ranked: dict[Direction, list[Candidate]], decision: Decision, most: int | None, top: int
) -> dict:
    """The object of --json. Bytes are what each rank sends, times in ms.

    `fits`: within the memory limit; `fits_device`: within the memory of a GPU of the cluster.
    """
    return {
        **setting.as_json(),
        "memory_limit": most,
        "ranking": {
            direction.value: [row(candidate, setting, most) for candidate in candidates[:top]]
            for direction, candidates in ranked.items()
        },
        "candidates": {direction.value: len(candidates) for direction, candidates in ranked.items()},
        "decision": {
            "forward": row(decision.forward, setting, most),
            "backward": row(decision.backward, setting, most),
            "time_ms": 1e3 * (decision.forward.seconds + decision.backward.seconds),
            "why": decision.why,
        },
    }


def row(c: Candidate, setting: Setting, most: int | None) -> dict:
    """A candidate in the JSON."""
    return {
        "tile": [c.tile.a, c.tile.b],
        "placement": "column" if c.tile.transposed else "row",
        "exchange": c.exchange,
        "bytes": c.bytes,
        "time_ms": 1e3 * c.seconds,
        "bound_ms": 1e3 * c.bound,
        "wait_ms": 1e3 * c.wait,
        "peak_bytes": c.peak_bytes,
        "fits": most is None or c.peak_bytes <= most,
        "fits_device": not check_device_memory(c.peak_bytes, setting.cluster),
    }


def table(
    direction: Direction, candidates: Sequence[Candidate], chosen: Candidate, most: int | None, top: int
) -> Table:
    """The best of one direction, with the chosen one below where it is not among them."""
    out = new_table(
        f"{direction.value.capitalize()}, the best {min(top, len(candidates))} of {len(candidates)}",
        {
            **dict.fromkeys(("", "tile", "exchange"), "left"),
            **dict.fromkeys(("sent", "ms", "bound ms", "waiting", "peak"), "right"),
            **({"fits": "left"} if most is not None else {}),
        },
    )
    places = [k for k, c in enumerate(candidates) if k < top or c == chosen]
    for place in places:
        c = candidates[place]
        cells = [size(c.bytes), milliseconds(c.seconds), milliseconds(c.bound), share(c.wait, c.seconds)]
        cells.append(limit(c.peak_bytes))
        if most is not None:
            cells.append("yes" if c.peak_bytes <= most else "no")
        mark = f"{place + 1}{' *' if c == chosen else ''}"
        out.add_row(mark, str(c.tile), c.exchange, *cells, style="bold" if c == chosen else None)
    return out


def _words(c: Candidate) -> str:
    words = f"{c.tile}, {c.exchange} exchange"
    if c.tile.a > 1 and c.tile.b > 1:
        words += f", {'column' if c.tile.transposed else 'row'} groups on consecutive ranks"
    return words
