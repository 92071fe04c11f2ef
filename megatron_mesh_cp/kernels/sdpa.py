"""The sdpa kernel: PyTorch's own fused attention (aten), on CPU tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..merge import stats_dtype

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class SdpaKernel:
    """See `kernels.Kernel`. aten's blocked CPU attention, which gives the lse and takes GQA natively.

    aten wants equal head dims of Q, K and V: the smaller ones are padded with zeros, which changes neither scores
    nor results. bf16 and fp16 are computed in fp32 (as a CPU does anyway) and returned in fp32: rounding every
    block's dQ, dK and dV before they are summed would cost up to 1.6 times the error of one whole call.
    """

    name = "sdpa"
    wants_out = True

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        if device_type != "cpu":
            raise ValueError(f"kernel sdpa: runs on CPU tensors only in this release, got {device_type}; use reference")
        if dtype not in _DTYPES:
            raise ValueError(f"kernel sdpa: dtype {dtype} is not supported; use one of {', '.join(map(str, _DTYPES))}")

    def forward(self, q, k, v, causal, scale):
        dim = max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _wide(q, dim), _wide(k, dim), _wide(v, dim), 0.0, causal, scale=scale
        )
        return _narrow(out, v.shape[-1]), lse

    def backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        dim = max(q.shape[-1], v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _wide(dout, dim),
            _wide(q, dim),
            _wide(k, dim),
            _wide(v, dim),
            _wide(out, dim),
            lse,
            0.0,
            causal,
            scale=scale,
        )
        return _narrow(dq, q.shape[-1]), _narrow(dk, k.shape[-1]), _narrow(dv, v.shape[-1])


def _wide(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x in the dtype and head dim that aten is given."""
    x = x.to(stats_dtype(x.dtype))
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _narrow(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x without its padding, and without the memory of it."""
    return x if x.shape[-1] == dim else x[..., :dim].clone()
