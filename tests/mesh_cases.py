"""What a rank does in a distributed case, and the dense fp64 attention it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention
from megatron_mesh_cp.cost import AttentionShape
from megatron_mesh_cp.layout import chunk_positions

NAMES = ("out", "lse", "dq", "dk", "dv")
_groups: dict[object, MeshGroups] = {}
_subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Case:
    """One attention over n ranks; `s` is the global sequence length."""

    s: int
    tile: str = "1x1"
    tile_backward: str | None = None
    b: int = 1
    heads: int = 4
    kv_heads: int = 4
    d: int = 8
    dv: int = 8
    dtype: torch.dtype = torch.float64
    causal: bool = True
    exchange: str = "direct"
    exchange_backward: str | None = None
    kernel: str = "sdpa"
    layout: str = "zigzag"
    qkv_format: str = "sbhd"
    strided: bool = False
    checkpoint: bool = False
    scale: float | None = None
    seed: int = 0

    def shape(self, n: int) -> AttentionShape:
        item = self.dtype.itemsize
        return AttentionShape(
            self.s // n, self.b, self.heads, self.kv_heads, self.d, self.dv, item, 8 if item == 8 else 4
        )


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Global q, k, v, dout [s, b, h, d], the same on every rank."""
    g = torch.Generator().manual_seed(case.seed)

    def make(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(case.s, case.b, heads, dim, generator=g, dtype=torch.float64).to(case.dtype)

    return (
        make(case.heads, case.d),
        make(case.kv_heads, case.d),
        make(case.kv_heads, case.dv),
        make(case.heads, case.dv),
    )


def dense(case: Case, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Softmax attention in fp64 by plain autograd: out, lse, dq, dk, dv, all [s, b, h, d] (lse [b, h, s])."""
    q, k, v, grad = inputs(case)
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    repeat = case.heads // case.kv_heads
    kk, vv = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, kk) * (case.scale or case.d**-0.5)
    if case.causal:
        live = torch.ones(case.s, case.s, dtype=torch.bool).tril()
        scores = scores.masked_fill(~live, float("-inf"))
    out = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), vv)
    out.backward((grad if dout is None else dout).double())
    return out.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad


def mesh_groups(tile: str, backward: str | None = None, members: tuple[int, ...] | None = None) -> MeshGroups | None:
    """Groups over `members` (global ranks in CP order; None: all), made once; None for a rank outside."""
    members = members or tuple(range(dist.get_world_size()))
    if members not in _subgroups:
        _subgroups[members] = dist.new_group(list(members), sort_ranks=False) if len(members) else dist.group.WORLD
    if dist.get_rank() not in members:
        return None
    key = (members, tile, backward)
    if key not in _groups:
        other = TileShape.parse(backward) if backward else None
        _groups[key] = MeshGroups.build(_subgroups[members], TileShape.parse(tile), other)
    return _groups[key]


def run_mesh(case: Case, groups: MeshGroups, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv of this rank's chunk, [s/n, b, h, d]; counters start at 0."""
    positions = chunk_positions(groups.rank, groups.size, case.s, case.layout)
    q, k, v, grad = inputs(case)
    local = [x[positions] for x in (q, k, v, grad if dout is None else dout)]
    if case.qkv_format == "bshd":
        local = [x.transpose(0, 1).contiguous() for x in local]
    if case.strided:  # every dimension strided, the last one too
        local = [torch.stack([x, -x], -1).flatten(-2)[..., ::2] for x in local]
    q, k, v, grad = local
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    groups.counters.reset()

    def call(q, k, v):
        return mesh_attention(
            q,
            k,
            v,
            groups,
            case.causal,
            qkv_format=case.qkv_format,
            softmax_scale=case.scale,
            kernel=case.kernel,
            exchange=case.exchange,
            exchange_backward=case.exchange_backward,
            layout=case.layout,
            return_lse=True,
        )

    if case.checkpoint:
        out, lse = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    else:
        out, lse = call(q, k, v)
    out.backward(grad)
    results = [out.detach(), q.grad, k.grad, v.grad]
    if case.qkv_format == "bshd":
        results = [x.transpose(0, 1) for x in results]
    return results[0], lse, *results[1:]


def local_part(whole: tuple[torch.Tensor, ...], case: Case, groups: MeshGroups) -> list[torch.Tensor]:
    """This rank's part of `dense`'s results."""
    positions = chunk_positions(groups.rank, groups.size, case.s, case.layout)
    return [x[:, :, positions] if name == "lse" else x[positions] for name, x in zip(NAMES, whole, strict=True)]


def errors(case: Case, groups: MeshGroups) -> dict[str, float]:
    """Largest absolute error of this rank's results against dense fp64."""
    got, want = run_mesh(case, groups), local_part(dense(case), case, groups)
    return {n: (g.double() - w).abs().max().item() for n, g, w in zip(NAMES, got, want, strict=True)}


def grid_errors(cases: list[Case]) -> list[dict[str, float]]:
    """Errors of many cases; the dense attention is computed once for cases that differ only in how."""
    known: dict[Case, tuple[torch.Tensor, ...]] = {}
    out = []
    for case in cases:
        groups = mesh_groups(case.tile, case.tile_backward)
        what = replace(case, tile="1x1", tile_backward=None, exchange="direct", kernel="sdpa", qkv_format="sbhd")
        what = replace(what, strided=False, checkpoint=False, layout="zigzag")
        if what not in known:
            known[what] = dense(case)
        got, want = run_mesh(case, groups), local_part(known[what], case, groups)
        out.append({n: (g.double() - w).abs().max().item() for n, g, w in zip(NAMES, got, want, strict=True)})
    return out
