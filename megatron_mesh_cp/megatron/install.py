"""install: mesh context parallelism in Megatron's own layer specs, and nothing else."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from datetime import timedelta

from .args import resolve_args
from .config import MeshConfig
from .versions import check_megatron

_undo: list[Callable[[], object]] = []
_installed: MeshConfig | None = None


def install(args_or_config: argparse.Namespace | MeshConfig) -> MeshConfig | None:
    """Make Megatron's attention layers use Mesh-Attention: dense, MoE block and MTP specs alike.

    Megatron's own (`local`) attention is swapped in the layer specs. Transformer Engine's stays what it is and runs
    mesh for cp_comm_type "mesh" (te_seam.py), which may be named for some layers only.

    Call it on all ranks once the arguments are parsed (before or after Megatron validates them) and before Megatron
    makes its process groups. With parsed arguments it sets `hierarchical_context_parallel_sizes` to the tile and
    `cp_comm_type` to "mesh" (or leaves a list that names it for some layers), so that an attention which knows nothing
    of mesh fails instead of running another algorithm.
    With --context-parallel-algo megatron it does nothing. Installing the same settings twice is harmless.

    Args: parsed Megatron arguments (see `add_args`), or a MeshConfig where there are none; then the model's
        TransformerConfig must have context_parallel_size and hierarchical_context_parallel_sizes = the tile's levels.

    Returns the settings, or None for --context-parallel-algo megatron.

    Raises ValueError for whatever mesh cannot do, and for other settings than those installed already.
    """
    global _installed
    args = None if isinstance(args_or_config, MeshConfig) else args_or_config
    mesh = args_or_config if args is None else resolve_args(args)
    if mesh is None:
        return None
    if _installed is not None and _installed != mesh:
        raise ValueError(f"mesh context parallelism is installed with other settings: {_installed}; uninstall first")
    if _installed is None:
        check_megatron()
        try:
            _patch(mesh, args)
        except BaseException:
            uninstall()
            raise
        _installed = mesh
    if args is not None:
        apply(mesh, args)
    return mesh


def apply(mesh: MeshConfig, args: argparse.Namespace) -> None:
    """Write the settings into parsed Megatron arguments, as Megatron reads them."""
    if mesh.size > 1:
        args.hierarchical_context_parallel_sizes = list(mesh.tile.levels)
    args.cp_comm_type = list(mesh.comm_types)


def uninstall() -> None:
    """Put Megatron's own core attention back. Models that are built keep theirs."""
    global _installed
    while _undo:
        _undo.pop()()
    _installed = None


def _patch(mesh: MeshConfig, args: argparse.Namespace | None) -> None:
    from .groups import after_model_parallel, make_backward_groups
    from .log_comm import wrap_training_log
    from .receipt import print_alone
    from .te_seam import open_seam, te_unavailable

    _swap_core_attention(mesh)
    # With arguments it is known which attention the model has; without, Transformer Engine's is served where it can be.
    if args.transformer_impl == "transformer_engine" if args is not None else not te_unavailable():
        _undo.append(open_seam(mesh))

    def make() -> None:
        if mesh.tile_backward != mesh.tile:
            minutes = getattr(args, "distributed_timeout_minutes", None)
            make_backward_groups(mesh.tile_backward, timedelta(minutes=minutes) if minutes else None)
        if mesh.size == 1 and getattr(args, "transformer_impl", None) == "transformer_engine":
            print_alone()

    _undo.append(after_model_parallel(make, said=mesh.said()))
    if mesh.log_comm:
        undo = wrap_training_log(mesh)
        if undo is None:
            raise ValueError("--mesh-log-comm needs megatron.training; leave the flag out with megatron.core alone")
        _undo.append(undo)


def _swap_core_attention(mesh: MeshConfig) -> None:
    # Every local GPT layer spec (dense, MoE blocks, MTP) asks this provider which core attention to use: the one place
    # that all of them pass.
    from megatron.core.models.backends import LocalSpecProvider

    from .core_attention import MeshDotProductAttention

    bound = MeshDotProductAttention.bind(mesh)
    _undo.append(functools.partial(setattr, LocalSpecProvider, "core_attention", LocalSpecProvider.core_attention))
    LocalSpecProvider.core_attention = lambda self: bound
