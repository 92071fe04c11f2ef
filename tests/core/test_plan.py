"""Plans are proven before they run, and the proof fails on every kind of broken plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mesh_cp.cost import AttentionShape, mesh_bytes
from megatron_mesh_cp.plan import (
    EXCHANGES,
    Block,
    Channel,
    Direction,
    EventKind,
    Payload,
    PlanError,
    Step,
    Transfer,
    live_bytes,
    sent_messages,
)
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.tile import TileShape, all_tiles
from megatron_mesh_cp.verify import verify

WAYS = [(d, e) for d in Direction for e in EXCHANGES]
ALL = pytest.mark.parametrize(("direction", "exchange"), WAYS, ids=lambda x: getattr(x, "value", x))


@ALL
def test_all_tiles_up_to_64_ranks_are_proven(direction, exchange):
    """PT #174288, nccl #2130: matched order for each pair and no wait cycle, for all a*b <= 64."""
    for n in range(1, 65):
        for tile in all_tiles(n):
            report = verify(make_plan(tile, direction, exchange))
            results = (tile.a - 1) + (tile.b - 1) * (direction is Direction.BACKWARD)
            assert report.blocks == n * n
            assert report.transfers == n * ((tile.a - 1) + (tile.b - 1) + results)


@ALL
def test_proof_by_symmetry_agrees_with_the_simulation_of_every_rank(direction, exchange):
    for n in (*range(1, 13), 16, 20):
        for tile in all_tiles(n):
            plan = make_plan(tile, direction, exchange)
            every = replace(plan, explicit={rank: plan.steps(rank) for rank in range(n)})
            assert verify(plan) == verify(every)


@ALL
def test_1024_ranks_are_proven(direction, exchange):
    for tile in (TileShape(32, 32), TileShape(1, 1024), TileShape(1024, 1)):
        assert verify(make_plan(tile, direction, exchange)).ranks == 1024


@pytest.mark.parametrize("explicit", [False, True], ids=["template", "every rank"])
@pytest.mark.parametrize("fault", ["chunk", "peer", "lost", "twice", "early", "block"])
def test_both_ways_find_the_same_faults_in_a_template(fault, explicit):
    plan = make_plan(TileShape(3, 3), Direction.BACKWARD, "direct")

    def hurt(step):
        result = [t for t in step.transfers if t.payload is Payload.DKV]
        transfers = step.transfers
        if fault == "chunk":
            transfers = tuple(replace(t, chunk=(t.chunk + 1) % 3) if t in result and t.send else t for t in transfers)
        elif fault == "peer":
            transfers = tuple(replace(t, peer=t.peer + 1) if t in result and t.send else t for t in transfers)
        elif fault == "lost":
            transfers = tuple(t for t in transfers if t not in result)
        return replace(step, transfers=transfers)

    template = tuple(map(hurt, plan.template))
    if fault == "twice":
        template = (*template, Step(blocks=(Block(1, 1),)))
    elif fault == "early":
        template = tuple(replace(s, blocks=()) for s in template) + tuple(Step(blocks=s.blocks) for s in template)
    elif fault == "block":
        template = tuple(replace(s, blocks=tuple(b for b in s.blocks if b != Block(2, 1))) for s in template)
    bad = replace(plan, template=template)
    if explicit:
        bad = replace(bad, explicit={rank: bad.steps(rank) for rank in range(9)})
    with pytest.raises(PlanError):
        verify(bad)


@ALL
def test_messages_of_a_plan_are_the_formulas_of_the_cost_model(direction, exchange):
    shape = AttentionShape(128, 2, 8, 2, 64)
    for tile in all_tiles(24):
        counts = sent_messages(make_plan(tile, direction, exchange), 5)
        by_channel = {c: 0 for c in Channel}
        for payload, count in counts.items():
            by_channel[payload.channel] += count * shape.message_bytes(payload)
        assert by_channel == mesh_bytes(tile, direction, shape)


@ALL
def test_every_step_posts_as_many_transfers_on_all_ranks_of_a_group(direction, exchange):
    """MLM PR #5240, PT PR #74701: unbatched, unequal P2P builds communicators lazily and deadlocks."""
    for tile in all_tiles(12):
        plan = make_plan(tile, direction, exchange)
        for channel in Channel:
            counts = {
                tuple(sum(t.payload.channel is channel for t in step.transfers) for step in plan.steps(rank))
                for rank in range(12)
            }
            assert len(counts) == 1


@ALL
def test_own_chunks_come_first_so_that_compute_starts_at_once(direction, exchange):
    for tile in all_tiles(12):
        kinds = [e.kind for e in make_plan(tile, direction, exchange).program(3)]
        assert EventKind.COMPUTE in kinds[: kinds.index(EventKind.FINISH) if EventKind.FINISH in kinds else None]


@ALL
def test_received_kv_chunks_are_not_kept_alive_together(direction, exchange):
    """TE #952, PR #3411: a ring that keeps every received chunk needs n chunks; here two are enough."""
    shape = AttentionShape(128, 1, 8, 8, 64)
    message = {p: shape.message_bytes(p) for p in Payload}
    none = dict.fromkeys(Payload, 0)
    figures = live_bytes(make_plan(TileShape(1, 16), Direction.FORWARD, exchange), 0, message, none)
    assert max(figures) <= 3 * message[Payload.KV]  # own packed, one in use, one under way


# Faults put into a good plan: each must be found, by name.


def broken(direction, edit, tile=None, exchange="direct", rank=1):
    plan = make_plan(tile or TileShape(2, 2), direction, exchange)
    return replace(plan, explicit={rank: tuple(edit(list(plan.steps(rank))))})


def drop_transfer(payload, send):
    def edit(steps):
        return [
            replace(s, transfers=tuple(t for t in s.transfers if (t.payload, t.send) != (payload, send))) for s in steps
        ]

    return edit


def test_finds_a_block_that_is_missing_or_computed_twice():
    first = Block(1, 1)
    with pytest.raises(PlanError, match=r"block \(1, 1\) is never computed"):
        verify(
            broken(
                Direction.FORWARD,
                lambda s: [replace(x, blocks=tuple(b for b in x.blocks if b != first)) for x in s],
            )
        )
    with pytest.raises(PlanError, match=r"block \(1, 1\) is computed twice"):
        verify(broken(Direction.FORWARD, lambda s: [*s, Step(blocks=(first,))]))


def test_finds_a_block_whose_input_is_not_there():
    with pytest.raises(PlanError, match="needs KV chunk 3, which is not there yet"):
        verify(broken(Direction.FORWARD, lambda s: [Step(blocks=(Block(1, 3),)), *s]))


@pytest.mark.parametrize("payload", [Payload.Q, Payload.KV, Payload.O])
def test_finds_a_send_without_a_receive_and_the_wait_for_it(payload):
    with pytest.raises(PlanError, match=f"waits for ever.*{payload.value.upper()}|has no match"):
        verify(broken(Direction.FORWARD, drop_transfer(payload, send=False)))
    with pytest.raises(PlanError, match="waits for ever"):
        verify(broken(Direction.FORWARD, drop_transfer(payload, send=True)))


def test_finds_a_result_that_leaves_before_it_is_complete():
    """TE #2484: each partial reaches its owner once, and whole."""

    def early(steps):
        out = [t for s in steps for t in s.transfers if t.payload is Payload.O]
        rest = [replace(s, transfers=tuple(t for t in s.transfers if t.payload is not Payload.O)) for s in steps]
        return [rest[0], replace(rest[1], transfers=rest[1].transfers + tuple(out)), *rest[2:]]

    with pytest.raises(PlanError, match="its result is not complete"):
        verify(broken(Direction.FORWARD, early))


def test_finds_a_share_that_never_reaches_its_owner():
    plan = make_plan(TileShape(2, 1), Direction.FORWARD, "direct")
    none = {r: tuple(drop_transfer(Payload.O, False)(drop_transfer(Payload.O, True)(plan.steps(r)))) for r in (0, 1)}
    with pytest.raises(PlanError, match="never sent|never reach"):
        verify(replace(plan, explicit=none))


def test_finds_transfers_in_another_order_than_the_peer_has_them():
    def swap(steps):
        out = [i for i, s in enumerate(steps) if any(t.payload is Payload.KV for t in s.transfers)][:2]
        a, b = (tuple(t for t in steps[i].transfers if t.payload is Payload.KV) for i in out)
        for i, kv in zip(out, (b, a), strict=True):
            rest = tuple(t for t in steps[i].transfers if t.payload is not Payload.KV)
            steps[i] = replace(steps[i], transfers=rest + kv)
        return steps

    with pytest.raises(PlanError, match="has .* in its place|waits for ever|not there yet"):
        verify(broken(Direction.FORWARD, swap, TileShape(1, 4), "shift"))


def test_finds_a_wait_cycle_over_all_ranks():
    """Each rank receives from its neighbour before it sends: every pair matches, and nobody ever starts."""
    tile = TileShape(1, 3)
    plan = make_plan(tile, Direction.FORWARD, "direct")

    def cyclic(rank):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        kv = Payload.KV
        return (
            Step((Transfer(kv, before, before, False),), (Block(rank, before),)),
            Step((Transfer(kv, rank, after, True),)),
            Step((Transfer(kv, after, after, False),), (Block(rank, after), Block(rank, rank))),
            Step((Transfer(kv, rank, before, True),)),
        )

    with pytest.raises(PlanError, match="waits for ever"):
        verify(replace(plan, explicit={r: cyclic(r) for r in range(3)}))


def test_finds_unequal_numbers_of_transfers_in_a_step():
    def split(steps):
        first, *rest = steps
        kv = tuple(t for t in first.transfers if t.payload is Payload.KV)
        other = tuple(t for t in first.transfers if t.payload is not Payload.KV)
        return [Step(other), Step(kv, first.blocks), *rest]

    with pytest.raises(PlanError, match="different numbers of transfers"):
        verify(broken(Direction.FORWARD, split))


IMPOSSIBLE = {
    "a payload of the other direction": (Transfer(Payload.DQ, 0, 1, True), Transfer(Payload.DQ, 0, 0, False)),
    "part of a chunk": (Transfer(Payload.Q, 0, 1, True, "first"), Transfer(Payload.Q, 0, 0, False, "first")),
    "to oneself": (Transfer(Payload.Q, 0, 0, True), None),
    "over the wrong group": (Transfer(Payload.KV, 0, 1, True), Transfer(Payload.KV, 0, 0, False)),
    "a chunk that is here already": (Transfer(Payload.Q, 0, 1, True), Transfer(Payload.Q, 0, 0, False)),
}


@pytest.mark.parametrize(("first", "second"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_finds_transfers_that_the_executor_cannot_carry(first, second):
    """On top of a good plan for ranks 0 and 1 of tile 2x2, matched at both ends but for the one to oneself."""
    plan = make_plan(TileShape(2, 2), Direction.FORWARD, "direct")
    back = None if second is None else Transfer(second.payload, 1, 0, True, second.part)
    steps = {r: plan.steps(r) for r in range(4)}
    steps[0] = (*steps[0], Step((first,) if back is None else (first, replace(back, peer=1, send=False))))
    if second is not None:
        steps[1] = (*steps[1], Step((second, back)))
    with pytest.raises(PlanError, match="has no transfer of|must belong to|here already"):
        verify(replace(plan, explicit=steps))


def test_finds_steps_for_a_rank_that_is_not_there():
    plan = make_plan(TileShape(2, 2), Direction.FORWARD, "direct")
    with pytest.raises(PlanError, match="steps for rank 9"):
        verify(replace(plan, explicit={9: ()}))


def test_rejects_an_unknown_exchange():
    with pytest.raises(ValueError, match="'ring'.*direct, shift"):
        make_plan(TileShape(2, 2), Direction.FORWARD, "ring")
