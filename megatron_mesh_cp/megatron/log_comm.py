"""--mesh-log-comm: what travelled, printed each time Megatron prints its iteration line, and given to its writers.

The figures are those of the rank that prints Megatron's line and holds its TensorBoard and W&B writers, the last one.
Evaluation between two lines counts to the second.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm import Counters
from ..streams import StreamClock
from .config import MeshConfig
from .groups import all_shared_groups

_DIRECTIONS = ("forward", "backward")
_TAG = "mesh-cp"


@dataclass(frozen=True)
class CommReport:
    """What one rank's channels did in `iterations` iterations.

    per_call: bytes of one call (one layer and microbatch) by direction; sent: bytes, all calls; waited: seconds in
    which attention waited for transfers, which nothing hid; rates: bytes/s by channel while a batch was under way.
    """

    iterations: int
    per_call: dict[str, int]
    sent: int
    waited: float
    rates: dict[str, float]

    @classmethod
    def take(cls, all_counters: list[Counters], iterations: int) -> CommReport:
        """Sum up the counters, and let them start again."""
        sent: dict[tuple[str, str], int] = {}
        busy: dict[tuple[str, str], float] = {}
        calls = dict.fromkeys(_DIRECTIONS, 0)
        waited = 0.0
        for counters in all_counters:
            counters.read_clock()
            for key, size in counters.sent.items():
                sent[key] = sent.get(key, 0) + size
            for key, seconds in counters.busy.items():
                busy[key] = busy.get(key, 0.0) + seconds
            for direction in _DIRECTIONS:
                calls[direction] += counters.calls.get(direction, 0)
            waited += counters.waited
            counters.reset()
        rates = {}
        for channel in sorted({channel for _, channel in sent}, reverse=True):  # row, column
            seconds = sum(part for (_, which), part in busy.items() if which == channel)
            if seconds > 0:
                rates[channel] = sum(size for (_, which), size in sent.items() if which == channel) / seconds
        per_call = {
            direction: sum(size for (which, _), size in sent.items() if which == direction) // max(1, calls[direction])
            for direction in _DIRECTIONS
        }
        return cls(max(1, iterations), per_call, sum(sent.values()), waited, rates)

    def line(self, iteration: int, mesh: MeshConfig) -> str:
        """The line for people."""
        sizes = " ".join(f"{direction} {size}" for direction, size in self.per_call.items())
        parts = [f"bytes per rank and layer: {sizes}"]
        if mesh.shape is not None:
            ring = mesh.bytes_per_call()
            parts.append(f"a ring would send: forward {ring['ring_forward']} backward {ring['ring_backward']}")
        parts.append(f"an iteration: {self.sent / self.iterations:.0f} bytes, waited {self._waited_ms:.1f} ms")
        rates = " ".join(f"{channel} {rate / 1e9:.3g} GB/s" for channel, rate in self.rates.items())
        parts.append(f"link rate: {rates or self._no_rate}")
        return f"[mesh-cp] comm iteration {iteration} | " + " | ".join(parts)

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and W&B."""
        return {
            f"{_TAG}/bytes-per-iteration": self.sent / self.iterations,
            f"{_TAG}/exposed-wait-ms": self._waited_ms,
            **{f"{_TAG}/link-rate-{channel}-GB-s": rate / 1e9 for channel, rate in self.rates.items()},
        }

    @property
    def _no_rate(self) -> str:
        return "not measured; TORCH_NCCL_ENABLE_TIMING=1 has NCCL time its transfers" if self.sent else "nothing sent"

    @property
    def _waited_ms(self) -> float:
        return 1e3 * self.waited / self.iterations


def wrap_training_log(mesh: MeshConfig) -> functools.partial | None:
    """Add the line to Megatron's training log; returns the way back, None where there is no megatron.training."""
    try:
        from megatron.training import get_args, training
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    except ImportError:
        return None
    original = training.training_log
    signature = inspect.signature(original)
    iterations = 0

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        nonlocal iterations
        result = original(*args, **kwargs)
        iterations += 1
        for counters in (groups.counters for groups in all_shared_groups()):
            counters.read_clock()  # every iteration: else events pile up
        if _start_clocks():
            iterations = 0
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]  # its place differs between versions
        if iteration % get_args().log_interval == 0:
            report = CommReport.take([groups.counters for groups in all_shared_groups()], iterations)
            iterations = 0
            if dist.get_rank() == dist.get_world_size() - 1:  # the rank that prints Megatron's iteration line
                print(report.line(iteration, mesh), flush=True)
            if (writer := get_tensorboard_writer()) is not None:
                for name, value in report.scalars().items():
                    writer.add_scalar(name, value, iteration)
            if (wandb := get_wandb_writer()) is not None:
                wandb.log(report.scalars(), iteration)
        return result

    training.training_log = training_log
    return functools.partial(setattr, training, "training_log", original)


def _start_clocks() -> bool:
    """On CUDA only events know how long a stream waits. True where clocks were started: counting begins anew then.

    Groups are made with the model, and this is first called after the first iteration.
    """
    if not torch.cuda.is_available():
        return False
    new = [groups.counters for groups in all_shared_groups() if groups.counters.clock is None]
    for counters in new:
        counters.clock = StreamClock()
        counters.reset()
    return bool(new)
