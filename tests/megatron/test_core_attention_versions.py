"""A self-attention layer as the installed megatron-core builds it, with mesh inside, against one dense process.

Uses megatron.core only, and nothing of it that changed between 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import passing_groups

from megatron_mesh_cp import TileShape, install, uninstall
from megatron_mesh_cp.layout import chunk_positions

pytestmark = pytest.mark.compat

SEQUENCE, BATCH, HEADS, HEAD_DIM = 48, 2, 4, 8
HIDDEN = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Layer:
    """One self-attention layer; tiles as AxB, `kv_heads` query groups."""

    tile: str
    tile_backward: str
    kv_heads: int
    dtype: torch.dtype


def tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Weights, input and gradient of the output, the same on every rank, in fp64; a rank takes its part."""
    g = torch.Generator().manual_seed(7)

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "hidden": make(SEQUENCE, BATCH, HIDDEN),
        "grad": make(SEQUENCE, BATCH, HIDDEN),
        "linear_qkv.weight": make((HEADS + 2 * layer.kv_heads) * HEAD_DIM, HIDDEN, scale=HIDDEN**-0.5),
        "linear_proj.weight": make(HIDDEN, HIDDEN, scale=HIDDEN**-0.5),
    }


def dense(layer: Layer) -> dict[str, torch.Tensor]:
    """Output and gradients of the whole sequence, in fp64, by plain autograd."""
    t = tensors(layer)
    leaves = {name: t[name].requires_grad_() for name in ("hidden", "linear_qkv.weight", "linear_proj.weight")}
    # Megatron's rows of linear_qkv: for every query group its queries, then its key, then its value.
    mixed = F.linear(t["hidden"], t["linear_qkv.weight"]).unflatten(2, (layer.kv_heads, -1, HEAD_DIM))
    ratio = HEADS // layer.kv_heads
    q = mixed[:, :, :, :ratio].flatten(2, 3)
    k, v = (mixed[:, :, :, ratio + i].repeat_interleave(ratio, 2) for i in range(2))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * HEAD_DIM**-0.5
    live = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    attention = scores.masked_fill(~live, float("-inf")).softmax(-1)
    out = F.linear(torch.einsum("bhst,tbhd->sbhd", attention, v).flatten(2), t["linear_proj.weight"])
    out.backward(t["grad"])
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def built_layer(layer: Layer) -> torch.nn.Module:
    """SelfAttention from the installed megatron-core's own local layer spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=layer.kv_heads,
        kv_channels=HEAD_DIM,
        add_bias_linear=False,
        attention_dropout=0.0,
        params_dtype=layer.dtype,
        use_cpu_initialization=True,
        context_parallel_size=4,
        hierarchical_context_parallel_sizes=list(TileShape.parse(layer.tile).levels),
    )
    # As a whole model gives its layers; a layer on its own would ask for the tp and cp groups only.
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "hcp"])
    spec = get_gpt_layer_local_spec().submodules.self_attention
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    weights = {name: t for name, t in tensors(layer).items() if name.endswith("weight")}
    module.load_state_dict({name: t.to(layer.dtype) for name, t in weights.items()}, strict=False)
    return module


@passing_groups()
def errors(layer: Layer) -> dict[str, float]:
    """On one of 4 ranks: the largest difference from dense of its output and of every gradient."""
    from megatron.core import parallel_state

    from megatron_mesh_cp.megatron.config import MeshConfig
    from megatron_mesh_cp.megatron.core_attention import MeshDotProductAttention

    tile, backward = TileShape.parse(layer.tile), TileShape.parse(layer.tile_backward)
    install(MeshConfig(tile, backward))
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=4,
            hierarchical_context_parallel_sizes=list(tile.levels),
            create_gloo_process_groups=False,
        )
        module = built_layer(layer)
        assert isinstance(module.core_attention, MeshDotProductAttention)
        mine = chunk_positions(dist.get_rank(), 4, SEQUENCE)
        given = tensors(layer)
        hidden = given["hidden"][mine].to(layer.dtype).requires_grad_()
        out, bias = module(hidden, attention_mask=None)
        assert bias is None
        out.backward(given["grad"][mine].to(layer.dtype))
        got = {"out": out.detach(), "hidden": hidden.grad}
        for name, parameter in module.named_parameters():
            got[name] = parameter.grad.double()
            dist.all_reduce(got[name])  # every rank has the part of its own tokens
        want = dense(layer)
        want |= {name: want[name][mine] for name in ("out", "hidden")}
        return {name: (got[name].double() - want[name]).abs().max().item() for name in want}
    finally:
        uninstall()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("layer", "tolerance"),
    [
        pytest.param(Layer("2x2", "2x2", 4, torch.float64), 1e-10, id="MHA fp64"),
        pytest.param(Layer("2x2", "2x2", 2, torch.float32), 1e-4, id="GQA fp32"),
        pytest.param(Layer("2x2", "4x1", 2, torch.float64), 1e-10, id="another backward tile"),
        pytest.param(Layer("1x4", "1x4", 1, torch.float64), 1e-10, id="MQA ring"),
    ],
)
def test_a_layer_of_the_installed_megatron_core_with_mesh_inside_equals_dense(ranks, layer, tolerance):
    """Megatron's process groups, layer spec and self-attention, forward and backward, on 4 ranks."""
    for rank, found in enumerate(ranks(4).run(errors, layer, timeout=120)):
        print(f"rank {rank}: {found}")
        assert found.keys() == {"out", "hidden", "linear_qkv.weight", "linear_proj.weight"}
        assert max(found.values()) <= tolerance, (rank, found)
