"""The reference kernel: the textbook formulas in plain torch, on any device and in any floating dtype.

It builds the block's whole score matrix, so it is for checks and small runs.
"""

from __future__ import annotations

import torch

from ..merge import stats_dtype


class ReferenceKernel:
    """See `kernels.Kernel`. Products and sums in fp32 (fp64 for fp64 inputs)."""

    name = "reference"
    wants_out = False

    @classmethod
    def unavailable(cls, device_type: str) -> str:
        return ""

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype {dtype} is not a floating-point type")

    def forward(self, q, k, v, causal, scale):
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, -1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ _grouped_kv(v)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        groups = k.shape[1]
        # P = exp(S - lse);  dV = P^T dO;  dS = P * (dO V^T - delta);  dQ = scale dS K;  dK = scale dS^T Q
        p = torch.exp(_scores(q, k, causal, scale) - lse.unflatten(1, (groups, -1)).unsqueeze(-1))
        grad = _grouped_q(dout, groups)
        dv = (p.transpose(-1, -2) @ grad).sum(2)
        ds = p * (grad @ _grouped_kv(v).transpose(-1, -2) - delta.unflatten(1, (groups, -1)).unsqueeze(-1)) * scale
        dq = (ds @ _grouped_kv(k)).flatten(1, 2)
        dk = (ds.transpose(-1, -2) @ _grouped_q(q, groups)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped_q(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[b, hq, s, d] -> [b, hkv, hq/hkv, s, d] in the accumulation dtype."""
    return x.to(stats_dtype(x.dtype)).unflatten(1, (groups, -1))


def _grouped_kv(x: torch.Tensor) -> torch.Tensor:
    """[b, hkv, s, d] -> [b, hkv, 1, s, d] in the accumulation dtype."""
    return x.to(stats_dtype(x.dtype)).unsqueeze(2)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Scaled scores [b, hkv, hq/hkv, sq, sk]; causal is top-left aligned."""
    scores = _grouped_q(q, k.shape[1]) @ _grouped_kv(k).transpose(-1, -2) * scale
    if causal:
        live = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~live, float("-inf"))
    return scores
