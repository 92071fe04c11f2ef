"""The event loop of the simulator: ranks, batches and flows, and who waits for whom; see simulate.py for the rules."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count as counter

from .network import Way
from .plan import Block, Channel, Event, EventKind, Plan, PlanError, Transfer


class Rank:
    """A representative. ops: START and FINISH with their batch, and runs of blocks as one delay; index of the event."""

    __slots__ = ("at", "done", "log", "ops", "since", "wait")

    def __init__(self, log: dict[int, tuple[float, float]] | None) -> None:
        self.ops: list[tuple[EventKind, Batch | float, int]] = []
        self.at = 0
        self.log = log  # event index -> when, where spans are wanted
        self.since: float | None = None  # waits since
        self.wait = self.done = 0.0

    @property
    def compute(self) -> float:
        return sum(argument for kind, argument, _ in self.ops if kind is EventKind.COMPUTE)


class Batch:
    """A batch of one rank. left: transfers that are not complete; flows: by place (None: the peer has no such end)."""

    __slots__ = ("flows", "left", "queue", "rank")

    def __init__(self, rank: Rank, queue: deque[Batch], transfers: int) -> None:
        self.rank, self.queue, self.left = rank, queue, transfers
        self.flows: list[Flow | None] = [None] * transfers


class Flow:
    """A transfer between two batches. to_go: bytes at time `since`; version: of the valid prediction of its end."""

    __slots__ = ("begin", "end", "ends", "missing", "rate", "since", "to_go", "version", "way")

    def __init__(self, ends: tuple[Batch, Batch], size: int, way: Way) -> None:
        self.ends, self.way, self.to_go = ends, way, float(size)
        self.missing, self.version, self.rate, self.since = 2, 0, 0.0, 0.0
        self.begin = self.end = 0.0


class _Port:
    __slots__ = ("flows", "load")

    def __init__(self) -> None:
        self.load = 0
        self.flows: dict[Flow, None] = {}  # in order of start (a set has no order, and sums must not vary)


End = tuple[Batch, int]  # one end of a transfer: a batch and the place in it


class Run:
    """One simulation: the heap holds what will happen, by time and then in the order of prediction."""

    def __init__(self, plan: Plan, count: int, block_seconds: Callable[[Block], float], logged: set[int]) -> None:
        self.plan, self.count, self.block_seconds = plan, count, block_seconds
        self.programs = [plan.program(rank) for rank in range(count)]
        self.ranks = [Rank({} if rank in logged else None) for rank in range(count)]
        self.batches: list[dict[int, Batch]] = [
            self._compile(*item) for item in zip(self.ranks, self.programs, strict=True)
        ]
        self.ports: dict[tuple[str, int], _Port] = {}
        self.heap: list[tuple[float, int, Callable[..., None], object, int]] = []
        self.order = counter()

    def _compile(self, rank: Rank, program: Sequence[Event]) -> dict[int, Batch]:
        """Fill rank.ops; returns its batches by index of their START."""
        row: deque[Batch] = deque()
        queues = {Channel.ROW: row, Channel.COLUMN: row if self.plan.links == 1 else deque()}
        outstanding: dict[tuple[Transfer, ...], Batch] = {}
        batches = {}
        for index, event in enumerate(program):
            if event.block is not None:
                seconds = self.block_seconds(event.block)
                if rank.ops and rank.ops[-1][0] is EventKind.COMPUTE:
                    seconds += rank.ops[-1][1]
                    index = rank.ops.pop()[2]
                rank.ops.append((EventKind.COMPUTE, seconds, index))
            elif event.kind is EventKind.START:
                batch = Batch(rank, queues[event.transfers[0].payload.channel], len(event.transfers))
                batches[index] = outstanding[event.transfers] = batch
                rank.ops.append((EventKind.START, batch, index))
            else:
                rank.ops.append((EventKind.FINISH, outstanding.pop(event.transfers), index))
        return batches

    def add_flow(self, source: End, target: End, size: int, way: Way) -> None:
        flow = Flow((source[0], target[0]), size, way)
        for batch, place in (source, target):
            batch.flows[place] = flow
        for port in way.ports:
            self.ports.setdefault(port, _Port())

    def play(self) -> None:
        """Run to the end. Raises PlanError where nothing can move any more."""
        for rank in self.ranks:
            self._advance(rank, 0.0)
        while self.heap:
            now, _, action, what, version = heapq.heappop(self.heap)
            if version < 0 or version == what.version:
                action(what, now)
        for number, rank in enumerate(self.ranks):
            if rank.at < len(rank.ops):
                event = self.programs[number][rank.ops[rank.at][2]]
                raise PlanError(
                    f"{self.plan.direction.value} plan, tile {self.plan.tile}, {self.plan.exchange} exchange: rank "
                    f"{number} waits for ever in step {event.step}: {', '.join(map(str, event.transfers))}"
                )

    def _at(self, when: float, action: Callable[..., None], what: object, version: int = -1) -> None:
        heapq.heappush(self.heap, (when, next(self.order), action, what, version))

    def _advance(self, rank: Rank, now: float) -> None:
        """A rank goes on until it computes, waits or is done."""
        while rank.at < len(rank.ops):
            kind, argument, index = rank.ops[rank.at]
            if kind is EventKind.FINISH:
                if argument.left:
                    if rank.since is None:
                        rank.since = now
                    return
                if rank.log is not None:
                    rank.log[index] = (now if rank.since is None else rank.since, now)
                if rank.since is not None:
                    rank.wait += now - rank.since
                    rank.since = None
            rank.at += 1
            if kind is EventKind.START:
                argument.queue.append(argument)
                if len(argument.queue) == 1:
                    self._begin(argument, now)
            elif kind is EventKind.COMPUTE:
                if rank.log is not None:
                    rank.log[index] = (now, now + argument)
                self._at(now + argument, self._advance, rank)
                return
        rank.done = now

    def _begin(self, batch: Batch, now: float) -> None:
        for flow in filter(None, batch.flows):
            flow.missing -= 1
            if not flow.missing:
                flow.begin = now
                self._at(now + flow.way.latency, self._move, flow)

    def _move(self, flow: Flow, now: float) -> None:
        flow.since = now
        for key, weight in zip(flow.way.ports, flow.way.weights, strict=True):
            port = self.ports[key]
            port.load += weight
            port.flows[flow] = None
        self._share(flow.way, now)

    def _arrive(self, flow: Flow, now: float) -> None:
        flow.end = now
        for key, weight in zip(flow.way.ports, flow.way.weights, strict=True):
            port = self.ports[key]
            port.load -= weight
            del port.flows[flow]
        self._share(flow.way, now)
        for batch in flow.ends:
            batch.left -= 1
            if not batch.left:
                batch.queue.popleft()  # the first of its queue: a batch begins when those before it are complete
                if batch.queue:
                    self._begin(batch.queue[0], now)
                if batch.rank.since is not None:
                    self._advance(batch.rank, now)

    def _share(self, way: Way, now: float) -> None:
        """New rates, and new predictions of their ends, for the flows on the two ports of a way."""
        for key in way.ports:
            for flow in self.ports[key].flows:
                out, into = flow.way.ports
                rate = flow.way.bandwidth / max(self.ports[out].load, self.ports[into].load)
                if rate != flow.rate:
                    flow.to_go -= flow.rate * (now - flow.since)
                    flow.since, flow.rate = now, rate
                    flow.version += 1
                    self._at(now + max(flow.to_go, 0.0) / rate, self._arrive, flow, flow.version)


def matched(run: Run) -> Iterator[tuple[End, End, Transfer, int]]:
    """Sender, receiver, the transfer as the sender lists it, and the sender's rank; by representatives.

    The k-th send from u to v on a channel meets the k-th receive at v from u. Representatives may talk to each other
    at several distances in their group, so the distance belongs to the key.
    """
    tile = run.plan.tile
    size = {Channel.ROW: tile.a, Channel.COLUMN: tile.b}
    quotient = run.count < tile.size
    sends: dict[tuple[object, ...], list[tuple[End, Transfer, int]]] = {}
    receives: dict[tuple[object, ...], list[End]] = {}
    for rank, program in enumerate(run.programs):
        relative = run.plan.template_program if quotient else program
        for index, batch in run.batches[rank].items():
            for place, (t, offset) in enumerate(zip(program[index].transfers, relative[index].transfers, strict=True)):
                channel = t.payload.channel
                distance = (offset.peer if t.send else -offset.peer) % size[channel] if quotient else 0
                peer = t.peer % run.count
                if t.send:
                    sends.setdefault((rank, peer, channel, distance), []).append(((batch, place), t, rank))
                else:
                    receives.setdefault((peer, rank, channel, distance), []).append((batch, place))
    for key, queue in sends.items():
        # A send or a receive too many stays alone: its batch is never complete.
        for (source, t, rank), target in zip(queue, receives.get(key, ()), strict=False):
            yield source, target, t, rank
