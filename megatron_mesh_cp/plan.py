"""The Plan: for each CP rank an ordered list of steps, as plain data. Executor, simulator and picture read the same
Plan, and nothing else decides order.

Note [Reading a plan]
~~~~~~~~~~~~~~~~~~~~~
A step names the transfers to start and the blocks to compute meanwhile. `Plan.program(rank)` spells out what a rank
does, as a sequence of events:

    START    put a batch, the step's transfers of one channel, into the channel's queue. A queue is first in, first
             out: a batch begins when those before it are complete, also in the middle of a block. With `links` 1
             both channels share one queue, as they share one link.
    FINISH   wait for one batch: when a block needs what it brings, when a result that it brings is to be passed on,
             when `depth` batches of its channel are outstanding and one more is to start, or at the end. A received
             result (O, dQ, dKV) is merged HERE, so the order of every sum is the order of the plan and never the
             order of arrival.
    COMPUTE  one block (Q_i, KV_j).

and after each event, the buffers whose last compute and last send are done, to be freed. Transfers that start early
and finish late are what hides communication behind computation; `depth` is what bounds the memory that this takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from .tile import TileShape

EXCHANGES = ("direct", "shift")


class PlanError(ValueError):
    """A plan that must not run; the message lists what is wrong with it."""


class Channel(Enum):
    """Row channel: over the row group. Column channel: over the column group."""

    ROW = "row"
    COLUMN = "column"

    __hash__ = object.__hash__


class Payload(Enum):
    """What a transfer carries. Inputs: Q, KV, QDO (backward: Q, dO, lse, delta). Results: O (with lse), DQ, DKV."""

    Q = "q"
    KV = "kv"
    O = "o"  # noqa: E741
    QDO = "qdo"
    DQ = "dq"
    DKV = "dkv"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is slow Python

    @cached_property
    def channel(self) -> Channel:
        return Channel.COLUMN if self in (Payload.KV, Payload.DKV) else Channel.ROW

    @cached_property
    def is_result(self) -> bool:
        return self in (Payload.O, Payload.DQ, Payload.DKV)


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"

    @cached_property
    def row_input(self) -> Payload:
        return Payload.Q if self is Direction.FORWARD else Payload.QDO

    @cached_property
    def row_result(self) -> Payload:
        return Payload.O if self is Direction.FORWARD else Payload.DQ

    @cached_property
    def column_result(self) -> Payload | None:
        return None if self is Direction.FORWARD else Payload.DKV


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a transfer, as the rank that lists it sees it.

    chunk: index of the chunk carried; peer: CP rank at the other end; part: which part of the chunk is carried
    (only "whole" is planned today).
    """

    payload: Payload
    chunk: int
    peer: int
    send: bool
    part: str = "whole"

    def __str__(self) -> str:
        verb, side = ("send", "to") if self.send else ("receive", "from")
        return f"{verb} {self.payload.value.upper()} chunk {self.chunk} {side} CP rank {self.peer}"

    @property
    def label(self) -> str:
        """In short, for charts and traces: "KV 12 <- 4" (received), "QDO 3 -> 2" (sent)."""
        return f"{self.payload.value.upper()} {self.chunk} {'->' if self.send else '<-'} {self.peer}"


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of Q chunk `q` against KV chunk `kv`."""

    q: int
    kv: int


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers to start, then blocks to compute while they are under way."""

    transfers: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()


Item = tuple[Payload, int]  # a buffer: what, and which chunk


class EventKind(Enum):
    START = "start"
    FINISH = "finish"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Event:
    """See Note [Reading a plan]. `frees`: input buffers that nothing after this event reads."""

    kind: EventKind
    step: int
    transfers: tuple[Transfer, ...] = ()
    block: Block | None = None
    frees: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Order of transfers and blocks for all ranks of a tile.

    template: the steps of every rank, relative to it: `chunk` and `peer` of a transfer count from the rank's own
        position in its row or column group, block indices from its own row and column of the tile.
    explicit: steps with absolute CP ranks and chunks, for ranks that do not follow the template.
    links: 2 where row and column channel run at once, 1 where they take turns on one link.
    depth: batches of one channel that may be outstanding (queued or in flight).
    """

    tile: TileShape
    direction: Direction
    exchange: str
    template: tuple[Step, ...]
    explicit: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)
    links: int = 2
    depth: int = 1

    def __post_init__(self) -> None:
        check_exchange(self.exchange)
        if self.links not in (1, 2):
            raise ValueError(f"links {self.links}: 1 (both channels share a link) or 2 (each has its own)")
        if self.depth < 1:
            raise ValueError(f"depth {self.depth}: at least one batch must be allowed on a channel")

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of CP rank `rank`, in CP ranks and chunk indices."""
        if rank in self.explicit:
            return self.explicit[rank]
        place = Place(self.tile, rank)
        return tuple(Step(place.transfers(s.transfers), tuple(map(place.block, s.blocks))) for s in self.template)

    def program(self, rank: int) -> tuple[Event, ...]:
        """What CP rank `rank` does, event by event; see Note [Reading a plan]."""
        if rank in self.explicit:
            return _compile(self.explicit[rank], self)
        place = Place(self.tile, rank)
        return tuple(
            Event(
                e.kind,
                e.step,
                place.transfers(e.transfers),
                e.block and place.block(e.block),
                place.items(e.frees),
            )
            for e in self.template_program
        )

    def inputs(self, block: Block) -> tuple[Item, Item]:
        """The two buffers that a block reads."""
        return (self.direction.row_input, block.q), (Payload.KV, block.kv)

    def results(self, block: Block) -> tuple[Item, ...]:
        """The accumulators that a block adds to."""
        row = (self.direction.row_result, block.q)
        column = self.direction.column_result
        return (row,) if column is None else (row, (column, block.kv))

    @cached_property
    def template_program(self) -> tuple[Event, ...]:
        """The program that the template stands for, with offsets in place of chunks and ranks."""
        return _compile(self.template, self)


class Place:
    """Turns offsets in the template into the chunks and CP ranks of one rank."""

    def __init__(self, tile: TileShape, rank: int) -> None:
        # Rotated so that offset 0 is the rank itself.
        self._at = {}
        for channel, members in (
            (Channel.ROW, tile.row_group(rank)),
            (Channel.COLUMN, tile.column_group(rank)),
        ):
            own = members.index(rank)
            self._at[channel] = members[own:] + members[:own]

    def transfers(self, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        out = []
        for t in transfers:
            at = self._at[t.payload.channel]
            out.append(Transfer(t.payload, at[t.chunk], at[t.peer % len(at)], t.send, t.part))
        return tuple(out)

    def block(self, block: Block) -> Block:
        return Block(self._at[Channel.ROW][block.q], self._at[Channel.COLUMN][block.kv])

    def items(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple((payload, self._at[payload.channel][chunk]) for payload, chunk in items)


def _compile(steps: tuple[Step, ...], plan: Plan) -> tuple[Event, ...]:
    """Spell out START, FINISH and COMPUTE; see Note [Reading a plan]."""
    events: list[Event] = []
    flying: dict[Channel, list[tuple[Transfer, ...]]] = {channel: [] for channel in Channel}
    arriving: dict[Item, int] = {}  # how many outstanding batches bring it
    order: list[Channel] = []  # of the outstanding batches, oldest first

    def finish(channel: Channel, step: int, enough: Callable[[], bool]) -> None:
        while flying[channel] and not enough():
            batch = flying[channel].pop(0)
            order.remove(channel)
            for t in batch:
                if not t.send:
                    arriving[t.payload, t.chunk] -= 1
            events.append(Event(EventKind.FINISH, step, batch))

    def arrived(item: Item) -> bool:
        return not arriving.get(item)

    for number, step in enumerate(steps):
        for channel in Channel:
            batch = tuple(sorted((t for t in step.transfers if t.payload.channel is channel), key=lambda t: t.send))
            if not batch:
                continue
            # An input may be passed on by the batch after the one that brings it; a result is merged before.
            passed_on = [(t.payload, t.chunk) for t in batch if t.send and t.payload.is_result]
            finish(channel, number, lambda items=passed_on: all(map(arrived, items)))
            finish(channel, number, lambda channel=channel: len(flying[channel]) < plan.depth)
            events.append(Event(EventKind.START, number, batch))
            flying[channel].append(batch)
            order.append(channel)
            for t in batch:
                if not t.send:
                    arriving[t.payload, t.chunk] = arriving.get((t.payload, t.chunk), 0) + 1
        for block in step.blocks:
            for item in plan.inputs(block):
                finish(item[0].channel, number, lambda item=item: arrived(item))
            events.append(Event(EventKind.COMPUTE, number, block=block))
    while order:
        left = len(order)
        finish(order[0], len(steps) - 1, lambda left=left: len(order) < left)

    last: dict[Item, int] = {}
    for index, event in enumerate(events):
        if event.block is not None:
            last.update(dict.fromkeys(plan.inputs(event.block), index))
        elif event.kind is EventKind.FINISH:
            # Also a chunk that was only passed on, or sent by its owner, is free after its last send.
            last.update({(t.payload, t.chunk): index for t in event.transfers if not t.payload.is_result})
    frees: dict[int, list[Item]] = {}
    for item, index in last.items():
        frees.setdefault(index, []).append(item)
    for index, items in frees.items():
        event = events[index]
        events[index] = Event(event.kind, event.step, event.transfers, event.block, tuple(items))
    return tuple(events)


def check_exchange(exchange: str, flag: str = "exchange") -> None:
    """Raise ValueError for an unknown exchange pattern."""
    if exchange not in EXCHANGES:
        raise ValueError(f"{flag} {exchange!r}: choose from {', '.join(EXCHANGES)}")


def sent_messages(plan: Plan, rank: int) -> dict[Payload, int]:
    """How many messages of each payload CP rank `rank` hands to the network."""
    counts: dict[Payload, int] = {}
    for step in plan.steps(rank):
        for transfer in step.transfers:
            if transfer.send:
                counts[transfer.payload] = counts.get(transfer.payload, 0) + 1
    return counts


def live_bytes(plan: Plan, rank: int, message: Mapping[Payload, int], partial: Mapping[Payload, int]) -> list[int]:
    """Largest number of bytes that the executor holds during each event of `plan.program(rank)`.

    Counted: messages (received chunks, packed own chunks, results under way) and accumulators of partial results.
    Not counted: the caller's own tensors and what a kernel allocates during one block.

    Args: message, partial: bytes of one message and of one accumulator of each payload.
    """
    held: dict[tuple[object, ...], int] = {}

    def message_key(t: Transfer) -> tuple[object, ...]:
        # An input chunk is one buffer, received or packed, however often it is sent on.
        return (t.send, t.payload, t.chunk, t.peer) if t.payload.is_result else ("input", t.payload, t.chunk)

    figures = []
    for event in plan.program(rank):
        if event.kind is EventKind.START:
            held.update({message_key(t): message[t.payload] for t in event.transfers})
        elif event.block is not None:
            held.update({("partial", *item): partial[item[0]] for item in plan.results(event.block)})
        else:  # a result that only passes through gets its accumulator when it arrives
            arrived = (t for t in event.transfers if t.payload.is_result and not t.send)
            held.update({("partial", t.payload, t.chunk): partial[t.payload] for t in arrived})
        figures.append(sum(held.values()))
        for t in event.transfers:
            if t.payload.is_result and event.kind is EventKind.FINISH:
                held.pop(message_key(t), None)
            elif t.payload.is_result and t.send:  # packed into its message, the accumulator is free
                held.pop(("partial", t.payload, t.chunk), None)
        for item in event.frees:
            held.pop(("input", *item), None)
    return figures
