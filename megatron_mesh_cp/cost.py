"""What an attention costs: bytes on the wire, exactly as the executor sends them.

Formulas of the Mesh-Attention communication model (arXiv 2512.20968 and its backward counterpart), per CP rank, in
units of one Q chunk, g = KV heads / Q heads, eps = fp32 row statistics (2/D of a bf16 chunk each):

              forward                        backward
    ring      2g(n-1)                        4g(n-1)
    a x b     (a-1)(2 + eps) + 2g(b-1)       (a-1)(3 + 2 eps) + 4g(b-1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Channel, Direction, Payload
from .tile import TileShape


@dataclass(frozen=True)
class AttentionShape:
    """One attention call on one CP rank: local sequence length, batch, heads on this tensor-parallel rank, head dims.

    item_bytes: bytes of one element of Q, K, V, O; stat_bytes: of one row statistic (lse, delta).
    Raises ValueError where a value is not positive or the Q heads are not a multiple of the KV heads.
    """

    seq_local: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    item_bytes: int = 2
    stat_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("seq_local", "batch", "heads", "kv_heads", "head_dim", "item_bytes", "stat_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        check_heads(self.heads, self.kv_heads)

    @property
    def rows(self) -> int:
        """Rows of a Q chunk over batch and heads: the number of values of one row statistic."""
        return self.seq_local * self.batch * self.heads

    def message_bytes(self, payload: Payload) -> int:
        """Bytes of one message of a payload."""
        v_dim = self.v_head_dim or self.head_dim
        q = self.rows * self.head_dim * self.item_bytes
        o = self.rows * v_dim * self.item_bytes
        kv = self.seq_local * self.batch * self.kv_heads * (self.head_dim + v_dim) * self.item_bytes
        stat = self.rows * self.stat_bytes
        return {
            Payload.Q: q,
            Payload.KV: kv,
            Payload.O: o + stat,
            Payload.QDO: q + o + 2 * stat,
            Payload.DQ: q,
            Payload.DKV: kv,
        }[payload]

    def partial_bytes(self, payload: Payload) -> int:
        """Bytes of the accumulator of a result (in the dtype of the statistics).

        With that of dQ goes the stand-in for O of the same rows, which some kernels need; see merge.stand_in_out.
        """
        v_dim = self.v_head_dim or self.head_dim
        kv_rows = self.seq_local * self.batch * self.kv_heads
        return {
            Payload.O: self.rows * (v_dim + 1) * self.stat_bytes,
            Payload.DQ: self.rows * (self.head_dim * self.stat_bytes + v_dim * self.item_bytes),
            Payload.DKV: kv_rows * (self.head_dim + v_dim) * self.stat_bytes,
        }.get(payload, 0)


@dataclass(frozen=True)
class Costs:
    """Durations that decide a schedule, in any one unit: one transfer of each kind, and one block.

    row_in: Q (backward: Q, dO, lse, delta); column_in: K, V; row_result: O with lse (backward: dQ); column_result:
    dK, dV (backward only). links: 2 where row and column channel run at once, 1 where they share a link.

    Raises ValueError where a duration is negative or not finite.
    """

    row_in: float
    column_in: float
    row_result: float
    column_result: float
    block: float
    links: int = 2

    def __post_init__(self) -> None:
        for name in ("row_in", "column_in", "row_result", "column_result", "block"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"costs: {name} must be a duration of 0 or more, got {value}")
        if self.links not in (1, 2):
            raise ValueError(f"costs: links {self.links}: 1 (both channels share a link) or 2 (each has its own)")


def nominal_costs(direction: Direction, shape: AttentionShape | None = None) -> Costs:
    """Costs where no cluster is known: in units of one Q chunk on its way, a block as long as that, backward 2.5 times.

    shape: for the true ratios of the messages; default MHA with row statistics left out.
    """
    forward = direction is Direction.FORWARD
    if shape is None:
        return Costs(1, 2, 1, 0, 1) if forward else Costs(2, 2, 1, 2, 2.5)
    unit = shape.message_bytes(Payload.Q)
    row_in, column_in, row_result = (
        shape.message_bytes(p) / unit for p in (direction.row_input, Payload.KV, direction.row_result)
    )
    return Costs(row_in, column_in, row_result, 0 if forward else column_in, 1 if forward else 2.5)


def check_heads(heads: int, kv_heads: int, flag: str = "heads", kv_flag: str = "kv heads") -> None:
    """Raise ValueError unless the query heads are a multiple of the KV heads."""
    if kv_heads < 1 or heads % kv_heads:
        fits = [k for k in range(1, heads + 1) if heads % k == 0]
        raise ValueError(
            f"{flag} {heads} with {kv_flag} {kv_heads}: query heads must be a multiple of KV heads; "
            f"{kv_flag} could be {', '.join(map(str, fits))}"
        )


def mesh_bytes(tile: TileShape, direction: Direction, shape: AttentionShape) -> dict[Channel, int]:
    """Bytes that each CP rank sends per attention, by channel (both exchange patterns move the same)."""
    row = shape.message_bytes(direction.row_input) + shape.message_bytes(direction.row_result)
    column = shape.message_bytes(Payload.KV)
    if direction.column_result is not None:
        column += shape.message_bytes(direction.column_result)
    return {Channel.ROW: (tile.a - 1) * row, Channel.COLUMN: (tile.b - 1) * column}


def total_bytes(tile: TileShape, shape: AttentionShape, tile_backward: TileShape | None = None) -> int:
    """Bytes that each CP rank sends per attention, forward and backward together."""
    forward = mesh_bytes(tile, Direction.FORWARD, shape)
    backward = mesh_bytes(tile_backward or tile, Direction.BACKWARD, shape)
    return sum(forward.values()) + sum(backward.values())


def reduction(tile: TileShape, shape: AttentionShape, tile_backward: TileShape | None = None) -> float:
    """1 - bytes / bytes of the ring (1, n), forward and backward; 0 for n = 1."""
    ring = total_bytes(TileShape(1, tile.size), shape)
    return 1 - total_bytes(tile, shape, tile_backward) / ring if ring else 0.0
