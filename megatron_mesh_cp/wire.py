"""How the tensors of one message lie in one buffer, so that a transfer is one contiguous send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_AXES = "bhsd"
Parts = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each tensor of a message


def from_heads_first(x: torch.Tensor, memory: str) -> torch.Tensor:
    """A [b, h, s, d] view with its axes in the order `memory`, such as "sbhd"; tensors of other ranks as they are."""
    return x.permute([_AXES.index(axis) for axis in memory]) if x.dim() == 4 else x


def heads_first(x: torch.Tensor, memory: str) -> torch.Tensor:
    """The way back: a tensor with its axes in the order `memory` as a [b, h, s, d] view."""
    return x.permute([memory.index(axis) for axis in _AXES])


def in_memory_order(flat: torch.Tensor, shape: tuple[int, ...], memory: str) -> torch.Tensor:
    """A contiguous tensor as a view of `shape` whose axes lie in the order `memory` ([b, h, s, d] only)."""
    if len(shape) != 4:
        return flat.view(shape)
    return heads_first(flat.view([shape[_AXES.index(axis)] for axis in memory]), memory)


@dataclass(frozen=True)
class Wire:
    """Shapes and dtypes of a message's tensors, in the caller's order.

    In the buffer the widest dtype comes first, so that every tensor is aligned to its own element size. A [b, h, s, d]
    tensor lies there as `memory` says, "sbhd" or "bshd": as the caller's own tensors do, so that packing is one plain
    copy and a kernel that wants that order has no more to make.
    """

    parts: Parts
    memory: str = "bhsd"

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def alloc(self, device: torch.device) -> torch.Tensor:
        """An empty buffer, uint8 [nbytes]."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The message's tensors, as views of its buffer."""
        out: list[torch.Tensor | None] = [None] * len(self.parts)
        offset = 0
        for index in sorted(range(len(self.parts)), key=lambda i: -self.parts[i][1].itemsize):
            shape, dtype = self.parts[index]
            size = math.prod(shape) * dtype.itemsize
            out[index] = in_memory_order(buffer[offset : offset + size].view(dtype), shape, self.memory)
            offset += size
        return tuple(out)

    def pack(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The buffer that holds `tensors` (rounded to the wire's dtypes); a lone contiguous tensor is not copied."""
        if len(tensors) == 1 and tensors[0].dtype == self.parts[0][1]:
            flat = from_heads_first(tensors[0], self.memory)
            if flat.is_contiguous():
                return flat.reshape(-1).view(torch.uint8)
        buffer = self.alloc(tensors[0].device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer
