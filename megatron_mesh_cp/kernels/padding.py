"""What kernels with one head dim, or another alignment of the causal mask, need around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def wide(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x padded with zeros to head dim `dim`, which changes neither scores nor results."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def narrow(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x without its padding, and without the memory of it."""
    return x if x.shape[-1] == dim else x[..., :dim].clone()


def common_dim(q: torch.Tensor, v: torch.Tensor, multiple: int = 1) -> int:
    """The head dim that Q, K and V are padded to."""
    return -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple


def top_left_forward(forward: Forward, q, k, v, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A top-left causal mask by a kernel whose own is bottom-right: the two agree on square blocks.

    Row i sees keys 0..i. So keys beyond the rows are never seen, and rows beyond the keys see all of them.
    Shapes as in `kernels.Kernel.forward`.
    """
    rows, columns = q.shape[2], k.shape[2]
    if not causal or rows == columns:
        return forward(q, k, v, causal, scale)
    if rows < columns:
        return forward(q, k[:, :, :rows], v[:, :, :rows], True, scale)
    square = forward(q[:, :, :columns], k, v, True, scale)
    below = forward(q[:, :, columns:], k, v, False, scale)
    return tuple(torch.cat(parts, 2) for parts in zip(square, below, strict=True))


def top_left_backward(backward: Backward, dout, q, k, v, out, lse, delta, causal: bool, scale: float):
    """The backward of `top_left_forward`; shapes as in `kernels.Kernel.backward`."""
    rows, columns = q.shape[2], k.shape[2]
    if not causal or rows == columns:
        return backward(dout, q, k, v, out, lse, delta, causal, scale)
    if rows < columns:
        dq, dk, dv = backward(dout, q, k[:, :, :rows], v[:, :, :rows], out, lse, delta, True, scale)
        unseen = (0, 0, 0, columns - rows)
        return dq, F.pad(dk, unseen), F.pad(dv, unseen)
    top, below = slice(None, columns), slice(columns, None)
    square, full = (
        backward(*(x[:, :, part] for x in (dout, q)), k, v, *(x[:, :, part] for x in (out, lse, delta)), mask, scale)
        for part, mask in ((top, True), (below, False))
    )
    return torch.cat((square[0], full[0]), 2), square[1] + full[1], square[2] + full[2]
