"""What a GPT pretraining job hands to Megatron's `pretrain()`: data sets, batches, forward step and loss.

The counterpart of stock `pretrain_gpt.py` for the features this project supports (see
`megatron_mesh_cp.megatron.pretrain`, which refuses the others). On CPU ranks import it after
`enable_cpu_ranks()`, as it imports Megatron.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]
BATCH_KEYS = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")

_straggler_timer = StragglerDetector()  # a singleton in Megatron, idle unless --log-straggler
_SPIKE = 10.0  # a loss this many times the largest seen so far counts as spiky


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the training, validation and test sets.

    Args:
        num_samples: sequences wanted for training, validation and test.
        vp_stage: the virtual pipeline stage the sets are for.

    Returns:
        Three Megatron data sets; None on ranks that read no data and for splits of size 0.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(_reads_data, args, vp_stage),
        _dataset_config(args),
    ).build()


datasets_provider.is_distributed = True  # built by every rank that reads, not by rank 0 for all


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Run one micro-batch through this stage of the model.

    Returns:
        The stage's output (on the last one the loss of each token, `[b, s_local]`), and the function that
        reduces it.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with _straggler_timer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_func, batch["loss_mask"])


def get_batch(data_iterator: Iterator, vp_stage: int | None = None) -> Batch:
    """This rank's part of the next micro-batch.

    Tensor-parallel rank 0 reads it and sends it to its group; each context-parallel rank keeps its zigzag
    part of the sequence.

    Returns:
        `BATCH_KEYS` to tensors `[b, s / cp]` (mask: `[b, 1, s / cp, s]`), or to None where this pipeline
        stage does not need them.
    """
    args = get_args()
    mtp_here = _has_mtp(args, vp_stage)
    if not (is_first_or_last_pipeline_stage(vp_stage) or mtp_here):
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        read = next(data_iterator)
        for key in BATCH_KEYS:
            value = read.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp_here,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: `[b, s_local]`, 1 for a token that counts, 0 for one that does not.
        output: losses of the tokens, `[b, s_local]`, in nats.

    Returns:
        The sum (a scalar), the number of tokens in it (int32, a scalar), and `{"lm loss": [sum, number]}`
        for the log. Megatron adds the parts of the context-parallel ranks.

    Raises:
        RuntimeError: the loss is NaN or infinite and `--no-check-for-nan-in-loss-and-grad` is absent; raised
            by Megatron's rerun state machine, as `--rerun-mode` says.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    _check_loss(loss)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The pipeline ranks that hold word embeddings: first, last if they are tied, and those with MTP."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _check_loss(loss: torch.Tensor) -> None:
    """Give the loss of this rank to the rerun state machine, before other ranks' losses are added to it."""
    args = get_args()
    check = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        check(rejection_func=torch.isnan, message="the local forward loss is NaN", fatal=True)
        check(rejection_func=torch.isinf, message="the local forward loss is infinite", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(get_rerun_state_machine().is_unexpectedly_large, threshold=_SPIKE, context="loss")
        check(rejection_func=is_spike, message="the local forward loss is spiky", fatal=False)


def _has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    if not args.mtp_num_layers:
        return False
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _reads_data(args: Namespace, vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(args, vp_stage)


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
