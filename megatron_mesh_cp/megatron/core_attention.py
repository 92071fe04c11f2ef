"""MeshDotProductAttention: Megatron's core attention, computed by Mesh-Attention."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from ..attention import mesh_attention
from ..cost import check_heads
from ..kernels import select_kernel
from .config import MeshConfig
from .groups import shared_groups
from .receipt import print_receipt

_MASKS = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class MeshDotProductAttention(MegatronModule):
    """Fits where a layer spec has DotProductAttention or TEDotProductAttention as `core_attention`.

    Called with q [s/cp, b, hq, d], k and v [s/cp, b, hkv, d] of this rank's zigzag chunk; returns [s/cp, b, hq*d].
    It has no parameters and adds nothing to a checkpoint.

    Use `bind(mesh)` for a class that carries the run's settings; `install` does.

    Raises, when the model is built, ValueError for whatever mesh cannot do, naming it; options it does not know are a
    TypeError.
    """

    mesh: MeshConfig | None = None

    @classmethod
    def bind(cls, mesh: MeshConfig) -> type[MeshDotProductAttention]:
        """A class with the same constructor that uses `mesh`; Megatron builds core attention from a class."""
        return type(cls.__name__, (cls,), {"mesh": mesh, "__doc__": cls.__doc__})

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if self.mesh is None:
            raise ValueError("MeshDotProductAttention: no settings; use MeshDotProductAttention.bind(MeshConfig(...))")
        self._check_config(config, attn_mask_type, attention_type, attention_dropout, cp_comm_type)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "hcp"])
        check_heads(config.num_attention_heads, config.num_query_groups, "num_attention_heads", "num_query_groups")
        # Query-key layer scaling divides the scores by the layer number and multiplies them again inside the
        # softmax, for fp16's sake; scores here are in fp32, so the scale is the same without.
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        kernel = select_kernel(
            self.mesh.kernel,
            dtype=config.params_dtype,
            device_type=device_type,
            head_dim=config.kv_channels,
            flag="--mesh-kernel",
        )
        self.kernel = kernel.name
        self.mesh.tile.check_size(config.context_parallel_size, "--mesh-tile-shape")
        self.groups = shared_groups(pg_collection, self.mesh)
        head_dims = config.kv_channels, config.kv_channels
        print_receipt(self.mesh, self.groups, self.kernel, config.params_dtype, head_dims)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """q [s/cp, b, hq, d], k, v [s/cp, b, hkv, d] -> [s/cp, b, hq*d]. Raises ValueError for masks and biases."""
        if attention_mask is not None:
            raise ValueError(
                f"mesh context parallelism takes no mask tensors, got attention_mask {list(attention_mask.shape)}; "
                "pass --no-create-attention-mask-in-dataloader"
            )
        if attention_bias is not None:
            raise ValueError(f"mesh context parallelism takes no attention_bias, got {list(attention_bias.shape)}")
        if packed_seq_params is not None:
            raise ValueError("mesh context parallelism: packed sequences (packed_seq_params) are not supported yet")
        out = mesh_attention(
            query,
            key,
            value,
            self.groups,
            self._causal(attn_mask_type or self.attn_mask_type),
            softmax_scale=self.softmax_scale,
            kernel=self.kernel,
            exchange=self.mesh.exchange,
            exchange_backward=self.mesh.exchange_backward,
        )
        return out.flatten(2)

    @staticmethod
    def _causal(mask: AttnMaskType) -> bool:
        if mask not in _MASKS:
            names = ", ".join(m.name for m in _MASKS)
            raise ValueError(f"attn_mask_type {mask.name} with mesh context parallelism: supported are {names}")
        return _MASKS[mask]

    def _check_config(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None,
        cp_comm_type: str | None,
    ) -> None:
        self._causal(attn_mask_type)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            "attention_dropout": (dropout, 0),
            "attention_type": (attention_type, "self"),
            "window_size": (config.window_size, None),
            "softmax_type": (getattr(config, "softmax_type", "vanilla"), "vanilla"),
            "fp8_dot_product_attention": (config.fp8_dot_product_attention, False),
            "cuda_graph_impl": (getattr(config, "cuda_graph_impl", "none"), "none"),
            "multi_latent_attention": (config.multi_latent_attention, False),
        }
        for name, (value, fine) in refused.items():
            if value != fine:
                raise ValueError(f"{name}={value} with mesh context parallelism: only {name}={fine} is supported")
        if cp_comm_type not in (None, "p2p", "mesh"):
            raise ValueError(
                f"cp_comm_type {cp_comm_type!r} with mesh context parallelism: mesh brings its own communication; "
                "leave it out"
            )
