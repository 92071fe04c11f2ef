"""The planner: in which order a tile's transfers and blocks happen.

This first planner takes the inputs of both channels in order of distance and spreads the blocks evenly over the
steps, holding the own row (backward: and the own column) back, since its results stay here and can cover the
transfers of the others.

Offsets: rank at position p of a group of m talks to p+s and p-s (mod m), so that all ranks of a group run the same
sequence and every send meets its receive.

    direct   step s: own chunk to p-s, chunk of p+s in; results: partial of chunk p+s to its owner, own partial in
             from p-s. Owner to user, one rounding of each partial.
    shift    step s: the neighbour ring. Chunks come from p+1 and are passed on to p-1. Partial results go home from
             both sides, the farthest first, each rank adding its own share: two chains of (m-1)/2 ranks round the
             sum half as often as one of m-1 would (in bf16 on 8 ranks: an error of 1.3 instead of 1.6 of one call).

Plans are drawn in docs/schedule.md, event by event.
"""

from __future__ import annotations

from functools import lru_cache

from .plan import Block, Direction, Payload, Plan, Step, Transfer, check_exchange
from .tile import TileShape


@lru_cache(maxsize=256)
def make_plan(tile: TileShape, direction: Direction, exchange: str = "direct") -> Plan:
    """The plan of one attention forward or backward over a tile. Raises ValueError for an unknown exchange."""
    check_exchange(exchange)
    row_in = [_input(direction.row_input, s, exchange) for s in range(1, tile.a)]
    column_in = [_input(Payload.KV, s, exchange) for s in range(1, tile.b)]
    row_out = _results(direction.row_result, tile.a, exchange)
    column_out = [] if direction.column_result is None else _results(direction.column_result, tile.b, exchange)
    return Plan(tile, direction, exchange, _spread(tile, row_in, column_in, row_out, column_out))


def _input(payload: Payload, s: int, exchange: str) -> list[Transfer]:
    """Step s of an input: the chunk of offset s comes in; see the module's drawing."""
    if exchange == "direct":
        return [Transfer(payload, s, s, send=False), Transfer(payload, 0, -s, send=True)]
    return [Transfer(payload, s, 1, send=False), Transfer(payload, s - 1, -1, send=True)]


def _results(payload: Payload, m: int, exchange: str) -> list[list[Transfer]]:
    """A result of a group of m, step by step; see the module's drawing."""
    if exchange == "direct":
        return [[Transfer(payload, 0, -s, send=False), Transfer(payload, s, s, send=True)] for s in range(1, m)]
    steps: list[list[Transfer]] = [[] for _ in range(m // 2)]
    for side, length in ((-1, m // 2), (1, (m - 1) // 2)):
        for s in range(length):
            left = length - s  # hops to the owner
            steps[s] += [
                Transfer(payload, side * (left - 1) % m, -side, send=False),
                Transfer(payload, side * left % m, side, send=True),
            ]
    return steps


def _spread(
    tile: TileShape,
    row_in: list[list[Transfer]],
    column_in: list[list[Transfer]],
    row_out: list[list[Transfer]],
    column_out: list[list[Transfer]],
) -> tuple[Step, ...]:
    """Inputs first, both channels at once, then results; blocks spread evenly and never later than they are due."""
    rounds_in = max(len(row_in), len(column_in))
    rounds_out = max(len(row_out), len(column_out))
    # The steps in which row x and column y leave; the own ones stay here: they are due after the last step.
    last = rounds_in + rounds_out + 1
    row_due, column_due = (
        {t.chunk: rounds_in + 1 + k for k, batch in enumerate(out) for t in batch if t.send}
        for out in (row_out, column_out)
    )

    due = {
        Block(x, y): min(row_due.get(x, last), column_due.get(y, last)) for x in range(tile.a) for y in range(tile.b)
    }
    todo = sorted(due, key=lambda b: (due[b], b.q, b.kv))
    steps: list[Step] = []
    rows = columns = 1  # chunks that are here, the own one first
    for number in range(last + 1):
        k = number - rounds_in - 1
        transfers: list[Transfer] = []
        for inputs, outputs in ((row_in, row_out), (column_in, column_out)):
            if number < len(inputs):
                transfers += inputs[number]
            elif 0 <= k < len(outputs):
                transfers += outputs[k]
        here = [b for b in todo if b.q < rows and b.kv < columns]
        urgent = sum(due[b] <= number + 1 for b in here)
        share = -(-len(todo) // (last + 1 - number))
        chosen = here[: max(urgent, share)]
        done = set(chosen)
        todo = [b for b in todo if b not in done]
        if transfers or chosen:
            steps.append(Step(tuple(transfers), tuple(chosen)))
        rows, columns = min(rows + 1, tile.a), min(columns + 1, tile.b)
    return tuple(steps)
