"""The measured peer: Transformer Engine's own ring (cp_comm_type p2p), its real Python over an emulated extension.

Importing this module puts the emulation into the process, for good: only the ranks of the peer do it. The blocks are
computed by the kernel that the tiles use, so that both sides differ in communication and order alone.
"""

from __future__ import annotations

import sys
import time

import te_emulation
import torch
import torch.distributed as dist

from megatron_mesh_cp.kernels.sdpa import SdpaKernel

from .measure import Job, Measured, Once, Run, repeat
from .problem import Problem

sys.path.insert(0, str(te_emulation.FOLDER))
_counters = te_emulation.Counters()
te_emulation.install(SdpaKernel())
te_emulation.make_gloo_safe(_counters)

from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (  # noqa: E402
    attn_forward_func_with_cp,
)


def measure(rank: int, job: Job) -> tuple[Measured, ...] | None:
    """On every rank: forward and backward of every problem; rank 0 returns them."""
    measured: list[Measured] = []
    for problem in job.problems:
        measured += repeat(problem, {(None, "shift"): _run(rank, problem)}, job.repeats)
    return tuple(measured) if rank == 0 else None


def _run(rank: int, problem: Problem) -> Run:
    *inputs, dout = problem.chunk(rank)
    lengths = torch.arange(problem.batch + 1, dtype=torch.int32) * problem.seq_len

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # As FusedAttention calls it, which refuses float32 before; what travels and when does not depend on the dtype.
        return attn_forward_func_with_cp(
            True,
            *(q, k, v),
            *(lengths, lengths, problem.seq_len, problem.seq_len, lengths, lengths),
            0.0,
            dist.group.WORLD,
            list(range(problem.ranks)),
            torch.cuda.Stream(),
            "p2p",
            softmax_scale=problem.scale,
            qkv_format="sbhd",
            attn_mask_type="causal" if problem.causal else "no_mask",
            use_fused_attention=True,
            window_size=(-1, 0) if problem.causal else (-1, -1),
        )

    def run() -> Once:
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        _counters.sent, _counters.waited = 0, 0.0
        dist.barrier()
        begin = time.monotonic()
        out = attention(q, k, v).view(q.shape)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        end = time.monotonic()
        return Once(begin, end, _counters.waited, _counters.sent, problem.error(rank, (out, *grads)))

    return run
