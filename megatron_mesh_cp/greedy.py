"""The greedy scheduler: when the transfers and blocks of one tile happen, on one or two links and one compute stream.

Note [Greedy schedule]
~~~~~~~~~~~~~~~~~~~~~~
A tile's work is up to four chains of transfers (row inputs, column inputs, row results, column results) and a*b blocks.
Rows and columns that come in are numbered in the order of their chain, which is no loss: they are alike. A block waits
for its row and its column, a result for all blocks of its row or column. Time advances from event to event, and at each
one every idle link and the idle compute stream choose what is next:

* a link: among inputs, the one that unlocks most block time per second of transfer (or always rows, or always columns
  first, or the order in which all blocks could be done soonest if there were no results); a result as soon as it is
  complete (or only after the inputs);
* compute: the block that gates the earliest result (by row, by column, or by both in turn); the own row and column,
  which gate nothing that leaves early, last.

No single one of these orders is good everywhere, so all are tried (`POLICIES`) and the best taken. Where that is not at
the lower bound, choices are made once more with a look ahead: every alternative, waiting included, is followed to the
end by one of the best policies, and the one that ends first is taken (`look_ahead`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, product
from math import inf

from .plan import Transfer

INPUTS = (0, 1)  # chains: row inputs, column inputs, row results, column results
RESULTS = (2, 3)
LOOK_AHEAD_BLOCKS = 16  # up to here `greedy` looks ahead at transfers and blocks, up to 16 times that at transfers
LOOK_AHEAD_EFFORT = 25_000  # blocks and transfers that the alternatives of one look ahead may simulate
GOOD_ENOUGH = 0.03  # above the bound: larger tiles look no further
_EPSILON = 1e-9  # relative: two times this close are one event


@dataclass(frozen=True)
class Round:
    """One batch of a chain. `brings`: offset of the row (column) that comes in, 0 for results.

    needs: offsets of the rows (columns) that must be complete on this rank before it starts; after_previous: the
    round before must be finished too, since what it brings is merged into what leaves.
    """

    transfers: tuple[Transfer, ...]
    seconds: float
    brings: int = 0
    needs: tuple[int, ...] = ()
    after_previous: bool = False


@dataclass(frozen=True)
class Work:
    """What one rank has to do: chains of rounds (see the Note), an a x b tile of blocks of `block` seconds each."""

    a: int
    b: int
    chains: tuple[tuple[Round, ...], ...]
    block: float
    links: int

    def bound(self) -> float:
        """No schedule is shorter: compute total, each link's total, and inputs of one kind before results of the other.

        No row result can leave before all columns are in, and no column result before all rows are.
        """
        seconds = [sum(r.seconds for r in chain) for chain in self.chains]
        compute = self.a * self.b * self.block
        if self.links == 1:
            return max(compute, sum(seconds))
        chains = [seconds[1] + seconds[2]] if self.chains[2] else []
        chains += [seconds[0] + seconds[3]] if self.chains[3] else []
        return max(compute, seconds[0] + seconds[2], seconds[1] + seconds[3], *chains)

    def tight_bound(self) -> float:
        """A bound that is harder to reach: blocks cannot be computed before their inputs are in.

        Compute is done soonest if inputs come without a pause and compute never waits for nothing; over all orders of
        the inputs, the end of all blocks that i rows and j columns allow is found from that of one row or one column
        less. In a backward every block but the own one gates a result, which follows it.
        """
        end, _ = self.best_input_order
        if not self.chains[2] or not self.chains[3]:
            return max(self.bound(), end)  # blocks of the own row (or column) gate nothing: they can be the last
        tail = min(r.seconds for chain in self.chains[2:] for r in chain)
        held, _ = self.input_order(0.0)  # the own block comes last
        return max(self.bound(), min(end + tail, held + max(self.block, tail)))

    @cached_property
    def best_input_order(self) -> tuple[float, tuple[int, ...]]:
        """`input_order` with the own block at the start."""
        return self.input_order(self.block)

    def input_order(self, own: float) -> tuple[float, tuple[int, ...]]:
        """The order of inputs (chain by chain) that lets all blocks be done soonest, and when that is.

        own: seconds of the own block at the start; 0 leaves it out.
        """
        rows, columns = ([0.0, *accumulate(r.seconds for r in self.chains[c])] for c in INPUTS)
        done: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (own, -1)}  # end of blocks, chain that came last
        for i, j in product(range(self.a), range(self.b)):
            arrived = rows[i] + columns[j] if self.links == 1 else max(rows[i], columns[j])
            ways = []
            if i:
                ways.append((max(done[i - 1, j][0], arrived) + (j + 1) * self.block, 0))
            if j:
                ways.append((max(done[i, j - 1][0], arrived) + (i + 1) * self.block, 1))
            if ways:
                done[i, j] = min(ways)
        i, j = self.a - 1, self.b - 1
        order: list[int] = []
        while (i, j) != (0, 0):
            order.append(done[i, j][1])
            i, j = (i - 1, j) if order[-1] == 0 else (i, j - 1)
        return done[self.a - 1, self.b - 1][0], tuple(reversed(order))

    @cached_property
    def block_orders(self) -> dict[str, list[float]]:
        """For each order of Policy the priority of every block (row * b + column), smallest first."""
        # tail: seconds of the results that cannot leave before a row (column) is complete; 0 for the own one.
        row_tail, column_tail = [0.0] * self.a, [0.0] * self.b
        for tails, chain in ((row_tail, self.chains[2]), (column_tail, self.chains[3])):
            left = 0.0
            for round_ in reversed(chain):
                left += round_.seconds
                for offset in round_.needs:
                    tails[offset] = left
        rows = sorted(range(self.a), key=lambda x: -row_tail[x])
        columns = sorted(range(self.b), key=lambda y: -column_tail[y])
        row_rank, column_rank = ({v: k for k, v in enumerate(order)} for order in (rows, columns))
        row_share, column_share = ([(k + 1) / size for k in range(size)] for size in (self.a, self.b))
        places = list(product(range(self.a), range(self.b)))
        keys = {
            "rows": lambda x, y: (row_rank[x], column_rank[y]),
            "columns": lambda x, y: (column_rank[y], row_rank[x]),
            "both": lambda x, y: (
                min(row_share[row_rank[x]], column_share[column_rank[y]]),
                row_rank[x] + column_rank[y],
            ),
            "tail": lambda x, y: (-max(row_tail[x], column_tail[y]), -min(row_tail[x], column_tail[y])),
        }
        orders = {}
        for name, key in keys.items():
            priority = [0.0] * len(places)
            for rank, (x, y) in enumerate(sorted(places, key=lambda place, key=key: key(*place))):
                priority[x * self.b + y] = rank
            orders[name] = priority
        return orders


@dataclass(frozen=True)
class Policy:
    """How to choose.

    rows_first: weighs row inputs against column inputs (0: columns first, inf: rows first, None: in the order of
    Work.best_input_order). eager: a result goes before an input. order: which blocks first. hold: the own block, which
    gates no result and needs no input, is kept for the end, where it covers the last results.
    """

    rows_first: float | None
    eager: bool
    order: str
    hold: bool = False


POLICIES = tuple(
    Policy(*choice) for choice in product((1.0, inf, 0.0, None), (True, False), ("rows", "columns", "both", "tail"))
)
WEIGHTS = (0.2, 0.35, 0.5, 0.7, 1.4, 2.0, 3.0, 5.0)  # of rows, tried with the best two policies


@dataclass(frozen=True)
class Schedule:
    """Start times: of rounds as (start, chain, index), and of blocks as (start, row, column), each in order of time."""

    seconds: float
    rounds: tuple[tuple[float, int, int], ...]
    blocks: tuple[tuple[float, int, int], ...]


def greedy(work: Work) -> Schedule:
    """The best schedule found; see Note [Greedy schedule]."""
    policies = POLICIES if work.chains[3] else tuple(p for p in POLICIES if p.order in ("rows", "columns"))
    bound = work.bound()
    small = work.a * work.b <= LOOK_AHEAD_BLOCKS
    if small:
        policies += tuple(replace(policy, hold=True) for policy in policies)
    found: list[tuple[Schedule, Policy]] = []
    for policy in policies:
        found.append((_State(work, policy).run(), policy))
        if found[-1][0].seconds <= bound * (1 + _EPSILON):
            return found[-1][0]
    for policy in [p for _, p in sorted(found, key=_seconds)[:2]]:
        found += [(_State(work, other).run(), other) for other in (replace(policy, rows_first=w) for w in WEIGHTS)]
    found.sort(key=_seconds)
    best = found[0][0]
    blocks = work.a * work.b
    for _, policy in found[: 3 if small else 2 if blocks <= 16 * LOOK_AHEAD_BLOCKS else 0]:
        if best.seconds <= bound * (1 + (_EPSILON if small else GOOD_ENOUGH)):
            break
        trials = LOOK_AHEAD_EFFORT // (blocks + sum(map(len, work.chains)))
        ahead = look_ahead(work, policy, trials, blocks_too=small)
        best = min(best, ahead, key=lambda s: s.seconds)
    return best


def _seconds(found: tuple[Schedule, Policy]) -> float:
    return found[0].seconds


def look_ahead(work: Work, policy: Policy, trials: int, blocks_too: bool = True) -> Schedule:
    """A schedule in which every choice is the one from which `policy` gets to the end soonest.

    trials: alternatives to follow in all; after that `policy` decides alone. blocks_too: look ahead at every block as
    well, not only at every transfer.
    """
    state = _State(work, policy)
    best = state.copy().run()
    while not state.done():
        machine = state.idle_machine()
        if machine is None:
            state.advance()
            continue
        if machine == state.compute and not blocks_too:
            state.take(machine, state.choose(machine))
            continue
        options = state.options(machine)
        chosen, seconds = options[0], inf
        if len(options) > 1 and trials <= 0:
            chosen = state.choose(machine)
        for option in options if len(options) > 1 and trials > 0 else ():
            trials -= 1
            trial = state.copy()
            trial.take(machine, option)
            result = trial.run(seconds * (1 - _EPSILON))
            if result is None:
                continue
            chosen, seconds = option, result.seconds
            if result.seconds < best.seconds:
                best = result
        state.take(machine, chosen)
    return min(best, state.schedule(), key=lambda s: s.seconds)


_WAIT = -1


class _State:
    """A schedule under way: what is here, what is running, what is done. Links come first among machines."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self.work, self.policy = work, policy
        self.orders = work.block_orders
        self.order = work.best_input_order[1] if policy.rows_first is None else ()
        self.priority = self.orders[policy.order]
        self.now = 0.0
        self.left = work.a * work.b + sum(map(len, work.chains))  # blocks and rounds still to start
        self.next = [0, 0, 0, 0]  # round that each chain starts next
        self.merged = [0, 0, 0, 0]  # rounds whose end the rank has seen between two blocks
        self.ended = [0, 0, 0, 0]
        self.compute = work.links  # index of the compute stream among machines
        self.running: list[tuple[float, int, int] | None] = [None] * (work.links + 1)  # end, chain or row, index
        self.waits = [False] * (work.links + 1)  # has chosen to wait for the next event
        self.rows, self.columns = [0], [0]
        self.row_left, self.column_left = [work.b] * work.a, [work.a] * work.b
        self.available = [(self.priority[0], 0)]
        self.rounds: list[tuple[float, int, int]] = []
        self.blocks: list[tuple[float, int, int]] = []

    def copy(self) -> _State:
        new = object.__new__(_State)
        new.__dict__.update(self.__dict__)
        for name in ("next", "merged", "ended", "running", "waits", "rows", "columns"):
            setattr(new, name, getattr(self, name).copy())
        for name in ("row_left", "column_left", "available", "rounds", "blocks"):
            setattr(new, name, getattr(self, name).copy())
        return new

    def run(self, limit: float = inf) -> Schedule | None:
        """Follow the policy to the end; None where that takes `limit` or longer."""
        while self.now < limit:
            for machine in range(self.work.links):
                if self.running[machine] is None and not self.waits[machine]:
                    ready = self._ready(machine)
                    if ready:
                        self.take(machine, self._choose_chain(machine, ready))
            if self.running[self.compute] is None and not self.waits[self.compute] and self.available:
                self.take(self.compute, self.choose(self.compute))
            if self.done():
                return self.schedule()
            self.advance()
        return None

    def done(self) -> bool:
        return not self.left and not any(self.running)

    def schedule(self) -> Schedule:
        return Schedule(self.now, tuple(self.rounds), tuple(self.blocks))

    def idle_machine(self) -> int | None:
        """A machine that has something to choose from now."""
        for machine in range(self.work.links):
            if self.running[machine] is None and not self.waits[machine] and self._ready(machine):
                return machine
        if self.running[self.compute] is None and not self.waits[self.compute] and self.available:
            return self.compute
        return None

    def options(self, machine: int) -> list[int]:
        """Chains whose next round may start, or blocks (one for each order); waiting, where something else runs."""
        if machine == self.compute:
            firsts = {min(self.available, key=lambda e, p=p: p[e[1]])[1] for p in self.orders.values()}
            options = sorted(firsts, key=self.priority.__getitem__)
        else:
            options = self._ready(machine)
        return [*options, _WAIT] if any(self.running) else options

    def choose(self, machine: int) -> int:
        """What the policy takes."""
        if machine == self.compute:
            block = self.available[0][1]
            early = block == 0 and len(self.blocks) < self.work.a * self.work.b - 1
            return _WAIT if self.policy.hold and early and any(self.running) else block
        return self._choose_chain(machine, self._ready(machine))

    def _choose_chain(self, machine: int, ready: list[int]) -> int:
        if len(ready) == 1:
            if ready[0] in INPUTS or self.policy.eager or not self._inputs_left(machine) or not any(self.running):
                return ready[0]
            return _WAIT
        inputs = [c for c in ready if c in INPUTS]
        results = [c for c in ready if c in RESULTS]
        if results and (self.policy.eager or not inputs):
            return max(results, key=self._chain_left)
        return max(inputs, key=self._unlocks)

    def take(self, machine: int, option: int) -> None:
        """Start what was chosen now."""
        if option == _WAIT:
            self.waits[machine] = True
            return
        self.left -= 1
        if machine == self.compute:
            if self.available[0][1] == option:
                heappop(self.available)
            else:
                self.available.remove((self.priority[option], option))
                heapify(self.available)
            x, y = divmod(option, self.work.b)
            self.running[machine] = (self.now + self.work.block, x, y)
            self.blocks.append((self.now, x, y))
        else:
            index = self.next[option]
            self.next[option] += 1
            self.running[machine] = (self.now + self.work.chains[option][index].seconds, option, index)
            self.rounds.append((self.now, option, index))

    def advance(self) -> None:
        """Go to the next event, and end what ends there."""
        self.now = min(entry[0] for entry in self.running if entry)
        for machine, entry in enumerate(self.running):
            self.waits[machine] = False
            if entry is None or entry[0] > self.now * (1 + _EPSILON):
                continue
            self.running[machine] = None
            _, first, second = entry
            if machine == self.compute:
                self.row_left[first] -= 1
                self.column_left[second] -= 1
            else:
                self.ended[first] = second + 1
                if first in INPUTS:
                    self._arrive(first, self.work.chains[first][second].brings)
        if self.running[self.compute] is None:
            self.merged = self.ended.copy()

    def _arrive(self, chain: int, offset: int) -> None:
        b = self.work.b
        if chain == 0:
            new = [offset * b + y for y in self.columns]
            self.rows.append(offset)
        else:
            new = [x * b + offset for x in self.rows]
            self.columns.append(offset)
        for block in new:
            heappush(self.available, (self.priority[block], block))

    def _ready(self, machine: int) -> list[int]:
        """Chains of a link whose next round may start now."""
        ready = []
        for chain in range(4) if self.work.links == 1 else (machine, machine + 2):
            rounds, index = self.work.chains[chain], self.next[chain]
            if index == len(rounds):
                continue
            if chain in RESULTS:
                left = self.row_left if chain == 2 else self.column_left
                round_ = rounds[index]
                if any(left[offset] for offset in round_.needs):
                    continue
                if round_.after_previous and self.merged[chain] < index:
                    continue
            ready.append(chain)
        return ready

    def _inputs_left(self, machine: int) -> bool:
        chains = INPUTS if self.work.links == 1 else (machine,)
        return any(self.next[c] < len(self.work.chains[c]) for c in chains)

    def _unlocks(self, chain: int) -> float:
        """Blocks that the next input of a chain unlocks, per second of transfer."""
        if self.policy.rows_first is None:
            return float(chain == self.order[self.next[0] + self.next[1]])
        seconds = self.work.chains[chain][self.next[chain]].seconds
        count = len(self.columns) if chain == 0 else len(self.rows)
        value = count / seconds if seconds else inf
        if chain == 1:
            return value
        return value * self.policy.rows_first if self.policy.rows_first else -1.0

    def _chain_left(self, chain: int) -> float:
        return sum(r.seconds for r in self.work.chains[chain][self.next[chain] :])
