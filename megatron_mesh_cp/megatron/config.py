"""MeshConfig: what a training run asks of mesh context parallelism, resolved and checked."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ..cost import AttentionShape, Costs, mesh_bytes
from ..plan import Direction, check_exchange
from ..schedule import make_plan
from ..tile import TileShape
from ..tune import Decision, peak_bytes


@dataclass(frozen=True)
class MeshConfig:
    """Resolved settings of one run.

    tile, tile_backward: a*b = context-parallel size. exchange, exchange_backward: direct or shift (backward default: as
    forward). kernel: as typed. shape: one attention call of one layer on one rank, for predictions; None where only
    the tile is known. log_comm: print what travels each log interval. costs: what each direction's order is planned
    for (default: nominal). why: how the tile was chosen, for the receipt. comm_types: Megatron's cp_comm_type, one for
    all layers or one a layer; the layers with "mesh" are ours.

    Raises ValueError where the two tiles are for different sizes or an exchange is unknown.
    """

    tile: TileShape
    tile_backward: TileShape
    exchange: str = "direct"
    kernel: str = "auto"
    shape: AttentionShape | None = None
    log_comm: bool = False
    exchange_backward: str | None = None
    costs: tuple[tuple[Direction, Costs], ...] = ()
    why: str = ""
    comm_types: tuple[str, ...] = ("mesh",)

    def __post_init__(self) -> None:
        self.tile_backward.check_size(self.tile.size, "--mesh-tile-shape-backward")
        for direction in Direction:
            check_exchange(self.exchange_of(direction), "--mesh-exchange")

    @classmethod
    def of(
        cls,
        decision: Decision,
        *,
        kernel: str,
        shape: AttentionShape,
        log_comm: bool,
        comm_types: tuple[str, ...] = ("mesh",),
    ) -> MeshConfig:
        """The settings that `tune.decide` chose."""
        forward, backward = decision.forward, decision.backward
        return cls(
            tile=forward.tile,
            tile_backward=backward.tile,
            exchange=forward.exchange,
            kernel=kernel,
            shape=shape,
            log_comm=log_comm,
            exchange_backward=backward.exchange,
            costs=tuple((c.direction, c.costs) for c in (forward, backward)),
            why=decision.why,
            comm_types=comm_types,
        )

    def said(self) -> str:
        """What all ranks must have in common: tiles, exchanges and the durations that the orders are planned for."""
        exchanges = ", ".join(self.exchange_of(direction) for direction in Direction)
        costs = zlib.crc32(repr(self.costs).encode())
        return f"tile {self.tile}, backward {self.tile_backward}, exchange {exchanges}, costs {costs:08x}"

    def exchange_of(self, direction: Direction) -> str:
        """The exchange pattern of a direction."""
        backward = direction is Direction.BACKWARD and self.exchange_backward is not None
        return self.exchange_backward if backward else self.exchange

    def peak_bytes(self) -> int:
        """The most that attention holds on a rank besides its own tensors, forward or backward, bytes."""
        if self.shape is None:
            raise ValueError("peak_bytes: the attention shape is not known")
        tiles = {Direction.FORWARD: self.tile, Direction.BACKWARD: self.tile_backward}
        return max(
            peak_bytes(make_plan(tile, d, self.exchange_of(d), dict(self.costs).get(d)), self.shape)
            for d, tile in tiles.items()
        )

    @property
    def size(self) -> int:
        """Context-parallel size."""
        return self.tile.size

    def bytes_per_call(self) -> dict[str, int]:
        """Predicted bytes per rank, layer and microbatch: forward, backward, and the same for a ring."""
        if self.shape is None:
            raise ValueError("bytes_per_call: the attention shape is not known")
        ring = TileShape(1, self.size)
        tiles = {"forward": (self.tile, Direction.FORWARD), "backward": (self.tile_backward, Direction.BACKWARD)}
        out = {}
        for name, (tile, direction) in tiles.items():
            out[name] = sum(mesh_bytes(tile, direction, self.shape).values())
            out[f"ring_{name}"] = sum(mesh_bytes(ring, direction, self.shape).values())
        return out
