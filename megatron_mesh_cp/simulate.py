"""The event simulator: how long a Plan takes on a Cluster, and where its ranks wait.

It reads the programs of the plan, and nothing else decides order. A rank runs its events strictly in order: START puts
a batch of transfers at the end of its queue (one queue for each channel, or one for both where `plan.links` is 1),
FINISH waits until that batch is complete, COMPUTE occupies the rank. A batch begins when every earlier batch of its
queue is complete. A transfer begins when both ends have begun the batch that holds it, moves after the latency of its
link, and shares ports as Note [Links] in network.py says, anew whenever a transfer starts or ends.

Note [Representatives]
~~~~~~~~~~~~~~~~~~~~~~
A template is the same for all ranks up to rotations of the two kinds of groups, so ranks that a rotation of the
machine maps onto each other do everything at the same time, and one of them stands for all. With w CP ranks a node and
consecutive groups of c ranks:

    n <= w             one node, all links alike: rank 0 stands for all
    w divides c        turning every consecutive group by w positions maps nodes to nodes: the w ranks of a node
    otherwise          turning the strided groups by lcm(c, w) / c does, if lcm(c, w) divides n: so many ranks
    otherwise          there is no such rotation: all ranks, as for a plan with explicit steps

In each case rank g is represented by g % (number of representatives). Whether a transfer leaves the node is decided
with the real ranks; the state of the peer is that of its representative. The tests compare with all ranks simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

from .cost import AttentionShape, Costs
from .events import Run, matched
from .layout import BlockKind
from .network import Network
from .plan import Block, Channel, Event, EventKind, Payload, Plan, Transfer
from .tile import TileShape

if TYPE_CHECKING:
    from .cluster import Cluster


@dataclass(frozen=True)
class Span:
    """Something a rank does for a while.

    lane: "row" or "column" (a transfer, from the moment that both ends have begun it), "compute" (a block) or "wait" (a
    FINISH). The transfers of a batch run side by side in their lane. label: "KV 12 <- 4", "QDO 3 -> 2", "block (3, 7)".
    """

    lane: str
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """What a simulation found, in seconds (or in the unit of the costs).

    seconds: until the last rank is done; compute: in blocks of one rank, the largest over ranks; wait: what the slowest
    rank spends in FINISH; spans: by CP rank, of those asked for, in order of start.
    """

    seconds: float
    compute: float
    wait: float
    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)


def simulate(
    plan: Plan,
    cluster: Cluster,
    shape: AttentionShape,
    *,
    tp: int = 1,
    causal: bool = True,
    spans_of: Sequence[int] = (),
) -> Timeline:
    """Time a plan on a cluster.

    Args:
        shape: the attention call of one CP rank (heads already divided by `tp`).
        tp: tensor-parallel size: CP ranks are `tp` GPUs apart.
        causal: causal mask in the zigzag layout (the diagonal block causal, all others half), or every block full.
        spans_of: CP ranks whose spans are wanted.

    Raises ValueError where tp does not fit a node or a rank of `spans_of` is not in the tile, and PlanError where ranks
    wait for each other for ever.
    """
    network = Network(cluster, tp)
    _check_ranks(plan, spans_of)
    full, diagonal, half = (
        cluster.block_seconds(shape, kind, plan.direction)
        # Which half is live depends on the rank, but both cost the same; see Note [Zigzag] in layout.py.
        for kind in (BlockKind.FULL, BlockKind.CAUSAL, BlockKind.KV_FIRST_HALF)
    )

    def block_seconds(block: Block) -> float:
        if not causal:
            return full
        return diagonal if block.q == block.kv else half

    count = representatives(plan, network.ranks_per_node)
    run = Run(plan, count, block_seconds, {rank % count for rank in spans_of})
    message = {payload: shape.message_bytes(payload) for payload in Payload}
    for source, target, transfer, rank in matched(run):
        run.add_flow(source, target, message[transfer.payload], network.way(rank, transfer.peer, count))
    run.play()
    last = max(run.ranks, key=lambda rank: rank.done)
    compute = max(rank.compute for rank in run.ranks)
    return Timeline(last.done, compute, last.wait, {rank: _spans_of(run, rank) for rank in spans_of})


def simulate_with(plan: Plan, costs: Costs, spans_of: Sequence[int] = ()) -> Timeline:
    """Time a template plan with one duration per payload and no topology: the model of the scheduler.

    All ranks do the same at the same time, so one stands for all. A batch takes, for each payload in it, its duration
    times the larger of its numbers of sends and receives; queues are those of `plan.links`.

    Raises ValueError for a plan with explicit steps, or where a rank of `spans_of` is not in the tile.
    """
    if plan.explicit:
        raise ValueError("simulate_with: a plan with explicit steps has no rank that stands for all; use simulate")
    _check_ranks(plan, spans_of)
    d = plan.direction
    duration = {d.row_input: costs.row_in, Payload.KV: costs.column_in, d.row_result: costs.row_result}
    if d.column_result is not None:
        duration[d.column_result] = costs.column_result
    now = compute = wait = 0.0
    free = {channel: 0.0 for channel in Channel}  # when the last batch of a queue is complete
    complete: dict[tuple[Transfer, ...], float] = {}
    log: list[tuple[float, float]] = []  # when each event happened; for a START, its batch
    for event in plan.template_program:
        start = now
        if event.block is not None:
            now += costs.block
            compute += costs.block
        elif event.kind is EventKind.FINISH:
            now = max(now, complete.pop(event.transfers))
            wait += now - start
        else:
            queue = event.transfers[0].payload.channel if plan.links == 2 else Channel.ROW
            start = max(now, free[queue])
            free[queue] = complete[event.transfers] = start + _batch_duration(event.transfers, duration)
            log.append((start, free[queue]))
            continue
        log.append((start, now))
    return Timeline(now, compute, wait, {r: _spans(plan.program(r), log, lambda i, _: log[i]) for r in spans_of})


def _batch_duration(transfers: tuple[Transfer, ...], duration: Mapping[Payload, float]) -> float:
    ends = Counter((t.payload, t.send) for t in transfers)
    return sum(duration[p] * max(ends[p, True], ends[p, False]) for p in {t.payload: None for t in transfers})


def representatives(plan: Plan, ranks_per_node: int) -> int:
    """How many ranks, from rank 0 on, stand for all; see Note [Representatives]."""
    return plan.tile.size if plan.explicit else representatives_of(plan.tile, ranks_per_node)


def representatives_of(tile: TileShape, ranks_per_node: int) -> int:
    """The same for any template of a tile."""
    n, consecutive, w = tile.size, tile.levels[0], ranks_per_node
    if n <= w:
        return 1
    if consecutive % w == 0:
        return w
    period = lcm(consecutive, w)
    return period if n % period == 0 else n


def _check_ranks(plan: Plan, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if not 0 <= rank < plan.tile.size:
            raise ValueError(f"spans_of {rank}: tile {plan.tile} has CP ranks 0..{plan.tile.size - 1}")


def _spans(
    program: Sequence[Event],
    log: Mapping[int, tuple[float, float]] | Sequence[tuple[float, float]],
    transfer_span: Callable[[int, int], tuple[float, float]],
) -> tuple[Span, ...]:
    """Spans of one rank, from when its events happened; transfer_span(index of a START, place in its batch)."""
    spans = []
    for index, event in enumerate(program):
        if event.block is not None:
            spans.append(Span("compute", *log[index], f"block ({event.block.q}, {event.block.kv})"))
        elif event.kind is EventKind.FINISH:
            start, end = log[index]
            if end > start:
                spans.append(Span("wait", start, end, ", ".join(t.label for t in event.transfers)))
        else:
            lane = event.transfers[0].payload.channel.value
            spans += [Span(lane, *transfer_span(index, k), t.label) for k, t in enumerate(event.transfers)]
    return tuple(sorted(spans, key=lambda span: (span.start, span.end)))


def _spans_of(run: Run, rank: int) -> tuple[Span, ...]:
    """The times of a representative, with the blocks and peers of the rank that it stands for."""
    own = rank % run.count
    program, log = run.programs[own], dict(run.ranks[own].log)
    for kind, _, index in run.ranks[own].ops:
        if kind is EventKind.COMPUTE:  # one delay for a run of blocks: cut it up
            now = log[index][0]
            while index < len(program) and program[index].block is not None:
                log[index] = now, now + run.block_seconds(program[index].block)
                now, index = log[index][1], index + 1

    def transfer_span(index: int, place: int) -> tuple[float, float]:
        flow = run.batches[own][index].flows[place]
        return flow.begin, flow.end

    return _spans(run.plan.program(rank), log, transfer_span)
