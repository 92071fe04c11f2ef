"""What one GPU will hold: Megatron's own theoretical report, corrected where it is known to be wrong, plus the plan's.

`megatron.training.theoretical_memory_usage` is called, not copied. What it assumes, and what is handed to it instead:

* It knows no context parallelism. It gets the tokens of one CP rank, and data-parallel size * CP as the ranks that a
  distributed optimizer is sharded over (experts: it divides the world size itself, so CP is in there already).
* It knows no full recompute, and of the selective one only that attention scores are not kept (mesh never keeps them).
  Here full recompute keeps the input of each unit of layers and the whole of the one unit that is recomputed, and the
  modules `mlp` and `moe` keep nothing of the feed-forward but in the layer that is recomputed. Other modules
  (`layernorm`, `moe_act`, ..) save more than is counted.
* Its activations are those of GELU and of heads that fill the hidden size. A gated activation keeps half as much again;
  query heads wider than the hidden size and normalised queries and keys are added; a MoE layer keeps top-k permuted
  tokens and top-k experts' worth of feed-forward, with all experts equally loaded.
* It counts the first pipeline stage. The last one, which has the logits, is counted too; the larger is taken.
* Without sequence parallelism (TP > 1) its formula has a feed-forward of 4 hidden sizes whatever the model has; that
  is left so.
* It counts bf16 weights, fp32 gradients and fp32 Adam states; for pure fp32 that is 2 bytes a parameter too much.
* Left as they are: layers are spread evenly over the pipeline stages, and what saves memory elsewhere (optimizer on the
  CPU or in lower precision, bf16 gradients, FP8, offloaded activations) saves nothing here.

Not counted: the CUDA context, NCCL's buffers, kernel workspaces, fragmentation, the second copy of the logits in the
loss, one attention's own temporaries. `fits` leaves MARGIN of the GPU for them. No figure here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..cluster import Cluster
from .config import MeshConfig

MARGIN = 0.10  # of the GPU's memory, for what is not counted


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes that the fullest GPU of a job holds at its peak, in parts.

    weights: weights, gradients and optimizer states; activations: kept for the backward, logits included; attention:
    chunks and partial results of one mesh attention (MeshConfig.peak_bytes), 0 without mesh.
    parameters: of the whole model, for a look at whether it is the one that is meant.
    """

    weights: int
    activations: int
    attention: int
    parameters: int

    @property
    def total(self) -> int:
        """All parts, bytes."""
        return self.weights + self.activations + self.attention

    def fits(self, cluster: Cluster, margin: float = MARGIN) -> bool:
        """Whether a GPU of the cluster holds it and has the part `margin` of its memory left."""
        return self.total <= (1 - margin) * cluster.memory

    def text(self, cluster: Cluster | None = None) -> str:
        """One line, GB = 10^9 bytes."""
        of = f" of {cluster.memory / 1e9:g} GB" if cluster else ""
        return (
            f"{_gb(self.total)}{of}: weights, gradients and optimizer {_gb(self.weights)}, activations "
            f"{_gb(self.activations)}, attention's chunks and results {_gb(self.attention)}"
        )


def planned_memory(args: argparse.Namespace, mesh: MeshConfig | None, ranks: int) -> PlannedMemory:
    """The memory of one GPU of a job.

    Args:
        args: after Megatron's validate_args (`Launch.validated`); they are not changed.
        mesh: `Launch.mesh`; None where Megatron's own context parallelism runs, whose buffers are not known here.
        ranks: world size.

    Raises ValueError where the vocabulary is not known before the tokenizer is there, and for what Megatron's report
    does not know either: hybrid models, latent attention, Megatron-FSDP.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    _refuse_unknown(args)
    job = copy.copy(args)  # the report writes num_query_groups
    cp, model = args.context_parallel_size, args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    job.world_size = ranks
    job.padded_vocab_size = _vocabulary(args)
    # DP * CP: what the distributed optimizer is sharded over, unless there are several of it
    job.data_parallel_size = ranks // model // (args.num_distributed_optimizer_instances or 1)
    whole = copy.copy(job)
    whole.tensor_model_parallel_size = whole.pipeline_model_parallel_size = 1
    whole.expert_model_parallel_size = whole.expert_tensor_parallel_size = 1
    whole.use_distributed_optimizer = False  # then the report is 18 bytes a parameter
    return PlannedMemory(
        weights=round(compute_weight_and_optimizer_memory(job)),
        activations=round(_activations(job, args.data_parallel_size, args.seq_length // cp)),
        attention=0 if mesh is None else mesh.peak_bytes(),
        parameters=round(compute_weight_and_optimizer_memory(whole) / 18),
    )


def _refuse_unknown(args: argparse.Namespace) -> None:
    for name in ("hybrid_layer_pattern", "multi_latent_attention", "use_megatron_fsdp"):
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: Megatron's theoretical memory report does not know it; measure one iteration")


def _vocabulary(args: argparse.Namespace) -> int:
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    if args.padded_vocab_size:
        return args.padded_vocab_size
    if not args.vocab_size:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} without --vocab-size: the memory of embeddings and logits is not "
            "known before the tokenizer is read; give --vocab-size too (a tokenizer with a size of its own ignores it)"
        )
    return calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )


def _activations(job: argparse.Namespace, data_parallel: int, tokens: int) -> float:
    """Bytes kept on the fuller of the first and the last pipeline stage."""
    from megatron.training import theoretical_memory_usage as report

    # The two formulas are the same at TP 1, but only the first looks at ffn_hidden_size.
    sharded = job.sequence_parallel or job.tensor_model_parallel_size == 1
    formula = report.compute_activation_memory if sharded else report.compute_activation_memory_without_sp
    microbatches = job.global_batch_size // (job.micro_batch_size * data_parallel)
    stages = job.pipeline_model_parallel_size

    def counted(layers: float, width: float, stages: int = 1, interleaved: int | None = None) -> float:
        stand_in = copy.copy(job)
        stand_in.seq_length, stand_in.num_layers, stand_in.ffn_hidden_size = tokens, layers, width
        stand_in.pipeline_model_parallel_size = stages
        stand_in.virtual_pipeline_model_parallel_size = interleaved
        return formula(stand_in, num_microbatches=microbatches)

    layers = job.num_layers + (job.mtp_num_layers or 0)
    kept, once = _kept(job, counted, layers, 2 * tokens * job.micro_batch_size * job.hidden_size)
    width = _attention_width(job) + _feed_forward_width(job)
    layer = counted(1, width) - counted(0, width)
    equal = kept / layer  # so many layers kept as a whole take the same
    first = counted(equal, width, stages, job.virtual_pipeline_model_parallel_size) + once
    return max(first, counted(equal / stages, width) + once) if stages > 1 else first


def _kept(
    job: argparse.Namespace, counted: Callable[[float, float], float], layers: int, layer_input: int
) -> tuple[float, float]:
    """Bytes that all layers keep for one microbatch, and those of what is recomputed at a time.

    layer_input: bytes of the input of one layer; sequence parallelism shards it.
    """
    width = _attention_width(job) + _feed_forward_width(job)
    layer = counted(1, width) - counted(0, width)
    if job.sequence_parallel:
        layer_input /= job.tensor_model_parallel_size
    if job.recompute_granularity == "full":
        unit = job.recompute_num_layers or 1
        if job.recompute_method == "block":  # so many layers of each stage, one at a time
            again = min(layers, unit * job.pipeline_model_parallel_size)
            return (layers - again) * layer + again * layer_input, layer
        return math.ceil(layers / unit) * layer_input, min(unit, layers) * layer
    modules = (job.recompute_modules or ()) if job.recompute_granularity == "selective" else ()
    dense, moe = (m in modules for m in ("mlp", "moe"))
    if not (dense or moe):
        return layers * layer, 0
    thin = _attention_width(job) + _feed_forward_width(job, dense=not dense, moe=not moe)
    kept = counted(1, thin) - counted(0, thin)
    return layers * kept, layer - kept


def _attention_width(job: argparse.Namespace) -> float:
    """Elements a token that attention keeps beyond the report's, as ffn_hidden_size (4 bytes each in the report).

    The report has 2 bytes each of Q, K, V and out, all of the hidden size.
    """
    heads = job.num_attention_heads
    q = job.kv_channels * heads
    kv = job.kv_channels * (job.num_query_groups if job.group_query_attention else heads)
    more = max(0, 2 * (q + kv + kv + q) - 8 * job.hidden_size)
    if job.qk_layernorm:
        more += 2 * (q + kv)  # what the two norms take
    return more / 4


def _feed_forward_width(job: argparse.Namespace, dense: bool = True, moe: bool = True) -> float:
    """ffn_hidden_size that stands for what the feed-forward of a layer keeps a token, the mean over the layers.

    dense, moe: whether layers of that kind keep it.
    """
    gated = 1.5 if job.swiglu else 1.0
    width = gated * job.ffn_hidden_size if dense else 0.0
    if job.num_experts is None:
        return width
    freq = job.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [int(i % freq == 0) for i in range(job.num_layers)]
    # in and out of the experts, 2 bytes each of the hidden size, top-k times
    routed = job.moe_router_topk * (gated * job.moe_ffn_hidden_size + job.hidden_size)
    shared = gated * (job.moe_shared_expert_intermediate_size or 0)
    share = sum(pattern) / len(pattern)
    return share * (routed + shared if moe else 0.0) + (1 - share) * width


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 or not size else f"{size / 1e9:.2g} GB"
