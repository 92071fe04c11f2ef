"""A rank of a pretraining run with `--transformer-impl transformer_engine`, on CPU: what test_te_pretrain.py starts.

Its attention is Megatron's TEDotProductAttention over the emulated extension. Transformer Engine's matrix products,
norms and optimizers are not emulated, so Megatron's own and torch's take their places. At its end each rank prints what
the attention kernel was given: `[calls] RANK {"fwd ROWS x COLUMNS MASK": number, ...}`.
"""

# ruff: noqa: E402  the emulation comes before whatever imports Transformer Engine or Megatron
from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import te_emulation

te_emulation.install()
te_emulation.make_gloo_safe()
sys.modules["transformer_engine.pytorch.optimizers"] = None  # Megatron falls back on torch's

from megatron_mesh_cp.megatron.cpu import enable_cpu_ranks

enable_cpu_ranks(training=True)
torch.set_num_threads(1)

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class NormThenLinear(ColumnParallelLinear):
    """What Transformer Engine fuses into one module."""

    def __init__(self, input_size, output_size, *, config, **more):
        super().__init__(input_size, output_size, config=config, **more)
        self.norm = WrappedTorchNorm(config, input_size, config.layernorm_epsilon)

    def forward(self, x, *rest, **more):
        return super().forward(self.norm(x), *rest, **more)


transformer_block.TENorm = transformer_block.LayerNormImpl = WrappedTorchNorm
TESpecProvider.column_parallel_layer_norm_linear = lambda self: NormThenLinear
for name in (
    "column_parallel_linear",
    "row_parallel_linear",
    "layer_norm",
    "activation_func",
):
    setattr(TESpecProvider, name, getattr(LocalSpecProvider, name))

from megatron_mesh_cp.megatron import pretrain

if __name__ == "__main__":
    pretrain.run()
    counted = collections.Counter(f"{c.kind} {c.rows} x {c.columns} {c.mask}" for c in te_emulation.calls)
    print(f"\n[calls] {os.environ['RANK']} {json.dumps(counted)}", flush=True)
