"""scripts/netbench.sh: ring, tiles and Transformer Engine's ring on one rate-limited network; see the README."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from megatron_mesh_cp.cli.gloo_ranks import RanksError, run_ranks
from megatron_mesh_cp.cli.options import Whole, check_output, parse_count

from . import report
from .hosts import MOST_HOSTS, Hosts, HostsError, check_can_make, hosts, parse_rate

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_RANKS = 256


def main(argv: list[str] | None = None) -> int:
    """Run the bench; 0, 1 where ranks or the network fail, 2 for bad input."""
    args = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    # For the ranks: hosts without names and the absent extension of Transformer Engine are meant to be so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        return _run(args)
    except ValueError as error:
        print(f"netbench: {error}", file=sys.stderr)
        return 2
    except (RanksError, HostsError, report.Refused) as error:
        print(f"netbench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("netbench: interrupted; the hosts are taken away", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/netbench.sh",
        allow_abbrev=False,
        description="Attention forward and backward over gloo ranks on network namespaces with rate-limited links: our "
        "ring, our tiles and Transformer Engine's ring, each beside what the simulator predicts. Needs root.",
    )
    parser.add_argument("--hosts", default="16", help="hosts; several by comma are measured in turn (%(default)s)")
    parser.add_argument("--ranks-per-host", action=Whole, default=1, help="(%(default)s)")
    parser.add_argument(
        "--rate", default="100mbit", help="of each host's link, each way; several by comma (%(default)s)"
    )
    parser.add_argument(
        "--tiles",
        default="1x16,4x4",
        help="AxB by comma, where they fit the ranks; 1xN: ring, auto: the tuner's for both directions (%(default)s)",
    )
    parser.add_argument("--exchange", default="direct", help="direct, shift or both by comma (%(default)s)")
    parser.add_argument(
        "--seq-len", help=f"tokens of the whole sequence; k = 1024 (default: {report.DEFAULT_TOKENS} a rank)"
    )
    parser.add_argument("--heads", action=Whole, default=128, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", help="KV heads; several by comma (default: as --heads)")
    parser.add_argument("--head-dim", action=Whole, default=128, help="(%(default)s)")
    parser.add_argument("--batch", action=Whole, default=1, help="(%(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument("--repeats", action=Whole, default=3, help="measured runs; the median counts (%(default)s)")
    parser.add_argument("--peer", choices=("te-p2p",), help="measure Transformer Engine's own ring too")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="for our ranks on each network, and for those of the peer (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", metavar="FILE", help="draw measured and predicted seconds (.png, .svg, .pdf)")
    return parser


def _run(args: argparse.Namespace) -> int:
    networks = checked_jobs(args)
    files = {
        flag: check_output(text, flag, endings)
        for flag, text, endings in (
            ("--json", args.json, (".json",)),
            ("--plot", args.plot, (".png", ".svg", ".pdf")),
        )
        if text is not None
    }
    if args.peer:
        check_peer()
    check_can_make()
    rows: list[report.Row] = []
    try:
        for count, group in itertools.groupby(networks, key=lambda network: network[0]):
            with hosts(count, args.ranks_per_host) as net:
                for _, rate, job in group:
                    print(f"{net.count} hosts x {args.ranks_per_host} at {rate} ...", file=sys.stderr)
                    net.limit(parse_rate(rate))
                    rows += measure_network(net, rate, job, args.peer)
    finally:  # also what was measured before a failure
        if rows:
            _report(args, report.Findings(rows), files)
    return 0


def _report(args: argparse.Namespace, found: report.Findings, files: dict[str, Path]) -> None:
    report.console().print(report.table(found, args))
    for line in report.conclusions(found):
        report.console().print(line)
    if "--json" in files:
        files["--json"].write_text(json.dumps(report.as_json(found, args), allow_nan=False, indent=1), encoding="utf-8")
    if "--plot" in files:
        report.plot(found, args, files["--plot"])


def checked_jobs(args: argparse.Namespace) -> list[tuple[int, str, object]]:
    """(hosts, rate, job) of every network, checked before any is made. Raises ValueError naming the flag."""
    from megatron_mesh_cp.cost import check_heads
    from megatron_mesh_cp.layout import check_seq_len
    from megatron_mesh_cp.plan import check_exchange
    from megatron_mesh_cp.tile import TileShape

    counts = [_whole(text, "--hosts") for text in args.hosts.split(",")]
    if max(counts) > MOST_HOSTS:
        raise ValueError(f"--hosts {args.hosts}: at most {MOST_HOSTS}")
    rates = args.rate.split(",")
    for rate in rates:
        parse_rate(rate)
    exchanges = tuple(args.exchange.split(","))
    for exchange in exchanges:
        check_exchange(exchange, "--exchange")
        if exchange == "auto":
            raise ValueError(
                "--exchange auto: here the exchange is what is measured; give direct, shift, or direct,shift"
            )
    kv_heads = [_whole(text, "--kv-heads") for text in (args.kv_heads or str(args.heads)).split(",")]
    for kv in kv_heads:
        check_heads(args.heads, kv, "--heads", "--kv-heads")
    if not (args.time_limit > 0 and math.isfinite(args.time_limit)):
        raise ValueError(f"--time-limit {args.time_limit:g}: must be a positive number of seconds")
    tiles = {t: None if t == "auto" else TileShape.parse(t, "--tiles") for t in args.tiles.split(",")}

    import torch

    from .measure import Job
    from .problem import Problem

    networks, used = [], set()
    for count in counts:
        ranks = count * args.ranks_per_host
        if not 2 <= ranks <= _MOST_RANKS:
            raise ValueError(f"--hosts {count} x --ranks-per-host {args.ranks_per_host}: 2 to {_MOST_RANKS} ranks")
        fitting = tuple(text for text, tile in tiles.items() if tile is None or tile.size == ranks)
        used.update(fitting)
        if not fitting:
            raise ValueError(
                f"--tiles {args.tiles}: none has {ranks} ranks (--hosts x --ranks-per-host); for example 1x{ranks}"
            )
        seq_len = parse_count(args.seq_len, "--seq-len") if args.seq_len else report.DEFAULT_TOKENS * ranks
        check_seq_len(seq_len, ranks, flag="--seq-len")
        sizes = args.batch, args.heads
        problems = tuple(
            Problem(ranks, seq_len, *sizes, kv, args.head_dim, getattr(torch, args.dtype), not args.full)
            for kv in kv_heads
        )
        job = Job(problems, args.ranks_per_host, fitting, exchanges, args.repeats, args.time_limit)
        networks += [(count, rate, job) for rate in rates]
    if unused := [text for text in tiles if text not in used]:
        raise ValueError(f"--tiles {','.join(unused)}: fits none of --hosts {args.hosts} x {args.ranks_per_host} ranks")
    return networks


def _whole(text: str, flag: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{flag} {text!r}: must be a whole number from 1 up, or several by comma")
    return int(text)


def check_peer() -> None:
    """Raise ValueError where Transformer Engine cannot be the peer."""
    import te_emulation

    if not (te_emulation.FOLDER / "transformer_engine").is_dir():
        raise ValueError(
            f"--peer te-p2p: no Transformer Engine in {te_emulation.FOLDER}; start scripts/netbench.sh, which makes an "
            "environment with it"
        )


def measure_network(net: Hosts, rate: str, job, peer: str | None) -> list[report.Row]:
    """Everything on one network: our ranks, then those of the peer."""
    from .measure import measure

    lower = "--hosts, --heads, --repeats or raise --rate"
    result = run_ranks(measure, job, job.ranks, job.limit, lower, net.places)
    measured = list(result.measured)
    if peer:
        measured += _peer_ranks(net, job, lower)
    clusters = dict(zip(job.problems, result.clusters, strict=True))
    return [report.Row.of(one, clusters[one.problem], net.count, rate) for one in measured]


def _peer_ranks(net: Hosts, job, lower: str) -> list:
    """In a process of its own: what emulates Transformer Engine stays in the processes that import it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peer_main, args=(net, job, lower, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        raise RanksError("the process of --peer te-p2p died") from None
    finally:
        process.terminate()
        process.join()
    if isinstance(found, str):
        raise RanksError(found)
    return list(found)


def _end_with_parent() -> None:
    """Even where the command was killed: its ranks see their end by ours."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _peer_main(net: Hosts, job, lower: str, sender) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C ends us through our parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from .te_ring import measure

    with contextlib.suppress(BrokenPipeError):
        try:
            sender.send(run_ranks(measure, replace(job, tiles=()), job.ranks, job.limit, lower, net.places))
        except RanksError as error:
            sender.send(f"--peer te-p2p: {error}")
