"""How a sequence is cut into chunks, and which part of block (i, j) is live under a mask.

Note [Zigzag]
~~~~~~~~~~~~~
Megatron and Transformer Engine give CP rank i the half-chunks i and 2n-1-i of 2n. Under a causal mask every block
(Q_i, KV_j) then costs exactly half of a full block, so any tile is balanced:

    i == j   plain causal on the local chunk (the local order is ascending)
    i >  j   all of Q_i            x  the first half of KV_j   no mask
    i <  j   the second half of Q_i x  all of KV_j             no mask

`plain` cuts the sequence into n contiguous chunks: under a causal mask i > j is full and i < j is empty.
"""

from __future__ import annotations

from enum import Enum

LAYOUTS = ("zigzag", "plain")


class BlockKind(Enum):
    """The live part of a block."""

    FULL = "full"
    CAUSAL = "causal"
    Q_SECOND_HALF = "q_second_half"
    KV_FIRST_HALF = "kv_first_half"
    EMPTY = "empty"

    @property
    def live_fraction(self) -> float:
        """Live area over the area of a full block (the diagonal counts half)."""
        return {"full": 1.0, "empty": 0.0}.get(self.value, 0.5)


def block_kind(i: int, j: int, *, causal: bool, layout: str) -> BlockKind:
    """Which part of block (Q_i, KV_j) is live; see Note [Zigzag]."""
    check_layout(layout)
    if not causal:
        return BlockKind.FULL
    if i == j:
        return BlockKind.CAUSAL
    if layout == "plain":
        return BlockKind.FULL if i > j else BlockKind.EMPTY
    return BlockKind.KV_FIRST_HALF if i > j else BlockKind.Q_SECOND_HALF


def check_layout(layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: choose from {', '.join(LAYOUTS)}")


def chunk_positions(rank: int, n: int, seq_len: int, layout: str = "zigzag") -> list[int]:
    """Global token positions that CP rank `rank` of `n` holds, in its local order.

    Raises ValueError where the sequence cannot be cut: `seq_len` must be a multiple of 2n (zigzag) or n (plain).
    """
    check_layout(layout)
    check_seq_len(seq_len, n, layout)
    if layout == "plain":
        size = seq_len // n
        return list(range(rank * size, (rank + 1) * size))
    half = seq_len // (2 * n)
    second = 2 * n - 1 - rank
    return [*range(rank * half, (rank + 1) * half), *range(second * half, (second + 1) * half)]


def check_seq_len(seq_len: int, n: int, layout: str = "zigzag", flag: str = "sequence length") -> None:
    """Raise ValueError, with lengths that would work, where the sequence cannot be cut for n ranks."""
    multiple = n if layout == "plain" or n == 1 else 2 * n
    if seq_len < 1 or seq_len % multiple:
        up = max(1, -(-seq_len // multiple)) * multiple
        down = seq_len // multiple * multiple
        near = f"{down} or {up}" if down > 0 else f"{up}"
        factor = "context_parallel_size" if multiple == n else "2 * context_parallel_size"
        raise ValueError(
            f"{flag} {seq_len} with context_parallel_size {n}: it must be a multiple of {factor} = {multiple}; "
            f"try {near}"
        )
