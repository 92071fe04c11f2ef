"""`mesh-cp calibrate`: measure the ranks of this machine, and write what they can do as a cluster file."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import textwrap
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_mesh_cp.cli.bench import PEAK_TFLOPS, cores
from megatron_mesh_cp.cli.options import MOST_STARTED, Whole, check_output
from megatron_mesh_cp.cluster import parse_cluster

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_mesh_cp.cli.calibrate_ranks import Job, Result

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_KINDS = tuple((direction, mask) for direction in ("forward", "backward") for mask in ("full", "causal"))
# A plan for more ranks than were measured stays on this one machine as long as they are not more than this.
_RANKS_A_NODE = 64


def add_parser(subparsers) -> None:
    """Add `calibrate` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure the links and the attention kernel of this machine, and write a cluster file",
        description="Measure gloo ranks on the CPUs of this machine: how fast they exchange messages, and how fast "
        "each runs the sdpa kernel while all the others do too. The result is a cluster file for `--cluster FILE`.",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write, .yaml or .yml")
    parser.add_argument("--name", help="name of the cluster (default: that of the file)")
    parser.add_argument("--force", action="store_true", help="overwrite FILE where it is there already")
    parser.add_argument("--ranks", action=Whole, default=4, help="ranks to start (%(default)s)")
    parser.add_argument("--heads", action=Whole, default=8, help="heads of the kernel (%(default)s)")
    parser.add_argument("--head-dim", action=Whole, default=64, help="head dimension (%(default)s)")
    parser.add_argument(
        "--lengths", default="128,256,512,1024,2048", help="chunk lengths in tokens, by comma (%(default)s)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--repeats", action=Whole, default=5, help="measured runs; the best counts (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=600, metavar="SECONDS", help="end hanging ranks then (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure and write the file; 0, or 1 where the ranks fail or hang. Raises ValueError for bad input."""
    job = checked_job(args)
    if args.name is not None and not args.name.strip():
        raise ValueError(f"--name {args.name!r}: must be a text, or leave it out for the name of the file")
    check_new(args.output, args.force)
    path = check_output(args.output, "--output", (".yaml", ".yml"))
    name = path.stem if args.name is None else args.name
    from megatron_mesh_cp.cli.calibrate_ranks import run_job
    from megatron_mesh_cp.cli.gloo_ranks import RanksError

    try:
        result = run_job(job)
    except RanksError as error:
        print(f"mesh-cp: calibrate: {error}", file=sys.stderr)
        return 1
    text = cluster_text(name, job, result)
    parse_cluster(text)  # refuses rates above the peak, before anything is written
    check_new(args.output, args.force)  # others may have written it meanwhile
    path.write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(name, path, job, result), allow_nan=False))
    else:
        from rich.console import Console

        console = Console()
        for heading, table in (link_table(job, result), kernel_table(job, result)):
            console.print(heading, soft_wrap=True)
            console.print(table)
        console.print(f"Written to {path}; use it with --cluster {path}", soft_wrap=True)
    return 0


def checked_job(args: argparse.Namespace) -> Job:
    """Everything that can be refused before a rank starts. Raises ValueError naming the flag."""
    if args.ranks < 2:
        raise ValueError(f"--ranks {args.ranks}: must be at least 2, since a link has two ends")
    if args.ranks > MOST_STARTED:
        raise ValueError(f"--ranks {args.ranks}: at most {MOST_STARTED} ranks are started on one machine")
    if not (args.time_limit > 0 and math.isfinite(args.time_limit)):
        raise ValueError(f"--time-limit {args.time_limit:g}: must be a positive number of seconds")
    words = args.lengths.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--lengths {args.lengths!r}: must be positive whole numbers by comma, such as 128,256,512")
    lengths = tuple(sorted({int(word) for word in words}))

    import torch

    from megatron_mesh_cp.cli.calibrate_ranks import Job
    from megatron_mesh_cp.kernels import select_kernel

    dtype = getattr(torch, args.dtype)
    select_kernel("sdpa", dtype=dtype, device_type="cpu", head_dim=args.head_dim, flag="--dtype")
    return Job(args.ranks, args.heads, args.head_dim, lengths, dtype, args.repeats, args.time_limit)


def check_new(text: str, force: bool) -> None:
    """Raise ValueError where a file is there that must not be overwritten."""
    if Path(text).is_file() and not force:
        raise ValueError(f"--output {text}: is there already; choose another name, or overwrite it with --force")


def fit_link(messages: dict[int, float]) -> tuple[float, float]:
    """(seconds, bytes/s) of latency and bandwidth: seconds = latency + bytes / bandwidth, by least squares.

    The errors are taken relative to the time: else only the largest messages would count. Raises ValueError where the
    time does not grow with the message.
    """
    sizes, seconds = (np.array(list(x), dtype=float) for x in (messages.keys(), messages.values()))
    # latency / t + bytes / bandwidth / t = 1
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(rows / rows.max(axis=0), np.ones(len(sizes)))[0] / rows.max(axis=0)
    if latency <= 0 or per_byte <= 0:
        times = ", ".join(f"{size} bytes {time * 1e6:.0f} us" for size, time in messages.items())
        raise ValueError(
            f"the measured times do not grow with the size of the message ({times}): the machine is too busy; measure "
            "again when it is quiet, or with more --repeats"
        )
    return float(latency), float(1 / per_byte)


def rates(job: Job, result: Result) -> dict[str, list[float]]:
    """FLOP/s by "forward_full" and so on, at each length."""
    from megatron_mesh_cp.cli.calibrate_ranks import flops

    return {
        f"{direction}_{mask}": [
            flops(job, length, direction, mask) / seconds
            for length, seconds in zip(job.lengths, result.calls[direction, mask], strict=True)
        ]
        for direction, mask in _KINDS
    }


def cluster_text(name: str, job: Job, result: Result) -> str:
    """The cluster file; see cluster.py for its form."""
    import psutil

    from megatron_mesh_cp.cli.calibrate_ranks import EXCHANGES_A_REPEAT

    latency, bandwidth = fit_link(result.messages)
    exchanges = EXCHANGES_A_REPEAT * job.repeats
    # A whole machine shares its memory; a rank gets its part.
    memory = psutil.virtual_memory().total / job.ranks
    command = f"measured on {date.today():%Y-%m-%d} by `mesh-cp calibrate {shlex.join(_flags(job))}` on {cores()} cores"
    link = (
        f"{command}: gloo over loopback; every rank sends to the next and receives from the one before at once, in "
        f"messages of {min(result.messages)} to {max(result.messages)} bytes; best of "
        f"{exchanges}, least squares."
    )
    lines = [
        f"name: {json.dumps(name)}",
        f"device: {json.dumps(f'CPU rank of one thread, {_dtype(job)}')}",
        f"description: {_folded(_description(job), 2)}",
        f"gpus_per_node: {max(_RANKS_A_NODE, job.ranks)}",
        "nics_per_node: 1",
        f"memory_gb: {_plain(memory / 1e9)}",
        f"peak_tflops: {PEAK_TFLOPS:g}",
        "links:",
    ]
    for which, source in (("intra", link), ("inter", "derived: as intra; no other machine was there.")):
        lines += [
            f"  {which}:",
            f"    bandwidth_gb_s: {_plain(bandwidth / 1e9)}",
            f"    latency_us: {_plain(latency * 1e6)}",
            f"    source: {_folded(source, 6)}",
        ]
    lines += ["kernel:", f"  head_dim: {job.head_dim}", f"  lengths: [{', '.join(map(str, job.lengths))}]"]
    for field, values in rates(job, result).items():
        lines.append(f"  {field}: [{', '.join(_plain(rate / 1e12) for rate in values)}]")
    kernel = f"{command}: kernel sdpa, {job.heads} heads of {job.head_dim}, all ranks at once; best of {job.repeats}."
    lines.append(f"  source: {_folded(kernel, 4)}")
    return "\n".join(lines) + "\n"


def _description(job: Job) -> str:
    shared = f"{job.ranks} ranks on {cores()} cores were measured, all busy at once"
    return (
        f"Gloo ranks on the CPUs of one machine: a GPU is a rank here, the machine is the node, and its number of "
        f"ranks is only what a plan may ask for ({shared}). The peak is a bound for any core, not this one's."
    )


def _flags(job: Job) -> list[str]:
    values = {
        "--ranks": job.ranks,
        "--heads": job.heads,
        "--head-dim": job.head_dim,
        "--lengths": ",".join(map(str, job.lengths)),
        "--dtype": _dtype(job),
        "--repeats": job.repeats,
    }
    return [word for flag, value in values.items() for word in (flag, str(value))]


def _dtype(job: Job) -> str:
    return str(job.dtype).removeprefix("torch.")


def _plain(value: float) -> str:
    """Three digits that count, never as 1e-05, which YAML takes for a text."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def _folded(text: str, indent: int) -> str:
    space = " " * indent
    return ">-\n" + textwrap.fill(
        text, 110, initial_indent=space, subsequent_indent=space, break_long_words=False, break_on_hyphens=False
    )


def as_json(name: str, path: Path, job: Job, result: Result) -> dict:
    """The object of --json: rates in FLOP/s, bandwidth in bytes/s, times in seconds."""
    latency, bandwidth = fit_link(result.messages)
    return {
        "cluster": name,
        "file": str(path),
        "latency": latency,
        "bandwidth": bandwidth,
        "messages": [{"bytes": size, "seconds": seconds} for size, seconds in result.messages.items()],
        "kernel": {"lengths": list(job.lengths), **rates(job, result)},
        **{"ranks": job.ranks, "heads": job.heads, "head_dim": job.head_dim, "dtype": _dtype(job)},
        **{"repeats": job.repeats, "cores": cores()},
    }


def link_table(job: Job, result: Result) -> tuple[str, Table]:
    """The exchanges for people, beside what the fitted latency and bandwidth say."""
    latency, bandwidth = fit_link(result.messages)
    heading = (
        f"Link: {job.ranks} gloo ranks on {cores()} CPU core(s); each sends to the next and receives at once\n"
        f"latency {_plain(latency * 1e6)} us, bandwidth {_plain(bandwidth / 1e9)} GB/s in each direction"
    )
    rows = []
    for size, seconds in result.messages.items():
        fitted = latency + size / bandwidth
        rows.append((str(size), f"{seconds * 1e6:.0f}", f"{fitted * 1e6:.0f}", _plain(size / seconds / 1e9)))
    return heading, _table(("bytes", "us", "fitted us", "GB/s"), rows)


def kernel_table(job: Job, result: Result) -> tuple[str, Table]:
    """The kernel rates for people."""
    by_kind = rates(job, result)
    heading = (
        f"Kernel sdpa, {_dtype(job)}, {job.heads} heads of {job.head_dim}: GFLOP/s of a rank while all are busy; "
        f"best of {job.repeats}"
    )
    rows = [
        (str(length), *(_plain(rate / 1e9) for rate in row))
        for length, *row in zip(job.lengths, *by_kind.values(), strict=True)
    ]
    return heading, _table(("tokens", *(kind.replace("_", " ") for kind in by_kind)), rows)


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        out.add_column(title, justify="right")
    for row in rows:
        out.add_row(*row)
    return out
