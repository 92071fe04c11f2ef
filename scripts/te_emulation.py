"""Transformer Engine's real Python on CPU, over an emulated C extension.

The wheel called `transformer-engine` (1 MB) holds all of its Python; what a GPU machine compiles in addition is the
module `transformer_engine_torch`. Here that module is emulated as far as attention needs it: enumerations, and the two
fused attention kernels in plain torch. They check what the real ones take on trust (contiguous memory, layouts,
lengths, statistics) and log the blocks that they are given. All else of the extension can be imported and fails when
called.

`install()` once per process, before anything imports transformer_engine. It makes torch.cuda answer as an H100 would
where Transformer Engine asks, lets `--mesh-kernel te` take CPU tensors, and is meant for processes of tests alone.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import importlib.util
import inspect
import os
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import torch

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call of an emulated kernel: "fwd" or "bwd", tokens of Q and KV, mask ("NO_MASK", "CAUSAL_MASK"), layout."""

    kind: str
    rows: int
    columns: int
    mask: str
    layout: str


calls: list[Call] = []
FOLDER = Path(sys.prefix) / "te"
_kernel = None


def install(kernel: object = None) -> None:
    """Make `import transformer_engine.pytorch` work in this process, if it can be found (in the project's environments
    it lies in FOLDER, which is not on sys.path).

    kernel: a megatron_mesh_cp.kernels.Kernel for CPU tensors that computes the blocks instead of plain torch; for
    benches, where both sides must have the same one.
    """
    global _kernel
    _kernel = kernel
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for the compiled core library
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    os.environ.setdefault("NVTE_RELEASE_BUILD", "0")
    sys.modules["transformer_engine_torch"] = _extension()
    _answer_as_a_gpu()
    _import_transformer_engine()

    from megatron_mesh_cp.kernels import forget_choices
    from megatron_mesh_cp.kernels.te import TeKernel

    TeKernel.devices = ("cuda", "cpu")
    forget_choices()


def make_gloo_safe(counters: Counters | None = None) -> None:
    """Have Transformer Engine's own ring send and receive as gloo wants it, and count what it does.

    It waits twice for a transfer, which hangs on gloo: the second wait does nothing. And every other rank posts its
    send before its receive, which on gloo doubles the time of an exchange: here the receive is always first. NCCL does
    not mind either.
    """
    ring = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    counters = counters or Counters()

    def communicate(rank, send_tensor, send_dst, recv_tensor, recv_src, cp_group, batch_p2p_comm):
        works = [
            torch.distributed.irecv(recv_tensor, recv_src, cp_group),
            torch.distributed.isend(send_tensor, send_dst, cp_group),
        ]
        counters.sent += send_tensor.numel() * send_tensor.element_size()
        return [_WaitOnce(work, counters) for work in works]

    ring.flash_attn_p2p_communicate = communicate


@dataclass
class Counters:
    """Bytes that a rank handed to torch.distributed in Transformer Engine's ring, and seconds that it waited."""

    sent: int = 0
    waited: float = 0.0


class _WaitOnce:
    def __init__(self, work: torch.distributed.Work, counters: Counters) -> None:
        self._work, self._counters = work, counters

    def wait(self) -> bool:
        if self._work is not None:
            begin = time.perf_counter()
            self._work.wait()
            self._counters.waited += time.perf_counter() - begin
        self._work = None
        return True


# --- the kernels ------------------------------------------------------------------------------------------------------


def _fused_attn_fwd(a: types.SimpleNamespace) -> list[torch.Tensor]:
    layout = _check(a, (a.q, a.k, a.v))
    q, k, v = (_heads_first(x, layout).float() for x in (a.q, a.k, a.v))
    _log("fwd", a, layout)
    if _kernel is not None:
        out, lse = _kernel.forward(q, k, v, _is_causal(a, q, k), a.attn_scale)
        stats = lse.unsqueeze(-1).contiguous()
    else:
        scores = _scores(a, q, k)
        stats = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - stats) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return [_in_layout(out.to(a.q.dtype), layout), stats, torch.zeros(2, dtype=torch.int64)]


def _fused_attn_bwd(a: types.SimpleNamespace) -> list[torch.Tensor | None]:
    layout = _check(a, (a.q, a.k, a.v, a.o, a.d_o))
    if hasattr(a, "dqkv_layout"):
        _expect(a.dqkv_layout == a.qkv_layout, f"dqkv_layout {a.dqkv_layout} with qkv_layout {a.qkv_layout}")
        _expect(a.do_format.name == f"NVTE_{layout.upper()}", f"do_format {a.do_format} with {a.qkv_layout}")
    q, k, v, out, dout = (_heads_first(x, layout).float() for x in (a.q, a.k, a.v, a.o, a.d_o))
    stats, rng_state = a.aux_ctx_tensors[:2]
    _expect(stats.dtype == torch.float32 and stats.is_contiguous(), f"stats: {stats.dtype}, {stats.stride()}")
    _expect(stats.shape == (*q.shape[:3], 1), f"stats {list(stats.shape)} for q {list(q.shape)}")
    _expect(rng_state.dtype == torch.int64 and rng_state.numel() == 2, f"rng_state {rng_state}")
    _log("bwd", a, layout)
    if _kernel is not None:
        grads = _kernel.backward(dout, q, k, v, out, stats.squeeze(-1), None, _is_causal(a, q, k), a.attn_scale)
        return [*(_in_layout(x.to(a.q.dtype), layout) for x in grads), None, None]
    groups = k.shape[1]
    kk, vv = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
    p = torch.exp(_scores(a, q, k) - stats)
    dv = p.transpose(-1, -2) @ dout
    ds = p * (dout @ vv.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * a.attn_scale
    dq, dk = ds @ kk, ds.transpose(-1, -2) @ q
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return [*(_in_layout(x.to(a.q.dtype), layout) for x in (dq, dk, dv)), None, None]


def _check(a: types.SimpleNamespace, tensors: tuple[torch.Tensor, ...]) -> str:
    """What the real kernels take on trust, or refuse. Returns the layout of Q."""
    layout = a.qkv_layout.name.removeprefix("NVTE_").split("_")[0].lower()
    _expect(a.qkv_layout.name == "NVTE_" + "_".join([layout.upper()] * 3), f"qkv_layout {a.qkv_layout}")
    for x in tensors:
        _expect(
            (x.dtype in _HALF or _kernel is not None) and x.is_contiguous(),
            f"{x.dtype} {list(x.shape)} with strides {x.stride()}",
        )
    _expect(a.dropout == 0.0 and getattr(a, "attn_bias", None) is None, "dropout or bias")
    if hasattr(a, "o_format"):
        _expect(a.o_format.name == f"NVTE_{layout.upper()}", f"o_format {a.o_format} with {a.qkv_layout}")
    batch, sequence = layout.index("b"), layout.index("s")
    for x, longest, cu_seqlens in ((a.q, a.max_seqlen_q, a.cu_seqlens_q), (a.k, a.max_seqlen_kv, a.cu_seqlens_kv)):
        full = torch.arange(x.shape[batch] + 1, dtype=torch.int32) * x.shape[sequence]
        _expect(longest == x.shape[sequence], f"max_seqlen {longest} for {list(x.shape)} ({layout})")
        _expect(cu_seqlens.dtype == torch.int32 and cu_seqlens.equal(full), f"cu_seqlens {cu_seqlens}, {list(x.shape)}")
    return layout


def _expect(fine: bool, what: str) -> None:
    if not fine:
        raise AssertionError(f"emulated fused attention: {what}")


def _is_causal(a: types.SimpleNamespace, q: torch.Tensor, k: torch.Tensor) -> bool:
    _expect("CAUSAL" not in a.attn_mask_type.name or q.shape[2] == k.shape[2], "a causal block that is not square")
    return "CAUSAL" in a.attn_mask_type.name


def _scores(a: types.SimpleNamespace, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * a.attn_scale
    mask = a.attn_mask_type.name
    if "CAUSAL" not in mask:
        return scores
    shift = k.shape[2] - q.shape[2] if "BOTTOM_RIGHT" in mask else 0
    return scores.masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(shift), float("-inf"))


def _log(kind: str, a: types.SimpleNamespace, layout: str) -> None:
    mask = a.attn_mask_type.name.removeprefix("NVTE_")
    calls.append(Call(kind, a.max_seqlen_q, a.max_seqlen_kv, mask, layout))


def _heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.permute([layout.index(axis) for axis in "bhsd"])


def _in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.permute(["bhsd".index(axis) for axis in layout]).contiguous()


# --- the extension module ---------------------------------------------------------------------------------------------

_MEMBERS = {
    "NVTE_Bias_Type": "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI",
    "NVTE_Mask_Type": "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD "
    "THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD "
    "Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
    "NVTEScalingMode": "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING "
    "INVALID_SCALING",
}
_NUMBERED = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
_PLAIN = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "NONE",
}


class _Numbered(type):
    """The class of classes that are missing: enumerations, as far as anyone asks."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


class _Extension(types.ModuleType):
    """Whatever it lacks can be imported (a class as a class: some are base classes), and fails when called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"the emulated transformer_engine_torch has no {name}")

        found = _Numbered(name, (), {}) if name[:1].isupper() else missing
        setattr(self, name, found)
        return found


def _extension() -> _Extension:
    module = _Extension("transformer_engine_torch")
    module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
    version = te_version()
    numbered = {name: dict(members) for name, members in _NUMBERED.items()}
    if version < (2, 16):
        numbered["NVTE_Fused_Attn_Backend"]["NVTE_F16_max512_seqlen"] = 0
    for name, text in _MEMBERS.items():
        numbered[name] = {f"NVTE_{member}": number for number, member in enumerate(text.split())}
    for name, text in _PLAIN.items():
        numbered[name] = {member: number for number, member in enumerate(text.split())}
    for name, members in numbered.items():
        setattr(module, name, enum.IntEnum(name, members))
    module.fused_attn_fwd = _by_name("fused_attn_fwd", _fused_attn_fwd)
    module.fused_attn_bwd = _by_name("fused_attn_bwd", _fused_attn_bwd)
    backend = module.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    module.get_fused_attn_backend = lambda *args, **kwargs: (backend, "") if version >= (2, 20) else backend
    module.get_cudnn_version = lambda: 92400
    return module


def te_version() -> tuple[int, int]:
    from importlib.metadata import version

    major, minor = version("transformer-engine").split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _by_name(function: str, kernel):
    """The extension is called by position, in an order of its version: read it off the caller's source."""
    names: list[str] = []

    def call(*args: object):
        if not names:
            wrapper = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
            for node in ast.walk(ast.parse(inspect.getsource(wrapper))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tex.{function}":
                    names.extend(_argument_name(arg) for arg in node.args)
        return kernel(types.SimpleNamespace(**dict(zip(names, args, strict=True))))

    return call


def _argument_name(node: ast.expr) -> str:
    """`QKVLayout[qkv_layout]` and `qkv_layout` are both the argument qkv_layout."""
    return ast.unparse(node.slice if isinstance(node, ast.Subscript) else node)


# --- what surrounds it ------------------------------------------------------------------------------------------------


class _Stream:
    """Stands for a CUDA stream or event: everything is done when it is asked for."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


def _answer_as_a_gpu() -> None:
    """To Transformer Engine; for torch and Megatron there is still no GPU."""
    cuda = torch.cuda
    h100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="emulated")
    cuda.is_available = lambda: sys._getframe(1).f_globals["__name__"].startswith("transformer_engine")
    cuda.current_stream = lambda *args: _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.get_device_properties = lambda *args: h100
    cuda.get_device_capability = lambda *args: (9, 0)
    torch.Tensor.is_cuda = property(lambda self: True)


class _Anything:
    """A stand-in for any object of a package that is imported and never used."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: object, **kwargs: object) -> object:
        decorated = len(args) == 1 and callable(args[0]) and not kwargs and not isinstance(args[0], _Anything)
        return args[0] if decorated else _Anything()

    def __getitem__(self, key: object) -> _Anything:
        return _Anything()

    def __class_getitem__(cls, key: object) -> type:
        return cls

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()


class _Unused(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Anything())
        return self.__dict__[name]


_UNUSED = (
    "triton",
    "triton.language",
    "triton.language.core",
    "triton.language.standard",
    "triton.runtime",
    "onnxscript",
    "onnxscript.onnx_opset",
    "onnx",
    "onnx.defs",
    "onnx_ir",
)


def _import_transformer_engine() -> None:
    """Import it without triton and onnx (1 GB), which its attention does not need."""
    importlib.import_module("torch._dynamo")  # these look for triton and must not find the stand-in
    importlib.import_module("torch._inductor.utils")
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("triton", "onnx")}
    for name in _UNUSED:
        module = _Unused(name)
        module.__path__, module.__version__, module.__spec__ = [], "3.6.0", None
        sys.modules[name] = module
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]
    import transformer_engine
    import transformer_engine.pytorch

    transformer_engine.pytorch = sys.modules["transformer_engine.pytorch"]
    for name in [name for name in sys.modules if name.split(".")[0] in ("triton", "onnx", "onnxscript", "onnx_ir")]:
        del sys.modules[name]
    sys.modules.update(hidden)
