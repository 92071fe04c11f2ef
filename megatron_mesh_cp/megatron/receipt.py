"""The start-up receipt: one line that says what is really on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..groups import MeshGroups
from ..kernels import auto_choice
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
    if len(set(mesh.comm_types)) > 1:
        parts.append(f"in {mesh.comm_types.count('mesh')} of {len(mesh.comm_types)} layers")
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


def print_receipt(
    mesh: MeshConfig, groups: MeshGroups, kernel: str, dtype: torch.dtype, head_dims: tuple[int, int]
) -> None:
    """Print the receipt once, on global rank 0; head_dims: of Q and K, and of V."""
    if mesh not in _printed and dist.get_rank() == 0:
        if mesh.kernel == "auto" and torch.cuda.is_available():
            kernel = f"{kernel} ({auto_choice(dtype, 'cuda', *head_dims).why})"
        print(receipt(mesh, groups, kernel, dtype), flush=True)
        for warning in warnings_of(mesh):
            print(f"[mesh-cp] warning: {warning}", flush=True)
    _printed.add(mesh)


def print_alone() -> None:
    """Say, on global rank 0, that there is no context parallelism to replace."""
    if dist.is_initialized() and dist.get_rank() == 0:
        print(
            "[mesh-cp] context_parallel_size 1: nothing to exchange, Transformer Engine's attention runs as it is",
            flush=True,
        )


def warnings_of(mesh: MeshConfig) -> list[str]:
    """What makes a run slower than it could be and can only be set before the process starts."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if mesh.size == 1 or not torch.cuda.is_available() or connections == "1":
        return []
    return [
        f"CUDA_DEVICE_MAX_CONNECTIONS is {connections or 'not set'}: with 1, a transfer starts before the blocks that "
        "are launched after it; export it before the processes start"
    ]
