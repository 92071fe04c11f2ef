"""--mesh-log-comm: what travelled, printed each time Megatron prints its iteration line."""

from __future__ import annotations

import functools
import inspect

import torch
import torch.distributed as dist

from .config import MeshConfig
from .groups import all_shared_groups


def comm_line(iteration: int, mesh: MeshConfig) -> str:
    """Measured bytes per rank and layer (one call), waiting time since the last line; counters start again."""
    parts = []
    waited = 0.0
    for groups in all_shared_groups():
        counters = groups.counters
        calls = counters.calls
        sizes = {d: counters.sent_in(d) // max(1, calls.get(d, 0)) for d in ("forward", "backward")}
        text = " ".join(f"{d} {size}" for d, size in sizes.items())
        parts.append(f"bytes per rank and layer: {text}")
        waited += counters.waited
        counters.reset()
    if mesh.shape is not None:
        ring = mesh.bytes_per_call()
        parts.append(f"a ring would send: forward {ring['ring_forward']} backward {ring['ring_backward']}")
    # On CUDA a wait is put into the stream and takes the host no time.
    parts.append("waiting is not measured on CUDA" if torch.cuda.is_available() else f"waited {1000 * waited:.1f} ms")
    return f"[mesh-cp] comm iteration {iteration} | " + " | ".join(parts)


def wrap_training_log(mesh: MeshConfig) -> functools.partial | None:
    """Add the line to Megatron's training log; returns the way back, None where there is no megatron.training."""
    try:
        from megatron.training import get_args, training
    except ImportError:
        return None
    original = training.training_log
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        result = original(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]  # its place differs between versions
        if iteration % get_args().log_interval == 0:
            line = comm_line(iteration, mesh)
            if dist.get_rank() == dist.get_world_size() - 1:  # the rank that prints Megatron's iteration line
                print(line, flush=True)
        return result

    training.training_log = training_log
    return functools.partial(setattr, training, "training_log", original)
