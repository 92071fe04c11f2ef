"""The process groups of a mesh run, as Megatron makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ..groups import MeshGroups
from ..plan import Direction
from ..tile import TileShape
from .config import MeshConfig

_backward: dict[TileShape, tuple[dist.ProcessGroup, ...]] = {}
_shared: dict[tuple[object, ...], MeshGroups] = {}


def shared_groups(pg_collection: ProcessGroupCollection, mesh: MeshConfig) -> MeshGroups:
    """The MeshGroups that all layers of this process share, made at the first layer; its plans are proven here."""
    key = (pg_collection.cp, mesh.tile, mesh.tile_backward, mesh.costs)
    if key not in _shared:
        other = mesh.tile_backward if mesh.tile_backward != mesh.tile else None
        groups = MeshGroups.from_megatron(
            pg_collection, other, other and backward_groups_of(other), tile=mesh.tile, costs=dict(mesh.costs)
        )
        for direction in Direction:
            groups.program(direction, mesh.exchange_of(direction))
        _shared[key] = groups
    return _shared[key]


def backward_groups_of(tile: TileShape) -> tuple[dist.ProcessGroup, ...] | None:
    """Row and column group that `make_backward_groups` made for this rank; None where it made none."""
    return _backward.get(tile)


def all_shared_groups() -> tuple[MeshGroups, ...]:
    """Every MeshGroups that this process trains with."""
    return tuple(_shared.values())


def forget_groups() -> None:
    """Drop what was made for groups that are gone (after destroy_model_parallel)."""
    _backward.clear()
    _shared.clear()


def make_backward_groups(tile: TileShape, timeout: timedelta | None = None) -> list[list[int]]:
    """Make the second pair of groups, for a backward with another tile, with Megatron's own function.

    Called by all ranks of the world, after Megatron has made its groups. Returns the global ranks of every group in
    the order of creation, the same list on all ranks. timeout: of the groups, None for torch's default.
    """
    own = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    rank = dist.get_rank()
    created: list[list[int]] = []
    for ranks in sorted({tuple(ranks) for ranks in every}):
        groups, _ = parallel_state.create_hierarchical_groups(
            rank, list(ranks), list(tile.levels), timeout=timeout, group_desc="CONTEXT_PARALLEL_BACKWARD_GROUP"
        )
        near = tile.levels[0]
        created += [list(ranks[first : first + near]) for first in range(0, tile.size, near)]
        created += [list(ranks[first::near]) for first in range(near)]
        if rank in ranks:
            _backward[tile] = tuple(groups)
    return created


def check_same_settings(said: str) -> None:
    """Raise ValueError on every rank of the world where the settings differ: other groups would wait for ever.

    A cluster file that is not the same on all nodes is enough to choose other tiles.
    """
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    if len(set(every)) > 1:
        listed = "; ".join(
            f"{text} on ranks {', '.join(str(r) for r, other in enumerate(every) if other == text)}"
            for text in dict.fromkeys(every)
        )
        raise ValueError(
            "mesh context parallelism: the ranks disagree on what --mesh-tile-shape, --mesh-exchange and "
            f"--mesh-cluster come to: {listed}; give all nodes the same flags and the same cluster file"
        )


def after_model_parallel(make: Callable[[], object], said: str = "") -> Callable[[], None]:
    """Run `make` each time Megatron has made its groups: now if it has, and when initialize_model_parallel returns.

    What was made for earlier groups is dropped first. said: settings that all ranks must have in common, compared
    before Megatron makes its groups. Returns the way back.
    """
    original = parallel_state.initialize_model_parallel

    @functools.wraps(original)
    def initialize_model_parallel(*args, **kwargs):
        if dist.is_initialized():
            check_same_settings(said)
        original(*args, **kwargs)
        forget_groups()
        make()

    def undo() -> None:
        if parallel_state.initialize_model_parallel is initialize_model_parallel:
            parallel_state.initialize_model_parallel = original
        forget_groups()

    parallel_state.initialize_model_parallel = initialize_model_parallel
    if parallel_state.model_parallel_is_initialized():
        check_same_settings(said)
        make()
    return undo
