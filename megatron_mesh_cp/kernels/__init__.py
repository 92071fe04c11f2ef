"""Block attention kernels behind one interface, and the choice among them.

A kernel computes attention of one Q chunk against one KV chunk. All tensors are [b, h, s, d] views of any stride
with a contiguous last dimension; row statistics are [b, h, s] in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import Protocol

import torch

from .reference import ReferenceKernel
from .sdpa import SdpaKernel

KERNELS = ("auto", "te", "flash", "sdpa", "reference")
_BUILT: dict[str, type] = {"sdpa": SdpaKernel, "reference": ReferenceKernel}


class Kernel(Protocol):
    """One block of attention, forward and backward.

    What it returns is new and belongs to the caller, who may write into it.

    wants_out: the backward needs `out` and not only `delta`; the caller then passes the stand-in of
    `merge.stand_in_out`, since O does not travel.
    """

    name: str
    wants_out: bool

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        """Raise ValueError, naming what would work, where this kernel cannot do what is asked."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [b, hq, sq, d], k [b, hkv, sk, d], v [b, hkv, sk, dv] -> out [b, hq, sq, dv], lse [b, hq, sq]."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of the block, shaped as q, k, v, given the GLOBAL lse and delta of the rows.

        Results may be wider than the inputs (fp32): they are summed in fp32 anyway.
        """


def select_kernel(
    name: str,
    *,
    dtype: torch.dtype,
    device_type: str,
    head_dim: int,
    v_head_dim: int | None = None,
    flag: str = "kernel",
) -> Kernel:
    """The kernel called `name` (`auto`: the fastest for the device), checked against what it will be given.

    Raises ValueError naming `flag` for an unknown or not installed kernel, or one that cannot do what is asked.
    """
    if name not in KERNELS:
        raise ValueError(f"{flag} {name!r}: choose from {', '.join(KERNELS)}")
    if name == "auto":
        if device_type != "cpu":
            raise ValueError(
                f"{flag} auto: this release has no fused kernel for {device_type} tensors; "
                f"{flag} reference runs there (unfused, for checks only)"
            )
        name = "sdpa"
    if name not in _BUILT:
        raise ValueError(
            f"{flag} {name}: kernel not installed (this release has no binding to it); use sdpa on CPU or reference"
        )
    kernel = _BUILT[name]()
    kernel.check(dtype, device_type, head_dim, v_head_dim or head_dim)
    return kernel
