"""The byte formulas, and the automatic tile."""

from __future__ import annotations

import pytest

from megatron_mesh_cp.cost import AttentionShape, mesh_bytes, reduction, total_bytes
from megatron_mesh_cp.plan import Channel, Direction
from megatron_mesh_cp.tile import TileShape, all_tiles
from megatron_mesh_cp.tune import best_tile, decide

# Best tile and reduction against ring, D = 128, bf16, forward + backward: MHA, GQA 4:1, GQA 8:1.
TABLE = {
    4: (("2x2", 38.6), ("1x4", 0.0), ("1x4", 0.0)),
    8: (("4x2", 49.7), ("2x4", 9.1), ("1x8", 0.0)),
    16: (("4x4", 63.2), ("2x8", 30.9), ("2x8", 8.5)),
    32: (("8x4", 71.3), ("4x8", 44.9), ("2x16", 29.9)),
    64: (("8x8", 79.5), ("4x16", 60.2), ("4x16", 44.1)),
    128: (("16x8", 84.6), ("8x16", 69.6), ("4x32", 59.7)),
    256: (("16x16", 89.2), ("8x32", 78.6), ("8x32", 69.4)),
}


def shape(kv_heads: int) -> AttentionShape:
    return AttentionShape(seq_local=4096, batch=1, heads=32, kv_heads=kv_heads, head_dim=128)


@pytest.mark.parametrize("n", TABLE)
def test_best_tiles_and_reductions_are_the_published_models(n):
    for kv_heads, (tile, percent) in zip((32, 8, 4), TABLE[n], strict=True):
        best = best_tile(n, shape(kv_heads))
        assert str(best) == tile
        assert round(100 * reduction(best, shape(kv_heads)), 1) == percent


def test_8x32_on_256_ranks_is_the_other_cell_of_the_table():
    assert round(100 * reduction(TileShape(8, 32), shape(32)), 1) == 85.5


@pytest.mark.parametrize("kv_heads", [32, 8, 4, 1])
def test_formulas_in_units_of_a_q_chunk(kv_heads):
    s = shape(kv_heads)
    unit, g, eps = 4096 * 32 * 128 * 2, kv_heads / 32, 2 / 128
    for tile in all_tiles(64):
        a, b = tile.a, tile.b
        forward, backward = (mesh_bytes(tile, d, s) for d in Direction)
        assert forward == {Channel.ROW: (a - 1) * (2 + eps) * unit, Channel.COLUMN: 2 * g * (b - 1) * unit}
        assert backward == {
            Channel.ROW: (a - 1) * (3 + 2 * eps) * unit,
            Channel.COLUMN: 4 * g * (b - 1) * unit,
        }


def test_transposed_ring_is_the_burst_style_backward():
    """(n, 1): Q, dO and dQ travel, KV stays: (n-1)(3 + 2 eps)."""
    s = shape(32)
    assert (
        sum(mesh_bytes(TileShape(64, 1), Direction.BACKWARD, s).values())
        == 63 * (3 + 2 * 2 / 128) * 4096 * 32 * 128 * 2
    )


def test_ties_go_to_the_smaller_row():
    # A row step costs four column steps here, so that 1x8 (7 C) and 2x4 (R + 3 C) tie.
    even = AttentionShape(seq_local=64, batch=1, heads=2, kv_heads=1, head_dim=1, item_bytes=2, stat_bytes=4)
    forward = {str(t): sum(mesh_bytes(t, Direction.FORWARD, even).values()) for t in all_tiles(8)}
    assert forward["1x8"] == forward["2x4"] == min(forward.values())
    assert best_tile(8, even, Direction.FORWARD) == TileShape(1, 8)


def test_auto_backward_is_chosen_for_the_backward_alone():
    s = shape(32)
    decision = decide(256, s, tile="auto", backward="auto")
    forward, backward = decision.forward.tile, decision.backward.tile
    best = min(all_tiles(256), key=lambda t: sum(mesh_bytes(t, Direction.BACKWARD, s).values()))
    assert backward == best
    assert total_bytes(forward, s, backward) <= total_bytes(best_tile(256, s), s)


def test_rejects_tiles_that_do_not_fit_and_names_the_flag():
    with pytest.raises(ValueError, match=r"context_parallel_size 12 with --mesh-tile-shape 8x2 = 16: a\*b must be 12"):
        decide(12, shape(32), tile="8x2")
    with pytest.raises(ValueError, match="--mesh-tile-shape-backward 3x3 = 9"):
        decide(12, shape(32), tile="3x4", backward="3x3")


def test_rejects_query_heads_that_are_no_multiple_of_kv_heads():
    with pytest.raises(ValueError, match="heads 6 with kv heads 4.*1, 2, 3, 6"):
        AttentionShape(16, 1, 6, 4, 8)
