"""ROW_IN_NODE: a recipe's claim that a tile's group on consecutive ranks never leaves a node, checked at launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tile import TileShape
from .recipe import Recipe, RecipeError, check_nodes

if TYPE_CHECKING:
    from .config import MeshConfig  # imports torch


def check_row_in_node(recipe: Recipe, ranks: int, tp: int, mesh: MeshConfig | None) -> None:
    """Refuse a job that breaks what its recipe says of nodes (RANKS_PER_NODE, ROW_IN_NODE).

    The consecutive group of a tile is its first level: a ranks of the row group, in a transposed tile b ranks of the
    column group. They are `tp` apart, so that a group spans that many times tp neighbouring ranks, and it stays inside
    a node where nodes hold a whole number of such spans.

    Raises:
        ValueError: names the tile, the sizes and what would work.
    """
    per_node = recipe.ranks_per_node
    if per_node is None:
        return
    check_nodes(ranks, per_node, f"{ranks} ranks", "; start a whole number of nodes")
    if not recipe.row_in_node:
        return
    if mesh is None:
        raise RecipeError(
            f"{recipe.path}: ROW_IN_NODE: true, but no tile is known here: it needs --context-parallel-algo mesh and "
            "flags that do not come from a checkpoint; drop ROW_IN_NODE"
        )
    for tile, flag in ((mesh.tile, "--mesh-tile-shape"), (mesh.tile_backward, "--mesh-tile-shape-backward")):
        width = tile.levels[0] * tp
        if ranks > per_node and per_node % width:
            raise RecipeError(
                f"{recipe.path}: ROW_IN_NODE: true with {flag} {tile}: its {_group(tile)} group has {tile.levels[0]} "
                f"consecutive ranks, times --tensor-model-parallel-size {tp} = {width} neighbours, and nodes of "
                f"RANKS_PER_NODE: {per_node} would split it; {_ways_out(tile, tp, per_node)}"
            )


def _group(tile: TileShape) -> str:
    return "column" if tile.transposed else "row"


def _ways_out(tile: TileShape, tp: int, per_node: int) -> str:
    """The same tile in the other placement where that fits, the nearest tile that does, or no claim."""
    ways = []
    if tile.a > 1 and tile.b > 1:
        turned = TileShape(tile.a, tile.b, not tile.transposed)
        if per_node % (turned.levels[0] * tp) == 0:
            ways.append(f"{turned}, which puts its {_group(turned)} group there")
    fits = [k for k in range(1, tile.size + 1) if tile.size % k == 0 and per_node % (k * tp) == 0]
    if fits:
        k = fits[-1]
        widest = TileShape(tile.size // k, k, True) if tile.transposed else TileShape(k, tile.size // k)
        ways.append(f"{widest}, the widest {_group(tile)} group that stays inside")
    ways = [f"try {' or '.join(ways)}"] if ways else []
    return ", or ".join([*ways, "drop ROW_IN_NODE"])
