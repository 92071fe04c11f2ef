"""The kernels for CUDA and the choice among them, on the CPU: what they call is faked, as strict as the real thing.

Not here: the te kernel's calls (tests/te, over Transformer Engine's own Python), and any real GPU (mesh-cp gpu-check).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.nn.attention import SDPBackend

from megatron_mesh_cp import kernels
from megatron_mesh_cp.kernels import flash, packages, padding, sdpa, te
from megatron_mesh_cp.kernels.flash import FlashKernel
from megatron_mesh_cp.kernels.reference import ReferenceKernel
from megatron_mesh_cp.kernels.sdpa import SdpaKernel
from megatron_mesh_cp.kernels.te import TeKernel
from megatron_mesh_cp.merge import NEG_INF, merge_, row_delta, stand_in_out
from megatron_mesh_cp.wire import heads_first

INF = float("inf")
REFERENCE = ReferenceKernel()
HALF = [torch.bfloat16, torch.float16]
SCALE = 0.3
BLOCKS = [(8, 8), (8, 20), (20, 8), (1, 8), (8, 1)]  # rows, columns
# The memory order of a [b, h, s, d] view, and the permutation that gives the view.
MEMORY = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}


@pytest.fixture(autouse=True)
def _asked_afresh():
    """Autouse, so it is set up before monkeypatch and forgets after the patches are undone."""
    kernels.forget_choices()
    yield
    kernels.forget_choices()
    sdpa.cuda_backend.cache_clear()


def made(batch, heads, tokens, dim, dtype=torch.float64, memory="bhsd", seed=0):
    """A [b, h, s, d] view of memory in that order."""
    sizes = {"b": batch, "h": heads, "s": tokens, "d": dim}
    g = torch.Generator().manual_seed(seed)
    return torch.randn([sizes[c] for c in memory], generator=g).to(dtype).permute(MEMORY[memory])


def block(rows, columns, *, heads=(4, 2), dims=(16, 16), dtype=torch.float64, memory="bhsd"):
    """q, k, v, dout."""
    shapes = ((heads[0], rows, dims[0]), (heads[1], columns, dims[0]), (heads[1], columns, dims[1]))
    shapes += ((heads[0], rows, dims[1]),)
    return tuple(made(2, *shape, dtype, memory, seed) for seed, shape in enumerate(shapes))


def close(got: torch.Tensor, want: torch.Tensor, ulps: float = 1.0) -> None:
    """Within `ulps` steps of got's dtype at the largest entry of `want`, or at 1: inputs are unit normals, and with one
    key dq and dk are what rounding leaves of 0."""
    assert got.shape == want.shape
    error, largest = (got.double() - want.double()).abs().max().item(), max(want.abs().max().item(), 1.0)
    assert error <= ulps * torch.finfo(got.dtype).eps * largest, f"{error} of {largest}"


def one_dtype_up(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.double() for x in tensors)


# --- a kernel with a bottom-right mask, of the reference kernel -----------------------------------------------------


def bottom_right_forward(q, k, v, causal, scale):
    """Row i sees keys 0 .. i + columns - rows; a row that sees none has lse = +inf and out = 0, as in flash-attn."""
    more = k.shape[2] - q.shape[2]
    if not causal:
        return REFERENCE.forward(q, k, v, False, scale)
    if more >= 0:
        out, lse = REFERENCE.forward(F.pad(q, (0, 0, more, 0)), k, v, True, scale)
        return out[:, :, more:], lse[:, :, more:]
    out, lse = REFERENCE.forward(q[:, :, -more:], k, v, True, scale)
    return F.pad(out, (0, 0, -more, 0)), F.pad(lse, (-more, 0), value=INF)


def bottom_right_backward(dout, q, k, v, out, lse, delta, causal, scale):
    delta = row_delta(dout, out)  # from `out` alone, as fused kernels do
    more = k.shape[2] - q.shape[2]
    if not causal:
        return REFERENCE.backward(dout, q, k, v, out, lse, delta, False, scale)
    if more >= 0:
        dout, q = (F.pad(x, (0, 0, more, 0)) for x in (dout, q))
        lse, delta = (F.pad(x, (more, 0)) for x in (lse, delta))
        dq, dk, dv = REFERENCE.backward(dout, q, k, v, None, lse, delta, True, scale)
        return dq[:, :, more:], dk, dv
    dout, q, lse, delta = (x[:, :, -more:] for x in (dout, q, lse, delta))
    dq, dk, dv = REFERENCE.backward(dout, q, k, v, None, lse, delta, True, scale)
    return F.pad(dq, (0, 0, -more, 0)), dk, dv


def test_the_bottom_right_kernel_of_these_tests_is_one():
    q, k, v, _ = block(3, 5, heads=(1, 1))
    live = torch.ones(3, 5, dtype=torch.bool).tril(2)
    scores = (q @ k.mT * SCALE).masked_fill(~live, NEG_INF)
    out, lse = bottom_right_forward(q, k, v, True, SCALE)
    close(out, scores.softmax(-1) @ v, 16)
    close(lse, scores.logsumexp(-1), 16)
    out, lse = bottom_right_forward(*block(5, 3, heads=(1, 1))[:3], True, SCALE)
    assert (lse[:, :, :2] == INF).all()
    assert (out[:, :, :2] == 0).all()
    assert lse[:, :, 2:].isfinite().all()


# --- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", BLOCKS, ids=str)
def test_a_bottom_right_kernel_gives_a_top_left_mask(lengths, causal):
    q, k, v, dout = block(*lengths)
    want_out, want_lse = REFERENCE.forward(q, k, v, causal, SCALE)
    out, lse = padding.top_left_forward(bottom_right_forward, q, k, v, causal, SCALE)
    close(out, want_out, 16)
    close(lse, want_lse, 16)
    delta = row_delta(dout, want_out)
    want = REFERENCE.backward(dout, q, k, v, None, want_lse, delta, causal, SCALE)
    got = padding.top_left_backward(bottom_right_backward, dout, q, k, v, want_out, want_lse, delta, causal, SCALE)
    for g, w in zip(got, want, strict=True):
        close(g, w, 32)


def test_keys_beyond_the_rows_get_a_gradient_of_zero():
    q, k, v, dout = block(3, 7)
    out, lse = REFERENCE.forward(q, k, v, True, SCALE)
    delta = row_delta(dout, out)
    _, dk, dv = padding.top_left_backward(bottom_right_backward, dout, q, k, v, out, lse, delta, True, SCALE)
    for grad in (dk, dv):
        assert grad.shape[2] == 7
        assert (grad[:, :, 3:] == 0).all()


@pytest.mark.parametrize(
    ("dims", "multiple", "want"), [((20, 12), 8, 24), ((12, 20), 8, 24), ((16, 16), 8, 16), ((20, 12), 1, 20)]
)
def test_the_common_head_dim_is_the_next_multiple_above_both(dims, multiple, want):
    assert padding.common_dim(*(torch.empty(1, 1, 1, dim) for dim in dims), multiple) == want


def test_padding_is_zeros_and_is_taken_off_with_its_memory():
    x = made(1, 2, 3, 20)
    padded = padding.wide(x, 24)
    assert torch.equal(padded[..., :20], x)
    assert (padded[..., 20:] == 0).all()
    cut = padding.narrow(padded, 20)
    assert torch.equal(cut, x)
    assert cut.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_without_padding_nothing_is_copied():
    x = made(1, 2, 3, 24)
    assert padding.wide(x, 24) is x
    assert padding.narrow(x, 24) is x


# --- flash ----------------------------------------------------------------------------------------------------------


def _checked(*tensors: torch.Tensor) -> None:
    """What flash-attn's C++ refuses, or reads wrongly."""
    assert all(x.dtype in HALF and x.dtype == tensors[0].dtype for x in tensors), "fp16 and bf16 only, and only one"
    assert len({x.shape[-1] for x in tensors}) == 1, "one head dim"
    assert tensors[0].shape[-1] % 8 == 0, "a multiple of 8"
    assert tensors[0].shape[-1] <= 256
    assert all(x.stride(-1) == 1 for x in tensors), "a contiguous last dimension"


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    _checked(q, k, v)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    assert not return_softmax
    assert q.shape[0] == k.shape[0] == v.shape[0], "[b, s, h, d]"
    assert k.shape == v.shape
    assert q.shape[2] % k.shape[2] == 0
    out, lse = bottom_right_forward(*(x.transpose(1, 2).double() for x in (q, k, v)), causal, softmax_scale)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse.float().contiguous(), None, torch.zeros(2)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    _checked(dout, q, k, v, out, dq, dk, dv)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert dout.shape == out.shape == q.shape == dq.shape
    assert dk.shape == k.shape == v.shape == dv.shape
    assert softmax_lse.dtype == torch.float32
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert all(x.is_contiguous() for x in (softmax_lse, dq, dk, dv)), "taken by pointer"
    inputs = (x.transpose(1, 2).double() for x in (dout, q, k, v, out))
    grads = bottom_right_backward(*inputs, softmax_lse.double(), None, causal, softmax_scale)
    for written, grad in zip((dq, dk, dv), grads, strict=True):
        written.copy_(grad.transpose(1, 2))


@pytest.fixture
def flash_attn(monkeypatch) -> ModuleType:
    """flash_attn.flash_attn_interface of flash-attn 2.8; `dims` are the head dims it was called with."""
    module = ModuleType("flash_attn.flash_attn_interface")
    module.dims = set()

    def forward(q, *args, **kwargs):
        module.dims.add(q.shape[-1])
        return _flash_attn_forward(q, *args, **kwargs)

    def backward(dout, *args, **kwargs):
        module.dims.add(dout.shape[-1])
        return _flash_attn_backward(dout, *args, **kwargs)

    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    monkeypatch.setattr(flash, "load", lambda name: (module, "") if name == module.__name__ else (None, "unknown"))
    return module


def as_the_reference(kernel, q, k, v, dout, causal) -> None:
    """Forward and backward of one block, with the stand-in for out that the executor passes."""
    wide = one_dtype_up(q, k, v, dout)
    want_out, want_lse = REFERENCE.forward(*wide[:3], causal, SCALE)
    out, lse = kernel.forward(q, k, v, causal, SCALE)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    close(out, want_out)
    close(lse, want_lse, 4)
    delta = row_delta(wide[3], want_out)
    want = REFERENCE.backward(wide[3], *wide[:3], None, want_lse, delta, causal, SCALE)
    stand_in = stand_in_out(dout, delta.float())
    # [b, h, s] views of other memory: the executor's lse comes as a slice of a chunk's.
    stats = (x.float().transpose(1, 2).contiguous().transpose(1, 2) for x in (want_lse, delta))
    got = kernel.backward(dout, q, k, v, stand_in, *stats, causal, SCALE)
    for g, w in zip(got, want, strict=True):
        close(g.to(q.dtype), w, 2)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, dout, stand_in)}
    assert not given & {x.untyped_storage().data_ptr() for x in (out, lse, *got)}, "results belong to the caller"


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", BLOCKS, ids=str)
def test_flash_is_the_reference_on_every_block(flash_attn, lengths, causal, dtype, memory):
    as_the_reference(FlashKernel(), *block(*lengths, dtype=dtype, memory=memory), causal)
    assert flash_attn.dims == {16}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    ("dims", "padded"), [((20, 20), 24), ((16, 24), 24), ((24, 16), 24), ((20, 12), 24), ((8, 33), 40)], ids=str
)
def test_flash_pads_heads_to_one_multiple_of_8(flash_attn, dims, padded, heads):
    for lengths, causal in (((8, 8), True), ((20, 8), True), ((8, 20), True), ((8, 12), False)):
        as_the_reference(FlashKernel(), *block(*lengths, heads=heads, dims=dims, dtype=torch.bfloat16), causal)
    assert flash_attn.dims == {padded}


def by_blocks(kernel, causal, dtype):
    """Rows 6 .. 16 against keys 0 .. 6 and 6 .. 16, and the gradients and result by autograd over the whole row."""
    q, k, v, dout = block(10, 16, dtype=dtype, dims=(20, 12))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expanded = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    scores = leaves[0] @ expanded[0].mT * SCALE
    if causal:
        scores = scores.masked_fill(~torch.ones(10, 16, dtype=torch.bool).tril(6), NEG_INF)
    want_out = scores.softmax(-1) @ expanded[1]
    want = torch.autograd.grad(want_out, leaves, dout.double())

    keys = ((slice(0, 6), False), (slice(6, 16), causal))
    out, lse = torch.zeros_like(want_out, dtype=torch.float32), torch.full(scores.shape[:3], NEG_INF)
    for part, mask in keys:
        merge_(out, lse, *kernel.forward(q, k[:, :, part], v[:, :, part], mask, SCALE))
    delta = row_delta(dout, out)
    stand_in = stand_in_out(dout, delta)
    grads = [
        kernel.backward(dout, q, k[:, :, part], v[:, :, part], stand_in, lse, delta, mask, SCALE) for part, mask in keys
    ]
    dq = grads[0][0].float() + grads[1][0].float()
    return (out, dq, *(torch.cat(parts, 2) for parts in list(zip(*grads, strict=True))[1:])), (want_out, *want)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_flash_by_blocks_with_the_global_lse_is_attention_over_the_whole_row(flash_attn, causal, dtype):
    for got, want in zip(*by_blocks(FlashKernel(), causal, dtype), strict=True):
        close(got.to(dtype), want, 2)


@pytest.mark.parametrize("mode", [True, False])
def test_flash_follows_torchs_deterministic_mode(flash_attn, monkeypatch, mode):
    seen = []
    backward = flash_attn._flash_attn_backward
    flash_attn._flash_attn_backward = lambda *args, **kw: seen.append(kw["deterministic"]) or backward(*args, **kw)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: mode)
    as_the_reference(FlashKernel(), *block(8, 8, dtype=torch.bfloat16), True)
    assert seen == [mode]


# --- sdpa -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)], ids=str)
def test_sdpa_keeps_to_the_schemas_of_aten(monkeypatch, backend, heads, dims):
    """On the meta device, which runs no kernel but the real argument parsing and shape inference."""
    monkeypatch.setattr(sdpa, "cuda_backend", lambda dtype, dim: backend)
    kernel = SdpaKernel()
    for (rows, columns), causal, dtype in (
        ((8, 8), True, HALF[0]),
        ((20, 8), True, HALF[1]),
        ((8, 20), False, HALF[0]),
    ):
        q, k, v, dout = (x.to("meta") for x in block(rows, columns, heads=heads, dims=dims, dtype=dtype))
        out, lse = kernel.forward(q, k, v, causal, SCALE)
        assert (out.shape, out.dtype) == (dout.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        grads = kernel.backward(dout, q, k, v, out, lse, lse, causal, SCALE)
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert grad.shape == x.shape
            assert grad.dtype in (dtype, torch.float32)


class Aten:
    """The aten calls of the sdpa kernel on CUDA, over the reference kernel; cuDNN's with equal head counts only."""

    def __init__(self, last: bool) -> None:
        self.last = last  # cuDNN's lse is [b, h, s, 1], of some versions [b, h, s]

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout_p, is_causal, return_debug_mask, *, scale):
        _checked(q, k, v)
        assert (dropout_p, return_debug_mask) == (0.0, False)
        out, lse = bottom_right_forward(*one_dtype_up(q, k, v), is_causal, scale)
        return out.to(q.dtype), lse.float(), *[None] * 7

    def _scaled_dot_product_flash_attention_backward(
        self, dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale
    ):
        _checked(dout, q, k, v, out)
        assert (cum_q, cum_k, max_q, max_k, dropout_p) == (None, None, q.shape[2], k.shape[2], 0.0)
        assert seed.dtype == offset.dtype == torch.int64
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        grads = bottom_right_backward(*one_dtype_up(dout, q, k, v, out, lse), None, is_causal, scale)
        return tuple(x.to(q.dtype) for x in grads)

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, with_lse, dropout_p, is_causal, debug, *, scale):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert bias is None
        assert with_lse
        out, lse, *rest = self._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, debug, scale=scale)
        return out, lse.unsqueeze(-1) if self.last else lse, *rest

    def _scaled_dot_product_cudnn_attention_backward(self, dout, q, k, v, out, lse, seed, offset, bias, *rest, scale):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert bias is None
        assert lse.shape == (*q.shape[:3], 1)
        cum_q, cum_k, max_q, max_k, dropout_p, is_causal = rest
        return self._scaled_dot_product_flash_attention_backward(
            *(dout, q, k, v, out, lse.squeeze(-1), cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset),
            scale=scale,
        )


@pytest.fixture(params=[("flash", False), ("cudnn", False), ("cudnn", True)], ids=["flash", "cudnn", "cudnn-lse4d"])
def sdpa_cuda(request, monkeypatch) -> SimpleNamespace:
    """What the sdpa kernel does with CUDA tensors, on CPU tensors; `kernel.dims` are the head dims asked about."""
    backend, last = request.param
    monkeypatch.setattr(sdpa, "_aten", Aten(last))
    dims = set()
    monkeypatch.setattr(sdpa, "cuda_backend", lambda dtype, dim: dims.add(dim) or backend)
    kernel = SdpaKernel()

    def forward(*args):
        return padding.top_left_forward(kernel._forward, *args)

    def backward(*args):
        return padding.top_left_backward(kernel._backward, *args)

    return SimpleNamespace(forward=forward, backward=backward, dims=dims)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12), (12, 20)], ids=str)
def test_sdpa_on_cuda_is_the_reference_and_folds_gqa(sdpa_cuda, heads, dims):
    for lengths, causal in (((8, 8), True), ((20, 8), True), ((8, 20), True), ((8, 12), False), ((1, 8), False)):
        as_the_reference(sdpa_cuda, *block(*lengths, heads=heads, dims=dims, dtype=torch.bfloat16), causal)
    assert sdpa_cuda.dims == {math.ceil(max(dims) / 8) * 8}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_sdpa_on_cuda_by_blocks_with_the_global_lse_is_attention_over_the_whole_row(sdpa_cuda, causal):
    for got, want in zip(*by_blocks(sdpa_cuda, causal, torch.float16), strict=True):
        close(got.to(torch.float16), want, 2)


@pytest.mark.parametrize("lengths", [(20, 8), (8, 20)], ids=str)
def test_sdpa_asks_aten_on_cuda_for_a_causal_mask_of_square_blocks_only(monkeypatch, lengths):
    """aten's flash aligns it bottom-right, cuDNN's top-left. On the meta device, which takes the CUDA branch."""
    asked = []
    forward, backward = sdpa._CUDA["flash"]

    def forward_seen(q, k, v, causal, scale):
        asked.append((causal, q.shape[2], k.shape[2]))
        return forward(q, k, v, causal, scale)

    def backward_seen(dout, q, k, v, out, lse, causal, scale):
        asked.append((causal, q.shape[2], k.shape[2]))
        return backward(dout, q, k, v, out, lse, causal, scale)

    monkeypatch.setattr(sdpa, "_CUDA", {"flash": (forward_seen, backward_seen)})
    monkeypatch.setattr(sdpa, "cuda_backend", lambda dtype, dim: "flash")
    q, k, v, dout = (x.to("meta") for x in block(*lengths, dtype=torch.bfloat16))
    want = [(True, 8, 8)] + ([(False, 12, 8)] if lengths == (20, 8) else [])
    out, lse = SdpaKernel().forward(q, k, v, True, SCALE)
    assert asked == want
    asked.clear()
    SdpaKernel().backward(dout, q, k, v, out, lse, lse, True, SCALE)
    assert asked == want


@pytest.fixture
def torch_picks(monkeypatch):
    """torch_picks(backend): what torch's own choice answers; returns the list of what it was asked."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **kw: empty(*sizes, **kw))

    def answer(backend: SDPBackend) -> list[tuple[torch.dtype, int, bool]]:
        asked = []

        def choice(q, k, v, mask, dropout, causal):
            asked.append((q.dtype, q.shape[-1], causal))
            return backend.value

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        sdpa.cuda_backend.cache_clear()
        return asked

    return answer


def test_sdpa_takes_the_backend_that_torch_picks_and_asks_once(torch_picks):
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
        asked = torch_picks(backend)
        assert [sdpa.cuda_backend(torch.bfloat16, 24) for _ in range(2)] == [name] * 2
        assert asked == [(torch.bfloat16, 24, True)]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=lambda x: x.name)
def test_sdpa_refuses_by_name_what_torch_picks_and_mesh_does_not_call(torch_picks, backend):
    torch_picks(backend)
    with pytest.raises(ValueError, match=f"torch picks {backend.name} for torch.float16, head dim 72 on this GPU.*use"):
        SdpaKernel().check(torch.float16, "cuda", 72, 64)


def test_sdpa_asks_about_the_padded_head_dim(torch_picks):
    asked = torch_picks(SDPBackend.FLASH_ATTENTION)
    SdpaKernel().check(torch.float16, "cuda", 20, 12)
    SdpaKernel().check(torch.float16, "cuda", 12, 36)
    assert [dim for _, dim, _ in asked] == [24, 40]


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """machine(te=..., flash=..., sdpa=...): why each is unavailable on CUDA; picked: what Transformer Engine picks."""

    def have(*, te="", flash="", sdpa="", picked="fused", fused=True) -> None:
        for kernel, why in ((TeKernel, te), (FlashKernel, flash), (SdpaKernel, sdpa)):
            monkeypatch.setattr(kernel, "unavailable", classmethod(lambda cls, device_type, why=why: why))

        @lru_cache
        def backends(dtype, head_dim, v_head_dim):
            assert not te, "Transformer Engine is asked where there is none"
            usable = [True, fused, True]
            flash, _, version = picked.partition(" ")
            version = Version(f"{version}.0") if version else Version("2.8.3")
            return kernels.te.Backends(flash == "flash", picked == "fused", picked == "unfused", usable, version)

        monkeypatch.setattr(kernels, "te_backends", backends)
        monkeypatch.setattr(kernels.te, "te_backends", backends)
        monkeypatch.setattr(kernels.sdpa, "cuda_backend", lambda dtype, dim: "flash")
        kernels.forget_choices()

    return have


def choice(dtype=torch.bfloat16, device_type="cuda", head_dim=64, v_head_dim=None):
    made_choice = kernels.auto_choice(dtype, device_type, head_dim, v_head_dim)
    kernel = kernels.select_kernel(
        "auto", dtype=dtype, device_type=device_type, head_dim=head_dim, v_head_dim=v_head_dim
    )
    assert kernel.name == made_choice.name
    return made_choice.name, made_choice.why


def test_auto_takes_te_where_transformer_engine_picks_fused_attention(machine):
    machine(picked="fused")
    assert choice() == ("te", "what Transformer Engine picks (fused attention)")


def test_auto_takes_flash_where_transformer_engine_picks_it(machine):
    machine(picked="flash")
    assert choice() == ("flash", "what Transformer Engine picks (flash attention)")


def test_auto_takes_te_and_says_why_where_the_flash_attn_that_transformer_engine_picks_is_not_usable(machine):
    machine(picked="flash", flash="flash-attn 3.0 is not supported")
    name, why = choice()
    assert name == "te"
    assert why == "Transformer Engine would pick flash attention (flash-attn 3.0 is not supported), so the next best"


@pytest.mark.parametrize("picked", ["unfused", "none", "flash 3", "flash 4"])
def test_auto_takes_the_first_that_can_where_transformer_engine_picks_none_of_them(machine, picked):
    why = f"Transformer Engine would pick {picked} attention, so the next best"
    machine(picked=picked)
    assert choice() == ("te", why)
    machine(picked=picked, fused=False)
    assert choice() == ("flash", why)
    machine(picked=picked, fused=False, flash="absent")
    assert choice() == ("sdpa", why)


def test_auto_passes_over_te_for_head_dims_that_its_wrapper_refuses(machine):
    machine(picked="fused")
    name, why = choice(head_dim=20)
    assert name == "flash"
    assert "Transformer Engine would pick fused attention (head dim 20 is not supported" in why
    name, why = choice(head_dim=64, v_head_dim=20)
    assert name == "flash"
    assert "head dim of V 20 is not supported" in why


def test_auto_without_transformer_engine_takes_flash_then_sdpa_and_says_why(machine):
    machine(te="te is absent")
    assert choice() == ("flash", "te: te is absent")
    machine(te="te is absent", flash="flash is absent")
    assert choice() == ("sdpa", "te: te is absent; flash: flash is absent")


def test_auto_where_nothing_can_names_each_reason_and_what_works(machine):
    machine(te="te is absent", flash="flash is absent", sdpa="torch sees no CUDA device")
    what = dict(dtype=torch.bfloat16, device_type="cuda", head_dim=64)
    with pytest.raises(ValueError) as error:
        kernels.select_kernel("auto", **what, flag="--mesh-kernel")
    text = str(error.value)
    assert text.startswith("--mesh-kernel auto: no kernel for torch.bfloat16, head dim 64 on cuda: te: te is absent; ")
    assert "flash: flash is absent; sdpa: torch sees no CUDA device; what works is bf16 or fp16, or kernel ref" in text
    with pytest.raises(ValueError, match="no kernel for"):
        kernels.auto_choice(*what.values())


def test_auto_refuses_fp32_on_cuda_and_names_it_for_every_kernel(machine):
    machine()
    with pytest.raises(ValueError) as error:
        choice(dtype=torch.float32)
    for name in ("te", "flash", "sdpa"):
        assert f"{name}: dtype torch.float32 is not supported" in str(error.value)


@pytest.mark.parametrize("name", ["te", "flash", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rejects_wide_dtypes_on_cuda_by_name(machine, name, dtype):
    machine()
    with pytest.raises(ValueError, match=f"^--mesh-kernel {name}: dtype {dtype} is not supported.*bfloat16"):
        kernels.select_kernel(name, dtype=dtype, device_type="cuda", head_dim=64, flag="--mesh-kernel")


@pytest.mark.parametrize("name", ["te", "flash", "sdpa"])
def test_rejects_head_dims_beyond_256_of_q_or_v(machine, name):
    machine()
    for head_dim, v_head_dim in ((264, 64), (64, 264)):
        with pytest.raises(ValueError, match=rf"^kernel {name}: head dim (of V )?264 is not supported.*at most 256"):
            kernels.select_kernel(
                name, dtype=torch.bfloat16, device_type="cuda", head_dim=head_dim, v_head_dim=v_head_dim
            )
    assert kernels.select_kernel(name, dtype=torch.bfloat16, device_type="cuda", head_dim=256).name == name


def test_rejects_te_for_head_dims_that_are_no_multiple_of_8(machine):
    machine()
    for dims, words in (((20, 24), "head dim 20"), ((24, 20), "head dim of V 20")):
        with pytest.raises(ValueError, match=f"{words} is not supported: it must be a multiple of 8"):
            kernels.select_kernel("te", dtype=torch.float16, device_type="cuda", head_dim=dims[0], v_head_dim=dims[1])


def test_rejects_te_where_transformer_engine_has_no_fused_attention(machine):
    machine(picked="unfused", fused=False)
    with pytest.raises(ValueError, match=r"kernel te: .* no fused attention for torch.float16, head dim 64 \(V: 32\)"):
        kernels.select_kernel("te", dtype=torch.float16, device_type="cuda", head_dim=64, v_head_dim=32)


def test_rejects_an_unknown_kernel_and_lists_the_known():
    with pytest.raises(ValueError, match="--mesh-kernel 'fa4': choose from auto, te, flash, sdpa, reference"):
        kernels.select_kernel("fa4", dtype=torch.bfloat16, device_type="cpu", head_dim=64, flag="--mesh-kernel")


def test_rejects_a_kernel_that_is_not_there_and_says_why(machine):
    machine(flash="flash-attn is not installed (pip install it)")
    with pytest.raises(ValueError, match="^kernel flash: flash-attn is not installed"):
        kernels.select_kernel("flash", dtype=torch.bfloat16, device_type="cuda", head_dim=64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_on_the_cpu_auto_is_sdpa_for_every_dtype_and_head_dim(dtype):
    for dims in ((20, 12), (512, 512)):
        name, why = choice(dtype, "cpu", *dims)
        assert name == "sdpa"
        assert "CPU" in why


@pytest.mark.parametrize("name", ["te", "flash"])
def test_rejects_cuda_kernels_on_the_cpu_and_names_what_runs_there(name):
    with pytest.raises(ValueError, match=f"kernel {name}: it runs on CUDA tensors, got cpu.*sdpa and reference"):
        kernels.select_kernel(name, dtype=torch.bfloat16, device_type="cpu", head_dim=64)


def test_every_kernel_but_reference_is_refused_on_an_unknown_device():
    with pytest.raises(ValueError) as error:
        kernels.auto_choice(torch.bfloat16, "xpu", 64)
    assert str(error.value).count("got xpu") == 3
    assert kernels.select_kernel("reference", dtype=torch.bfloat16, device_type="xpu", head_dim=64).name == "reference"


def test_without_a_gpu_sdpa_says_so():
    assert SdpaKernel.unavailable("cuda") == "torch sees no CUDA device"  # tests/conftest.py hides any


def test_a_choice_holds_until_it_is_forgotten(machine, monkeypatch):
    machine()
    what = dict(dtype=torch.bfloat16, device_type="cuda", head_dim=64)
    kernel = kernels.select_kernel("auto", **what)
    assert choice() == ("te", "what Transformer Engine picks (fused attention)")
    monkeypatch.setattr(TeKernel, "unavailable", classmethod(lambda cls, device_type: "gone"))
    assert kernels.select_kernel("auto", **what) is kernel
    assert choice() == ("te", "what Transformer Engine picks (fused attention)")
    kernels.forget_choices()
    assert choice() == ("flash", "te: gone")


def test_a_refusal_is_not_remembered(machine, monkeypatch):
    machine(flash="absent")
    what = dict(dtype=torch.bfloat16, device_type="cuda", head_dim=64)
    with pytest.raises(ValueError, match="absent"):
        kernels.select_kernel("flash", **what)
    monkeypatch.setattr(FlashKernel, "unavailable", classmethod(lambda cls, device_type: ""))
    assert kernels.select_kernel("flash", **what).name == "flash"


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """installed(version): what every distribution's version is; None: none is installed."""

    def have(version: str | None) -> None:
        def answer(package):
            if version is None:
                raise PackageNotFoundError(package)
            return version

        fake = SimpleNamespace(version=answer, PackageNotFoundError=PackageNotFoundError)
        monkeypatch.setattr(packages, "metadata", fake)
        kernels.forget_choices()

    return have


RANGE = (Version("2.12"), Version("2.21"))


@pytest.mark.parametrize("version", ["2.12", "2.12.0", "2.14.0+abc", "2.20.2.dev3+g12", "2.12.0rc1", "2.20.9.post1"])
def test_versions_in_range_are_taken_whatever_their_suffix(installed, version):
    installed(version)
    assert packages.installed_version("p") == Version(version)
    assert packages.outside("p", RANGE) == ""


@pytest.mark.parametrize("version", ["2.11.9", "1.0", "2.21", "2.21.0.dev0+abc", "2.21.0rc1", "3.0", "2.11.0+zzz"])
def test_versions_out_of_range_are_refused_with_what_to_install(installed, version):
    installed(version)
    assert packages.outside("p", RANGE) == f"p {Version(version)} is not supported; install 'p>=2.12,<2.21'"


@pytest.mark.parametrize("version", [None, "not a version"])
def test_a_package_that_is_not_there_is_refused_with_how_to_install_it(installed, version):
    installed(version)
    assert packages.installed_version("p") is None
    assert packages.outside("p", RANGE) == "p is not installed (pip install 'p>=2.12,<2.21')"


@pytest.mark.parametrize("kernel", [TeKernel, FlashKernel], ids=lambda x: x.name)
def test_a_kernel_is_unavailable_by_version_before_anything_is_imported(installed, monkeypatch, kernel):
    module = {TeKernel: te, FlashKernel: flash}[kernel]
    monkeypatch.setattr(module, "load", lambda name: pytest.fail(f"imported {name}"))
    for version, words in ((None, "is not installed"), ("0.1", "0.1 is not supported"), ("99", "99 is not supported")):
        installed(version)
        assert f"{module.PACKAGE} {words}" in kernel.unavailable("cuda")
        assert "CUDA tensors" in kernel.unavailable("cpu")


@pytest.mark.parametrize("kernel", [TeKernel, FlashKernel], ids=lambda x: x.name)
def test_a_kernel_is_available_only_where_all_its_modules_import(installed, monkeypatch, kernel):
    module = {TeKernel: te, FlashKernel: flash}[kernel]
    installed(str(module.SUPPORTED[0]))
    names = [te._FUSED, te._UTILS] if module is te else [flash._INTERFACE]
    for broken in names:
        monkeypatch.setattr(module, "load", lambda name, b=broken: (None, f"no {b}") if name == b else (module, ""))
        assert kernel.unavailable("cuda") == f"no {broken}"
    monkeypatch.setattr(module, "load", lambda name: (module, ""))
    assert kernel.unavailable("cuda") == ""


def test_a_module_that_fails_to_import_gives_its_reason_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "mesh_cp_broken.py").write_text('raise RuntimeError("built for another torch\\nand more\\n")')
    monkeypatch.syspath_prepend(tmp_path)
    reason = "importing mesh_cp_broken fails: RuntimeError: built for another torch"
    assert packages.load("mesh_cp_broken") == (None, reason)
    module, why = packages.load("mesh_cp_absent.part")
    assert module is None
    assert why.startswith("importing mesh_cp_absent.part fails: ModuleNotFoundError: ")
    assert packages.load("math") == (math, "")


def test_a_failed_import_is_tried_again_only_after_choices_are_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "mesh_cp_repaired.py"
    path.write_text("raise OSError('libcudart')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "libcudart" in packages.load("mesh_cp_repaired")[1]
    path.write_text("answer = 42  # longer or shorter than before: a cached .pyc goes by size and time")
    assert "libcudart" in packages.load("mesh_cp_repaired")[1]
    kernels.forget_choices()
    assert packages.load("mesh_cp_repaired")[0].answer == 42


# --- te, without Transformer Engine ----------------------------------------------------------------------------------


@dataclass
class AttentionParams:
    """Of Transformer Engine 2.12 .. 2.19: no nominal_dtype and no softmax_scale."""

    qkv_dtype: torch.dtype
    qkv_layout: str
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool


@pytest.mark.parametrize(
    ("answer", "picked", "fused"),
    [
        ((False, None, True, 0, False, [True, True, True]), "fused", True),
        ((True, Version("2.8"), False, None, False, [True, True, True]), "flash", True),
        ((True, Version("3.0.0b1"), False, None, False, [True, True, True]), "flash 3", True),
        ((False, None, False, None, True, [False, False, True]), "unfused", False),
        ((False, None, False, None, False, [False, False, False]), "none", False),
    ],
    ids=["fused", "flash", "flash 3", "unfused", "none"],
)
def test_te_backends_reads_transformer_engines_answer(monkeypatch, answer, picked, fused):
    asked = []
    utils = SimpleNamespace(
        AttentionParams=AttentionParams, get_attention_backend=lambda params: asked.append(params) or answer
    )
    monkeypatch.setattr(te, "load", lambda name: (utils, "") if name == te._UTILS else pytest.fail(name))
    backends = te.te_backends(torch.bfloat16, 64, 32)
    assert (backends.picked, backends.fused_available) == (picked, fused)
    assert te.te_backends(torch.bfloat16, 64, 32) is backends
    (params,) = asked
    assert (params.qkv_dtype, params.head_dim_qk, params.head_dim_v) == (torch.bfloat16, 64, 32)
    assert (params.attn_mask_type, params.window_size) == ("causal", (-1, 0))


def test_te_is_called_with_the_arguments_that_its_version_has():
    def of_2_12(q, dqkv_dtype):
        return q, dqkv_dtype

    def of_2_20(q, o_format, do_format, dqkv_layout):
        return q, o_format, do_format, dqkv_layout

    arguments = dict(q=1, dqkv_dtype=2, o_format=3, do_format=4, dqkv_layout=5)
    assert te._call(of_2_12, **arguments) == (1, 2)
    assert te._call(of_2_20, **arguments) == (1, 3, 4, 5)


def test_te_without_an_argument_that_every_version_has_is_an_error():
    """Dropping one (a mask, a scale) would compute something else."""

    def renamed(q, mask_type="no_mask"):
        return q

    with pytest.raises(TypeError, match="attn_mask_type"):
        te._call(renamed, q=1, attn_mask_type="causal", o_format="sbhd")


def test_the_format_is_that_of_the_memory():
    shape = (2, 4, 6, 8)
    assert te._format_of(made(*shape, memory="sbhd")) == "sbhd"
    assert te._format_of(made(*shape, memory="bshd")) == "bshd"
    assert te._format_of(made(*shape, memory="bhsd")) == "sbhd"
    assert te._format_of(made(*shape, memory="sbhd")[:, :, 3:]) == "sbhd"


@pytest.mark.parametrize("memory", ["sbhd", "bshd"])
def test_of_batch_1_both_formats_are_one_and_nothing_is_copied(memory):
    x = made(1, 4, 6, 8, memory=memory)
    fmt = te._format_of(x)
    assert fmt == "sbhd"
    assert te._lay_out(x, fmt).data_ptr() == x.data_ptr()
    half = x[:, :, 3:]
    assert te._lay_out(half, te._format_of(half)).data_ptr() == half.data_ptr()


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("memory", MEMORY)
def test_te_gets_contiguous_memory_and_copies_only_where_it_has_to(fmt, memory):
    whole = made(2, 4, 6, 8, memory=memory)
    for x, lies_so in ((whole, memory == fmt), (whole[:, :, 3:], memory == fmt == "sbhd")):
        laid = te._lay_out(x, fmt)
        assert laid.is_contiguous()
        assert laid.shape == tuple(dict(zip("bhsd", x.shape, strict=True))[c] for c in fmt)
        assert torch.equal(heads_first(laid, fmt), x)
        assert (laid.data_ptr() == x.data_ptr()) == lies_so
