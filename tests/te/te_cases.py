"""What a rank does in a case with Transformer Engine's real Python over the emulated extension."""

from __future__ import annotations

from dataclasses import dataclass

import te_emulation
import torch
import torch.distributed as dist
from rank_pool import destroy_groups

from megatron_mesh_cp import TileShape, install, uninstall
from megatron_mesh_cp.layout import BlockKind, block_kind, chunk_positions
from megatron_mesh_cp.megatron.config import MeshConfig
from megatron_mesh_cp.plan import Direction, EventKind
from megatron_mesh_cp.schedule import make_plan

_own_groups: set[dist.ProcessGroup] = set()  # those that are there before any case
SEQUENCE, BATCH, HEADS, DIM = 256, 2, 8, 64


@dataclass(frozen=True)
class Case:
    """One attention of bf16 over all ranks; comm_type and tile as they are typed."""

    comm_type: str = "mesh"
    tile: str = "2x2"
    tile_backward: str | None = None
    causal: bool = True
    kv_heads: int = 2
    exchange: str = "direct"
    kernel: str = "te"

    @property
    def mesh(self) -> MeshConfig:
        tile = TileShape.parse(self.tile)
        backward = TileShape.parse(self.tile_backward) if self.tile_backward else tile
        return MeshConfig(tile, backward, exchange=self.exchange, kernel=self.kernel)


def emulate() -> None:
    """Once in every rank."""
    te_emulation.install()
    te_emulation.make_gloo_safe()
    _own_groups.update(dist.distributed_c10d._world.pg_map)


def problem(case: Case) -> tuple[torch.Tensor, ...]:
    """Global q, k, v, dout [s, b, h, d] in bf16, the same on every rank."""
    g = torch.Generator().manual_seed(7)
    heads = HEADS, case.kv_heads, case.kv_heads, HEADS
    return tuple(torch.randn(SEQUENCE, BATCH, h, DIM, generator=g).bfloat16() for h in heads)


def dense(case: Case) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv in fp64 by plain autograd."""
    q, k, v, dout = (x.double() for x in problem(case))
    for x in (q, k, v):
        x.requires_grad_()
    kk, vv = (x.repeat_interleave(HEADS // case.kv_heads, 2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, kk) * DIM**-0.5
    if case.causal:
        scores = scores.masked_fill(~torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril(), float("-inf"))
    out = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), vv)
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's zigzag part of a global tensor."""
    positions = chunk_positions(dist.get_rank(), dist.get_world_size(), SEQUENCE, "zigzag")
    return x[torch.tensor(positions)].contiguous()


def start_megatron(case: Case) -> None:
    """Megatron's groups for the case's tile, with mesh installed (but for Megatron's own comm types nothing is)."""
    from megatron.core import parallel_state

    uninstall()
    parallel_state.destroy_model_parallel()
    destroy_groups(but=_own_groups)
    install(case.mesh)
    parallel_state.initialize_model_parallel(
        context_parallel_size=dist.get_world_size(),
        hierarchical_context_parallel_sizes=list(case.mesh.tile.levels),
    )


def te_attention(case: Case, **more: object) -> torch.nn.Module:
    """Megatron's TEDotProductAttention, built as a layer builds it."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": 1,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": case.kv_heads,
        "attention_dropout": 0.0,
        "context_parallel_size": dist.get_world_size(),
        "cp_comm_type": case.comm_type,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }
    config = TransformerConfig(**{**settings, **more})
    mask = AttnMaskType.causal if case.causal else AttnMaskType.no_mask
    return TEDotProductAttention(config, 1, mask, "self", cp_comm_type=case.comm_type)


def run(case: Case) -> tuple[list[float], list[te_emulation.Call]]:
    """Forward and backward: relative errors of out, dq, dk, dv against fp64 (over all ranks), and this rank's kernel
    calls."""
    from megatron.core.transformer.enums import AttnMaskType

    start_megatron(case)
    attention = te_attention(case)
    q, k, v, dout = (mine(x) for x in problem(case))
    for x in (q, k, v):
        x.requires_grad_()
    te_emulation.calls.clear()
    out = attention(q, k, v, None, AttnMaskType.causal if case.causal else AttnMaskType.no_mask)
    assert out.shape == (*q.shape[:2], HEADS * DIM)
    out.backward(dout.flatten(2))
    errors = []
    for got, want in zip((out.unflatten(2, (HEADS, DIM)), q.grad, k.grad, v.grad), dense(case), strict=True):
        want = mine(want)
        sums = torch.stack([(got.detach().double() - want).square().sum(), want.square().sum()])
        dist.all_reduce(sums)
        errors.append((sums[0] / sums[1]).sqrt().item())
    return errors, list(te_emulation.calls)


def planned_calls(case: Case, rank: int, n: int) -> list[te_emulation.Call]:
    """The kernel calls that the plan names, in its order."""
    local = SEQUENCE // n
    calls = []
    for kind, direction, tile in (
        ("fwd", Direction.FORWARD, case.mesh.tile),
        ("bwd", Direction.BACKWARD, case.mesh.tile_backward),
    ):
        for event in make_plan(tile, direction, case.exchange).program(rank):
            if event.kind is not EventKind.COMPUTE:
                continue
            block = block_kind(event.block.q, event.block.kv, causal=case.causal, layout="zigzag")
            if block is BlockKind.EMPTY:
                continue
            rows = local // 2 if block is BlockKind.Q_SECOND_HALF else local
            columns = local // 2 if block is BlockKind.KV_FIRST_HALF else local
            mask = "CAUSAL_MASK" if block is BlockKind.CAUSAL else "NO_MASK"
            calls.append(te_emulation.Call(kind, rows, columns, mask, "sbhd"))
    return calls
