"""install: every GPT layer spec gets the mesh core attention, nothing else changes, and it can be undone."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import textwrap

import pytest
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from test_args import BASE

from megatron_mesh_cp import TileShape, add_args, install, uninstall
from megatron_mesh_cp.megatron.config import MeshConfig
from megatron_mesh_cp.megatron.core_attention import MeshDotProductAttention

pytestmark = pytest.mark.compat

MESH = MeshConfig(TileShape(2, 2), TileShape(2, 2))


@pytest.fixture(autouse=True)
def _undo(monkeypatch):
    # It would ask the pipeline groups, which are not there in a unit test.
    monkeypatch.setattr(gpt_layer_specs, "get_mtp_num_layers_to_build", lambda *args, **kwargs: 1)
    yield
    uninstall()


def parse(flags: str) -> argparse.Namespace:
    pytest.importorskip("megatron.training", reason="this megatron-core ships no megatron.training")
    from megatron.training.arguments import add_megatron_arguments

    return add_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))).parse_args(shlex.split(flags))


def config(**more) -> TransformerConfig:
    return TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=8, use_cpu_initialization=True, **more)


def core_attentions() -> dict[str, list[type]]:
    """The core attention in the dense, MoE block and MTP specs."""
    moe = config(num_moe_experts=4, moe_layer_freq=[0, 1, 1, 0])
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(moe, use_transformer_engine=False)
    dense = gpt_layer_specs.get_gpt_layer_local_spec()
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config(mtp_num_layers=1), dense, use_transformer_engine=False)
    # megatron-core 0.16 calls it transformer_layer.
    name = "mtp_model_layer" if hasattr(mtp.layer_specs[0].submodules, "mtp_model_layer") else "transformer_layer"
    inner = [getattr(layer.submodules, name) for layer in mtp.layer_specs]
    return {
        name: [spec.submodules.self_attention.submodules.core_attention for spec in specs]
        for name, specs in {"dense": [dense], "MoE": layers, "MTP": inner}.items()
    }


def test_dense_moe_and_mtp_specs_get_the_mesh_core_attention():
    before = core_attentions()
    assert all(found == DotProductAttention for every in before.values() for found in every)
    install(MESH)
    after = core_attentions()
    assert {name: len(found) for name, found in after.items()} == {"dense": 1, "MoE": 4, "MTP": 1}
    for found in (f for every in after.values() for f in every):
        assert issubclass(found, MeshDotProductAttention)
        assert found.mesh is MESH


def test_nothing_but_the_core_attention_changes_in_a_spec():
    before = gpt_layer_specs.get_gpt_layer_local_spec()
    install(MESH)
    after = gpt_layer_specs.get_gpt_layer_local_spec()
    assert after.submodules.self_attention.submodules.core_attention != DotProductAttention
    after.submodules.self_attention.submodules.core_attention = DotProductAttention
    assert repr(after.submodules.self_attention) == repr(before.submodules.self_attention)


def test_transformer_engine_specs_keep_their_own_attention():
    """It runs mesh for cp_comm_type "mesh": tests/te."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    before = TESpecProvider.core_attention
    install(MESH)
    assert TESpecProvider.core_attention is before


def test_uninstall_puts_megatrons_own_back_and_a_second_install_is_harmless():
    install(MESH)
    assert install(MESH) is not None
    uninstall()
    assert all(found == DotProductAttention for every in core_attentions().values() for found in every)


def test_at_context_parallel_size_1_one_line_says_that_transformer_engines_attention_stays(monkeypatch, capsys):
    from megatron_mesh_cp.megatron import receipt

    monkeypatch.setattr(receipt.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(receipt.dist, "get_rank", lambda: 0)
    receipt.print_alone()
    assert "context_parallel_size 1: nothing to exchange" in capsys.readouterr().out


def test_rejects_other_settings_while_installed():
    install(MESH)
    with pytest.raises(ValueError, match="installed with other settings.*uninstall first"):
        install(MeshConfig(TileShape(4, 1), TileShape(4, 1)))


def test_algo_megatron_changes_neither_arguments_nor_specs():
    args = parse("--num-layers 2 --hidden-size 64 --num-attention-heads 8 --context-parallel-size 4")
    before = dict(vars(args))
    assert install(args) is None
    assert vars(args) == before
    assert all(found == DotProductAttention for every in core_attentions().values() for found in every)


def test_hierarchical_sizes_are_the_tile_and_an_attention_that_was_not_swapped_cannot_run():
    args = parse(f"{BASE} --mesh-tile-shape 4x1")
    install(args)
    assert args.hierarchical_context_parallel_sizes == [4, 1]
    assert args.cp_comm_type == ["mesh"]  # Transformer Engine refuses it; Megatron's own refuses CP > 1
    install(args)  # again, on its own result


SCRIPT = """
    import torch, torch.distributed as dist
    from megatron_mesh_cp.megatron.cpu import enable_cpu_ranks
    enable_cpu_ranks()
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron_mesh_cp import TileShape
    from megatron_mesh_cp.megatron.config import MeshConfig
    from megatron_mesh_cp.megatron.core_attention import MeshDotProductAttention
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    def make(mesh=MeshConfig(TileShape(1, 1), TileShape(1, 1)), mask=AttnMaskType.causal, kind="self", call={}, **more):
        base = dict(num_layers=1, hidden_size=64, num_attention_heads=8, attention_dropout=0.0)
        return MeshDotProductAttention.bind(mesh)(
            config=TransformerConfig(**(base | more)), layer_number=1, attn_mask_type=mask, attention_type=kind, **call)
    def refused(what):
        try:
            what()
        except (ValueError, TypeError) as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("accepted")
    good = make()
    q = torch.randn(8, 2, 8, 8)
    assert good(q, q, q, None).shape == (8, 2, 64)
    assert good(q, q, q, None, attn_mask_type=AttnMaskType.no_mask).shape == (8, 2, 64)
    assert not good.state_dict() and not list(good.parameters())
    refused(lambda: good(q, q, q, torch.ones(1, 1, 8, 8, dtype=torch.bool)))
    refused(lambda: good(q, q, q, None, attention_bias=torch.ones(8, 8)))
    refused(lambda: good(q, q, q, None, packed_seq_params=object()))
    refused(lambda: good(q, q, q, None, attn_mask_type=AttnMaskType.padding))
    refused(lambda: make(mask=AttnMaskType.arbitrary))
    refused(lambda: make(kind="cross"))
    refused(lambda: make(attention_dropout=0.1))
    refused(lambda: make(window_size=(7, 0)))
    refused(lambda: make(softmax_type="learnable"))
    refused(lambda: make(mesh=MeshConfig(TileShape(2, 2), TileShape(2, 2))))
    refused(lambda: make(call={"cp_comm_type": "a2a"}))
    refused(lambda: make(call={"num_splits": 2}))
    refused(lambda: MeshDotProductAttention(
        config=good.config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"))
"""
MESSAGES = [
    r"ValueError: .*no mask tensors, got attention_mask \[1, 1, 8, 8\].*--no-create-attention-mask-in-dataloader",
    r"ValueError: .*no attention_bias, got \[8, 8\]",
    "ValueError: .*packed sequences",
    "ValueError: attn_mask_type padding .*supported are causal, no_mask",
    "ValueError: attn_mask_type arbitrary .*supported are causal, no_mask",
    "ValueError: attention_type=cross .*only attention_type=self",
    "ValueError: attention_dropout=0.1 .*only attention_dropout=0",
    r"ValueError: window_size=\(7, 0\) .*only window_size=None",
    "ValueError: softmax_type=learnable .*only softmax_type=vanilla",
    "ValueError: context_parallel_size 1 with --mesh-tile-shape 2x2 = 4",
    "ValueError: cp_comm_type 'a2a'",
    "TypeError: .*num_splits",
    "ValueError: .*no settings; use MeshDotProductAttention.bind",
]


def test_the_core_attention_refuses_when_it_is_built_or_called_never_silently(tmp_path):
    import re

    from launch import free_port

    code = textwrap.dedent(SCRIPT).replace("127.0.0.1:0", f"127.0.0.1:{free_port()}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "Error: " in line or line == "accepted"]
    assert len(lines) == len(MESSAGES), done.stdout
    for line, message in zip(lines, MESSAGES, strict=True):
        assert re.match(message, line), (line, message)
