"""The choice of a tile: the fewest bytes for the model's head ratio."""

from __future__ import annotations

from .cost import AttentionShape, mesh_bytes, total_bytes
from .plan import Direction
from .tile import TileShape, all_tiles


def best_tile(n: int, shape: AttentionShape, direction: Direction | None = None) -> TileShape:
    """The tile for n ranks that sends the fewest bytes, ties to the smaller row.

    direction: count only the forward or the backward; None counts both, for one tile that serves both.
    """

    def cost(tile: TileShape) -> tuple[int, int]:
        if direction is None:
            return total_bytes(tile, shape), tile.a
        return sum(mesh_bytes(tile, direction, shape).values()), tile.a

    return min(all_tiles(n), key=cost)


def choose_tiles(n: int, shape: AttentionShape, tile: str, backward: str = "same") -> tuple[TileShape, TileShape]:
    """Forward and backward tile from what the user typed: 'auto' or AxB, and 'same', 'auto' or AxB.

    An automatic forward tile whose backward is 'same' serves both directions. Raises ValueError, with tiles that fit,
    where a*b is not n.
    """
    flag, flag_backward = "--mesh-tile-shape", "--mesh-tile-shape-backward"
    if tile == "auto":
        forward = best_tile(n, shape, None if backward == "same" else Direction.FORWARD)
    else:
        forward = TileShape.parse(tile, flag)
        forward.check_size(n, flag)
    if backward == "same":
        return forward, forward
    if backward == "auto":
        return forward, best_tile(n, shape, Direction.BACKWARD)
    chosen = TileShape.parse(backward, flag_backward)
    chosen.check_size(n, flag_backward)
    return forward, chosen
