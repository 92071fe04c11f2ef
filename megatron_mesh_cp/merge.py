"""Merging of partial attention results, and the stand-in for `out` in the backward.

Row statistics (`lse`, `delta`) are [b, h, s] in fp32 (fp64 for fp64 inputs); lse is the natural log of the summed
exponentials of the scaled scores. Results (`out`, `dout`) are [b, h, s, d].
"""

from __future__ import annotations

import torch

NEG_INF = float("-inf")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row statistics and accumulators: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clean_lse(lse: torch.Tensor) -> torch.Tensor:
    """Map the +inf that some kernels write for a fully masked row to -inf, so that a merge ignores the row."""
    return torch.where(lse == float("inf"), NEG_INF, lse)


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a partial result into (out, lse), in place.

        m = logaddexp(l1, l2);  o = exp(l1 - m) o1 + exp(l2 - m) o2

    Args: out [b, h, s, d] and lse [b, h, s] in the accumulation dtype; part_out in any dtype, part_lse [b, h, s].
    A row with lse = -inf (or +inf, a kernel's mark for a fully masked row) has weight 0: two such rows give
    out = 0, lse = -inf and no NaN.
    """
    part_lse = clean_lse(part_lse).to(lse.dtype)
    merged = torch.logaddexp(lse, part_lse)
    # -inf - -inf is NaN: shift by 0 where both rows are empty, so that the part's weight is exp(-inf) = 0.
    shift = torch.where(merged == NEG_INF, 0.0, merged)
    weight = torch.exp(part_lse - shift).unsqueeze(-1)
    # exp(l1 - m) = 1 - exp(l2 - m), so this is one pass over out: o1 + w (o2 - o1).
    out.lerp_(part_out.to(out.dtype), weight)
    lse.copy_(merged)


def row_delta(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """delta = rowsum(dO * O), [b, h, s] in fp32 (fp64 for fp64 inputs); both inputs [b, h, s, d]."""
    acc = stats_dtype(out.dtype)
    return (dout.to(acc) * out.to(acc)).sum(-1)


def stand_in_out(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An `out'` with rowsum(dO * out') = delta, for kernels that want `out` where only (dO, delta) has travelled.

        out' = dO * delta / ||dO||^2,  then once  out'[j] += (delta - sum(dO * out')) / dO[j],  j = argmax |dO|

    dO is first scaled by its largest entry (no overflow or underflow of the square); zero rows give 0. The one
    compensation step absorbs the rounding of out' to the kernel's dtype: without it bf16 gradients are up to 6x
    worse than with the true out, with it they are as good or better.

    Args: dout [b, h, s, dv] in the kernel's dtype, delta [b, h, s]. Returns [b, h, s, dv] in dout's dtype.
    """
    acc = stats_dtype(dout.dtype)
    tiny = torch.finfo(acc).tiny
    grad = dout.to(acc)
    delta = delta.to(acc).unsqueeze(-1)
    largest, where = grad.abs().max(-1, keepdim=True)
    safe = largest.clamp_min(tiny)
    out = grad / safe
    # For rows of zeros out is 0 and stays so; clamp_min(1) holds for every other row: its largest entry is 1.
    norm = torch.linalg.vector_norm(out, dim=-1, keepdim=True).square_().clamp_min_(1.0)
    out.mul_(delta / safe / norm)
    out = out.to(dout.dtype).to(acc)
    rest = delta - (grad * out).sum(-1, keepdim=True)
    pivot = grad.gather(-1, where)
    fix = torch.where(pivot != 0, rest / torch.where(pivot != 0, pivot, 1.0), 0.0)
    return out.scatter_add_(-1, where, fix).to(dout.dtype)
