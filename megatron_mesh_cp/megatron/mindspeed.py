"""Beside MindSpeed, whose parser has a --context-parallel-algo of its own with other algorithms behind it.

Names and defaults are those of github.com/Ascend/MindSpeed (`mindspeed/arguments.py` of its older branches,
`mindspeed/features_manager/` of the newer ones) and of MindSpeed-MM. `--kv-head-repeat-before-uly-alltoall` is not
among them: there it is on by default and cannot be switched off, so it says nothing about what the user wants.
"""

from __future__ import annotations

import argparse
import sys

# What tunes MindSpeed's own algorithms: name of the argument -> its default.
COMPANIONS: dict[str, object] = {
    "ulysses_degree_in_cp": None,
    "use_ulysses_allgather_kv": False,
    "cp_window_size": 1,
    "use_cp_send_recv_overlap": False,
    "use_fused_ring_attention_update": False,
    "megatron_cp_in_bnsd": False,
    "attention_mask_type": "causal",
    "cp_attention_mask_type": "causal",
    "attention_mask_on_cpu": False,
    "adaptive_cp_without_coarse": False,
    "adaptive_cp_dynamic_attn_mask": False,
    "adaptive_cp_only_reschedule": False,
    "adaptive_cp_manually_set_mask_list": False,
    "context_parallel_kv_cache_policy": None,
    "context_parallel_cache_interval": 0,
    "use_fusion_attn_v2": False,
    "sparse_mode": 0,
    "pre_tockens": 65536,
    "next_tockens": 0,
    "alibi_fusion_attn_type": None,
    "tp_2d": False,
}

# Functions that MindSpeed replaces by ones that know its own algorithms only.
_CUTTERS = (
    ("megatron.core.utils", "get_batch_on_this_cp_rank"),
    ("megatron.training.utils", "get_batch_on_this_cp_rank"),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "get_pos_emb_on_this_cp_rank"),
)


def refuse_companions(args: argparse.Namespace) -> None:
    """Raise ValueError, naming the flag, for what MindSpeed would do differently and mesh would ignore."""
    for name, default in COMPANIONS.items():
        value = getattr(args, name, default)
        if value != default:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} with --context-parallel-algo mesh: it belongs to MindSpeed's own "
                f"algorithms and mesh would ignore it; leave it out (default: {default})"
            )
    if args.context_parallel_size == 1:
        return
    for module, name in _CUTTERS:
        found = getattr(sys.modules.get(module), name, None)
        owner = getattr(found, "__module__", None) or ""
        if owner.partition(".")[0].startswith("mindspeed"):
            raise ValueError(
                f"MindSpeed has replaced {module}.{name} by one that does not know --context-parallel-algo mesh: the "
                "sequence would be cut wrong; start without MindSpeed's adaptor, or choose one of its own algorithms"
            )
