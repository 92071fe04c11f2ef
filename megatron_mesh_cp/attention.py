"""mesh_attention: one autograd Function that executes a Plan, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from .cost import check_heads
from .executor import BackwardRun, ForwardRun, Problem
from .groups import MeshGroups
from .kernels import Kernel, select_kernel
from .layout import check_layout
from .merge import row_delta
from .plan import Direction, check_exchange
from .wire import from_heads_first, heads_first

_SEQUENCE_AND_BATCH = {"sbhd": (0, 1), "bshd": (1, 0)}


def mesh_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: MeshGroups,
    causal: bool = True,
    *,
    qkv_format: str = "sbhd",
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    kernel: str = "auto",
    exchange: str = "direct",
    exchange_backward: str | None = None,
    layout: str = "zigzag",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over a sequence that is spread over the ranks of a context-parallel group.

    Every rank of the group calls it with its own chunk; see Note [Tile layout] in tile.py for who computes what, and
    Note [Zigzag] in layout.py for which tokens a rank holds. Each rank

        1. receives the Q chunks of its row group and the KV chunks of its column group, in the order of a Plan,
        2. computes its a*b blocks meanwhile, merging partial results by their lse,
        3. sends the partial (O, lse) of the other ranks' rows home and merges those of its own row.

    The backward does the same with (Q, dO, lse, delta), (K, V), dQ and (dK, dV), over the backward tile. Saved for
    it: local q, k, v, out and lse, nothing else. Two runs are bit-equal where the kernel's are (te, flash and sdpa on
    CUDA: under torch.use_deterministic_algorithms).

    Args:
        q: [s/n, b, hq, d] ("sbhd") or [b, s/n, hq, d] ("bshd"); any strides.
        k: [s/n, b, hkv, d], with hq a multiple of hkv.
        v: [s/n, b, hkv, dv].
        groups: the row and column groups of this rank.
        causal: causal mask over the whole sequence, or none.
        softmax_scale: factor on the scores; default 1/sqrt(d).
        cu_seqlens: packed sequences are not supported yet.
        kernel: "auto", "te", "flash", "sdpa" or "reference"; see kernels.select_kernel.
        exchange: "direct" (owner to user) or "shift" (neighbour ring); both move the same bytes.
        exchange_backward: the same for the backward; default as `exchange`.
        layout: "zigzag" (Megatron's) or "plain" (contiguous chunks).
        return_lse: also return lse, [b, hq, s/n] in fp32 (fp64 for fp64 inputs), natural log, not differentiable.

    Returns: [s/n, b, hq, dv] ("bshd": [b, s/n, hq, dv]) in q's dtype; with return_lse a pair.

    Raises: ValueError, before any communication, for shapes, dtypes or options that are not supported, and at the first
        call where the ranks disagree on them; comm.CommError when a peer dies or hangs.
    """
    if groups is None:
        raise ValueError("mesh_attention: groups is None; make them with MeshGroups.build or from_megatron")
    if cu_seqlens is not None or qkv_format == "thd":
        raise ValueError("mesh_attention: packed sequences (qkv_format thd, cu_seqlens) are not supported yet")
    if qkv_format not in _SEQUENCE_AND_BATCH:
        raise ValueError(f"mesh_attention: qkv_format {qkv_format!r}: choose from sbhd, bshd")
    if not isinstance(causal, bool):
        raise ValueError(
            f"mesh_attention: causal must be True or False, got {causal!r}; mask tensors are not supported"
        )
    if not isinstance(softmax_scale, float | int | None):
        raise ValueError(f"mesh_attention: softmax_scale must be a number, got {type(softmax_scale).__name__}")
    exchange_backward = exchange if exchange_backward is None else exchange_backward
    check_exchange(exchange)
    check_exchange(exchange_backward, "exchange_backward")
    check_layout(layout)
    _check_tensors(q, k, v, qkv_format, layout, causal, groups.size)
    chosen = select_kernel(
        kernel, dtype=q.dtype, device_type=q.device.type, head_dim=q.shape[-1], v_head_dim=v.shape[-1]
    )
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    call = _Call(groups, chosen, causal, scale, (exchange, exchange_backward), layout, qkv_format)
    plans = ", ".join(groups.fingerprint(d, e) for d, e in zip(Direction, call.exchanges, strict=True))
    groups.check_agreement(
        f"q {list(q.shape)} k {list(k.shape)} v {list(v.shape)} {qkv_format} {q.dtype}, causal {causal}, "
        f"scale {scale}, exchange {exchange}, backward {exchange_backward}, layout {layout}, plans {plans}"
    )
    out, lse = _MeshAttention.apply(q, k, v, call)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Call:
    groups: MeshGroups
    kernel: Kernel
    causal: bool
    scale: float
    exchanges: tuple[str, str]  # forward, backward
    layout: str
    qkv_format: str

    def problem(self, direction: Direction) -> Problem:
        exchange = self.exchanges[direction is Direction.BACKWARD]
        program = self.groups.program(direction, exchange)
        return Problem(self.groups, program, self.kernel, self.causal, self.scale, self.layout, self.qkv_format)

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """A [b, h, s, d] view; the kernels want a contiguous last dimension."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        return heads_first(x, self.qkv_format)

    def as_given(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """From [b, h, s, d] back to the caller's layout, contiguous, in `dtype`."""
        return from_heads_first(x, self.qkv_format).to(dtype, memory_format=torch.contiguous_format).contiguous()


class _MeshAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        with torch.autocast(q.device.type, enabled=False):  # the kernels choose their precision themselves
            out, lse = ForwardRun(call.problem(Direction.FORWARD), *map(call.heads_first, (q, k, v))).run()
        out = call.as_given(out, q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        dout_h, out_h = call.heads_first(dout), call.heads_first(out)
        with torch.autocast(q.device.type, enabled=False):
            run = BackwardRun(
                call.problem(Direction.BACKWARD),
                *map(call.heads_first, (q, k, v)),
                dout_h,
                lse,
                row_delta(dout_h, out_h),
            )
            results = run.run()
        grads = tuple(
            call.as_given(grad, x.dtype) if wanted else None
            for grad, x, wanted in zip(results, (q, k, v), ctx.needs_input_grad[:3], strict=True)
        )
        return *grads, None


def _check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str, layout: str, causal: bool, n: int
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} ({qkv_format})"
    if any(x.dim() != 4 for x in (q, k, v)):
        raise ValueError(f"mesh_attention: q, k and v must have 4 dimensions, got {shapes}")
    if not q.dtype.is_floating_point or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"mesh_attention: q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"mesh_attention: q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    sequence, batch = _SEQUENCE_AND_BATCH[qkv_format]
    for dim, name in ((sequence, "local sequence length"), (batch, "batch size")):
        if not q.shape[dim] == k.shape[dim] == v.shape[dim]:
            raise ValueError(f"mesh_attention: q, k and v differ in {name}: {shapes}")
    if k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"mesh_attention: k and v need equal heads, q and k equal head dims: {shapes}")
    if min(q.numel(), k.numel(), v.numel()) == 0:
        raise ValueError(f"mesh_attention: empty tensor: {shapes}")
    check_heads(q.shape[2], k.shape[2], "query heads", "KV heads")
    if layout == "zigzag" and causal and n > 1 and q.shape[sequence] % 2:
        length = q.shape[sequence] * n
        raise ValueError(
            f"sequence length {length} with context_parallel_size {n}: it must be a multiple of "
            f"2 * context_parallel_size = {2 * n}; every rank holds two half-chunks"
        )
