"""`mesh-cp plan`: one tile's plan, proven over all ranks, with its bytes, its simulated time, a picture and a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.memory import Needs, memory_error
from megatron_mesh_cp.cli.options import (
    PICTURES,
    Setting,
    Whole,
    add_setting_options,
    check_device_memory,
    check_output,
    parse_bytes,
    read_setting,
)
from megatron_mesh_cp.cli.report import console, limit, milliseconds, new_table, share, size, spinner
from megatron_mesh_cp.cost import AttentionShape, total_bytes
from megatron_mesh_cp.plan import EXCHANGES, Channel, Direction, Plan, sent_messages
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import Decision, MemoryLimitError, best_tile, decide
from megatron_mesh_cp.verify import verify

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatron_mesh_cp.simulate import Timeline


def add_parser(subparsers) -> None:
    """Add `plan` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "plan",
        help="show the plan of a tile: bytes, time, memory, a picture, a trace",
        description="Make the plans of one attention forward and backward, prove them over all ranks, and show what "
        "they send, how long they take on a cluster, and what they hold in memory.",
    )
    add_setting_options(parser)
    add_tile_options(parser)
    parser.add_argument(
        "--rank", action=Whole, least=0, default=0, help="the CP rank to show and to draw (%(default)s)"
    )
    parser.add_argument("--show", action="store_true", help="print what --rank does, event by event")
    parser.add_argument("--plot", metavar="FILE", help="draw the assignment matrix and the step chart (png, svg, pdf)")
    parser.add_argument("--trace", metavar="FILE.json", help="write a trace for ui.perfetto.dev or chrome://tracing")
    parser.add_argument(
        "--trace-ranks", metavar="RANKS", help="CP ranks in the trace, by comma (default: the node of --rank)"
    )


def add_tile_options(parser: argparse.ArgumentParser) -> None:
    """The options of `choose`."""
    parser.add_argument("--tile", default="auto", help="auto, AxB (Q chunks x KV chunks), or AxBt (%(default)s)")
    parser.add_argument("--tile-backward", default="same", help="same, auto, AxB or AxBt (%(default)s)")
    parser.add_argument("--exchange", choices=(*EXCHANGES, "auto"), default="auto", help="(%(default)s)")
    parser.add_argument(
        "--by", choices=("time", "bytes"), default="time", help="what auto makes least on the cluster (%(default)s)"
    )
    parser.add_argument("--memory-limit", metavar="SIZE", help="of the chunks a rank holds at a time, such as 20GB")


def run(args: argparse.Namespace) -> int:
    """Show the plan; 0. Raises ValueError for bad input."""
    setting = read_setting(args)
    if not 0 <= args.rank < setting.cp:
        raise ValueError(f"--rank {args.rank} with --cp {setting.cp}: it must be 0 to {setting.cp - 1}")
    if args.show and args.json:
        raise ValueError("--show with --json: stdout holds the JSON and nothing else; leave one of them out")
    if args.trace_ranks is not None and args.trace is None:
        raise ValueError(f"--trace-ranks {args.trace_ranks} without --trace: name the file to write")
    plot = check_output(args.plot, "--plot", PICTURES) if args.plot is not None else None
    trace = check_output(args.trace, "--trace", (".json",)) if args.trace is not None else None
    ranks = trace_ranks(args.trace_ranks, args.rank, setting)
    with spinner("planning"):
        decision = choose(args, setting)
    with spinner(f"checking the plans over {setting.cp} ranks"):
        proofs = [verify(candidate.plan) for candidate in (decision.forward, decision.backward)]
    said = as_json(setting, decision)
    if plot:
        from megatron_mesh_cp.cli.plots import draw_plan

        draw_plan(plot, setting, decision, timelines(setting, decision, (args.rank,)), args.rank)
    if trace:
        write_trace(trace, decision, timelines(setting, decision, ranks))
    if args.json:
        print(json.dumps(said, allow_nan=False))
        return 0
    out = console()
    for part in for_people(setting, decision, said):
        out.print(part, soft_wrap=isinstance(part, str))
    blocks, transfers = (sum(getattr(proof, name) for proof in proofs) for name in ("blocks", "transfers"))
    print(f"Verified over all {setting.cp} ranks: {blocks:,} blocks, {transfers:,} transfers, forward and backward.")
    for flag, path in (("picture", plot), ("trace", trace)):
        if path:
            print(f"Written: {flag} {path}")
    if args.show:
        from megatron_mesh_cp.draw import describe

        for candidate in (decision.forward, decision.backward):
            print(f"\n{describe(candidate.plan, args.rank)}")
    return 0


def choose(args: argparse.Namespace, setting: Setting) -> Decision:
    """Tiles and exchange from what the user typed. Raises ValueError naming the option."""
    for flag, text in (("--tile", args.tile), ("--tile-backward", args.tile_backward)):
        if text == "auto" or (text == "same" and flag == "--tile-backward"):
            continue
        try:
            TileShape.parse(text, flag).check_size(setting.cp, flag)
        except ValueError as error:
            raise ValueError(str(error).replace("context_parallel_size", "--cp")) from None
    most = None if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    tile, backward, asked = args.tile, args.tile_backward, ""
    how = {"exchange": args.exchange, "tp": setting.tp, "causal": setting.causal, "memory_limit": most}
    try:
        if args.by == "bytes" and "auto" in (tile, backward):
            tile, backward = fewest_bytes(setting, tile, backward, args.exchange, most)
            asked = "fewest bytes"
        decision = decide(setting.cp, setting.shape, setting.cluster, tile=tile, backward=backward, **how)
    except MemoryLimitError:
        raise memory_error(args.memory_limit, setting, args.tile, args.tile_backward, args.exchange) from None
    return replace(decision, why=decision.why.replace("as given", asked, 1)) if asked else decision


def fewest_bytes(setting: Setting, tile: str, backward: str, exchange: str, most: int | None) -> tuple[str, str]:
    """Tiles that send the fewest bytes in the place of each 'auto': of all, or of those that fit in `most` bytes.

    Raises MemoryLimitError where none fits.
    """
    needs = Needs(setting, exchange)

    def best(*directions: Direction) -> str:
        if most is None:
            return str(best_tile(setting.cp, setting.shape, directions[0] if len(directions) == 1 else None))
        found = needs.fewest_bytes(directions, most)
        if found is None:
            raise MemoryLimitError(f"no tile fits {most} bytes", needs.least(tile, backward))
        return str(found)

    if tile == "auto":
        tile = best(*Direction) if backward == "same" else best(Direction.FORWARD)
    return tile, best(Direction.BACKWARD) if backward == "auto" else backward


def sent_bytes(plan: Plan, shape: AttentionShape) -> dict[Channel, int]:
    """Bytes that a rank sends by channel, counted from the messages of the plan; the largest over ranks."""
    most = dict.fromkeys(Channel, 0)
    for rank in range(plan.tile.size) if plan.explicit else (0,):  # the ranks of a template send alike
        counts = dict.fromkeys(Channel, 0)
        for payload, count in sent_messages(plan, rank).items():
            counts[payload.channel] += count * shape.message_bytes(payload)
        most = {channel: max(most[channel], counts[channel]) for channel in Channel}
    return most


def timelines(setting: Setting, decision: Decision, ranks: Sequence[int]) -> tuple[Timeline, Timeline]:
    """Forward and backward simulated once more, with the spans of some ranks."""
    from megatron_mesh_cp.simulate import simulate

    forward, backward = (
        simulate(
            candidate.plan, setting.cluster, setting.shape, tp=setting.tp, causal=setting.causal, spans_of=tuple(ranks)
        )
        for candidate in (decision.forward, decision.backward)
    )
    return forward, backward


def trace_ranks(text: str | None, rank: int, setting: Setting) -> list[int]:
    """The ranks to trace: by default those of one node. Raises ValueError naming --trace-ranks."""
    most = min(setting.cp, setting.cluster.gpus_per_node // setting.tp)
    if text is None:
        first = rank // most * most
        return list(range(first, min(setting.cp, first + most)))
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) < setting.cp for word in words):
        raise ValueError(f"--trace-ranks {text}: must be CP ranks from 0 to {setting.cp - 1} by comma, such as 0,1")
    ranks = sorted({int(word) for word in words})
    if len(ranks) > most:
        raise ValueError(
            f"--trace-ranks {text}: a trace holds at most the {most} CP ranks of a node of {setting.cluster.name}"
        )
    return ranks


def write_trace(path: Path, decision: Decision, found: tuple[Timeline, Timeline]) -> None:
    """Forward and then backward, as one trace."""
    from megatron_mesh_cp.trace import Run, chrome_trace

    forward, backward = found
    runs = [
        Run(f"forward {decision.forward.tile}", 0.0, forward.spans),
        Run(f"backward {decision.backward.tile}", forward.seconds, backward.spans),
    ]
    path.write_text(json.dumps(chrome_trace(runs), allow_nan=False), encoding="utf-8")


def as_json(setting: Setting, decision: Decision) -> dict:
    """The object of --json. Bytes are per rank, the largest over ranks; times in ms; wait: of the slowest rank."""
    both = {"forward": decision.forward, "backward": decision.backward}
    shape = setting.shape
    sent = {name: by_name(sent_bytes(c.plan, shape)) for name, c in both.items()}
    total = sum(sum(channels.values()) for channels in sent.values())
    ring = total_bytes(TileShape(1, setting.cp), shape)
    times = {name: 1e3 * c.seconds for name, c in both.items()}
    bounds = {f"{name}_bound": 1e3 * c.bound for name, c in both.items()}
    return {
        **setting.as_json(),
        "tile": [decision.forward.tile.a, decision.forward.tile.b],
        "tile_backward": [decision.backward.tile.a, decision.backward.tile.b],
        "placement": placement(decision.forward.tile),
        "placement_backward": placement(decision.backward.tile),
        "exchange": decision.forward.exchange,
        "exchange_backward": decision.backward.exchange,
        "links": {name: c.plan.links for name, c in both.items()},
        "depth": {name: c.plan.depth for name, c in both.items()},
        "why": decision.why,
        "verified": True,
        "bytes": {**sent, "total": total, "ring_total": ring, "reduction": 1 - total / ring if ring else 0.0},
        "time_ms": {**times, **bounds, "total": sum(times.values())},
        "wait_ms": {name: 1e3 * c.wait for name, c in both.items()},
        "peak_bytes": max(c.peak_bytes for c in both.values()),
        "fits_device": not check_device_memory(max(c.peak_bytes for c in both.values()), setting.cluster),
        "peak_bytes_by_direction": {name: c.peak_bytes for name, c in both.items()},
    }


def by_name(channels: Mapping[Channel, int]) -> dict[str, int]:
    """Keys as the JSON has them."""
    return {channel.value: count for channel, count in channels.items()}


def placement(tile: TileShape) -> str:
    """Which group sits on consecutive ranks: "row" or "column"."""
    return "column" if tile.transposed else "row"


def for_people(setting: Setting, decision: Decision, said: dict) -> list[RenderableType]:
    """The table, and lines around it."""
    both = (decision.forward, decision.backward)
    sent = said["bytes"]["forward"], said["bytes"]["backward"]
    seconds, bound, wait = (sum(getattr(c, name) for c in both) for name in ("seconds", "bound", "wait"))
    table = new_table(
        f"Plan of one attention, CP {setting.cp}, {setting.seq_len:,} tokens\n{setting.model()}",
        {"": "left", **dict.fromkeys(("forward", "backward", "together"), "right")},
    )
    table.add_row("tile", *(str(c.tile) for c in both))
    table.add_row("exchange", *(c.exchange for c in both))
    table.add_row("links that the channels have", *(str(c.plan.links) for c in both))
    table.add_row("batches outstanding on a channel", *(str(c.plan.depth) for c in both))
    for channel in Channel:
        each = [s[channel.value] for s in sent]
        table.add_row(f"sent by a rank, {channel.value} channel", *map(size, each), size(sum(each)))
    table.add_row("milliseconds", *(milliseconds(c.seconds) for c in both), milliseconds(seconds))
    table.add_row("lower bound of any order", *(milliseconds(c.bound) for c in both), milliseconds(bound))
    table.add_row("waiting, the slowest rank", *(share(c.wait, c.seconds) for c in both), share(wait, seconds))
    table.add_row("peak of held chunks and results", *(limit(c.peak_bytes) for c in both), limit(said["peak_bytes"]))
    total, ring = said["bytes"]["total"], said["bytes"]["ring_total"]
    against = f"{-said['bytes']['reduction']:+.1%} against the ring" if total != ring else "as much as the ring"
    lines = [f"On {setting.machine()}", f"Tile: {decision.why}", f"Sent {size(total)} by each rank, {against}."]
    if any(c.tile.transposed for c in both):
        lines.append("A tile with a t has its column group (K, V), not its row group, on consecutive ranks.")
    too_much = check_device_memory(said["peak_bytes"], setting.cluster)
    if too_much:
        lines.append(f"Warning: does not fit; the peak of {too_much}.")
    return [table, *lines]
