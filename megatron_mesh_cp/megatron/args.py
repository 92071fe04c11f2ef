"""The flags, on Megatron's own parser, and what they resolve to."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from contextlib import nullcontext

from ..cluster import load_cluster
from ..cost import AttentionShape, check_heads
from ..kernels import KERNELS, select_kernel
from ..layout import check_seq_len
from ..network import check_tp
from ..plan import EXCHANGES
from ..tile import TileShape
from ..tune import MemoryLimitError, decide
from ..units import parse_size
from .config import MeshConfig
from .mindspeed import refuse_companions
from .versions import check_megatron

ALGO_FLAG = "--context-parallel-algo"
ALIASES = {"mesh_cp_algo": "mesh", "megatron_cp_algo": "megatron"}
_OWN = "{megatron,mesh}"  # the metavar of the flag where it is ours
_DEFAULTS = {
    "mesh_tile_shape": "auto",
    "mesh_tile_shape_backward": "same",
    "mesh_exchange": "auto",
    "mesh_cluster": "auto",
    "mesh_memory_limit": None,
    "mesh_kernel": "auto",
    "mesh_log_comm": False,
}


def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to a parser; fits Megatron's `extra_args_provider`. Returns the parser.

    Where the parser has --context-parallel-algo already (MindSpeed's), `mesh` is added to its choices; a parser that
    gets it later replaces ours or refuses it, so call this last, or again: a second call only adds what is missing.
    """
    group = parser.add_argument_group("mesh context parallelism")
    _add_algo(parser, group)
    if any("--mesh-tile-shape" in a.option_strings for a in parser._actions):
        return parser  # the others are there already
    group.add_argument(
        "--mesh-tile-shape",
        type=_tile("auto"),
        default="auto",
        metavar="{auto,AxB,AxBt}",
        help="A Q chunks x B KV chunks per rank, A*B = context-parallel size; AxBt puts the column group, not the row "
        "group, on consecutive ranks. auto: the least predicted time on --mesh-cluster, without one the fewest bytes.",
    )
    group.add_argument(
        "--mesh-tile-shape-backward",
        type=_tile("same", "auto"),
        default="same",
        metavar="{same,auto,AxB,AxBt}",
        help="The tile of the backward.",
    )
    group.add_argument(
        "--mesh-exchange",
        type=_one_of("exchange", ("auto", *EXCHANGES)),
        default="auto",
        metavar="{auto," + ",".join(EXCHANGES) + "}",
        help="direct: owner to user. shift: neighbour ring. Both move the same bytes. auto: the faster one on "
        "--mesh-cluster, without one direct.",
    )
    group.add_argument(
        "--mesh-cluster",
        default="auto",
        metavar="{auto,NAME,FILE}",
        help="What the machine can do: a cluster of configs/clusters by name, or a YAML file such as `mesh-cp "
        "calibrate` writes. auto: nothing is known of it.",
    )
    group.add_argument(
        "--mesh-memory-limit",
        type=_size,
        default=None,
        metavar="SIZE",
        help="Chunks and partial results that attention may hold on a rank (its own tensors, kernel workspace and "
        "temporaries come on top), for instance 8GB or 512MiB; an automatic tile respects it, and a given one that "
        "needs more is refused.",
    )
    group.add_argument(
        "--mesh-kernel",
        type=_one_of("kernel", KERNELS),
        default="auto",
        metavar="{" + ",".join(KERNELS) + "}",
        help="Block attention kernel.",
    )
    group.add_argument(
        "--mesh-log-comm",
        action="store_true",
        help="Print bytes sent per layer and exposed waiting time at each log interval.",
    )
    return parser


def _add_algo(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    present = next((a for a in parser._actions if ALGO_FLAG in a.option_strings), None)
    if present is None:
        group.add_argument(
            ALGO_FLAG,
            type=_one_of("algorithm", ("megatron", "mesh"), ALIASES),
            default="megatron",
            metavar=_OWN,
            help="megatron: Megatron's own context parallelism, as --cp-comm-type says. mesh: Mesh-Attention.",
        )
    elif present.choices is not None:
        present.choices = [*present.choices, *(c for c in ("mesh", "mesh_cp_algo") if c not in present.choices)]
    elif present.metavar != _OWN:
        raise ValueError(f"the parser has an {ALGO_FLAG} without choices; mesh cannot be added to it")


def _one_of(what: str, choices: tuple[str, ...], aliases: dict[str, str] | None = None):
    aliases = aliases or {}

    def convert(text: str) -> str:
        value = aliases.get(text, text)
        if value not in choices:
            near = difflib.get_close_matches(text.lower(), choices, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentTypeError(f"unknown {what} {text!r}: choose from {', '.join(choices)}{hint}")
        return value

    return convert


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tile(*words: str):
    def convert(text: str) -> str:
        if text in words:
            return text
        try:
            return str(TileShape.parse(text))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no tile: give {' or '.join(words)}, or AxB (Q chunks x KV chunks), for example 2x4, or "
                "2x4t with the column group on consecutive ranks"
            ) from None

    return convert


def resolve_args(args: argparse.Namespace, *, elsewhere: bool = False) -> MeshConfig | None:
    """Check parsed Megatron arguments and work out the tiles; None for --context-parallel-algo megatron.

    Works on arguments before and after Megatron's validate_args, and changes nothing. elsewhere: the job will run on
    other machines than this one, so that nothing is asked of this one's devices and kernels.

    Raises ValueError, naming the flag, both values and a way out, for anything mesh cannot do.
    """
    if not hasattr(args, "mesh_tile_shape"):
        raise ValueError("the arguments have no mesh flags; pass megatron_mesh_cp.add_args as extra_args_provider")
    if not wants_mesh(args):
        for name, default in _DEFAULTS.items():
            if getattr(args, name) != default:
                raise ValueError(
                    f"{_flag(name)} {getattr(args, name)} has no effect with {ALGO_FLAG} {args.context_parallel_algo}; "
                    f"add {ALGO_FLAG} mesh"
                )
        return None
    check_megatron()
    _require_sizes(args)
    _refuse_unsupported(args)
    comm_types = _comm_types(args)
    n = args.context_parallel_size
    if n > 1:
        check_seq_len(args.seq_length, n, flag="--seq-length")
    shape = _attention_shape(args)
    cluster = None if args.mesh_cluster == "auto" else load_cluster(args.mesh_cluster, "--mesh-cluster")
    if cluster is not None:
        flag = f"--mesh-cluster {args.mesh_cluster} and --tensor-model-parallel-size"
        check_tp(args.tensor_model_parallel_size, cluster.gpus_per_node, flag)
    try:
        decision = decide(
            n,
            shape,
            cluster,
            tile=args.mesh_tile_shape,
            backward=args.mesh_tile_shape_backward,
            exchange=args.mesh_exchange,
            tp=args.tensor_model_parallel_size,
            memory_limit=args.mesh_memory_limit,
        )
    except MemoryLimitError as error:
        raise ValueError(f"--mesh-memory-limit {args.mesh_memory_limit}: {error}") from None
    tile = decision.forward.tile
    given = args.hierarchical_context_parallel_sizes
    if given and list(given) != list(tile.levels):
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, given))} with --mesh-tile-shape {tile}: mesh "
            f"sets the sizes to the tile; leave the flag out"
        )
    if not elsewhere:
        _check_kernel(args, shape)
    return MeshConfig.of(
        decision,
        kernel=args.mesh_kernel,
        shape=shape,
        log_comm=args.mesh_log_comm,
        comm_types=comm_types,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# name of the argument -> (values that are fine, what to do instead)
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "window_size": ((None,), "sliding-window attention is not supported"),
    "window_attn_skip_freq": ((None,), "sliding-window attention is not supported"),
    "softmax_type": (("vanilla",), "attention sinks and softmax offsets are not supported; use vanilla"),
    "reset_attention_mask": ((False,), "packed sequences are not supported"),
    "dataloader_inter_document_masking": ((False,), "packed sequences are not supported"),
    "sft": ((False,), "packed sequences are not supported"),
    "hybrid_context_parallel": ((False,), "it is another context-parallel algorithm"),
    "experimental_attention_variant": ((None,), "only softmax attention is supported"),
    "heterogeneous_layers_config_path": ((None,), "heterogeneous layers are not supported"),
    "heterogeneous_layers_config_encoded_json": ((None,), "heterogeneous layers are not supported"),
    "multi_latent_attention": ((False,), "multi-latent attention is not supported"),
    "use_kitchen_attention": ((False,), "choose the kernel with --mesh-kernel"),
    "qk_clip": ((False,), "the maximum attention logit is not available"),
    "log_max_attention_logit": ((False,), "the maximum attention logit is not available"),
    "cuda_graph_impl": (("none", None), "CUDA graphs are not supported"),
    "enable_cuda_graph": ((False,), "CUDA graphs are not supported"),
    "external_cuda_graph": ((False,), "CUDA graphs are not supported"),
    "use_flash_attn": ((False,), "choose the kernel with --mesh-kernel"),
    "flash_decode": ((False,), "it is for inference"),
    "batch_invariant_mode": ((False,), "it is for Transformer Engine's attention"),
    "perform_rl_step": ((False,), "reinforcement learning steps are not supported"),
}

# The same, for what works with Transformer Engine's attention only: it knows mesh wherever a layer spec has it.
_REFUSED_LOCALLY: dict[str, tuple[tuple[object, ...], str]] = {
    "hybrid_layer_pattern": ((None,), "hybrid models have Transformer Engine's attention"),
    "hybrid_override_pattern": ((None,), "hybrid models have Transformer Engine's attention"),
    "spec": ((None,), "with Megatron's own attention, mesh knows its own layer specs only"),
}


def _require_sizes(args: argparse.Namespace) -> None:
    for name in ("seq_length", "num_attention_heads", "hidden_size", "micro_batch_size"):
        if getattr(args, name) is None:
            raise ValueError(f"{_flag(name)} is missing: {ALGO_FLAG} mesh needs it to choose and check the tile")
    for name in ("context_parallel_size", "tensor_model_parallel_size", "micro_batch_size", "num_attention_heads"):
        if getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(args, name)}: it must be at least 1")


def _refuse_unsupported(args: argparse.Namespace) -> None:
    for flag, value, why in _not_fine(args, _REFUSED):
        raise ValueError(f"{flag} {value} with {ALGO_FLAG} mesh: {why}")
    if args.transformer_impl != "transformer_engine":
        for flag, value, why in _not_fine(args, _REFUSED_LOCALLY):
            raise ValueError(
                f"{flag} {value} with {ALGO_FLAG} mesh and --transformer-impl {args.transformer_impl}: {why}; use "
                "--transformer-impl transformer_engine, or leave the flag out"
            )
    refuse_companions(args)
    if args.attention_dropout:
        raise ValueError(
            f"--attention-dropout {args.attention_dropout} with {ALGO_FLAG} mesh: dropout inside attention is not "
            "supported; pass --attention-dropout 0"
        )
    if getattr(args, "create_attention_mask_in_dataloader", False):
        raise ValueError(
            f"the data loader would build a dense {args.seq_length} x {args.seq_length} attention mask for each "
            f"sample, and {ALGO_FLAG} mesh takes no mask tensors; pass --no-create-attention-mask-in-dataloader"
        )
    if args.context_parallel_size > 1 and args.eod_mask_loss and not args.calculate_per_token_loss:
        raise ValueError(
            "--eod-mask-loss with context parallelism: Megatron divides the loss of each shard by the shard's own "
            "token count, so unequal counts change the gradient; add --calculate-per-token-loss"
        )
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend != "auto":
        raise ValueError(
            f"--attention-backend {backend} with {ALGO_FLAG} mesh: it chooses among kernels that mesh does not call; "
            "use --mesh-kernel"
        )
    if args.transformer_impl not in ("local", "transformer_engine"):
        raise ValueError(
            f"--transformer-impl {args.transformer_impl} with {ALGO_FLAG} mesh: use local or transformer_engine"
        )


def _not_fine(
    args: argparse.Namespace, table: dict[str, tuple[tuple[object, ...], str]]
) -> Iterator[tuple[str, object, str]]:
    """Flag, value and reason of what a table refuses."""
    for name, (fine, why) in table.items():
        value = getattr(args, name, fine[0])
        if value not in fine:
            yield _flag(name), value, why


def wants_mesh(args: argparse.Namespace) -> bool:
    """Whether the parsed arguments ask for mesh: by --context-parallel-algo, or by --cp-comm-type for some layer."""
    return ALIASES.get(args.context_parallel_algo, args.context_parallel_algo) == "mesh" or "mesh" in args.cp_comm_type


def _comm_types(args: argparse.Namespace) -> tuple[str, ...]:
    """--cp-comm-type with mesh: one for all layers, or one a layer. p2p alone is Megatron's default, not a wish."""
    types = tuple(args.cp_comm_type)
    typed = f"--cp-comm-type {' '.join(types)}"
    if types in (("p2p",), ("mesh",)):
        return ("mesh",)
    if "mesh" not in types:
        raise ValueError(
            f"{typed} with {ALGO_FLAG} mesh: mesh brings its own communication; leave --cp-comm-type out, or name mesh "
            "for the layers that shall have it"
        )
    if len(types) > 1 and args.num_layers is not None and len(types) != args.num_layers:
        raise ValueError(
            f"{typed} names {len(types)} layers, --num-layers is {args.num_layers}: give one, or one a layer"
        )
    others = sorted(set(types) - {"mesh", "p2p", "all_gather", "a2a"})
    if others:
        why = "hierarchical sizes are the tile of the mesh" if others == ["a2a+p2p"] else "it is unknown"
        raise ValueError(f"{typed}: {others[0]} cannot stand beside mesh, {why}; use p2p, all_gather or a2a")
    if set(types) != {"mesh"} and args.transformer_impl != "transformer_engine":
        raise ValueError(
            f"{typed} with --transformer-impl {args.transformer_impl}: only Transformer Engine's attention has other "
            "types of communication; use --cp-comm-type mesh or --transformer-impl transformer_engine"
        )
    return types


def _attention_shape(args: argparse.Namespace) -> AttentionShape:
    """One attention call of one layer on one rank, from the model's flags."""
    heads = args.num_attention_heads
    kv_heads = args.num_query_groups if args.group_query_attention else heads
    check_heads(heads, kv_heads, "--num-attention-heads", "--num-query-groups")
    tp = args.tensor_model_parallel_size
    if heads % tp:
        raise ValueError(
            f"--num-attention-heads {heads} with --tensor-model-parallel-size {tp}: the heads must divide evenly"
        )
    return AttentionShape(
        seq_local=max(1, args.seq_length // args.context_parallel_size),
        batch=args.micro_batch_size,
        heads=heads // tp,
        kv_heads=max(1, kv_heads // tp),
        head_dim=args.kv_channels or args.hidden_size // heads,
        item_bytes=2 if args.bf16 or args.fp16 else 4,
    )


def _check_kernel(args: argparse.Namespace, shape: AttentionShape) -> None:
    import torch

    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    gpu = torch.cuda.is_available()
    # Megatron has not set the device yet, and all ranks of a node must not make a context on the first GPU.
    own = (getattr(args, "local_rank", 0) or 0) % torch.cuda.device_count() if gpu else 0
    with torch.cuda.device(own) if gpu else nullcontext():
        select_kernel(
            args.mesh_kernel,
            dtype=dtype,
            device_type="cuda" if gpu else "cpu",
            head_dim=shape.head_dim,
            flag="--mesh-kernel",
        )
