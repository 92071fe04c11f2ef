"""How good the greedy schedules are: small tiles against the proven optimum, large ones against the lower bound.

    python scripts/schedule_grid.py small            every tile up to 4x4
    python scripts/schedule_grid.py large [--part K/N]    every tile with 64 <= a*b <= 256 (K/N: every N-th, from K)

Durations in units of a Q chunk: Q and O 1, row bundle 2, dQ 1, KV and dKV 2 (MHA) or 0.5 (GQA 4:1), a block 0.05 to 5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product

from megatron_mesh_cp.cost import Costs
from megatron_mesh_cp.greedy import greedy
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.schedule import make_work
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.yardstick import optimum

T_KV = (2.0, 0.5)
T_BLOCK = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def grid_costs(direction: Direction, t_kv: float, t_block: float, links: int) -> Costs:
    """Durations of one cell of the grid."""
    if direction is Direction.FORWARD:
        return Costs(1.0, t_kv, 1.0, 0.0, t_block, links)
    return Costs(2.0, t_kv, 1.0, t_kv, t_block, links)


def cells(tiles: list[TileShape], exchanges: tuple[str, ...]) -> Iterator[tuple]:
    for tile, direction, exchange, links, t_kv, t_block in product(tiles, Direction, exchanges, (1, 2), T_KV, T_BLOCK):
        work = make_work(tile, direction, exchange, grid_costs(direction, t_kv, t_block, links))
        yield (str(tile), direction.value, exchange, f"{links} link(s)", f"t_kv {t_kv}", f"t_block {t_block}"), work


def small_tiles() -> list[TileShape]:
    return [TileShape(a, b) for a in range(1, 5) for b in range(1, 5)]


def large_tiles() -> list[TileShape]:
    return [TileShape(a, b) for a in range(1, 257) for b in range(1, 257) if 64 <= a * b <= 256]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("small", "large"))
    parser.add_argument("--part", default="0/1", help="K/N: every N-th tile, from the K-th on (%(default)s)")
    parser.add_argument("--worst", type=int, default=20, help="cells to print (%(default)s)")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    begin = time.perf_counter()
    found = []
    if args.which == "small":
        for cell, work in cells(small_tiles()[first::step], ("direct", "shift")):
            best = optimum(work)
            found.append((greedy(work).seconds / best.seconds, cell, "" if best.proven else "optimum not proven"))
    else:
        for cell, work in cells(large_tiles()[first::step], ("direct",)):
            seconds = greedy(work).seconds
            found.append((seconds / work.bound(), cell, f"of the tight bound {seconds / work.tight_bound():.4f}"))
    found.sort(reverse=True)
    against = "the optimum" if args.which == "small" else "the lower bound"
    print(f"{len(found)} cells in {time.perf_counter() - begin:.0f} s; greedy / {against}, the worst first")
    for ratio, cell, note in found[: args.worst]:
        print(f"{ratio:.4f}  {'  '.join(cell)}  {note}")
    for limit in (1.0 + 1e-6, 1.03, 1.05, 1.10):
        print(f"above {limit:.2f}: {sum(ratio > limit for ratio, *_ in found)}")


if __name__ == "__main__":
    main()
