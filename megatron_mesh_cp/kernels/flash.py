"""The flash kernel: flash-attn 2's low-level functions (signatures of 2.7 .. 2.8)."""

from __future__ import annotations

import torch
from packaging.version import Version

from .packages import load, outside
from .padding import common_dim, narrow, top_left_backward, top_left_forward, wide

PACKAGE = "flash-attn"
SUPPORTED = (Version("2.7"), Version("2.9"))
_INTERFACE = "flash_attn.flash_attn_interface"
_DTYPES = (torch.bfloat16, torch.float16)
_NO_EXTRAS = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


class FlashKernel:
    """See `kernels.Kernel`. bf16 and fp16 on CUDA, GQA native, any strides.

    Heads are padded with zeros to one dim for Q, K and V, a multiple of 8. flash-attn aligns a causal mask bottom-right
    and marks a row without keys by lse = +inf (`merge.clean_lse`).
    """

    name = "flash"
    wants_out = True
    devices = ("cuda",)

    @classmethod
    def unavailable(cls, device_type: str) -> str:
        if device_type not in cls.devices:
            return f"it runs on CUDA tensors, got {device_type} (sdpa and reference run there)"
        return outside(PACKAGE, SUPPORTED) or load(_INTERFACE)[1]

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype} is not supported: flash-attn takes bfloat16 and float16")
        if max(head_dim, v_head_dim) > 256:
            raise ValueError(f"head dim {max(head_dim, v_head_dim)} is not supported: flash-attn takes at most 256")

    def forward(self, q, k, v, causal, scale):
        return top_left_forward(self._forward, q, k, v, causal, scale)

    def backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        return top_left_backward(self._backward, dout, q, k, v, out, lse, delta, causal, scale)

    def _forward(self, q, k, v, causal, scale):
        dim = common_dim(q, v, 8)
        out, lse, *_ = load(_INTERFACE)[0]._flash_attn_forward(
            *(_tokens_first(x, dim) for x in (q, k, v)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            return_softmax=False,
            **_NO_EXTRAS,
        )
        return narrow(out.transpose(1, 2), v.shape[-1]), lse

    def _backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        dim = common_dim(q, v, 8)
        dout, query, key, value, out = (_tokens_first(x, dim) for x in (dout, q, k, v, out))
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]  # written in place
        load(_INTERFACE)[0]._flash_attn_backward(
            dout,
            query,
            key,
            value,
            out,
            lse.to(torch.float32).contiguous(),
            *grads,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_NO_EXTRAS,
        )
        return tuple(narrow(grad.transpose(1, 2), x.shape[-1]) for grad, x in zip(grads, (q, k, v), strict=True))


def _tokens_first(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[b, h, s, d] -> [b, s, h, dim]."""
    return wide(x, dim).transpose(1, 2)
