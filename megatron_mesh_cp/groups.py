"""MeshGroups: the process groups of a tile, and what travels over them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch.distributed as dist

from .comm import ChannelComm, CommError, Counters, check_timeout, warm_up
from .cost import Costs
from .plan import Channel, Direction, Event, Plan
from .schedule import make_plan
from .tile import TileShape
from .verify import verify

# Called after each event of a run with (direction, index of the event, bytes held); see `plan.live_bytes`.
Watcher = Callable[[Direction, int, int], None]


@lru_cache(maxsize=256)
def verified_plan(tile: TileShape, direction: Direction, exchange: str, costs: Costs | None = None) -> Plan:
    """The plan that will run, proven over all ranks first. Raises plan.PlanError."""
    plan = make_plan(tile, direction, exchange, costs)
    verify(plan)
    return plan


class MeshGroups:
    """The row and the column group of this rank, for the forward and for the backward tile.

    Drawn for CP rank 3 of 8 with tile 2x4 (see Note [Tile layout] in tile.py):

        row group     ranks 2 3        exchange Q and O;   backward: Q, dO, lse, delta and dQ
        column group  ranks 1 3 5 7    exchange K and V;   backward: K, V and dK, dV

    Make it with `MeshGroups.build` (plain torch.distributed) or `MeshGroups.from_megatron`.

    Attributes:
        rank, size: CP rank of this process and CP size.
        tile, tile_backward: the tiles of the two directions.
        counters: bytes handed to torch.distributed, and waiting time; also where a `comm.Recorder` can be set.
        costs: what the order of each direction was planned for; None where nothing is known of the cluster.
        watcher: None, or a function told the bytes held after each event (tests and tools).
    """

    def __init__(
        self,
        cp_group: dist.ProcessGroup,
        tile: TileShape,
        pairs: dict[TileShape, tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]],
        *,
        backward: TileShape | None = None,
        timeout: float | None = None,
        costs: Mapping[Direction, Costs] | None = None,
    ) -> None:
        self.costs = dict(costs or {})
        self.tile, self.tile_backward = tile, backward or tile
        _check_group(cp_group, self.tile, self.tile_backward)
        self.cp_group = cp_group
        self.rank, self.size = dist.get_rank(cp_group), dist.get_world_size(cp_group)
        self.counters = Counters()
        self.watcher: Watcher | None = None
        self._broken = ""
        self._agreed = False
        self._programs: dict[tuple[Direction, str], tuple[Event, ...]] = {}
        self._fingerprints: dict[tuple[Direction, str], int] = {}
        self._channels: dict[Direction, dict[Channel, ChannelComm]] = {}
        ranks = dist.get_process_group_ranks(cp_group)
        for direction, shape in ((Direction.FORWARD, tile), (Direction.BACKWARD, self.tile_backward)):
            row, column = pairs[shape]
            members = shape.row_group(self.rank), shape.column_group(self.rank)
            self._channels[direction] = {
                channel: ChannelComm(
                    channel.value, group, {m: ranks[m] for m in who}, self.rank, self.counters, timeout
                )
                for channel, group, who in zip(Channel, (row, column), members, strict=True)
                if len(who) > 1
            }

    @classmethod
    def build(
        cls,
        cp_group: dist.ProcessGroup,
        tile: TileShape,
        backward: TileShape | None = None,
        *,
        timeout: float | None = None,
        costs: Mapping[Direction, Costs] | None = None,
    ) -> MeshGroups:
        """Rows and columns over `cp_group`, which may be any subset of the world, in any stride and order.

        Called by the members of `cp_group` only, all of them, with the same tiles. Both channels use `cp_group`
        itself (no pair of ranks shares a row and a column, so their messages cannot be mixed up): torch counts
        new_group calls to name groups, and a group made by some ranks only would put the count, and with it every
        later new_group of the world, out of step. On NCCL the two channels then share one communicator;
        `from_megatron` has one for each.

        Args:
            tile, backward: tiles of forward and backward (default: the same), a*b = size of cp_group.
            timeout: seconds that one batch of transfers may take (default: the process group's own limit; on NCCL
                that is the only one).
            costs: durations that decide the order of each direction (tune.costs_for; default: nominal ones).

        Raises: ValueError where a*b is not the group's size or the members disagree on the tiles.
        """
        backward = backward or tile
        _check_group(cp_group, tile, backward)  # before the members talk
        check_timeout(cp_group, timeout)
        _check_agreement(cp_group, f"tile {tile}, backward tile {backward}{_said(costs)}")
        warm_up(cp_group)
        pairs = dict.fromkeys((tile, backward), (cp_group, cp_group))
        return cls(cp_group, tile, pairs, backward=backward, timeout=timeout, costs=costs)

    @classmethod
    def from_megatron(
        cls,
        pg_collection: object,
        backward: TileShape | None = None,
        backward_groups: Sequence[dist.ProcessGroup] | None = None,
        *,
        tile: TileShape | None = None,
        costs: Mapping[Direction, Costs] | None = None,
    ) -> MeshGroups:
        """Take `cp` and `hcp` as Megatron built them with hierarchical_context_parallel_sizes = tile.levels.

        Args:
            pg_collection: megatron.core's ProcessGroupCollection.
            backward, backward_groups: another tile for the backward, and its groups of level 0 and 1
                (`megatron.groups.make_backward_groups` makes them, on all ranks).
            tile: default a x b as the sizes of the two levels say, not transposed.
            costs: as for `build`; the same on all ranks.

        Raises: ValueError where the groups are missing or are not those of the tile.
        """
        cp_group = getattr(pg_collection, "cp", None)
        if cp_group is None:
            raise ValueError("MeshGroups.from_megatron: pg_collection has no cp group; initialize model parallel first")
        size = dist.get_world_size(cp_group)
        levels = getattr(pg_collection, "hcp", None)
        if size == 1:
            tile = TileShape(1, 1)
            return cls(cp_group, tile, {tile: (None, None)})
        if not levels or len(levels) != 2:
            raise ValueError(
                f"MeshGroups.from_megatron: pg_collection.hcp holds {len(levels or ())} groups; set "
                "hierarchical_context_parallel_sizes=[a, b] so that Megatron builds the row and the column group"
            )
        built = dist.get_world_size(levels[0]), dist.get_world_size(levels[1])
        tile = tile or TileShape(*built)
        tile.check_size(size, "hierarchical_context_parallel_sizes")
        if built != tile.levels:
            raise ValueError(
                f"tile {tile} needs hierarchical_context_parallel_sizes {list(tile.levels)}, but Megatron built groups "
                f"for {list(built)}; call install(args) before Megatron initializes its groups"
            )
        pairs = {tile: (levels[0], levels[1])}
        if backward is not None and backward != tile:
            if backward_groups is None:
                raise ValueError(
                    f"MeshGroups.from_megatron: backward tile {backward} needs groups of its own; pass backward_groups"
                )
            pairs[backward] = (backward_groups[0], backward_groups[1])
        for shape, pair in pairs.items():
            pairs[shape] = pair = (pair[1], pair[0]) if shape.transposed else pair  # level 0 is the consecutive one
            _check_members(cp_group, shape, pair)
            for group in pair:
                warm_up(group)
        return cls(cp_group, tile, pairs, backward=backward, costs=costs)

    def channel(self, direction: Direction, channel: Channel) -> ChannelComm:
        """The channel that a direction uses. Raises RuntimeError for a group of one rank, which has none."""
        try:
            return self._channels[direction][channel]
        except KeyError:
            raise RuntimeError(f"{direction.value}: a {channel.value} group of one rank has no channel") from None

    def tile_of(self, direction: Direction) -> TileShape:
        return self.tile if direction is Direction.FORWARD else self.tile_backward

    def check_agreement(self, call: str) -> None:
        """At the first call, compare what the ranks are about to do; other shapes or masks would give wrong numbers.

        Raises ValueError on every rank where they differ.
        """
        if not self._agreed and self.size > 1:
            _check_agreement(self.cp_group, call)
        self._agreed = True

    def check_usable(self) -> None:
        """Raise CommError if an earlier call failed half way: the ranks are out of step then."""
        if self._broken:
            raise CommError(
                f"CP rank {self.rank}: an earlier mesh attention failed on this rank ({self._broken}), so the ranks "
                "are out of step; restart the job"
            )

    def mark_broken(self, error: BaseException) -> None:
        """Remember why a call failed half way, and let go of what was under way."""
        self._broken = self._broken or repr(error)  # the error itself would keep its frames' tensors alive
        for channels in self._channels.values():
            for channel in channels.values():
                channel.abandon()

    def __deepcopy__(self, memo: dict) -> MeshGroups:
        return self  # process groups cannot be copied; a copy of a model talks over the same ones

    def program(self, direction: Direction, exchange: str) -> tuple[Event, ...]:
        """This rank's part of the plan of a direction, proven over all ranks when first asked for."""
        key = (direction, exchange)
        if key not in self._programs:
            plan = verified_plan(self.tile_of(direction), direction, exchange, self.costs.get(direction))
            if plan.links == 1 and len(self._channels[direction]) == 2:
                row, column = self._channels[direction].values()
                column.queue = row.queue
            self._programs[key] = plan.program(self.rank)
            self._fingerprints[key] = zlib.crc32(repr((plan.template, plan.links, plan.depth)).encode())
        return self._programs[key]

    def fingerprint(self, direction: Direction, exchange: str) -> str:
        """A short text that differs between plans; ranks with different plans would wait for each other for ever."""
        self.program(direction, exchange)
        return f"{self.tile_of(direction)} {self._fingerprints[direction, exchange]:08x}"

    def __repr__(self) -> str:
        return f"MeshGroups(rank {self.rank} of {self.size}, tile {self.tile}, backward {self.tile_backward})"


def _check_group(cp_group: dist.ProcessGroup | None, tile: TileShape, backward: TileShape) -> None:
    if cp_group is None:
        raise ValueError("MeshGroups: cp_group is None; pass the context-parallel process group")
    if dist.get_rank(cp_group) < 0:
        raise ValueError("MeshGroups: this process is not a member of cp_group; only members build the groups")
    tile.check_size(dist.get_world_size(cp_group))
    backward.check_size(dist.get_world_size(cp_group), "backward tile")


def _said(costs: Mapping[Direction, Costs] | None) -> str:
    return "".join(f", {direction.value} {planned}" for direction, planned in (costs or {}).items())


def _check_agreement(cp_group: dist.ProcessGroup, text: str) -> None:
    said: list[str | None] = [None] * dist.get_world_size(cp_group)
    dist.all_gather_object(said, text, group=cp_group)
    if len(set(said)) > 1:
        listed = "; ".join(f"CP rank {rank}: {what}" for rank, what in enumerate(said))
        raise ValueError(f"MeshGroups: the ranks of one CP group disagree: {listed}")


def _check_members(cp_group: dist.ProcessGroup, tile: TileShape, pair: Sequence[dist.ProcessGroup]) -> None:
    ranks, own = dist.get_process_group_ranks(cp_group), dist.get_rank(cp_group)
    wanted = tile.row_group(own), tile.column_group(own)
    for name, group, members in zip(("row", "column"), pair, wanted, strict=True):
        got, want = dist.get_process_group_ranks(group), [ranks[m] for m in members]
        if sorted(got) != sorted(want):
            raise ValueError(f"tile {tile}: the {name} group of CP rank {own} must hold ranks {want}, got {got}")
