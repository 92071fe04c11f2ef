"""What the ranks of a network bench do: time the links, time the blocks, then run ring and tiles in turn."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_mesh_cp.attention import mesh_attention
from megatron_mesh_cp.cluster import Cluster, KernelRates, Link
from megatron_mesh_cp.groups import MeshGroups
from megatron_mesh_cp.kernels import Kernel, select_kernel
from megatron_mesh_cp.layout import BlockKind
from megatron_mesh_cp.plan import Channel, Direction, Payload, Transfer
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import costs_for, decide

from .problem import Problem

_SMALL, _LARGE = 2**12, 2**20  # bytes of a message
_PEAK_FLOPS = 1e12  # of one core; only a bound
_CALLS = 5


@dataclass(frozen=True)
class Job:
    """One network: problems (they differ in their KV heads) that all run on it, and the tiles to run them with.

    tiles: as typed; "auto" is what the tuner takes. exchanges: "direct", "shift"; limit: seconds.
    """

    problems: tuple[Problem, ...]
    ranks_per_host: int
    tiles: tuple[str, ...]
    exchanges: tuple[str, ...]
    repeats: int
    limit: float

    @property
    def ranks(self) -> int:
        return self.problems[0].ranks


@dataclass(frozen=True)
class Measured:
    """One algorithm on one problem.

    seconds: forward + backward, from the first rank's begin to the last one's end, of the median repeat (of two, the
    faster); waited: seconds in which a rank waits for transfers, the mean over ranks, of the same repeat; bytes: handed
    to torch.distributed by one rank, the largest over ranks; error: see Problem.error, the largest over ranks and
    repeats.
    """

    problem: Problem
    tile: TileShape | None
    exchange: str
    seconds: float
    waited: float
    bytes: int
    error: float


@dataclass(frozen=True)
class Result:
    """What rank 0 hands back. clusters: as measured, one for each problem."""

    clusters: tuple[Cluster, ...]
    measured: tuple[Measured, ...]


def measure(rank: int, job: Job) -> Result | None:
    """On every rank; see the top of this file."""
    links = _links(rank, job)
    clusters, measured = [], []
    for problem in job.problems:
        cluster = _cluster(problem, job.ranks_per_host, links)
        clusters.append(cluster)
        runs = {}
        for tile, exchange in _choices(rank, job, problem, cluster):
            costs = {
                d: costs_for(cluster, problem.shape, tile, d, exchange=exchange, causal=problem.causal)
                for d in Direction
            }
            groups = MeshGroups.build(dist.group.WORLD, tile, costs=costs)
            runs[tile, exchange] = _mesh_run(rank, problem, groups, exchange)
        measured += repeat(problem, runs, job.repeats)
    return Result(tuple(clusters), tuple(measured)) if rank == 0 else None


@dataclass(frozen=True)
class Once:
    """One forward and backward on one rank: begin and end by the clock that all processes of a machine share."""

    begin: float
    end: float
    waited: float
    bytes: int
    error: float


Run = Callable[[], Once]


def repeat(problem: Problem, runs: dict[tuple[TileShape | None, str], Run], repeats: int) -> list[Measured]:
    """Run all in turn, `repeats` times after a round that warms up plans and connections."""
    all_times: dict[tuple[TileShape | None, str], list[Measured]] = {key: [] for key in runs}
    for number in range(repeats + 1):
        for (tile, exchange), run in runs.items():
            dist.barrier()
            said: list[Once | None] = [None] * problem.ranks
            dist.all_gather_object(said, run())
            if number > 0:
                seconds = max(s.end for s in said) - min(s.begin for s in said)
                waited = sum(s.waited for s in said) / len(said)
                error = torch.tensor([s.error for s in said], dtype=torch.float64).max().item()
                one = Measured(problem, tile, exchange, seconds, waited, max(s.bytes for s in said), error)
                all_times[tile, exchange].append(one)
    return [_median(times) for times in all_times.values()]


def _median(times: list[Measured]) -> Measured:
    middle = sorted(times, key=lambda one: one.seconds)[(len(times) - 1) // 2]
    worst = torch.tensor([one.error for one in times], dtype=torch.float64).max().item()
    return replace(middle, error=worst)


def _mesh_run(rank: int, problem: Problem, groups: MeshGroups, exchange: str) -> Run:
    *inputs, dout = problem.chunk(rank)
    counters = groups.counters

    def run() -> Once:
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        counters.reset()
        dist.barrier()
        begin = time.monotonic()
        out = mesh_attention(q, k, v, groups, problem.causal, exchange=exchange, kernel="sdpa")
        grads = torch.autograd.grad(out, (q, k, v), dout)
        end = time.monotonic()
        sent = counters.sent_in("forward") + counters.sent_in("backward")
        return Once(begin, end, counters.waited, sent, problem.error(rank, (out, *grads)))

    return run


def _choices(rank: int, job: Job, problem: Problem, cluster: Cluster) -> list[tuple[TileShape, str]]:
    """Tiles and exchanges; rank 0 looks them up for all."""
    chosen: list[tuple[TileShape, str]] = []
    if rank == 0:
        for text, exchange in itertools.product(job.tiles, job.exchanges):
            decision = decide(
                problem.ranks, problem.shape, cluster, tile=text, exchange=exchange, causal=problem.causal
            )
            if (decision.forward.tile, exchange) not in chosen:
                chosen.append((decision.forward.tile, exchange))
    box = [chosen]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# --- what the simulator must know -------------------------------------------------------------------------------------


def _links(rank: int, job: Job) -> dict[str, Link]:
    """Latency and bandwidth between hosts and inside one, as pairs of neighbours see them that exchange at once."""
    r = job.ranks_per_host
    first_of_hosts = list(range(0, job.ranks, r))
    inter = _link(rank, first_of_hosts) if len(first_of_hosts) > 1 else None
    intra = _link(rank, list(range(r))) if r > 1 else None
    return {"inter": inter or intra, "intra": intra or inter}


def _link(rank: int, ring: Sequence[int]) -> Link:
    """Of a ring of ranks, each of which sends to the next and receives from the one before; the others wait.

    The bandwidth is that of large messages in a row, which the token buckets cannot take up, and the latency what a
    small one takes beyond its bytes.
    """
    channel = MeshGroups.build(dist.group.WORLD, TileShape(1, dist.get_world_size())).channel(
        Direction.FORWARD, Channel.COLUMN
    )

    def seconds(size: int, count: int) -> float:
        batch = []
        if rank in ring:
            out, into = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
            place = ring.index(rank)
            after, before = ring[(place + 1) % len(ring)], ring[place - 1]
            batch = [
                (Transfer(Payload.KV, before, before, False), into),
                (Transfer(Payload.KV, rank, after, True), out),
            ]

        def work() -> None:
            if batch:
                channel.start(batch, "calibration", "forward")
                channel.finish()

        return statistics.median(together(work, count) for _ in range(3))

    bandwidth = _LARGE / seconds(_LARGE, 4)
    return Link(bandwidth, max(0.0, seconds(_SMALL, 10) - _SMALL / bandwidth))


def together(work: Callable[[], None], count: int) -> float:
    """Seconds of one `work()`, of `count` in a row on all ranks: from the first rank's begin to the last one's end."""
    work()
    dist.barrier()
    begin = time.monotonic()
    for _ in range(count):
        work()
    both = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both.sum().item() / count


def _cluster(problem: Problem, ranks_per_host: int, links: dict[str, Link]) -> Cluster:
    """The hosts as a cluster: blocks timed on all ranks at once, as they are called, since they share the cores."""
    kernel = select_kernel("sdpa", dtype=problem.dtype, device_type="cpu", head_dim=problem.head_dim)
    length = problem.seq_len // problem.ranks
    rates = {
        f"{d.value}_{name}": tuple(_rate(kernel, problem, d, kind) for kind in kinds)
        for d in Direction
        for name, kinds in (
            # A half block gets the rate of its shorter side; see Cluster.block_seconds.
            ("full", (BlockKind.KV_FIRST_HALF, BlockKind.FULL)),
            ("causal", (BlockKind.CAUSAL, BlockKind.CAUSAL)),
        )
    }
    return Cluster(
        name="netbench",
        device="CPU rank of one thread",
        gpus_per_node=ranks_per_host,
        nics_per_node=1,
        intra=links["intra"],
        inter=links["inter"],
        kernel=KernelRates((max(1, length // 2), length), **rates),
        peak_flops=_PEAK_FLOPS,
        memory=2**34,
    )


def _rate(kernel: Kernel, problem: Problem, direction: Direction, kind: BlockKind) -> float:
    """FLOP/s of one kind of block with all ranks at it."""
    length, causal = problem.seq_len // problem.ranks, kind is BlockKind.CAUSAL
    columns = length // 2 if kind is BlockKind.KV_FIRST_HALF else length
    q, k, v, dout = (
        torch.randn(problem.batch, heads, tokens, problem.head_dim).to(problem.dtype)
        for heads, tokens in (
            (problem.heads, length),
            (problem.kv_heads, columns),
            (problem.kv_heads, columns),
            (problem.heads, length),
        )
    )
    out, lse = kernel.forward(q, k, v, causal, problem.scale)
    delta = (dout.to(lse.dtype) * out).sum(-1)

    def forward() -> None:
        kernel.forward(q, k, v, causal, problem.scale)

    def backward() -> None:
        kernel.backward(dout, q, k, v, out, lse, delta, causal, problem.scale)

    work = forward if direction is Direction.FORWARD else backward
    seconds = statistics.median(together(work, _CALLS) for _ in range(3))
    flops = 4 * kind.live_fraction * length**2 * problem.heads * problem.head_dim * problem.batch
    return flops * (1.0 if direction is Direction.FORWARD else 2.5) / max(seconds, math.ulp(1.0))
