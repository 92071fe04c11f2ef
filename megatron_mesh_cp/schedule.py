"""The planner: in which order a tile's transfers and blocks happen, as a Plan.

Offsets: rank at position p of a group of m talks to p+s and p-s (mod m), so that all ranks of a group run the same
sequence and every send meets its receive.

    direct   step s: own chunk to p-s, chunk of p+s in; results: partial of chunk p+s to its owner, own partial in
             from p-s. Owner to user, one rounding of each partial.
    shift    step s: the neighbour ring. Chunks come from p+1 and are passed on to p-1. Partial results go home from
             both sides, the farthest first, each rank adding its own share: two chains of (m-1)/2 ranks round the
             sum half as often as one of m-1 would (in bf16 on 8 ranks: an error of 1.3 instead of 1.6 of one call).

The order comes from the greedy scheduler (Note [Greedy schedule] in greedy.py), driven by `Costs`.

Note [From a schedule to steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A schedule has a start time for every transfer and block. A rank can post a transfer only between two blocks, and the
channel's queue begins it when its turn comes; so a transfer is posted before the block during which it starts. Inputs
that nothing needs yet are posted later, as late as they can without holding anything up, with the time of one more
transfer to spare: chunks that lie about unused are memory. For the same reason the plan's depth is the smallest that
does not make it slower.

Plans are drawn in docs/schedule.md, event by event.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from .cost import Costs, nominal_costs
from .greedy import INPUTS, Round, Schedule, Work, greedy
from .plan import Block, Direction, Payload, Plan, Step, Transfer, check_exchange
from .simulate import simulate_with
from .tile import TileShape

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_SAME = 1.002  # a plan at most this much slower is as good


@lru_cache(maxsize=256)
def make_plan(tile: TileShape, direction: Direction, exchange: str = "direct", costs: Costs | None = None) -> Plan:
    """The plan of one attention forward or backward over a tile.

    costs: durations that decide the order; default `nominal_costs`, for a cluster that nothing is known of.

    Raises ValueError for an unknown exchange.
    """
    check_exchange(exchange)
    costs = costs or nominal_costs(direction)
    work = make_work(tile, direction, exchange, costs)
    schedule = greedy(work)
    template = _steps(work, schedule)
    plan = Plan(tile, direction, exchange, template, links=work.links, depth=max(tile.size, 1))
    limit = _SAME * simulate_with(plan, costs).seconds
    for depth in _DEPTHS:
        lean = Plan(tile, direction, exchange, template, links=work.links, depth=depth)
        if depth < plan.depth and simulate_with(lean, costs).seconds <= limit:
            return lean
    return plan


def make_work(tile: TileShape, direction: Direction, exchange: str, costs: Costs) -> Work:
    """What one rank has to transfer and compute, with its durations, for the scheduler."""
    chains = (
        _inputs(direction.row_input, tile.a, exchange, costs.row_in),
        _inputs(Payload.KV, tile.b, exchange, costs.column_in),
        _results(direction.row_result, tile.a, exchange, costs.row_result),
        ()
        if direction.column_result is None
        else _results(direction.column_result, tile.b, exchange, costs.column_result),
    )
    return Work(tile.a, tile.b, chains, costs.block, costs.links)


def transfers_of(tile: TileShape, direction: Direction, exchange: str) -> tuple[Transfer, ...]:
    """Every transfer of a template, in no order that matters."""
    work = make_work(tile, direction, exchange, nominal_costs(direction))
    return tuple(t for chain in work.chains for round_ in chain for t in round_.transfers)


def _inputs(payload: Payload, m: int, exchange: str, seconds: float) -> tuple[Round, ...]:
    """Round s: the chunk of offset s comes in; see the module's drawing."""
    rounds = []
    for s in range(1, m):
        if exchange == "direct":
            transfers = Transfer(payload, s, s, send=False), Transfer(payload, 0, -s, send=True)
        else:
            transfers = Transfer(payload, s, 1, send=False), Transfer(payload, s - 1, -1, send=True)
        rounds.append(Round(transfers, seconds, brings=s))
    return tuple(rounds)


def _results(payload: Payload, m: int, exchange: str, seconds: float) -> tuple[Round, ...]:
    """A result of a group of m, round by round; see the module's drawing."""
    if exchange == "direct":
        return tuple(
            Round((Transfer(payload, 0, -s, send=False), Transfer(payload, s, s, send=True)), seconds, needs=(s,))
            for s in range(1, m)
        )
    rounds: list[list[Transfer]] = [[] for _ in range(m // 2)]
    for side, length in ((-1, m // 2), (1, (m - 1) // 2)):
        for s in range(length):
            left = length - s  # hops to the owner
            rounds[s] += [
                Transfer(payload, side * (left - 1) % m, -side, send=False),
                Transfer(payload, side * left % m, side, send=True),
            ]
    out = []
    for number, transfers in enumerate(rounds):
        needs = tuple(t.chunk for t in transfers if t.send)
        out.append(Round(tuple(transfers), len(needs) * seconds, needs=needs, after_previous=number > 0))
    return tuple(out)


def _steps(work: Work, schedule: Schedule) -> tuple[Step, ...]:
    """See Note [From a schedule to steps]: one step for each batch, with the blocks that follow it."""
    ends = [start + work.block for start, _, _ in schedule.blocks]
    slack = 1e-9 * schedule.seconds
    first_use: dict[tuple[int, int], int] = {}  # (chain, offset) -> index of the first block that needs it
    for index, (_, x, y) in enumerate(schedule.blocks):
        first_use.setdefault((0, x), index)
        first_use.setdefault((1, y), index)
    posted: list[tuple[int, float, tuple[Transfer, ...]]] = []
    for (start, chain, index), latest in zip(schedule.rounds, _latest_starts(work, schedule), strict=True):
        round_ = work.chains[chain][index]
        when = max(start, latest - round_.seconds) if chain in INPUTS else start
        position = bisect_right(ends, when + slack)
        if chain in INPUTS:  # a block may be shorter than the slack
            position = min(position, first_use[chain, round_.brings])
        posted.append((position, start, round_.transfers))
    posted.sort(key=lambda item: item[:2])
    steps: list[Step] = []
    done = 0
    for number, (position, _, transfers) in enumerate(posted):
        if number == 0 and position > 0:
            steps.append(Step((), _blocks(schedule, 0, position)))
            done = position
        until = posted[number + 1][0] if number + 1 < len(posted) else len(ends)
        steps.append(Step(transfers, _blocks(schedule, max(done, position), until)))
        done = max(done, until)
    if not posted:
        steps.append(Step((), _blocks(schedule, 0, len(ends))))
    return tuple(steps)


def _blocks(schedule: Schedule, first: int, last: int) -> tuple[Block, ...]:
    return tuple(Block(x, y) for _, x, y in schedule.blocks[first:last])


def _latest_starts(work: Work, schedule: Schedule) -> list[float]:
    """For every round the latest start that keeps all blocks and results of the schedule where they are."""
    first_use = {}
    for start, x, y in reversed(schedule.blocks):
        first_use[0, x] = first_use[1, y] = start
    latest = [start for start, _, _ in schedule.rounds]
    next_start: dict[int, float] = {}
    for number in range(len(latest) - 1, -1, -1):
        start, chain, index = schedule.rounds[number]
        round_ = work.chains[chain][index]
        link = 0 if work.links == 1 else chain % 2
        if chain in INPUTS:
            end = min(next_start.get(link, schedule.seconds), first_use[chain, round_.brings])
            latest[number] = max(start, end - round_.seconds)
        next_start[link] = latest[number]
    return latest
