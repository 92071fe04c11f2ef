"""The transfers of all ranks of a plan, matched rank by rank without time: what `verify` does where symmetry fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .plan import Channel, Event, EventKind, Item, Plan, Transfer

_Key = tuple[int, int, Channel, bool]  # source, target, channel, and whether it is the sender's end


@dataclass
class _Queue:
    """Batches of one rank in order; the first `done` are complete, and batch `done`, if there is one, has begun."""

    batches: list[tuple[Transfer, ...]] = field(default_factory=list)
    done: int = 0
    tickets: list[tuple[_Key, int]] = field(default_factory=list)  # partners that the begun batch needs


def check_matching(plan: Plan, programs: list[tuple[Event, ...]], problems: list[str]) -> int:
    """Run the transfers of all ranks: match sends with receives, find wait cycles, follow each share home."""
    n = plan.tile.size
    posted: dict[_Key, list[Transfer]] = {}
    waiting_for: dict[_Key, set[int]] = {}
    # shares[rank][item]: bit mask of the ranks whose blocks are in this rank's partial result
    shares: list[dict[Item, int]] = [{} for _ in range(n)]
    sent: dict[tuple[int, Transfer], int] = {}  # the share that a result message carries
    for rank, program in enumerate(programs):
        for event in program:
            if event.block is not None:
                shares[rank].update(dict.fromkeys(plan.results(event.block), 1 << rank))
    todo = [[e for e in program if e.transfers] for program in programs]
    at = [0] * n
    queues: list[dict[Channel, _Queue]] = []
    for _ in range(n):
        row = _Queue()
        queues.append({Channel.ROW: row, Channel.COLUMN: row if plan.links == 1 else _Queue()})
    places: list[dict[Channel, deque[int]]] = [{channel: deque() for channel in Channel} for _ in range(n)]
    ready = deque(range(n))

    def begin(rank: int, queue: _Queue) -> None:
        """Post the transfers of the batch whose turn it is."""
        queue.tickets = []
        if queue.done == len(queue.batches):
            return
        for t in queue.batches[queue.done]:
            source, target = (rank, t.peer) if t.send else (t.peer, rank)
            channel = t.payload.channel
            mine = posted.setdefault((source, target, channel, t.send), [])
            queue.tickets.append(((source, target, channel, not t.send), len(mine)))
            mine.append(t)
            ready.extend(waiting_for.pop((source, target, channel, t.send), ()))

    def advance(rank: int, queue: _Queue) -> None:
        """Complete the batches of a queue whose partners have all posted."""
        while queue.done < len(queue.batches):
            for key, place in queue.tickets:
                if len(posted.get(key, ())) <= place:
                    waiting_for.setdefault(key, set()).add(rank)
                    return
            for (key, place), t in zip(queue.tickets, queue.batches[queue.done], strict=True):
                other = posted[key][place]
                if (other.payload, other.chunk, other.part) != (t.payload, t.chunk, t.part):
                    problems.append(f"rank {rank}: {t}, but CP rank {t.peer} has '{other}' in its place")
            queue.done += 1
            begin(rank, queue)

    while ready:
        rank = ready.popleft()
        for queue in queues[rank].values():
            advance(rank, queue)
        while at[rank] < len(todo[rank]):
            event = todo[rank][at[rank]]
            channel = event.transfers[0].payload.channel
            queue = queues[rank][channel]
            if event.kind is EventKind.START:
                for t in event.transfers:
                    if t.send and t.payload.is_result:
                        sent[rank, t] = shares[rank].get((t.payload, t.chunk), 0)
                places[rank][channel].append(len(queue.batches))
                queue.batches.append(event.transfers)
                if queue.done == len(queue.batches) - 1:
                    begin(rank, queue)
                advance(rank, queue)
            else:
                if places[rank][channel][0] >= queue.done:
                    break
                places[rank][channel].popleft()
                for t in event.transfers:
                    if t.payload.is_result and not t.send:
                        share = sent.get((t.peer, Transfer(t.payload, t.chunk, rank, True, t.part)), 0)
                        item = (t.payload, t.chunk)
                        if shares[rank].get(item, 0) & share:
                            problems.append(f"rank {rank}: {t} brings a share that is already there")
                        shares[rank][item] = shares[rank].get(item, 0) | share
            at[rank] += 1
    stuck = [rank for rank in range(n) if at[rank] < len(todo[rank])]
    for rank in stuck:
        event = todo[rank][at[rank]]
        problems.append(f"rank {rank} waits for ever in step {event.step}: {', '.join(map(str, event.transfers))}")
    for (source, target, channel, send), mine in posted.items():
        other = posted.get((source, target, channel, not send), [])
        for t in mine[len(other) :]:
            problems.append(f"rank {source if send else target}: {t} over the {channel.value} channel has no match")
    if not problems:
        _check_shares(plan, shares, problems)
    return sum(len(mine) for key, mine in posted.items() if key[3])


def _check_shares(plan: Plan, shares: list[dict[Item, int]], problems: list[str]) -> None:
    expected: dict[Item, int] = {}
    for rank in range(plan.tile.size):
        row = sum(1 << member for member in plan.tile.row_group(rank))
        expected[(plan.direction.row_result, rank)] = row
        if plan.direction.column_result is not None:
            column = sum(1 << member for member in plan.tile.column_group(rank))
            expected[(plan.direction.column_result, rank)] = column
    for (payload, chunk), mask in expected.items():
        got = shares[chunk].get((payload, chunk), 0)
        if got != mask:
            missing = [rank for rank in range(plan.tile.size) if (mask & ~got) >> rank & 1]
            problems.append(f"{payload.value.upper()} chunk {chunk}: the shares of ranks {missing} never reach it")
