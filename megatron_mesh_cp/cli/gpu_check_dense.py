"""The attention that scripts/gpu_check.sh compares with: dense in fp64, and torch's own in the dtype under test."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_mesh_cp.cli.gpu_check_rows import Error

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One attention over a whole sequence of `length` tokens; memory: "sbhd" or "bshd", how its tensors lie."""

    length: int
    head_dim: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    causal: bool
    memory: str = "sbhd"
    batch: int = 2

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.memory} {self.length} tokens, heads {self.heads}/{self.kv_heads} x {self.head_dim}"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def eps(self) -> float:
        return torch.finfo(self.dtype).eps

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """q, k, v, dout as they lie in memory, [s, b, h, d] or [b, s, h, d]; the same on every rank and device."""
        g = torch.Generator().manual_seed(self.length)
        out = []
        for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads):
            x = torch.randn(self.length, self.batch, heads, self.head_dim, generator=g)
            x = x if self.memory == "sbhd" else x.transpose(0, 1)
            out.append(x.to(device, self.dtype).contiguous())
        return out

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """A [b, h, s, d] view of a tensor as it lies in memory."""
        return x.permute(1, 2, 0, 3) if self.memory == "sbhd" else x.permute(0, 2, 1, 3)

    def tokens(self, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Some tokens of a tensor as it lies in memory, in the same order of axes."""
        return x[positions] if self.memory == "sbhd" else x[:, positions].contiguous()


class Dense:
    """Softmax attention in fp64: out, dq [b, h, s, d], dk, dv [b, hkv, s, d], lse [b, h, s].

        P = exp(S - lse);  dV = P^T dO;  dS = scale P * (dO V^T - delta);  dQ = dS K;  dK = dS^T Q

    A block's part of all of these is a part of P and dS, at the positions of its tokens: that knows nothing of kinds
    of blocks, alignments of masks and merging.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        q, k, v, dout = (case.heads_first(x).double() for x in case.inputs(device))
        self._kv_heads = case.kv_heads
        self._q, self._dout = q, dout
        self._k, self._v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
        scores = q @ self._k.transpose(-1, -2) * case.scale
        if case.causal:
            seen = torch.ones(case.length, case.length, dtype=torch.bool, device=device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        self.lse = scores.logsumexp(-1)
        self._p = (scores - self.lse.unsqueeze(-1)).exp()
        self.out = self._p @ self._v
        delta = (dout * self.out).sum(-1, keepdim=True)
        self._ds = self._p * (dout @ self._v.transpose(-1, -2) - delta) * case.scale
        everything = list(range(case.length))
        self.dq, self.dk, self.dv = self.gradients(everything, everything)

    def forward(self, rows: list[int], columns: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of the block of these tokens alone."""
        p = self._p[:, :, rows][..., columns]
        weight = p.sum(-1, keepdim=True)
        return p @ self._v[:, :, columns] / weight, self.lse[:, :, rows] + weight.squeeze(-1).log()

    def gradients(self, rows: list[int], columns: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the block of these tokens adds to dq, dk and dv of the whole sequence."""
        p, ds = (x[:, :, rows][..., columns] for x in (self._p, self._ds))
        dk = ds.transpose(-1, -2) @ self._q[:, :, rows]
        dv = p.transpose(-1, -2) @ self._dout[:, :, rows]
        return ds @ self._k[:, :, columns], *(x.unflatten(1, (self._kv_heads, -1)).sum(2) for x in (dk, dv))

    def whole(self) -> dict[str, torch.Tensor]:
        """The results by name."""
        return {name: getattr(self, name) for name in NAMES}


def torch_errors(case: Case, device: torch.device, dense: Dense) -> dict[str, Error | None]:
    """Error of F.scaled_dot_product_attention on the unsplit problem, by result; None where torch cannot compute it.

    On CUDA only by its fused kernels: its unfused one computes in fp32 and is no yardstick for them.
    """
    q, k, v, dout = (case.heads_first(x).contiguous() for x in case.inputs(device))
    for x in (q, k, v):
        x.requires_grad_()
    many = [x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v)]
    try:
        with sdpa_kernel(_FUSED) if device.type == "cuda" else nullcontext():
            out = F.scaled_dot_product_attention(q, *many, is_causal=case.causal, scale=case.scale)
        out.backward(dout)
    except RuntimeError:  # torch's "No available kernel"
        return dict.fromkeys(NAMES)
    got = dict(zip(NAMES, (out, q.grad, k.grad, v.grad), strict=True))
    return {name: Error.of(got[name], want) for name, want in dense.whole().items()}
