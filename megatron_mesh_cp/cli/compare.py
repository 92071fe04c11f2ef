"""`mesh-cp compare`: mesh beside the other context-parallel algorithms, on one cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.options import (
    PICTURES,
    Setting,
    add_setting_options,
    check_device_memory,
    check_output,
    read_settings,
)
from megatron_mesh_cp.cli.plan import add_tile_options, choose
from megatron_mesh_cp.cli.report import console, limit, milliseconds, new_table, progress_bar, size
from megatron_mesh_cp.peers import Peer, compare_peers

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(subparsers) -> None:
    """Add `compare` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "compare",
        help="set mesh beside ring, Ulysses and the others: bytes, time, memory",
        description="What one attention forward and backward sends, takes and holds with each algorithm. --cp and "
        "--seq-len may be lists; each is then compared with each.",
    )
    add_setting_options(parser, lists=True)
    add_tile_options(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw bytes and time over --cp (png, svg, pdf)")


def run(args: argparse.Namespace) -> int:
    """Compare; 0. Raises ValueError for bad input."""
    settings = read_settings(args)
    plot = check_output(args.plot, "--plot", PICTURES) if args.plot is not None else None
    rows: list[dict] = []
    with progress_bar("settings") as progress:
        for done, setting in enumerate(settings):
            progress(done, len(settings))
            rows += rows_of(setting, [*compare_peers_of(setting), mesh(args, setting)])
    if plot:
        from megatron_mesh_cp.cli.plots_scaling import draw_scaling

        draw_scaling(plot, settings, rows)
    if args.json:
        print(json.dumps(as_json(settings, rows), allow_nan=False))
        return 0
    out = console()
    out.print(f"One attention, forward + backward: {settings[0].model()}", soft_wrap=True)
    out.print(f"On {settings[0].machine()}\n", soft_wrap=True)
    for setting in settings:
        out.print(table(setting, _of(setting, rows)))
    for line in _impossible(rows):
        out.print(line, soft_wrap=True)
    for line in _too_much(settings, rows):
        out.print(line, soft_wrap=True)
    if len(settings) > 1:
        out.print(_summary_line(summary(rows)), soft_wrap=True)
    if plot:
        print(f"Written: picture {plot}")
    return 0


def compare_peers_of(setting: Setting) -> tuple[Peer, ...]:
    """All other algorithms."""
    return compare_peers(setting.cp, setting.shape, setting.cluster, tp=setting.tp, causal=setting.causal)


def mesh(args: argparse.Namespace, setting: Setting) -> Peer:
    """Mesh with the tile that the options ask for, in the form of the others."""
    decision = choose(args, setting)
    both = (decision.forward, decision.backward)
    tiles, exchanges = ("/".join(dict.fromkeys(str(getattr(c, of)) for c in both)) for of in ("tile", "exchange"))
    return Peer(
        algo="mesh",
        seconds_forward=decision.forward.seconds,
        seconds_backward=decision.backward.seconds,
        bytes_forward=decision.forward.bytes,
        bytes_backward=decision.backward.bytes,
        # The slowest rank either computes or waits.
        wait_share=sum(c.wait for c in both) / sum(c.seconds for c in both),
        peak_bytes=max(c.peak_bytes for c in both),
        note=f"{tiles} {exchanges}",
    )


def rows_of(setting: Setting, peers: Sequence[Peer]) -> list[dict]:
    """Rows of the JSON. Bytes are sent by a rank; speedup, reduction: against the ring, None where it cannot run."""
    ring = next(peer for peer in peers if peer.algo == "ring")
    ring_seconds, ring_bytes = _seconds(ring), _bytes(ring)
    rows = []
    for peer in peers:
        seconds, sent = _seconds(peer), _bytes(peer)
        rows.append(
            {
                "algo": peer.algo,
                "cp": setting.cp,
                "seq_len": setting.seq_len,
                "bytes": sent,
                "bytes_forward": peer.bytes_forward,
                "bytes_backward": peer.bytes_backward,
                "time_ms": None if seconds is None else 1e3 * seconds,
                "time_ms_forward": None if seconds is None else 1e3 * peer.seconds_forward,
                "time_ms_backward": None if seconds is None else 1e3 * peer.seconds_backward,
                "wait_share": peer.wait_share,
                "peak_bytes": peer.peak_bytes,
                "fits_device": None if peer.impossible else not check_device_memory(peer.peak_bytes, setting.cluster),
                "speedup": None if seconds is None else ring_seconds / seconds,
                "reduction": None if sent is None else 1 - sent / ring_bytes if ring_bytes else 0.0,
                "note": peer.note,
                "impossible": peer.impossible or None,
            }
        )
    return rows


def summary(rows: Sequence[dict]) -> dict:
    """Mesh against the ring over all settings: mean and largest speed-up and byte reduction."""
    ours = [row for row in rows if row["algo"] == "mesh"]
    return {
        "settings": len(ours),
        **{
            f"{name}_{how}": value
            for name in ("speedup", "reduction")
            for how, value in (
                ("mean", sum(row[name] for row in ours) / len(ours)),
                ("largest", max(row[name] for row in ours)),
            )
        },
    }


def as_json(settings: Sequence[Setting], rows: list[dict]) -> dict:
    """The object of --json."""
    first = settings[0].as_json()
    common = {key: value for key, value in first.items() if key not in ("cp", "seq_len")}
    return {"rows": rows, "summary": summary(rows), **common}


def table(setting: Setting, rows: Sequence[dict]) -> Table:
    """One setting; algorithms that cannot run have no figures."""
    columns = ("sent", "vs ring", "ms", "speed-up", "waiting", "peak")
    out = new_table(
        f"CP {setting.cp}, {setting.seq_len:,} tokens", {"algorithm": "left", **dict.fromkeys(columns, "right")}
    )
    for row in rows:
        name = f"{row['algo']} {row['note']}".strip()
        if row["impossible"]:
            out.add_row(name, *["-"] * len(columns), style="dim")
            continue
        out.add_row(
            name,
            size(row["bytes"]),
            f"{-row['reduction']:+.1%}" if row["reduction"] else "",
            milliseconds(row["time_ms"] / 1e3),
            f"{row['speedup']:.2f}x",
            f"{row['wait_share']:.1%}",
            limit(row["peak_bytes"]),
            style="bold" if row["algo"] == "mesh" else None,
        )
    return out


def _impossible(rows: Sequence[dict]) -> list[str]:
    """One line for each reason, with the context-parallel sizes that it is true of."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["impossible"]:
            sizes = reasons.setdefault((row["algo"], row["impossible"]), [])
            if row["cp"] not in sizes:
                sizes.append(row["cp"])
    return [f"{algo} cannot run at CP {', '.join(map(str, s))}: {why}." for (algo, why), s in reasons.items()]


def _too_much(settings: Sequence[Setting], rows: Sequence[dict]) -> list[str]:
    """One line where an algorithm holds more than a GPU has."""
    algos: dict[str, list[str]] = {}
    for row in rows:
        if row["fits_device"] is False:
            algos.setdefault(f"CP {row['cp']} with {row['seq_len']:,} tokens", []).append(row["algo"])
    if not algos:
        return []
    places: dict[str, list[str]] = {}
    for place, names in algos.items():
        places.setdefault(", ".join(names), []).append(place)
    said = "; ".join(f"{names} at {', '.join(where)}" for names, where in places.items())
    most = max(row["peak_bytes"] for row in rows if not row["impossible"])
    return [f"Warning: does not fit: {said}. A peak of {check_device_memory(most, settings[0].cluster)}."]


def _summary_line(s: dict) -> str:
    return (
        f"Mesh against the ring in {s['settings']} settings: {s['speedup_mean']:.2f}x as fast on average, up to "
        f"{s['speedup_largest']:.2f}x; {s['reduction_mean']:.1%} fewer bytes on average, up to "
        f"{s['reduction_largest']:.1%}."
    )


def _of(setting: Setting, rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if (row["cp"], row["seq_len"]) == (setting.cp, setting.seq_len)]


def _seconds(peer: Peer) -> float | None:
    return None if peer.impossible else peer.seconds_forward + peer.seconds_backward


def _bytes(peer: Peer) -> int | None:
    return None if peer.impossible else peer.bytes_forward + peer.bytes_backward
