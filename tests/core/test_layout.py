"""Cutting a sequence, and the live part of a block."""

from __future__ import annotations

import pytest

from megatron_mesh_cp.layout import BlockKind, block_kind, check_seq_len, chunk_positions


@pytest.mark.parametrize("layout", ["zigzag", "plain"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_chunks_partition_the_sequence(n, layout):
    parts = [chunk_positions(rank, n, 6 * n, layout) for rank in range(n)]
    assert sorted(sum(parts, [])) == list(range(6 * n))
    assert all(part == sorted(part) for part in parts)


def test_zigzag_is_megatrons():
    """Half-chunks i and 2n-1-i of 2n."""
    assert chunk_positions(1, 4, 16) == [2, 3, 12, 13]


@pytest.mark.parametrize("layout", ["zigzag", "plain"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_block_kind_is_the_causal_mask(n, layout):
    """Each kind's live part equals the mask between the positions of the two chunks, token by token."""
    for i in range(n):
        for j in range(n):
            rows, columns = chunk_positions(i, n, 4 * n, layout), chunk_positions(j, n, 4 * n, layout)
            live = {(r, c) for r, x in enumerate(rows) for c, y in enumerate(columns) if y <= x}
            size = range(4)
            expected = {
                BlockKind.FULL: {(r, c) for r in size for c in size},
                BlockKind.EMPTY: set(),
                BlockKind.CAUSAL: {(r, c) for r in size for c in size if c <= r},
                BlockKind.Q_SECOND_HALF: {(r, c) for r in (2, 3) for c in size},
                BlockKind.KV_FIRST_HALF: {(r, c) for r in size for c in (0, 1)},
            }
            assert expected[block_kind(i, j, causal=True, layout=layout)] == live
            assert block_kind(i, j, causal=False, layout=layout) is BlockKind.FULL


def test_zigzag_balances_every_tile():
    from megatron_mesh_cp.tile import all_tiles

    for tile in all_tiles(12):
        load = [
            sum(
                block_kind(i, j, causal=True, layout="zigzag").live_fraction
                for i in tile.row_group(g)
                for j in tile.column_group(g)
            )
            for g in range(12)
        ]
        assert load == [6.0] * 12


@pytest.mark.parametrize(("length", "near"), [(30, "24 or 32"), (3, "8"), (0, "8")])
def test_rejects_a_length_that_cannot_be_cut_and_says_which_can(length, near):
    with pytest.raises(ValueError, match=rf"--seq-length {length} with context_parallel_size 4.*= 8; try {near}"):
        check_seq_len(length, 4, flag="--seq-length")


def test_rejects_an_unknown_layout():
    with pytest.raises(ValueError, match="'zag'.*zigzag, plain"):
        block_kind(0, 1, causal=True, layout="zag")
