"""The ranks behind `mesh-cp calibrate`: gloo processes on this machine that time their links and the attention kernel.

All ranks do the same thing at the same time, as in a run: they share the cores and the loopback then too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_mesh_cp.cli.gloo_ranks import run_ranks
from megatron_mesh_cp.groups import MeshGroups
from megatron_mesh_cp.kernels import Kernel, select_kernel
from megatron_mesh_cp.plan import Channel, Direction, Payload, Transfer
from megatron_mesh_cp.tile import TileShape

Key = TypeVar("Key", bound=Hashable)

MESSAGES = (4096, 16384, 65536, 262144, 1048576, 4194304)  # bytes
_BYTES_A_ROUND = 16 * 2**20  # that a rank sends in one measurement, in 20 messages at most
EXCHANGES_A_REPEAT = 4  # they are short, and all but a few of them hit a busy moment on a machine that others use
_FLOPS_A_ROUND = 2e9  # that a rank computes in one measurement, about 0.1 s of one core, in 100 calls at most


@dataclass(frozen=True)
class Job:
    """A checked calibration: one attention call of `heads` x `head_dim` at every chunk length. `limit` in seconds."""

    ranks: int
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    repeats: int
    limit: float


@dataclass(frozen=True)
class Result:
    """Seconds of one exchange by bytes, and of one kernel call by (direction, mask) and length.

    Each is the best of the repeats, and in every repeat the time until the slowest rank is done.
    """

    messages: dict[int, float]
    calls: dict[tuple[str, str], tuple[float, ...]]


def flops(job: Job, length: int, direction: str, mask: str) -> float:
    """FLOPs of one call: 4 s^2 h d, backward 2.5 times that, half of it under a causal mask."""
    forward = 4 * length**2 * job.heads * job.head_dim * (0.5 if mask == "causal" else 1.0)
    return forward if direction == "forward" else 2.5 * forward


def run_job(job: Job) -> Result:
    """Start the ranks, wait for them, and return what they measured; see `run_ranks`."""
    return run_ranks(_measure, job, job.ranks, job.limit, lower="--lengths, --heads or --repeats")


def _measure(rank: int, job: Job) -> Result:
    kernel = select_kernel("sdpa", dtype=job.dtype, device_type="cpu", head_dim=job.head_dim)
    messages = _best({size: _exchange(rank, job.ranks, size) for size in MESSAGES}, EXCHANGES_A_REPEAT * job.repeats)
    calls = {
        (direction, mask, length): _call(kernel, job, length, direction, mask)
        for direction in ("forward", "backward")
        for mask in ("full", "causal")
        for length in job.lengths
    }
    seconds = _best(calls, job.repeats)
    rows = {key[:2]: tuple(seconds[*key[:2], length] for length in job.lengths) for key in calls}
    return Result(messages, rows)


def _best(measurements: dict[Key, tuple[Callable[[], None], int]], repeats: int) -> dict[Key, float]:
    """The least seconds of every (work, count), measured in turn, so that a busy moment spoils one repeat of each."""
    best = dict.fromkeys(measurements, math.inf)
    for number in range(repeats + 1):
        for key, (work, count) in measurements.items():
            seconds = _together(work, count)
            if number > 0:  # the first round warms up memory and connections
                best[key] = min(best[key], seconds)
    return best


def _together(work: Callable[[], None], count: int) -> float:
    """Seconds of one `work()`, of `count` in a row on all ranks: from the first rank's begin to the last one's end.

    A rank's own time would not do where ranks share cores: one that is given its core late has it alone then, and
    none would be seen to wait for the others.
    """
    dist.barrier()
    begin = time.monotonic()  # one clock for all processes of a machine
    for _ in range(count):
        work()
    both = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both.sum().item() / count


def _exchange(rank: int, ranks: int, size: int) -> tuple[Callable[[], None], int]:
    """Send `size` bytes to the next rank and receive as much from the one before, at once, and how often to do it."""
    channel = MeshGroups.build(dist.group.WORLD, TileShape(1, ranks)).channel(Direction.FORWARD, Channel.COLUMN)
    out, into = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    batch = [(Transfer(Payload.KV, before, before, False), into), (Transfer(Payload.KV, rank, after, True), out)]

    def work() -> None:
        channel.start(batch, "calibration", "forward")
        channel.finish()

    return work, max(1, min(20, _BYTES_A_ROUND // size))


def _call(kernel: Kernel, job: Job, length: int, direction: str, mask: str) -> tuple[Callable[[], None], int]:
    """One call of the kernel on a chunk, and how often to make it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, job.heads, length, job.head_dim, generator=generator).to(job.dtype) for _ in range(4)
    )
    causal, scale = mask == "causal", job.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    delta = (dout.to(lse.dtype) * out).sum(-1)

    def forward() -> None:
        kernel.forward(q, k, v, causal, scale)

    def backward() -> None:
        kernel.backward(dout, q, k, v, out, lse, delta, causal, scale)

    count = math.ceil(_FLOPS_A_ROUND / flops(job, length, direction, mask))
    return forward if direction == "forward" else backward, min(100, count)
