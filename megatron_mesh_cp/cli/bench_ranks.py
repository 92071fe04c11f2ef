"""The ranks behind `mesh-cp bench`: gloo processes on this machine that run, time and check attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_mesh_cp.attention import mesh_attention
from megatron_mesh_cp.cli.gloo_ranks import Place, join_ranks, run_ranks
from megatron_mesh_cp.cost import Costs
from megatron_mesh_cp.groups import MeshGroups
from megatron_mesh_cp.layout import chunk_positions
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.simulate import Span
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.trace import Run

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Job:
    """A checked bench: one attention (global `seq_len`), and the tiles to run it with.

    limit: seconds; traced: record what every rank does in the last repeat of each tile; costs: what the order of each
    tile is planned for (default: nothing is known of the machine); joined: which rank this process is,
    of a world that something else has started.
    """

    ranks: int
    tiles: tuple[TileShape, ...]
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype
    causal: bool
    exchange: str
    kernel: str
    repeats: int
    limit: float
    traced: bool = False
    costs: tuple[Mapping[Direction, Costs], ...] = ()
    joined: Place | None = None


@dataclass(frozen=True)
class Measured:
    """One forward and backward. Of one rank first; `_all_ranks` makes it that of all.

    seconds, waited, error, bytes: the largest over ranks; cpu: CPU seconds summed over ranks, all threads of the
    processes (gloo's too); error: largest absolute difference of out, dq, dk, dv from the fp64 attention.
    """

    seconds: float
    cpu: float
    error: float = 0.0
    waited: float = 0.0
    bytes_forward: int = 0
    bytes_backward: int = 0


@dataclass(frozen=True)
class Result:
    """What rank 0 hands back: the best of the repeats of the single process, and of every tile; and the recordings."""

    single: Measured
    tiles: tuple[Measured, ...]
    recorded: tuple[Run, ...] = ()


def run_job(job: Job) -> Result | None:
    """Start the ranks, wait for them, and return what they measured; see `run_ranks`.

    A joined job is run as the one rank that this process is: None on all but rank 0.
    """
    if job.joined:
        return join_ranks(_measure, job, job.joined, job.limit)
    return run_ranks(_measure, job, job.ranks, job.limit, lower="--seq-len or --repeats")


def _measure(rank: int, job: Job) -> Result:
    """All measurements, the single process and the tiles in turn, so that a drift of the clock hits all alike."""
    whole = _inputs(job)
    want = _fp64(rank, job, whole)
    positions = chunk_positions(rank, job.ranks, job.seq_len)
    own, own_want = ([x[positions] for x in tensors] for tensors in (whole, want))
    if rank > 0:
        del whole, want
    costs = job.costs or [None] * len(job.tiles)
    built = [MeshGroups.build(dist.group.WORLD, t, costs=c) for t, c in zip(job.tiles, costs, strict=True)]
    singles: list[Measured] = []
    runs: list[list[Measured]] = [[] for _ in built]
    for number in range(job.repeats + 1):
        dist.barrier()  # gloo blocks without spinning: the machine is rank 0's alone
        one = _timed(lambda: _single(job, *whole), want) if rank == 0 else None
        dist.barrier()
        recorders = [Recorder() if job.traced and number == job.repeats else None for _ in built]
        many = []
        for groups, recorder in zip(built, recorders, strict=True):
            groups.counters.recorder = recorder
            many.append(_all_ranks(_mesh(job, groups, own, own_want)))
        if number > 0:  # the first round warms up memory, connections and plans
            singles.append(one)
            for row, measured in zip(runs, many, strict=True):
                row.append(measured)
    recorded = _gather(job.tiles, recorders) if job.traced else ()
    return Result(_best(singles), tuple(map(_best, runs)), recorded) if rank == 0 else None


def _mesh(job: Job, groups: MeshGroups, own: list[torch.Tensor], want: list[torch.Tensor]) -> Measured:
    """One forward and backward of this rank. Bytes are what the channels handed to torch.distributed."""
    dout = own[3]
    q, k, v = (x.detach().requires_grad_() for x in own[:3])

    def attention() -> Tensors:
        out = mesh_attention(q, k, v, groups, job.causal, exchange=job.exchange, kernel=job.kernel)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    counters = groups.counters
    counters.reset()
    dist.barrier()
    measured = _timed(attention, want)
    return replace(
        measured,
        waited=counters.waited,
        bytes_forward=counters.sent_in("forward"),
        bytes_backward=counters.sent_in("backward"),
    )


class Recorder:
    """Keeps what one rank does; see comm.Recorder. The threads of the channels call it too: append is atomic."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __call__(self, lane: str, label: str, start: float, end: float) -> None:
        self.spans.append(Span(lane, start, end, label))


def _gather(tiles: tuple[TileShape, ...], recorders: list[Recorder]) -> tuple[Run, ...]:
    """The spans of all ranks, tile after tile: perf_counter is one clock for all processes of a machine."""
    runs, now = [], 0.0
    for tile, recorder in zip(tiles, recorders, strict=True):
        said: list[list[Span]] = [[]] * dist.get_world_size()
        dist.all_gather_object(said, recorder.spans)
        first = min(span.start for spans in said for span in spans)
        moved = [[replace(s, start=s.start - first, end=s.end - first) for s in spans] for spans in said]
        runs.append(Run(f"tile {tile}", now, dict(enumerate(moved))))
        now += max(span.end for spans in moved for span in spans)
    return tuple(runs)


def _timed(attention: Callable[[], Tensors], want: list[torch.Tensor]) -> Measured:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    got = attention()
    cpu, seconds = time.process_time() - begin_cpu, time.perf_counter() - begin
    # NaN must survive: max() of Python drops it, depending on the order.
    error = torch.stack([(g.detach().double() - w).abs().max() for g, w in zip(got, want, strict=True)]).max()
    return Measured(seconds, cpu, error.item())


def _all_ranks(mine: Measured) -> Measured:
    said: list[Measured] = [mine] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return Measured(
        max(m.seconds for m in said),
        sum(m.cpu for m in said),
        _worst(said),
        max(m.waited for m in said),
        max(m.bytes_forward for m in said),
        max(m.bytes_backward for m in said),
    )


def _best(repeats: list[Measured]) -> Measured:
    """The fastest repeat, with the least CPU time and the worst error of all repeats."""
    fastest = min(repeats, key=lambda m: m.seconds)
    return replace(fastest, cpu=min(m.cpu for m in repeats), error=_worst(repeats))


def _worst(all_of: list[Measured]) -> float:
    return torch.tensor([m.error for m in all_of], dtype=torch.float64).max().item()


def _inputs(job: Job) -> list[torch.Tensor]:
    """Global q, k, v, dout [s, b, h, d], the same on every rank."""
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(job.seq_len, job.batch, heads, job.head_dim, generator=g, dtype=torch.float64).to(job.dtype)
        for heads in (job.heads, job.kv_heads, job.kv_heads, job.heads)
    ]


def _single(job: Job, *inputs: torch.Tensor) -> Tensors:
    """aten's attention over the whole sequence in one process: out, dq, dk, dv [s, b, h, d].

    The bare operators with no autograd around them: the least that attention costs here. They work block by block,
    so that 8k tokens fit the memory of a laptop.
    """
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in inputs)
    ops, scale = torch.ops.aten, job.head_dim**-0.5
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, job.causal, scale=scale)
    grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, job.causal, scale=scale
    )
    return tuple(x.permute(2, 0, 1, 3) for x in (out, *grads))


def _fp64(rank: int, job: Job, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The attention that all are compared with, in fp64: computed once, on rank 0, and given to the others."""
    doubles = [x.double() for x in inputs]
    if rank == 0:
        want = [x.contiguous() for x in _single(job, *doubles)]
    else:
        want = [torch.empty_like(x) for x in (doubles[0], *doubles[:3])]
    for x in want:
        dist.broadcast(x, src=0)
    return want
