"""The start-up receipt: one line that says what is really on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..groups import MeshGroups
from ..plan import Direction
from ..units import human
from .config import MeshConfig

_printed: set[MeshConfig] = set()


def receipt(mesh: MeshConfig, groups: MeshGroups, kernel: str, dtype: torch.dtype) -> str:
    """Tile, groups, exchange, kernel, dtype, why this tile, and the predicted bytes of a layer against ring."""
    tile = mesh.tile
    backward = "the same" if mesh.tile_backward == tile else str(mesh.tile_backward)
    exchange, other = (mesh.exchange_of(direction) for direction in Direction)
    if other != exchange:
        exchange = f"{exchange}, backward {other}"
    ranks = dist.get_process_group_ranks(groups.cp_group)
    row = " ".join(str(ranks[m]) for m in tile.row_group(0))
    column = " ".join(str(ranks[m]) for m in tile.column_group(0))
    parts = [
        f"[mesh-cp] Mesh-Attention is on: CP {mesh.size}, tile {tile} (Q chunks x KV chunks), backward {backward}",
        f"row group of rank {ranks[0]}: {row}, column group: {column}",
        f"exchange {exchange}, kernel {kernel}, {str(dtype).removeprefix('torch.')}",
    ]
    if mesh.why:
        parts.append(f"chosen: {mesh.why}")
    if mesh.shape is not None:
        size = mesh.bytes_per_call()
        mesh_total = size["forward"] + size["backward"]
        ring_total = size["ring_forward"] + size["ring_backward"]
        saved = f" ({100 * (1 - mesh_total / ring_total):.1f} % less)" if ring_total else ""
        parts.append(
            f"per rank, layer and microbatch: forward {human(size['forward'])} + backward {human(size['backward'])}, "
            f"a ring {human(ring_total)}{saved}; chunks and partial results held: "
            f"at most {human(mesh.peak_bytes())}"
        )
    return "; ".join(parts)


def print_receipt(mesh: MeshConfig, groups: MeshGroups, kernel: str, dtype: torch.dtype) -> None:
    """Print the receipt once, on global rank 0."""
    if mesh not in _printed and dist.get_rank() == 0:
        print(receipt(mesh, groups, kernel, dtype), flush=True)
    _printed.add(mesh)
