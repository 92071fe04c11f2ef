"""The te kernel: cuDNN's fused attention, through Transformer Engine's Python wrappers.

Called by keyword, since the order of the arguments differs between versions (2.12 .. 2.20.2 read in source):

    fused_attn_fwd(...) -> out, [stats, rng_state, ...]        stats fp32 [b, h, sq, 1]: natural log, scaled scores
    fused_attn_bwd(..., aux_ctx_tensors=[stats, rng_state]) -> dq, dk, dv, ...

The backward of one block is right with the GLOBAL stats and with `out` of the whole row, or anything that has the same
rowsum(dO * out): the kernel uses `out` for that sum alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache

import torch
from packaging.version import Version

from ..wire import from_heads_first, heads_first
from .packages import load, outside

PACKAGE = "transformer-engine"
SUPPORTED = (Version("2.12"), Version("2.21"))
_FUSED = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
_DTYPES = (torch.bfloat16, torch.float16)
# Arguments that exist in some of the supported versions only; all others must exist.
_VERSIONED = {"o_format", "do_format", "dqkv_layout", "dqkv_dtype"}


class TeKernel:
    """See `kernels.Kernel`. bf16 and fp16 on CUDA; non-square blocks, GQA and dv != d as cuDNN takes them.

    Where q, k and v lie as [s, b, h, d] or [b, s, h, d], as the executor's do, nothing is copied but half chunks of
    [b, s, h, d]. Transformer Engine hands pointers on without looking at strides, so whatever else comes is copied.
    """

    name = "te"
    wants_out = True
    devices = ("cuda",)

    def __init__(self) -> None:
        # Transformer Engine's own switch, which it reads when its module is made.
        self._deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"

    @classmethod
    def unavailable(cls, device_type: str) -> str:
        if device_type not in cls.devices:
            return f"it runs on CUDA tensors, got {device_type} (sdpa and reference run there)"
        return outside(PACKAGE, SUPPORTED) or load(_FUSED)[1] or load(_UTILS)[1]

    def check(self, dtype: torch.dtype, device_type: str, head_dim: int, v_head_dim: int) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype} is not supported: cuDNN's fused attention takes bfloat16 and float16")
        for name, dim in (("head dim", head_dim), ("head dim of V", v_head_dim)):
            if dim % 8 or dim > 256:
                raise ValueError(f"{name} {dim} is not supported: it must be a multiple of 8, at most 256")
        if not te_backends(dtype, head_dim, v_head_dim).fused_available:
            raise ValueError(
                f"Transformer Engine has no fused attention for {dtype}, head dim {head_dim} (V: {v_head_dim}) on this "
                "GPU; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 makes it say why, NVTE_FUSED_ATTN=0 turns it off"
            )

    def forward(self, q, k, v, causal, scale):
        fmt = _format_of(q)
        q, k, v = (_lay_out(x, fmt) for x in (q, k, v))
        common = self._common(q, k, v, fmt, causal, scale)
        out, aux, *_ = _call(load(_FUSED)[0].fused_attn_fwd, is_training=True, **common)
        return heads_first(out, fmt), aux[0].squeeze(-1)

    def backward(self, dout, q, k, v, out, lse, delta, causal, scale):
        fmt = _format_of(q)
        q, k, v, out, dout = (_lay_out(x, fmt) for x in (q, k, v, out, dout))
        stats = lse.to(torch.float32).contiguous().unsqueeze(-1)
        grads = _call(
            load(_FUSED)[0].fused_attn_bwd,
            o=out,
            d_o=dout,
            dqkv_dtype=q.dtype,
            aux_ctx_tensors=[stats, _rng_state(q.device)],
            do_format=fmt,
            dqkv_layout=_layout(fmt),
            deterministic=self._deterministic or torch.are_deterministic_algorithms_enabled(),
            **self._common(q, k, v, fmt, causal, scale),
        )
        return tuple(heads_first(grad, fmt) for grad in grads[:3])

    def _common(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fmt: str, causal: bool, scale: float
    ) -> dict[str, object]:
        batch, rows, columns = q.shape[fmt.index("b")], q.shape[fmt.index("s")], k.shape[fmt.index("s")]
        return {
            "q": q,
            "k": k,
            "v": v,
            "o_format": fmt,
            "max_seqlen_q": rows,
            "max_seqlen_kv": columns,
            "cu_seqlens_q": _full_cu_seqlens(batch, rows, q.device),
            "cu_seqlens_kv": _full_cu_seqlens(batch, columns, q.device),
            "fake_dtype": q.dtype,
            "fused_attention_backend": load(_FUSED)[0].FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": _layout(fmt),
            "attn_bias_type": "no_bias",
            "attn_mask_type": "causal" if causal else "no_mask",  # "causal" is top-left, as `Kernel` wants it
            "window_size": (-1, 0) if causal else (-1, -1),
        }


class Backends:
    """What Transformer Engine would use for a block on this GPU.

    picked: "fused", "flash" (flash-attn 2), "flash 3", "flash 4", "unfused" or "none". fused_available: whether it
    could use its fused attention.
    """

    def __init__(
        self, flash: bool, fused: bool, unfused: bool, available: list[bool], flash_version: Version | None = None
    ) -> None:
        self.picked = "flash" if flash else "fused" if fused else "unfused" if unfused else "none"
        if flash and flash_version is not None and flash_version.major != 2:
            self.picked += f" {flash_version.major}"
        self.fused_available = bool(available[1])


@lru_cache(maxsize=64)
def te_backends(dtype: torch.dtype, head_dim: int, v_head_dim: int) -> Backends:
    """Ask Transformer Engine itself (its environment variables included), for one causal block."""
    utils = load(_UTILS)[0]
    known = {field.name for field in fields(utils.AttentionParams)}
    wanted = {
        "qkv_dtype": dtype,
        "nominal_dtype": dtype,  # from 2.20
        "qkv_layout": "sbhd_sbhd_sbhd",
        "max_seqlen_q": 4096,
        "max_seqlen_kv": 4096,
        "head_dim_qk": head_dim,
        "head_dim_v": v_head_dim,
        "attn_mask_type": "causal",
        "window_size": (-1, 0),
        "bottom_right_diagonal": False,
        "softmax_scale": head_dim**-0.5,  # from 2.20
    }
    params = utils.AttentionParams(**{name: value for name, value in wanted.items() if name in known})
    answer = utils.get_attention_backend(params)
    # 2.12 .. 2.20: use_flash, flash version, use_fused, fused backend, use_unfused, available.
    return Backends(answer[0], answer[2], answer[4], answer[5], answer[1])


@lru_cache(maxsize=16)
def _parameters(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _call(function: Callable, **arguments: object):
    """Call with those arguments that this version has; only `_VERSIONED` ones may be missing."""
    missing = _VERSIONED & set(arguments) - _parameters(function)
    return function(**{name: value for name, value in arguments.items() if name not in missing})


def _format_of(x: torch.Tensor) -> str:
    """The memory order of a [b, h, s, d] view."""
    return "bshd" if from_heads_first(x, "bshd").is_contiguous() and x.shape[0] > 1 else "sbhd"


def _lay_out(x: torch.Tensor, fmt: str) -> torch.Tensor:
    return from_heads_first(x, fmt).contiguous()


def _layout(fmt: str) -> str:
    """Transformer Engine's name for Q, K and V that lie apart, all three in one order."""
    return "_".join([fmt] * 3)


@lru_cache(maxsize=256)
def _full_cu_seqlens(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """int32 [batch + 1]: where the sequences of a batch of equal lengths begin."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def _rng_state(device: torch.device) -> torch.Tensor:
    """Seed and offset, int64 [2]. Only dropout reads them, but the kernel wants the tensor."""
    return torch.zeros(2, dtype=torch.int64, device=device)
