"""`mesh-cp bench`: attention alone on CPU ranks. What is measured is printed, nothing is computed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.options import MOST_STARTED, Whole, check_output, parse_count
from megatron_mesh_cp.cli.report import console
from megatron_mesh_cp.cluster import Cluster, load_cluster
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.trace import chrome_trace

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_mesh_cp.cli.bench_ranks import Job, Measured
    from megatron_mesh_cp.cli.gloo_ranks import Place
    from megatron_mesh_cp.cost import AttentionShape, Costs
    from megatron_mesh_cp.plan import Direction

# Largest believable error, as a coarse net: a lost or wrongly merged block is off by the size of the values, about 1.
_MAX_ERROR = {"float64": 1e-8, "float32": 1e-2, "bfloat16": 0.5, "float16": 0.1}
PEAK_TFLOPS = 1.0  # of one CPU core; above the peak of every core with vector units alone


def add_parser(subparsers) -> None:
    """Add `bench` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure attention alone: bytes, seconds and error of several tiles",
        description="Run attention forward and backward over gloo ranks on the CPUs of this machine, with every "
        "tile, and set it beside one process that attends to the whole sequence.",
    )
    parser.add_argument("--ranks", action=Whole, help="context-parallel ranks to start (4; with --join: all)")
    parser.add_argument("--tiles", help="tiles AxB with A*B = ranks, by comma (default: a ring and the squarest)")
    parser.add_argument("--seq-len", default="4k", help="tokens of the whole sequence; k = 1024 (%(default)s)")
    parser.add_argument("--heads", action=Whole, default=8, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", action=Whole, help="KV heads (default: as --heads)")
    parser.add_argument("--head-dim", action=Whole, default=64, help="head dimension (%(default)s)")
    parser.add_argument("--batch", action=Whole, default=1, help="batch size (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(_MAX_ERROR), default="float32", help="(%(default)s)")
    parser.add_argument("--exchange", default="direct", help="direct or shift (%(default)s)")
    parser.add_argument("--kernel", default="auto", help="auto, sdpa or reference (%(default)s)")
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument("--repeats", action=Whole, default=3, help="measured runs; the best counts (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=1800, metavar="SECONDS", help="end hanging ranks then (%(default)s)"
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="plan each tile for this cluster, such as one that `mesh-cp calibrate` wrote, and simulate it there too",
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="write what the ranks do in the last run of each tile, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="start no ranks: be one of those that srun or torchrun has started, on any number of nodes",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the bench; 0, or 1 where the ranks fail or hang. Raises ValueError for bad input and unbelievable results."""
    job = checked_job(args)
    trace = check_output(args.trace, "--trace", (".json",)) if args.trace is not None else None
    cluster = load_cluster(args.cluster) if args.cluster is not None else None
    if cluster:
        job = replace(job, costs=tuple(planned_costs(job, tile, cluster) for tile in job.tiles))
    from megatron_mesh_cp.cli.bench_ranks import run_job
    from megatron_mesh_cp.cli.gloo_ranks import RanksError

    try:
        result = run_job(job)
    except RanksError as error:
        print(f"mesh-cp: bench: {error}", file=sys.stderr)
        return 1
    if result is None:  # a joined rank other than 0, which prints
        return 0
    dtype = str(job.dtype).removeprefix("torch.")
    refuse_nonsense("single process", result.single, job, ranks=1)
    for tile, measured in zip(job.tiles, result.tiles, strict=True):
        refuse_nonsense(f"tile {tile}", measured, job, ranks=job.ranks)
    single = {
        "seconds": result.single.seconds,
        "cpu_seconds": result.single.cpu,
        "max_error": result.single.error,
        "tflops": tflops(job, result.single.seconds),
    }
    ring = next((m for t, m in zip(job.tiles, result.tiles, strict=True) if t.a == 1), None)
    rows = [_row(job, t, m, result.single, ring) for t, m in zip(job.tiles, result.tiles, strict=True)]
    for number, row in enumerate(rows):
        row["predicted_seconds"] = predicted_seconds(job, number, cluster) if cluster else None
    if trace:
        trace.write_text(json.dumps(chrome_trace(result.recorded), allow_nan=False), encoding="utf-8")
    settings = {
        **{"ranks": job.ranks, "seq_len": job.seq_len, "heads": job.heads, "kv_heads": job.kv_heads},
        **{"head_dim": job.head_dim, "batch": job.batch, "dtype": dtype, "causal": job.causal},
        **{"exchange": job.exchange, "kernel": job.kernel, "repeats": job.repeats, "cores": cores()},
        **{"cluster": cluster.name if cluster else None, "joined": job.joined is not None},
    }
    if args.json:
        print(json.dumps({"rows": rows, "single": single, **settings}, allow_nan=False))
    else:
        console().print(table(rows, single, settings))
    return 0


def checked_job(args: argparse.Namespace) -> Job:
    """Everything that can be refused before a rank starts. Raises ValueError naming the flag."""
    joined = _joined(args)
    ranks = joined.ranks if joined else args.ranks or 4
    if ranks > MOST_STARTED and not joined:
        raise ValueError(f"--ranks {ranks}: at most {MOST_STARTED} ranks are started on one machine")
    seq_len = parse_count(args.seq_len, "--seq-len")
    if not (args.time_limit > 0 and math.isfinite(args.time_limit)):
        raise ValueError(f"--time-limit {args.time_limit:g}: must be a positive number of seconds")
    tiles = _ring_and_squarest(ranks)
    if args.tiles is not None:
        tiles = tuple(TileShape.parse(text, "--tiles") for text in args.tiles.split(","))
    twice = next((tile for tile in tiles if tiles.count(tile) > 1), None)
    if twice is not None:
        raise ValueError(f"--tiles {args.tiles}: {twice} is there {tiles.count(twice)} times; name it once")

    from megatron_mesh_cp.cost import check_heads
    from megatron_mesh_cp.layout import check_seq_len
    from megatron_mesh_cp.plan import check_exchange

    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    check_heads(args.heads, kv_heads, "--heads", "--kv-heads")
    try:
        for tile in tiles:
            tile.check_size(ranks, "--tiles")
        check_seq_len(seq_len, ranks, flag="--seq-len")
        check_exchange(args.exchange, "--exchange")
    except ValueError as error:  # the checks speak of what --ranks is called elsewhere
        raise ValueError(str(error).replace("context_parallel_size", "--ranks")) from None

    import torch

    from megatron_mesh_cp.cli.bench_ranks import Job
    from megatron_mesh_cp.kernels import select_kernel

    dtype = getattr(torch, args.dtype)
    select_kernel(args.kernel, dtype=dtype, device_type="cpu", head_dim=args.head_dim, flag="--kernel")
    return Job(
        ranks=ranks,
        tiles=tiles,
        seq_len=seq_len,
        heads=args.heads,
        kv_heads=kv_heads,
        head_dim=args.head_dim,
        batch=args.batch,
        dtype=dtype,
        causal=not args.full,
        exchange=args.exchange,
        kernel=args.kernel,
        repeats=args.repeats,
        limit=args.time_limit,
        traced=args.trace is not None,
        joined=joined,
    )


def _joined(args: argparse.Namespace) -> Place | None:
    """The rank that this process is, with --join. Raises ValueError where the other options do not fit that."""
    if not args.join:
        return None
    from megatron_mesh_cp.cli.gloo_ranks import find_place

    place = find_place(os.environ)
    if args.ranks not in (None, place.ranks):
        raise ValueError(f"--ranks {args.ranks} with --join in a world of {place.ranks}: leave --ranks out")
    if args.trace is not None:
        raise ValueError(f"--trace {args.trace} with --join: the clocks of several machines are not one; leave one out")
    return place


def _ring_and_squarest(ranks: int) -> tuple[TileShape, ...]:
    side = next(a for a in range(math.isqrt(ranks), 0, -1) if ranks % a == 0)
    return tuple(dict.fromkeys((TileShape(1, ranks), TileShape(side, ranks // side))))


def attention_shape(job: Job) -> AttentionShape:
    """The attention of one rank of a bench."""
    from megatron_mesh_cp.cost import AttentionShape

    size = job.dtype.itemsize
    return AttentionShape(
        *(job.seq_len // job.ranks, job.batch, job.heads, job.kv_heads, job.head_dim),
        item_bytes=size,
        stat_bytes=max(4, size),  # row statistics are fp32, beside fp64 they are fp64
    )


def planned_costs(job: Job, tile: TileShape, cluster: Cluster) -> dict[Direction, Costs]:
    """What the order of a tile is planned for on a cluster."""
    from megatron_mesh_cp.plan import Direction
    from megatron_mesh_cp.tune import costs_for

    shape = attention_shape(job)
    return {d: costs_for(cluster, shape, tile, d, exchange=job.exchange, causal=job.causal) for d in Direction}


def predicted_seconds(job: Job, number: int, cluster: Cluster) -> float:
    """Seconds of the forward and the backward of a tile as the simulator has them: the plans that the ranks run."""
    from megatron_mesh_cp.schedule import make_plan
    from megatron_mesh_cp.simulate import simulate

    plans = [make_plan(job.tiles[number], d, job.exchange, costs) for d, costs in job.costs[number].items()]
    return sum(simulate(plan, cluster, attention_shape(job), causal=job.causal).seconds for plan in plans)


def tflops(job: Job, seconds: float) -> float:
    """TFLOP/s of a forward and backward: 4 s^2 h d b and 2.5 times that, half under a causal mask."""
    flops = 3.5 * 4 * job.seq_len**2 * job.heads * job.head_dim * job.batch * (0.5 if job.causal else 1.0)
    return flops / seconds / 1e12 if seconds > 0 else math.inf


def refuse_nonsense(who: str, measured: Measured, job: Job, ranks: int) -> None:
    """Raise ValueError where a measurement cannot be true, rather than print it.

    A bench that had lost its communication once reported 1937 TFLOP/s (Megatron-Bridge PR 2665).
    """
    sent = measured.bytes_forward, measured.bytes_backward
    if ranks > 1 and min(sent) < 1:
        raise ValueError(
            f"{who}: {ranks} ranks sent {sent[0]} bytes forward and {sent[1]} backward, but every rank needs data of "
            "the others: communication was off. The result is refused; please report it with the command"
        )
    # Of a job on several machines the cores are not known: a rank has one thread.
    rate, used = tflops(job, measured.seconds), ranks if job.joined else min(ranks, cores())
    if rate > PEAK_TFLOPS * used:
        raise ValueError(
            f"{who}: {rate:.3g} TFLOP/s on {used} CPU core(s) is more than {PEAK_TFLOPS:g} TFLOP/s a core can do: "
            "work was skipped. The result is refused; please report it with the command"
        )
    limit = _MAX_ERROR[str(job.dtype).removeprefix("torch.")]
    if not measured.error <= limit:
        raise ValueError(
            f"{who}: largest error {measured.error:.3g} against fp64 attention is above {limit:g} for {job.dtype}: "
            "the attention is wrong. The result is refused; please report it with the command"
        )


def _row(job: Job, tile: TileShape, measured: Measured, single: Measured, ring: Measured | None) -> dict:
    """One row of the JSON. reduction: 1 - bytes / bytes of the measured 1xn row; None where that was not run."""
    sent = measured.bytes_forward + measured.bytes_backward
    ring_sent = ring.bytes_forward + ring.bytes_backward if ring else 0
    return {
        "tile": [tile.a, tile.b],
        "bytes_forward": measured.bytes_forward,
        "bytes_backward": measured.bytes_backward,
        "reduction": 1 - sent / ring_sent if ring_sent else None,
        "seconds": measured.seconds,
        "wait_seconds": measured.waited,
        "cpu_seconds": measured.cpu,
        "cpu_ratio": measured.cpu / single.cpu,
        "tflops": tflops(job, measured.seconds),
        "max_error": measured.error,
    }


def table(rows: list[dict], single: dict, settings: dict) -> Table:
    """The rows for people, the single process last."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    s = settings
    mask = "causal" if s["causal"] else "no mask"
    where = ", rank 0" if s.get("joined") else ""
    out = Table(
        title=f"Attention forward + backward, {s['ranks']} gloo ranks{where} on {s['cores']} CPU core(s)\n"
        f"{s['seq_len']} tokens, batch {s['batch']}, heads {s['heads']}/{s['kv_heads']} x {s['head_dim']}, "
        f"{s['dtype']}, {mask}, {s['exchange']}; best of {s['repeats']}",
        title_justify="left",
        caption="fwd, bwd: sent, as a rank handed it to torch.distributed, the largest over ranks\n"
        "CPU s: of all ranks together; ratio: to that of one process"
        + (f"\nsimulated: seconds on cluster {s['cluster']}" if s.get("cluster") else ""),
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    out.add_column("tile")
    predicted = ("simulated",) if s.get("cluster") else ()
    for title in ("fwd MiB", "bwd MiB", "vs ring", "seconds", *predicted, "waiting", "CPU s", "ratio", "error"):
        out.add_column(title, justify="right")
    for row in rows:
        out.add_row(
            "{}x{}".format(*row["tile"]),
            _mib(row["bytes_forward"]),
            _mib(row["bytes_backward"]),
            f"{-row['reduction']:+.1%}" if row["reduction"] else "-",
            f"{row['seconds']:.3f}",
            *(f"{row['predicted_seconds']:.3f}" for _ in predicted),
            f"{row['wait_seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['cpu_ratio']:.3f}",
            f"{row['max_error']:.1e}",
        )
    seconds = f"{single['seconds']:.3f}", *("-" for _ in predicted), "-", f"{single['cpu_seconds']:.3f}", "1"
    out.add_row("single", "-", "-", "-", *seconds, f"{single['max_error']:.1e}")
    return out


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
