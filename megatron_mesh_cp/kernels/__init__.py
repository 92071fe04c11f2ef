"""Block attention kernels behind one interface, and the choice among them.

A kernel computes attention of one Q chunk against one KV chunk. All tensors are [b, h, s, d] views of any stride
with a contiguous last dimension; row statistics are [b, h, s] in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from .flash import FlashKernel
from .packages import load
from .reference import ReferenceKernel
from .sdpa import SdpaKernel, cuda_backend
from .te import TeKernel, te_backends

_BUILT: dict[str, type] = {"te": TeKernel, "flash": FlashKernel, "sdpa": SdpaKernel, "reference": ReferenceKernel}
KERNELS = ("auto", *_BUILT)
_FUSED = ("te", "flash", "sdpa")  # what `auto` chooses among, in this order where Transformer Engine has no say


class Kernel(Protocol):
    """One block of attention, forward and backward.

    What it returns is new and belongs to the caller, who may write into it.

    wants_out: the backward needs `out` and not only `delta`; the caller then passes the stand-in of
    `merge.stand_in_out`, since O does not travel.
    """

    name: str
    wants_out: bool

    @classmethod
    def unavailable(cls, device_type: str) -> str:
        """Why the kernel cannot be used on this machine for tensors of `device_type`; empty where it can."""

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        """Raise ValueError, naming what would work, where an available kernel cannot do what is asked."""

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


@dataclass(frozen=True)
class Choice:
    """A kernel's name, and why it was chosen."""

    name: str
    why: str


def unavailable(name: str, device_type: str) -> str:
    """Why the kernel called `name` cannot be used here for tensors of `device_type`; empty where it can."""
    return _BUILT[name].unavailable(device_type)


@lru_cache(maxsize=64)
def auto_choice(dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int | None = None) -> Choice:
    """What `auto` stands for: on CUDA what Transformer Engine itself would pick for this GPU and dtype.

    Where that is a kernel mesh attention does not call (flash-attn 3 or 4, or Transformer Engine's unfused one), or
    there is no Transformer Engine: the first of te, flash and sdpa that can do what is asked.

    Raises ValueError, saying of each kernel what is in the way, where none can.
    """
    v_head_dim = v_head_dim or head_dim
    if device_type == "cpu":
        return Choice("sdpa", "PyTorch's own fused attention, the fastest on a CPU")
    refusals = {name: _refusal(name, dtype, device_type, head_dim, v_head_dim) for name in _FUSED}
    fine = [name for name in _FUSED if not refusals[name]]
    if not fine:
        raise ValueError(
            f"no kernel for {dtype}, head dim {head_dim} on {device_type}: "
            + "; ".join(f"{name}: {why}" for name, why in refusals.items())
            + "; what works is bf16 or fp16, or kernel reference (unfused, for checks only)"
        )
    if not unavailable("te", device_type):
        picked = te_backends(dtype, head_dim, v_head_dim).picked
        wanted = {"fused": "te", "flash": "flash"}.get(picked)
        if wanted in fine:
            return Choice(wanted, f"what Transformer Engine picks ({picked} attention)")
        why = f"Transformer Engine would pick {picked} attention" + (f" ({refusals[wanted]})" if wanted else "")
        return Choice(fine[0], f"{why}, so the next best")
    return Choice(fine[0], "; ".join(f"{name}: {refusals[name]}" for name in _FUSED[: _FUSED.index(fine[0])]))


def _refusal(name: str, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> str:
    """Why a kernel cannot do what is asked on this machine; empty where it can."""
    if why := unavailable(name, device_type):
        return why
    try:
        _BUILT[name]().check(dtype, device_type, head_dim, v_head_dim)
    except ValueError as error:
        return str(error)
    return ""


def select_kernel(
    name: str,
    *,
    dtype: torch.dtype,
    device_type: str,
    head_dim: int,
    v_head_dim: int | None = None,
    flag: str = "kernel",
) -> Kernel:
    """The kernel called `name` (`auto`: see `auto_choice`), checked against what it will be given.

    Raises ValueError naming `flag` for an unknown or not installed kernel, or one that cannot do what is asked.
    """
    if name not in KERNELS:
        raise ValueError(f"{flag} {name!r}: choose from {', '.join(KERNELS)}")
    try:
        return _selected(name, dtype, device_type, head_dim, v_head_dim or head_dim)
    except ValueError as error:
        raise ValueError(f"{flag} {name}: {error}") from None


@lru_cache(maxsize=64)  # asked at every call of the attention
def _selected(name: str, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> Kernel:
    if name == "auto":
        name = auto_choice(dtype, device_type, head_dim, v_head_dim).name
    if why := unavailable(name, device_type):
        raise ValueError(why)
    kernel = _BUILT[name]()
    kernel.check(dtype, device_type, head_dim, v_head_dim)
    return kernel


def forget_choices() -> None:
    """Ask packages, versions and Transformer Engine again (they are asked once a process)."""
    for forget in _FORGET:
        forget()


_FORGET = [cached.cache_clear for cached in (auto_choice, _selected, te_backends, load, cuda_backend)]
