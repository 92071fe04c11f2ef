"""The sdpa kernel: PyTorch's own fused attention (aten), on CPU and CUDA tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend

from ..merge import stats_dtype
from .padding import common_dim, narrow, top_left_backward, top_left_forward, wide

_aten = torch.ops.aten
_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)


class SdpaKernel:
    """See `kernels.Kernel`. aten takes GQA natively, and wants equal head dims of Q, K and V: the smaller ones are
    padded with zeros.

    On the CPU bf16 and fp16 are computed in fp32 (as a CPU does anyway) and returned in fp32: rounding every block's
    dQ, dK and dV before they are summed would cost up to 1.6 times the error of one whole call. On CUDA, bf16 and fp16
    only, torch itself chooses between flash and cuDNN (`torch.backends.cuda.enable_cudnn_sdp` and its kin apply).
    """

    name = "sdpa"
    wants_out = True
    devices = ("cpu", "cuda")

    @classmethod
    def unavailable(cls, device_type: str) -> str:
        if device_type not in cls.devices:
            return f"it runs on CPU and CUDA tensors, got {device_type}"
        return "" if device_type == "cpu" or torch.cuda.is_available() else "torch sees no CUDA device"

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        dtypes = _CPU_DTYPES if device_type == "cpu" else _CUDA_DTYPES
        if dtype not in dtypes:
            raise ValueError(f"dtype {dtype} is not supported on {device_type}; use one of {_names(dtypes)}")
        if device_type == "cpu":
            return
        dim = max(head_dim, v_head_dim)
        if dim > 256:
            raise ValueError(f"head dim {dim} is not supported on CUDA: at most 256")
        cuda_backend(dtype, -(-dim // 8) * 8)

    def forward(self, q, k, v, causal, scale):
        if q.device.type == "cpu":
            dim, acc = common_dim(q, v), stats_dtype(q.dtype)
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                *(wide(x.to(acc), dim) for x in (q, k, v)), 0.0, causal, scale=scale
            )
            return narrow(out, v.shape[-1]), lse
        return top_left_forward(self._forward, q, k, v, causal, scale)

    def backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        if q.device.type == "cpu":
            dim, acc = common_dim(q, v), stats_dtype(q.dtype)
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(wide(x.to(acc), dim) for x in (dout, q, k, v, out)), lse, 0.0, causal, scale=scale
            )
            return tuple(narrow(grad, x.shape[-1]) for grad, x in zip(grads, (q, k, v), strict=True))
        return top_left_backward(self._backward, dout, q, k, v, out, lse, delta, causal, scale)

    def _forward(self, q, k, v, causal, scale):
        dim = common_dim(q, v, 8)
        out, lse = _CUDA[cuda_backend(q.dtype, dim)][0](*(wide(x, dim) for x in (q, k, v)), causal, scale)
        return narrow(out, v.shape[-1]), lse

    def _backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        dim = common_dim(q, v, 8)
        padded = (wide(x, dim) for x in (dout, q, k, v, out))
        grads = _CUDA[cuda_backend(q.dtype, dim)][1](*padded, lse.to(torch.float32).contiguous(), causal, scale)
        return tuple(narrow(grad, x.shape[-1]) for grad, x in zip(grads, (q, k, v), strict=True))


@lru_cache(maxsize=64)
def cuda_backend(dtype: torch.dtype, dim: int) -> str:
    """flash or cudnn, as torch's own scaled_dot_product_attention would choose for a block of this head dim."""
    block = torch.empty(1, 1, 128, dim, dtype=dtype, device="cuda")
    choice = SDPBackend(torch._fused_sdp_choice(block, block, block, None, 0.0, True))
    names = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cudnn"}
    if choice not in names:
        raise ValueError(
            f"torch picks {choice.name} for {dtype}, head dim {dim} on this GPU, which mesh attention does not call; "
            "enable flash or cuDNN attention (torch.backends.cuda), or use reference"
        )
    return names[choice]


def _flash_forward(q, k, v, causal, scale):
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(dout, q, k, v, out, lse, causal, scale):
    rows, columns = q.shape[2], k.shape[2]
    seed = _no_dropout(q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, rows, columns, 0.0, causal, seed, seed, scale=scale
    )


def _cudnn_forward(q, k, v, causal, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def _cudnn_backward(dout, q, k, v, out, lse, causal, scale):
    rows, columns, heads = q.shape[2], k.shape[2], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    seed = _no_dropout(q.device)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, rows, columns, 0.0, causal, scale=scale
    )
    return dq, *(x.float().unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))


_CUDA = {"flash": (_flash_forward, _flash_backward), "cudnn": (_cudnn_forward, _cudnn_backward)}


@lru_cache(maxsize=16)
def _no_dropout(device: torch.device) -> torch.Tensor:
    """Seed and offset, int64 [2]; without dropout nobody reads them."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))
