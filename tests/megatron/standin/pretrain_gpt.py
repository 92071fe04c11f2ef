# ruff: noqa: I001
"""Stands for the pretrain_gpt.py of a Megatron-LM checkout: same calls in the same order, of the project's own writing.

It knows nothing of mesh context parallelism. Data and forward step are those of `megatron_mesh_cp.megatron.gpt_job`,
so that its losses can be compared; Megatron is the installed wheel.
"""

import os
import sys

import torch

# The patch goes between these two comments.

# Megatron's imports follow.
import megatron.core.datasets.utils as data_utils
from megatron.core.enums import ModelType
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_mesh_cp.megatron import gpt_job

data_utils.compile_helpers = lambda: None  # the wheel holds the compiled helper, and no Makefile


class OwnAttention(DotProductAttention):
    """A core attention that a script brings along: no context parallelism, and no check for it either."""

    def __init__(self, config, *args, cp_comm_type=None, **kwargs):
        size, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)
        config.context_parallel_size = size


def own_layer_spec(config, vp_stage=None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = OwnAttention
    return spec


def add_own_flags(parser):
    parser.add_argument("--own-layer-spec", action="store_true", help="A flag of the script's own.")
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_own_flags, args_defaults={"tokenizer_type": "NullTokenizer"})
    model = gpt_config_from_args(args)
    if args.own_layer_spec:
        model.transformer_layer_spec = own_layer_spec
    if os.environ.get("TEST_FAIL_ON_RANK") == os.environ["RANK"]:
        raise RuntimeError("this rank fails while the others wait for it")
    print(f"[standin] argv {sys.argv[0]} {torch.distributed.is_initialized()}", flush=True)
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        gpt_job.datasets_provider,
        ModelType.encoder_or_decoder,
        gpt_job.forward_step,
        get_embedding_ranks=gpt_job.embedding_ranks,
    )
