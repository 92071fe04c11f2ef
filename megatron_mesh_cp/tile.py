"""The tile: which rank computes which (Q chunk, KV chunk) block, and who talks to whom.

Note [Tile layout]
~~~~~~~~~~~~~~~~~~
The sequence is cut into n chunks, one per context-parallel (CP) rank. `TileShape(a, b)` with a*b = n gives every
rank a tile of a Q chunks (rows of the assignment matrix) by b KV chunks (columns). Ring-Attention is (1, n).

CP rank g sits at row r = g // a, column c = g % a of a b x a process mesh. Drawn for n = 8, tile 2x4
(a = 2 Q chunks, b = 4 KV chunks):

    process mesh (b x a)         assignment matrix: the rank that computes block (Q_i, KV_j)

        c=0  c=1                          KV_0 KV_1 KV_2 KV_3 KV_4 KV_5 KV_6 KV_7
    r=0  0    1    <- row group    Q_0     0    1    0    1    0    1    0    1
    r=1  2    3                    Q_1     0    1    0    1    0    1    0    1
    r=2  4    5                    Q_2     2    3    2    3    2    3    2    3
    r=3  6    7                    Q_3     2    3    2    3    2    3    2    3
         ^                         Q_4     4    5    4    5    4    5    4    5
         column group              ...

* Row group of g: ranks r*a .. r*a + a-1. They exchange Q and O; the tile's Q chunks are exactly their own chunks.
* Column group of g: ranks c, a+c, ..., (b-1)*a + c. They exchange K and V; the tile's KV chunks are exactly theirs.
* Block (i, j) belongs to rank (i // a) * a + (j % a), hence rank g's tile holds (g, g): its own Q and KV need no
  transfer (the Local Q-KV property of arXiv 2512.20968).
* These are Megatron's hierarchical CP groups for sizes [a, b]: level 0 the row groups, level 1 the column groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TileShape:
    """A tile of `a` Q chunks (rows) by `b` KV chunks (columns) per rank; a*b is the context-parallel size.

    Raises ValueError where a or b is not a positive whole number.
    """

    a: int
    b: int

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"tile {self.a}x{self.b}: {name} must be a positive whole number, got {value!r}")

    @classmethod
    def parse(cls, text: str, flag: str = "tile") -> TileShape:
        """Read 'AxB', e.g. '4x2': 4 Q chunks by 2 KV chunks. Raises ValueError naming `flag`."""
        match = re.fullmatch(r"\s*([1-9]\d*)[xX]([1-9]\d*)\s*", str(text))
        if match is None:
            raise ValueError(f"{flag} {text!r}: a tile is written AxB (Q chunks x KV chunks), for example 2x4")
        return cls(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        """Number of CP ranks that the tile is made for, n = a*b."""
        return self.a * self.b

    def __str__(self) -> str:
        return f"{self.a}x{self.b}"

    def check_size(self, n: int, flag: str = "tile") -> None:
        """Raise ValueError unless a*b == n; the message lists the tiles that fit."""
        if self.size != n:
            raise ValueError(
                f"context_parallel_size {n} with {flag} {self} = {self.size}: a*b must be {n}; "
                f"try {suggest_tiles(n, self)}"
            )

    def row_group(self, rank: int) -> tuple[int, ...]:
        """CP ranks that exchange Q and O with `rank`, ascending: a consecutive ranks."""
        start = self._checked(rank) // self.a * self.a
        return tuple(range(start, start + self.a))

    def column_group(self, rank: int) -> tuple[int, ...]:
        """CP ranks that exchange K and V with `rank`, ascending: b ranks, a apart."""
        return tuple(range(self._checked(rank) % self.a, self.size, self.a))

    def owner(self, i: int, j: int) -> int:
        """The CP rank that computes block (Q_i, KV_j)."""
        return self._checked(i) // self.a * self.a + self._checked(j) % self.a

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise ValueError(f"tile {self}: rank or chunk {index} is outside 0..{self.size - 1}")
        return index


def all_tiles(n: int) -> tuple[TileShape, ...]:
    """Every tile for n ranks, from the ring (1, n) to its transpose (n, 1)."""
    if n < 1:
        raise ValueError(f"context_parallel_size must be at least 1, got {n}")
    return tuple(TileShape(a, n // a) for a in range(1, n + 1) if n % a == 0)


def suggest_tiles(n: int, near: TileShape) -> str:
    """Up to three tiles for n ranks, those with a or b as close as can be to `near` first."""
    ranked = sorted(all_tiles(n), key=lambda t: (min(abs(t.a - near.a), abs(t.b - near.b)), abs(t.a - t.b)))
    names = [str(tile) for tile in ranked[:3]]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def assignment_matrix(tile: TileShape) -> tuple[tuple[int, ...], ...]:
    """AM[i][j] = the CP rank that computes block (Q_i, KV_j); see Note [Tile layout]. O(n^2) integers."""
    return tuple(tuple(tile.owner(i, j) for j in range(tile.size)) for i in range(tile.size))
