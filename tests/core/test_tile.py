"""The tile: assignment matrix, groups, and errors that name what would fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_mesh_cp.tile import TileShape, all_tiles, assignment_matrix


def test_matrix_is_the_drawn_one():
    """Note [Tile layout], n = 8, tile 2x4."""
    assert assignment_matrix(TileShape(2, 4)) == tuple(
        tuple(r + c for c in (0, 1) * 4) for r in (0, 0, 2, 2, 4, 4, 6, 6)
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 64, 1024])
def test_every_rank_owns_one_tile_that_holds_its_own_block(n):
    for tile in all_tiles(n):
        for rank in range(0, n, max(1, n // 16)):
            rows = tile.row_group(rank)
            columns = tile.column_group(rank)
            assert len(rows) == tile.a
            assert len(columns) == tile.b
            assert rank in rows
            assert rank in columns
            assert {tile.owner(i, j) for i in rows for j in columns} == {rank}
        assert tile.owner(n - 1, n - 1) == n - 1


def test_ring_is_one_row_and_its_transpose_one_column():
    assert TileShape(1, 4).row_group(2) == (2,)
    assert TileShape(1, 4).column_group(2) == (0, 1, 2, 3)
    assert TileShape(4, 1).row_group(2) == (0, 1, 2, 3)
    assert TileShape(4, 1).column_group(2) == (2,)


@pytest.mark.parametrize(("a", "b"), [(2, 4), (4, 2), (3, 5), (8, 8)])
def test_transposed_tiles_put_the_column_group_on_consecutive_ranks(a, b):
    tile = TileShape(a, b, transposed=True)
    assert (str(tile), tile.levels) == (f"{a}x{b}t", (b, a))
    assert TileShape.parse(f"{a}x{b}t") == tile
    for rank in range(a * b):
        rows, columns = tile.row_group(rank), tile.column_group(rank)
        assert (len(rows), len(columns)) == (a, b)
        assert columns == tuple(range(columns[0], columns[0] + b))
        assert rank in rows
        assert rank in columns
        assert {tile.owner(i, j) for i in rows for j in columns} == {rank}


def test_one_row_or_one_column_has_nothing_to_transpose():
    for a, b in ((1, 6), (6, 1), (1, 1)):
        assert TileShape(a, b, transposed=True) == TileShape(a, b)


def test_rejects_a_tile_of_another_size_with_tiles_that_fit():
    with pytest.raises(ValueError, match=r"context_parallel_size 12 with tile 8x2 = 16: a\*b must be 12; try .*6x2"):
        TileShape(8, 2).check_size(12)


@pytest.mark.parametrize("text", ["2", "2x", "x2", "0x4", "2x-2", "2*2", "axb", "2x2x2", "", "1.5x2"])
def test_rejects_what_is_not_of_the_form_axb(text):
    with pytest.raises(ValueError, match="--mesh-tile-shape.*AxB"):
        TileShape.parse(text, "--mesh-tile-shape")


@pytest.mark.parametrize(("a", "b"), [(0, 4), (-1, 4), (2, 0), (2.0, 2), (True, 4)])
def test_rejects_sizes_that_are_no_positive_whole_numbers(a, b):
    with pytest.raises(ValueError, match="positive whole number"):
        TileShape(a, b)


def test_parse_reads_what_str_writes():
    assert all(TileShape.parse(str(t)) == t for t in all_tiles(24))


def test_pure_rooms_import_without_torch():
    rooms = "tile layout plan verify greedy schedule cost cluster simulate peers tune draw"
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['megatron'] = None\n"
        f"import importlib; [importlib.import_module('megatron_mesh_cp.' + r) for r in '{rooms}'.split()]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_needs_no_optional_package():
    """verl PR #6959: a private symbol imported before the version check."""
    code = (
        "import sys\n"
        "for name in ('megatron', 'transformer_engine', 'flash_attn', 'apex'): sys.modules[name] = None\n"
        "import megatron_mesh_cp; from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention, add_args"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
