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

Note [Transposed placement]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Consecutive ranks share a node and its fast links. `TileShape(a, b, transposed=True)`, written "2x4t", gives them to
the column group: g has column group {g // b * b, ... + b-1} and row group {g % b, b + g % b, ...}, a ranks b apart.
Block (i, j) then belongs to rank (j // b) * b + (i % b). Everything else stays. Megatron's sizes are [b, a] then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TileShape:
    """A tile of `a` Q chunks (rows) by `b` KV chunks (columns) per rank; a*b is the context-parallel size.

    transposed: the column group, not the row group, sits on consecutive ranks; see Note [Transposed placement].

    Raises ValueError where a or b is not a positive whole number.
    """

    a: int
    b: int
    transposed: bool = False

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"tile {self.a}x{self.b}: {name} must be a positive whole number, got {value!r}")
        if 1 in (self.a, self.b):  # one group holds all ranks, the other one: both placements are the same
            object.__setattr__(self, "transposed", False)

    @classmethod
    def parse(cls, text: str, flag: str = "tile") -> TileShape:
        """Read 'AxB', e.g. '4x2': 4 Q chunks by 2 KV chunks; '4x2t' is transposed. Raises ValueError naming `flag`."""
        match = re.fullmatch(r"\s*([1-9]\d*)[xX]([1-9]\d*)(t?)\s*", str(text))
        if match is None:
            raise ValueError(
                f"{flag} {text!r}: a tile is written AxB (Q chunks x KV chunks), for example 2x4, or 2x4t with the "
                "column group on consecutive ranks"
            )
        return cls(int(match[1]), int(match[2]), bool(match[3]))

    @property
    def size(self) -> int:
        """Number of CP ranks that the tile is made for, n = a*b."""
        return self.a * self.b

    @property
    def levels(self) -> tuple[int, int]:
        """Megatron's hierarchical_context_parallel_sizes: the size of the consecutive groups, then of the strided."""
        return (self.b, self.a) if self.transposed else (self.a, self.b)

    def __str__(self) -> str:
        return f"{self.a}x{self.b}" + ("t" if self.transposed else "")

    def check_size(self, n: int, flag: str = "tile") -> None:
        """Raise ValueError unless a*b == n; the message lists the tiles that fit."""
        if self.size != n:
            raise ValueError(
                f"context_parallel_size {n} with {flag} {self} = {self.size}: a*b must be {n}; "
                f"try {suggest_tiles(n, self)}"
            )

    def row_group(self, rank: int) -> tuple[int, ...]:
        """CP ranks that exchange Q and O with `rank`, ascending: a consecutive ranks (transposed: b apart)."""
        return self._strided(rank, self.b) if self.transposed else self._consecutive(rank, self.a)

    def column_group(self, rank: int) -> tuple[int, ...]:
        """CP ranks that exchange K and V with `rank`, ascending: b ranks, a apart (transposed: consecutive)."""
        return self._consecutive(rank, self.b) if self.transposed else self._strided(rank, self.a)

    def owner(self, i: int, j: int) -> int:
        """The CP rank that computes block (Q_i, KV_j)."""
        if self.transposed:
            i, j = j, i
        stride = self.levels[0]
        return self._checked(i) // stride * stride + self._checked(j) % stride

    def _consecutive(self, rank: int, size: int) -> tuple[int, ...]:
        start = self._checked(rank) // size * size
        return tuple(range(start, start + size))

    def _strided(self, rank: int, stride: int) -> tuple[int, ...]:
        return tuple(range(self._checked(rank) % stride, self.size, stride))

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
