"""Transformer Engine's DotProductAttention with cp_comm_type="mesh", and so Megatron's TEDotProductAttention.

Note [Seam]
~~~~~~~~~~~
Transformer Engine has no extension point for context parallelism. But both of its backends that know it (fused and
flash attention) call one function, `attn_forward_func_with_cp`, by the name under which their module imported it, and
nothing before that call looks at what the comm type is (2.12 .. 2.20.2, read in source). So it is replaced there: a
call with "mesh" runs mesh attention, any other goes on exactly as it came. What mesh attention cannot do is refused
when the module is built; the call checks again, for modules built before and for arguments of forward().
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ..attention import mesh_attention
from ..groups import MeshGroups
from ..kernels import packages, select_kernel, te
from .config import MeshConfig
from .groups import shared_groups
from .receipt import print_receipt

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_BACKENDS = f"{_ATTENTION}.backends"
_SEAM = "attn_forward_func_with_cp"
_REFUSAL = "_mesh_cp_refusal"  # on a DotProductAttention: why it cannot run with "mesh", or ""

# Argument (of the constructor, or of the seam) -> what is fine, what it is.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "attention_dropout": ((0, None), "dropout inside attention"),
    "dropout_p": ((0, None), "dropout inside attention"),
    "window_size": ((None, (-1, -1), (-1, 0)), "sliding-window attention"),
    "softcap": ((0, None), "capped scores"),
    "softmax_type": (("vanilla",), "attention sinks and softmax offsets"),
    "softmax_offset": ((None,), "attention sinks and softmax offsets"),
    "return_max_logit": ((False, None), "the maximum attention logit"),
    "attention_type": (("self",), "cross attention"),
    "qkv_format": (("sbhd", "bshd"), "packed sequences"),
    "attn_mask_type": (("causal", "no_mask"), "padding and other masks"),
    "attn_bias_type": (("no_bias",), "attention bias"),
    "attn_bias": ((None,), "attention bias"),
    "pad_between_seqs": ((False, None), "packed sequences"),
    "fp8": ((False, None), "FP8 attention"),
    "fp8_output": ((False, None), "FP8 attention"),
}
_groups: dict[tuple[object, MeshConfig], MeshGroups] = {}  # of context-parallel groups that Megatron did not make


def te_unavailable() -> str:
    """Why there is no Transformer Engine to plug into; empty where there is one in the supported range."""
    return packages.outside(te.PACKAGE, te.SUPPORTED) or packages.load(_BACKENDS)[1]


def open_seam(mesh: MeshConfig) -> Callable[[], None]:
    """Let Transformer Engine accept cp_comm_type="mesh"; see Note [Seam]. Returns the way back.

    Raises ValueError where Transformer Engine is absent, out of range, or lacks the seam.
    """
    if why := te_unavailable():
        raise ValueError(f"mesh context parallelism in Transformer Engine: {why}")
    backends = importlib.import_module(_BACKENDS)
    module = importlib.import_module(f"{_ATTENTION}.dot_product_attention").DotProductAttention
    original = getattr(backends, _SEAM, None)
    if original is None:
        raise ValueError(f"mesh context parallelism in Transformer Engine: {_BACKENDS} has no {_SEAM}")
    undo = [functools.partial(setattr, backends, _SEAM, original)]
    setattr(backends, _SEAM, _dispatch(original, mesh))
    for name, prepared in (("__init__", _prepared_init), ("set_context_parallel_group", _prepared_setter)):
        method = getattr(module, name)
        undo.append(functools.partial(setattr, module, name, method))
        setattr(module, name, prepared(method, mesh))

    def close() -> None:
        for step in undo:
            step()
        _groups.clear()

    return close


def _dispatch(original: Callable, mesh: MeshConfig) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def attn_forward_func_with_cp(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["cp_comm_type"] != "mesh":
            return original(*args, **kwargs)
        return _attend(mesh, call.arguments)

    return attn_forward_func_with_cp


def _attend(mesh: MeshConfig, call: Mapping[str, object]) -> torch.Tensor:
    """q, k, v [s/cp, b, h, d] or [b, s/cp, h, d] -> out, likewise."""
    if why := _refusal(call):
        raise ValueError(why)
    return mesh_attention(
        call["q"],
        call["k"],
        call["v"],
        _groups_of(call["cp_group"], mesh),
        call["attn_mask_type"] == "causal",
        qkv_format=call["qkv_format"],
        softmax_scale=call["softmax_scale"],
        kernel=mesh.kernel,
        exchange=mesh.exchange,
        exchange_backward=mesh.exchange_backward,
    )


def _prepared_init(init: Callable, mesh: MeshConfig) -> Callable:
    """DotProductAttention's constructor: what mesh cannot do is refused before it does anything, or kept for later."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        refusal = _refusal(call.arguments)
        if refusal and call.arguments["cp_comm_type"] == "mesh" and call.arguments["cp_group"] is not None:
            raise ValueError(refusal)
        init(self, *args, **kwargs)
        setattr(self, _REFUSAL, refusal)
        _prepare(self, mesh)

    return wrapper


def _prepared_setter(setter: Callable, mesh: MeshConfig) -> Callable:
    """set_context_parallel_group, which can decide on the comm type after the constructor."""

    @functools.wraps(setter)
    def wrapper(self, *args, **kwargs):
        setter(self, *args, **kwargs)
        _prepare(self, mesh)

    return wrapper


def _prepare(module: torch.nn.Module, mesh: MeshConfig) -> None:
    """Check a DotProductAttention that will run with "mesh", and make its groups. Raises ValueError."""
    if module.cp_comm_type != "mesh" or module.cp_group is None:
        return
    if why := getattr(module, _REFUSAL, ""):
        raise ValueError(why)
    config = getattr(module, "config", None)  # Megatron's, on a TEDotProductAttention
    if getattr(config, "fp8_dot_product_attention", False):
        raise ValueError("fp8_dot_product_attention=True with cp_comm_type 'mesh': FP8 attention is not supported")
    if isinstance(module.cp_group, list):
        raise ValueError("cp_comm_type 'mesh' takes one process group as cp_group, got a list (that is for a2a+p2p)")
    if dist.get_world_size(module.cp_group) == 1:
        return  # Transformer Engine does not take the way of context parallelism then
    channels = module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v
    dtype = getattr(config, "params_dtype", torch.bfloat16)
    kernel = select_kernel(
        mesh.kernel,
        dtype=dtype,
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        head_dim=channels[0],
        v_head_dim=channels[1],
        flag="--mesh-kernel",
    )
    print_receipt(mesh, _groups_of(module.cp_group, mesh), kernel.name, dtype, channels)


def _refusal(call: Mapping[str, object]) -> str:
    for name, (fine, what) in _REFUSED.items():
        value = call.get(name, fine[0])
        value = tuple(value) if isinstance(value, list) else value
        if torch.is_tensor(value) or value not in fine:
            said = "a tensor" if torch.is_tensor(value) else repr(value)
            return (
                f"{name}={said} with cp_comm_type 'mesh': {what} is not supported; use {name}={fine[0]!r}, or another "
                "cp_comm_type"
            )
    return ""


def _groups_of(cp_group: dist.ProcessGroup, mesh: MeshConfig) -> MeshGroups:
    """Megatron's own row and column groups where the group is Megatron's, else groups made of `cp_group`."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if parallel_state.get_context_parallel_group(check_initialized=False) is cp_group:
        return shared_groups(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "hcp"]), mesh)
    key = (cp_group, mesh)
    if key not in _groups:
        _groups[key] = MeshGroups.build(cp_group, mesh.tile, mesh.tile_backward, costs=dict(mesh.costs))
    return _groups[key]
