"""The grid: real gloo ranks against dense single-process attention in fp64, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import Case, grid_errors

from megatron_mesh_cp.plan import EXCHANGES
from megatron_mesh_cp.tile import all_tiles

HEADS = {"MHA": (4, 4), "GQA 2": (4, 2), "GQA 4": (8, 2), "MQA": (4, 1)}
TOLERANCE = 1e-10


def check(pool, cases: list[Case], tolerance: float = TOLERANCE) -> None:
    by_rank = pool.run(grid_errors, cases, timeout=240)
    worst = {name: max(e[name] for rank in by_rank for e in rank) for name in by_rank[0][0]}
    print(f"{len(cases)} cases on {len(by_rank)} ranks, largest errors: {worst}")
    for rank, per_case in enumerate(by_rank):
        for case, found in zip(cases, per_case, strict=True):
            bad = {name: e for name, e in found.items() if not e <= tolerance}
            assert not bad, f"rank {rank} of {len(by_rank)}: {case}: {bad}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.compat), 6, 8])
def test_every_tile_exchange_head_ratio_and_length_equals_dense(ranks, n, causal):
    """MLM #1464, TE #1557 (dQ, dK, dV under CP differ), MagiAttention #122 (odd sizes), verl #1226 (one KV head)."""
    cases = [
        Case(
            s=2 * n * m,
            tile=str(tile),
            exchange=exchange,
            heads=heads,
            kv_heads=kv_heads,
            causal=causal,
            seed=m,
        )
        for tile in all_tiles(n)
        for exchange in EXCHANGES
        for heads, kv_heads in HEADS.values()
        for m in (1, 3, 7)
    ]
    check(ranks(n), cases)


@pytest.mark.parametrize("n", [pytest.param(4, marks=pytest.mark.compat), 6])
def test_options_equal_dense_on_every_tile(ranks, n):
    """Batch > 1, bshd, strided inputs, plain layout, reference kernel, recompute, own scale, another backward tile."""
    tiles = [str(t) for t in all_tiles(n)]
    variants = [
        {"b": 3},
        {"qkv_format": "bshd", "b": 2},
        {"strided": True, "b": 2},
        {"strided": True, "qkv_format": "bshd", "b": 2},
        {"layout": "plain"},
        {"layout": "plain", "exchange": "shift"},
        {"layout": "plain", "causal": False},
        {"kernel": "reference", "kv_heads": 2},
        {"checkpoint": True},
        {"checkpoint": True, "exchange": "shift"},
        {"scale": 0.77},
        {"kv_heads": 2, "heads": 8, "d": 24, "dv": 16},  # TE #2868, #1552: dk != dv
        {"kv_heads": 2, "heads": 8, "d": 16, "dv": 24, "kernel": "reference"},
        {"kv_heads": 2, "heads": 8, "d": 16, "dv": 24},
    ]
    cases = [Case(s=2 * n * 3, tile=tile, **v) for tile in tiles for v in variants]
    cases += [
        Case(s=2 * n, tile=f, tile_backward=b, kv_heads=2, exchange=x)
        for f in tiles
        for b in tiles
        if f != b
        for x in EXCHANGES
    ]
    check(ranks(n), cases)


@pytest.mark.compat
def test_fp32_is_within_1e_5(ranks):
    check(ranks(4), [Case(s=64, tile=t, heads=4, dtype=torch.float32) for t in ("1x4", "2x2", "4x1")], 1e-5)
