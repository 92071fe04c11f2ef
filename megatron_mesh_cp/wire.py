"""How the tensors of one message lie in one buffer, so that a transfer is one contiguous send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Wire:
    """Shapes and dtypes of a message's tensors, in the caller's order.

    In the buffer the widest dtype comes first, so that every tensor is aligned to its own element size.
    """

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

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
            out[index] = buffer[offset : offset + size].view(dtype).view(shape)
            offset += size
        return tuple(out)

    def pack(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The buffer that holds `tensors` (rounded to the wire's dtypes); a lone contiguous tensor is not copied."""
        if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].dtype == self.parts[0][1]:
            return tensors[0].reshape(-1).view(torch.uint8)
        buffer = self.alloc(tensors[0].device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer
