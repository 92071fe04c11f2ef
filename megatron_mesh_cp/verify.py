"""The proof that a plan may run: checked for all ranks, before any of them starts.

What is proven, for every rank and over all ranks:

* every block (i, j) is computed exactly once, and its inputs are there or under way by then;
* a result leaves only when every block of its row (column) is in it, and each rank's share reaches the owner once;
* every send meets a receive of the same payload, chunk and part, in the same order for each pair and channel;
* in every step all ranks of a group post the same number of transfers (NCCL builds communicators lazily);
* no wait cycle over all ranks, under the rule that a batch begins when those before it in its queue are complete.

Note [Proof by symmetry]
~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that follow one template do the same, with offsets in place of ranks. It is then enough to look at the template:
every send to offset p must meet, in the same batch, a receive from offset -p of the same chunk. Suppose so, and suppose
that ranks were stuck; take the earliest event of the program at which one is. It is a FINISH, and every rank has passed
all STARTs before it. The first batch of that queue has then begun everywhere and finds all its partners, so it is
complete; so the next one begins everywhere, and so on to the batch waited for: nobody was stuck. A plan with
explicit steps, or one that does not match batch by batch, is simulated rank by rank. Both ways are compared in the
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .matching import check_matching
from .plan import Channel, Event, EventKind, Item, Payload, Plan, PlanError, Transfer

_MOST = 8  # problems listed before the rest is only counted


@dataclass(frozen=True)
class Verified:
    """What was checked: ranks, blocks and transfers (each counted once, at its sender)."""

    ranks: int
    blocks: int
    transfers: int


def verify(plan: Plan) -> Verified:
    """Check a plan over all ranks; see the module's list. Raises PlanError with the first problems found."""
    problems: list[str] = []
    n = plan.tile.size
    transfers = None if plan.explicit else _check_template(plan, problems)
    if transfers is None and not problems:
        programs = [plan.program(rank) for rank in range(n)]
        _check_blocks(plan, programs, problems)
        for rank, program in enumerate(programs):
            _check_rank(plan, rank, program, problems)
        problems += [f"steps for rank {rank}, which is not in the tile" for rank in set(plan.explicit) - set(range(n))]
        _check_step_counts(plan, problems)
        transfers = check_matching(plan, programs, problems)
    if problems:
        more = f"\n  ... and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
        listed = "\n  ".join(problems[:_MOST])
        raise PlanError(f"{plan.direction.value} plan, tile {plan.tile}, {plan.exchange} exchange:\n  {listed}{more}")
    return Verified(n, n * n, transfers)


def _check_template(plan: Plan, problems: list[str]) -> int | None:
    """Note [Proof by symmetry]. Returns the number of transfers, or None where every rank must be simulated."""
    size = {Channel.ROW: plan.tile.a, Channel.COLUMN: plan.tile.b}
    todo = {(x, y) for x in range(plan.tile.a) for y in range(plan.tile.b)}
    sends = 0
    # shares[item]: offsets, counted from the owner of the chunk, of the ranks whose blocks are in the partial result
    shares: dict[Item, frozenset[int]] = {}
    flying: dict[Channel, list[list[tuple[Transfer, frozenset[int]]]]] = {channel: [] for channel in Channel}
    for event in plan.template_program:
        if event.block is not None:
            place = (event.block.q, event.block.kv)
            if place not in todo:
                problems.append(f"block at offsets {place} is computed twice, or is not in the tile")
            todo.discard(place)
            for payload, chunk in plan.results(event.block):
                own = frozenset({-chunk % size[payload.channel]})
                shares[payload, chunk] = shares.get((payload, chunk), frozenset()) | own
            continue
        channel = event.transfers[0].payload.channel
        m = size[channel]
        if event.kind is EventKind.START:
            sent: dict[int, list[Transfer]] = {}
            for t in event.transfers:
                if t.send:
                    sends += 1
                    sent.setdefault(t.peer % m, []).append(t)
            flying[channel].append([])
            for t in event.transfers:
                if t.send:
                    continue
                queue = sent.get(-t.peer % m)
                if not queue:
                    return None
                other = queue.pop(0)
                if (other.payload, other.part) != (t.payload, t.part) or (other.chunk - other.peer - t.chunk) % m:
                    return None
                # Offset of the same chunk as the peer counts it; its share as it is when the batch is posted.
                flying[channel][-1].append((t, shares.get((t.payload, (t.chunk - t.peer) % m), frozenset())))
            if any(sent.values()):
                return None
        else:
            for t, share in flying[channel].pop(0):
                item = (t.payload, t.chunk)
                if not t.payload.is_result:
                    continue
                if shares.get(item, frozenset()) & share:
                    problems.append(f"step {event.step}: {t} brings a share that is already there")
                shares[item] = shares.get(item, frozenset()) | share
    problems += [f"block at offsets {place} is never computed" for place in sorted(todo)]
    _check_rank(plan, 0, plan.template_program, problems, {channel: range(m) for channel, m in size.items()})
    for payload in filter(None, (plan.direction.row_result, plan.direction.column_result)):
        m = size[payload.channel]
        missing = sorted(set(range(m)) - shares.get((payload, 0), frozenset()))
        if missing:
            problems.append(f"{payload.value.upper()}: the shares of offsets {missing} never reach their owner")
    return plan.tile.size * sends


def _check_blocks(plan: Plan, programs: list[tuple[Event, ...]], problems: list[str]) -> None:
    n = plan.tile.size
    seen = bytearray(n * n)
    for rank, program in enumerate(programs):
        for event in program:
            if event.block is not None:
                place = event.block.q * n + event.block.kv
                if seen[place]:
                    problems.append(f"rank {rank}: block ({event.block.q}, {event.block.kv}) is computed twice")
                seen[place] = 1
    for place, count in enumerate(seen):
        if not count:
            problems.append(f"block ({place // n}, {place % n}) is never computed")


def _check_rank(
    plan: Plan,
    rank: int,
    program: tuple[Event, ...],
    problems: list[str],
    members: Mapping[Channel, Sequence[int]] | None = None,
) -> None:
    """Transfers that the executor can carry, inputs before use, and results only when they are complete.

    members: the ranks of the row and the column; a template has offsets there.
    """
    d = plan.direction
    known = {d.row_input, Payload.KV, d.row_result, d.column_result}
    if members is None:
        members = {Channel.ROW: plan.tile.row_group(rank), Channel.COLUMN: plan.tile.column_group(rank)}
    relative = isinstance(members[Channel.ROW], range)

    def report(event: Event, text: str) -> None:
        problems.append(f"rank {rank}, step {event.step}: {text}")

    row_input = plan.direction.row_input
    held = {(row_input, rank), (Payload.KV, rank)}
    left: dict[tuple[Payload, int], int] = {}  # blocks still to add to a result
    for event in program:
        if event.block is not None:
            for item in plan.results(event.block):
                left[item] = left.get(item, 0) + 1
    gone: set[tuple[Payload, int]] = set()
    arriving: set[tuple[Payload, int]] = set()  # started to be received, not finished yet
    for event in program:
        if event.block is not None:
            for payload, chunk in plan.inputs(event.block):
                if (payload, chunk) not in held:
                    report(event, f"block needs {payload.value.upper()} chunk {chunk}, which is not there yet")
            for item in plan.results(event.block):
                left[item] -= 1
                if item in gone:
                    report(
                        event,
                        f"block adds to {item[0].value.upper()} chunk {item[1]}, which has left already",
                    )
        before = set(arriving) if event.kind is EventKind.START else arriving
        for t in event.transfers:
            item = (t.payload, t.chunk)
            group = members[t.payload.channel]
            peer = t.peer % len(group) if relative else t.peer
            if t.payload not in known or t.part != "whole":
                report(event, f"{t}: a {d.value} has no transfer of {t.part} {t.payload.value.upper()} chunks")
            elif peer == rank or peer not in group or t.chunk not in group:
                report(event, f"{t}: peer and chunk must belong to the {t.payload.channel.value} group, not to oneself")
            elif event.kind is EventKind.START and not t.send and not t.payload.is_result:
                if item in held or item in arriving:
                    report(event, f"{t}: it is here already")
                arriving.add(item)
            if event.kind is EventKind.FINISH:
                if not t.send and not t.payload.is_result:
                    held.add(item)
                arriving.discard(item)
            elif t.payload.is_result:
                if t.send and (left.get(item, 0) or item in arriving):
                    report(event, f"{t}: its result is not complete")
                if t.send and item in gone:
                    report(event, f"{t}: it has left already")
                if not t.send and item in gone:
                    report(event, f"{t}: that chunk's result has left already")
                (gone if t.send else arriving).add(item)
            elif t.send and item not in held and item not in before:  # a queue passes on what an earlier batch brings
                report(event, f"{t}: it is not there yet")
    results = {item for item in left if item[1] != rank}
    for payload, chunk in sorted(results - gone, key=str):
        problems.append(f"rank {rank}: its part of {payload.value.upper()} chunk {chunk} is never sent")


def _check_step_counts(plan: Plan, problems: list[str]) -> None:
    def counts(rank: int) -> list[dict[Channel, int]]:
        return [
            {channel: sum(t.payload.channel is channel for t in step.transfers) for channel in Channel}
            for step in plan.steps(rank)
        ]

    by_rank = [counts(rank) for rank in range(plan.tile.size)]
    groups: dict[Channel, Callable[[int], tuple[int, ...]]] = {
        Channel.ROW: plan.tile.row_group,
        Channel.COLUMN: plan.tile.column_group,
    }
    for channel, members in groups.items():
        for rank in range(plan.tile.size):
            first = members(rank)[0]
            if [c[channel] for c in by_rank[rank]] != [c[channel] for c in by_rank[first]]:
                problems.append(
                    f"ranks {first} and {rank} of one {channel.value} group post different numbers of transfers"
                )
