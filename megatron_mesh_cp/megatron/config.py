"""MeshConfig: what a training run asks of mesh context parallelism, resolved and checked."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import AttentionShape, mesh_bytes
from ..plan import Direction, check_exchange
from ..tile import TileShape


@dataclass(frozen=True)
class MeshConfig:
    """Resolved settings of one run.

    tile, tile_backward: a*b = context-parallel size. exchange, kernel: as typed. shape: one attention call of one
    layer on one rank, for predictions; None where only the tile is known. log_comm: print what travels each log
    interval.

    Raises ValueError where the two tiles are for different sizes or the exchange is unknown.
    """

    tile: TileShape
    tile_backward: TileShape
    exchange: str = "direct"
    kernel: str = "auto"
    shape: AttentionShape | None = None
    log_comm: bool = False

    def __post_init__(self) -> None:
        self.tile_backward.check_size(self.tile.size, "--mesh-tile-shape-backward")
        check_exchange(self.exchange, "--mesh-exchange")

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
