"""The simulator against hand arithmetic, against all ranks simulated, and against the model of the scheduler."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_mesh_cp.cluster import Cluster, KernelRates, Link
from megatron_mesh_cp.cost import AttentionShape, Costs
from megatron_mesh_cp.layout import BlockKind
from megatron_mesh_cp.network import Network
from megatron_mesh_cp.plan import EXCHANGES, Block, Direction, Payload, Plan, PlanError, Step, Transfer
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.simulate import representatives, simulate, simulate_with
from megatron_mesh_cp.tile import TileShape, all_tiles

FORWARD, BACKWARD = Direction
SHAPE = AttentionShape(1000, 1, 8, 4, 100)  # KV chunks as large as Q chunks: 1.6 MB
CHUNK = 1_600_000
STAT = 32_000


def cluster(gpus=8, nics=None, intra=100e9, inter=10e9, latency=(0.0, 0.0), flops=1e12):
    rates = [(flops,), (flops / 2,)] * 2  # forward full and causal, backward full and causal
    links = Link(intra, latency[0]), Link(inter, latency[1])
    return Cluster("test", "GPU", gpus, nics or gpus, *links, KernelRates((1,), *rates), flops, 10**10)


def recv(payload, chunk, peer):
    return Transfer(payload, chunk, peer, send=False)


def send(payload, chunk, peer):
    return Transfer(payload, chunk, peer, send=True)


def ring(n, row=False):
    """Each step passes the neighbour's chunk on and computes with the last one."""
    payload = Payload.Q if row else Payload.KV
    block = (lambda s: Block(s, 0)) if row else (lambda s: Block(0, s))
    steps = [Step((recv(payload, s + 1, 1), send(payload, s, -1)), (block(s),)) for s in range(n - 1)]
    tile = TileShape(n, 1) if row else TileShape(1, n)
    return Plan(tile, FORWARD, "shift", (*steps, Step(blocks=(block(n - 1),))))


def every_rank(plan):
    return replace(plan, explicit={rank: plan.steps(rank) for rank in range(plan.tile.size)})


def test_sizes_of_these_tests():
    assert SHAPE.message_bytes(Payload.Q) == SHAPE.message_bytes(Payload.KV) == CHUNK
    assert SHAPE.message_bytes(Payload.O) == CHUNK + STAT


@pytest.mark.parametrize("flops", [1e12, 1e15], ids=["compute-bound", "link-bound"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "gpus"), [(4, 8), (8, 4), (6, 2), (5, 4)])
def test_ring_takes_a_hop_or_a_block_each_step_and_then_the_last_block(n, gpus, causal, flops):
    c = cluster(gpus, flops=flops)
    hop = CHUNK / (c.intra if n <= gpus else c.inter).bandwidth
    blocks = [c.block_seconds(SHAPE, BlockKind.CAUSAL if causal else BlockKind.FULL, FORWARD)]
    blocks += [c.block_seconds(SHAPE, BlockKind.KV_FIRST_HALF if causal else BlockKind.FULL, FORWARD)] * (n - 1)
    found = simulate(ring(n), c, SHAPE, causal=causal)
    assert found.seconds == pytest.approx(sum(max(b, hop) for b in blocks[:-1]) + blocks[-1])
    assert found.compute == pytest.approx(sum(blocks))
    assert found.wait == pytest.approx(found.seconds - found.compute)


SQUARE = (
    Step(
        (recv(Payload.Q, 1, 1), send(Payload.Q, 0, -1), recv(Payload.KV, 1, 1), send(Payload.KV, 0, -1)),
        (Block(0, 0), Block(1, 0), Block(1, 1)),
    ),
    Step((recv(Payload.O, 0, -1), send(Payload.O, 1, 1)), (Block(0, 1),)),
)


@pytest.mark.parametrize("gpus", [8, 2])
@pytest.mark.parametrize("links", [1, 2])
def test_tile_2x2_by_hand(links, gpus):
    """In one node Q and KV share the GPU's port; in nodes of two they do not."""
    c = cluster(gpus, flops=1e14)
    plan = Plan(TileShape(2, 2), FORWARD, "direct", SQUARE, links=links)
    block = c.block_seconds(SHAPE, BlockKind.FULL, FORWARD)
    q, kv, o = (size / c.intra.bandwidth for size in (CHUNK, CHUNK, CHUNK + STAT))
    if gpus == 8:
        q_here = q if links == 1 else q + kv
        kv_here = q + kv
    else:
        kv = CHUNK / c.inter.bandwidth
        q_here, kv_here = q, (q if links == 1 else 0) + kv
    first = max(block, q_here) + block  # block (0, 0), then (1, 0), which needs Q
    second = max(first, kv_here) + block  # block (1, 1), which needs KV
    end = second + max(block, o)
    found = simulate(plan, c, SHAPE, causal=False)
    assert found.seconds == pytest.approx(end)
    assert found.wait == pytest.approx(end - 4 * block)


def test_a_faster_flow_takes_what_another_leaves():
    """Q is through its shared port first; then KV, twice as large, has the port alone."""
    shape = replace(SHAPE, kv_heads=8)
    c = cluster(flops=1e20)
    plan = Plan(TileShape(2, 2), FORWARD, "direct", (SQUARE[0],))
    spans = simulate(plan, c, shape, spans_of=[0]).spans[0]
    ends = {s.label: s.end for s in spans if s.lane in ("row", "column")}
    assert ends["Q 1 <- 1"] == pytest.approx(2 * CHUNK / 100e9)
    assert ends["KV 2 <- 2"] == pytest.approx(3 * CHUNK / 100e9)


def test_latency_comes_before_the_bytes_of_every_message():
    c = cluster(4, latency=(3e-6, 5e-6), flops=1e20)
    assert simulate(ring(4), c, SHAPE).seconds == pytest.approx(3 * (CHUNK / 100e9 + 3e-6))
    assert simulate(ring(8), c, SHAPE).seconds == pytest.approx(7 * (CHUNK / 10e9 + 5e-6))


@pytest.mark.parametrize(("tp", "nics", "share"), [(1, 8, 1), (2, 8, 1), (2, 4, 2), (8, 8, 1), (8, 4, 2), (8, 1, 8)])
def test_gpus_of_one_cp_rank_share_their_nics(tp, nics, share):
    """CP ranks are TP apart: a ring of 16 leaves the node every 8 / TP ranks, through NICs / 8 of a NIC for a GPU."""
    c = cluster(8, nics, flops=1e20)
    assert simulate(ring(16), c, SHAPE, tp=tp).seconds == pytest.approx(15 * CHUNK * share / 10e9)


def test_cp_ranks_share_a_nic():
    """Column groups over two nodes, all eight ranks of a node at once over four NICs: each gets half of one."""
    steps = (Step((recv(Payload.KV, 1, 1), send(Payload.KV, 0, -1)), (Block(0, 0),)),)
    plan = Plan(TileShape(8, 2), FORWARD, "direct", steps)
    assert simulate(plan, cluster(8, 4, flops=1e20), SHAPE).seconds == pytest.approx(2 * CHUNK / 10e9)
    assert simulate(plan, cluster(8, 8, flops=1e20), SHAPE).seconds == pytest.approx(CHUNK / 10e9)


def test_a_cp_group_in_one_node_uses_no_nic():
    assert simulate(ring(4), cluster(8, flops=1e20), SHAPE, tp=2).seconds == pytest.approx(3 * CHUNK / 100e9)


@pytest.mark.parametrize(("tp", "says"), [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8"), (0, "1, 2, 4, 8")])
def test_rejects_a_tp_that_does_not_fill_a_node(tp, says):
    with pytest.raises(ValueError, match=f"tp {tp} with 8 GPUs.*{says}"):
        simulate(ring(4), cluster(), SHAPE, tp=tp)


def test_shift_pushes_every_chunk_over_the_boundary_link_and_direct_only_half():
    """A row group of 16 over two nodes of 8: 15 chunks through one NIC against 8."""
    c = cluster(8, intra=1e15, flops=1e20)
    chain = ring(16, row=True)
    steps = [Step((recv(Payload.Q, s, s), send(Payload.Q, 0, -s))) for s in range(1, 16)]
    direct = replace(chain, template=(*steps, chain.template[-1]), depth=15)

    def crossing(plan, rank):
        spans = simulate(plan, c, SHAPE, spans_of=[rank]).spans[rank]
        peers = [int(s.label.split(" -> ")[1]) for s in spans if s.lane == "row" and "->" in s.label]
        return sum(peer // 8 != rank // 8 for peer in peers)

    assert [crossing(chain, rank) for rank in (0, 1, 7, 8)] == [15, 0, 0, 15]
    assert [crossing(direct, rank) for rank in range(16)] == [8] * 16
    hop = CHUNK / 10e9
    assert simulate(chain, c, SHAPE).seconds == pytest.approx(15 * hop, rel=1e-3)
    assert 8 * hop < simulate(direct, c, SHAPE).seconds < 15.001 * hop


QUOTIENTS = [(16, 8, "4x4 16x1 2x8t"), (32, 8, "2x16 16x2 4x8t"), (32, 4, "8x4t"), (24, 8, "6x4 3x8t"), (18, 4, "3x6")]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
@pytest.mark.parametrize(("n", "gpus", "tiles"), QUOTIENTS)
def test_representatives_stand_for_all_ranks(n, gpus, tiles, direction, exchange):
    for tile in map(TileShape.parse, tiles.split()):
        plan = make_plan(tile, direction, exchange)
        for nics, flops, links in ((gpus, 3e13, 2), (gpus // 2, 1e15, 1)):
            c = cluster(gpus, nics, latency=(1e-6, 5e-6), flops=flops)
            asked = [0, 5, n - 1]
            one = simulate(replace(plan, links=links), c, SHAPE, spans_of=asked)
            full = simulate(every_rank(replace(plan, links=links)), c, SHAPE, spans_of=asked)
            assert one.seconds == pytest.approx(full.seconds, rel=1e-9), (tile, nics)
            assert (one.compute, one.wait) == (pytest.approx(full.compute), pytest.approx(full.wait, abs=1e-12))
            for rank in asked:
                ours, theirs = (
                    {(s.lane, s.label): (s.start, s.end) for s in t.spans[rank] if s.lane != "wait"}
                    for t in (one, full)
                )
                assert ours.keys() == theirs.keys()
                assert all(ours[key] == pytest.approx(theirs[key], abs=1e-12) for key in ours)


def test_number_of_representatives():
    def found(text, w):
        return representatives(make_plan(TileShape.parse(text), FORWARD), w)

    assert found("2x4", 8) == 1
    assert found("16x2", 8) == found("16x16", 8) == found("2x16t", 8) == 8
    assert found("4x8", 8) == found("2x16", 8) == found("1x64", 8) == 8
    assert found("6x8", 4) == 12
    assert found("3x6", 8) == 18, "nodes of 8 do not divide 18 ranks"
    assert representatives(every_rank(make_plan(TileShape(4, 8), FORWARD)), 8) == 32


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_compute_and_wait_fill_the_time_and_spans_do_not_overlap(direction):
    c = cluster(4, flops=2e14, latency=(1e-6, 5e-6))
    for tile in all_tiles(16):
        found = simulate(make_plan(tile, direction), c, SHAPE, spans_of=[6])
        assert found.compute + found.wait == pytest.approx(found.seconds)
        spans = found.spans[6]
        busy = [s for s in spans if s.lane in ("compute", "wait")]
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(busy))
        assert sum(s.end - s.start for s in spans if s.lane == "compute") == pytest.approx(found.compute)
        transfers = [s for s in spans if s.lane in ("row", "column")]
        results = (tile.a - 1) + (tile.b - 1) * (direction is BACKWARD)
        assert len(transfers) == 2 * (tile.a - 1 + tile.b - 1 + results)
        assert all(0 <= s.start < s.end <= found.seconds + 1e-12 for s in transfers)


def test_spans_name_chunks_and_ranks_of_the_rank_that_is_asked():
    """Rank 13 of tile 4x4 in nodes of 8 is represented by rank 5; its peers and blocks are its own."""
    found = simulate(make_plan(TileShape(4, 4), FORWARD), cluster(), SHAPE, spans_of=[13])
    labels = {s.label for s in found.spans[13]}
    assert {"Q 12 <- 12", "Q 13 -> 14", "KV 1 <- 1", "KV 13 -> 9", "block (13, 13)", "block (14, 5)"} <= labels
    assert not any("block (5" in label for label in labels)


def test_rejects_spans_of_a_rank_that_is_not_there():
    for run in (lambda p: simulate(p, cluster(), SHAPE, spans_of=[4]), lambda p: simulate_with(p, None, [-1])):
        with pytest.raises(ValueError, match=r"spans_of (4|-1): tile 1x4 has CP ranks 0..3"):
            run(ring(4))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_that_waits_for_ever_is_named(depth):
    plan = replace(ring(4), depth=depth)
    lost = replace(plan, explicit={2: tuple(replace(s, transfers=s.transfers[:1]) for s in plan.steps(2))})
    with pytest.raises(PlanError, match=r"rank \d waits for ever in step \d: receive KV chunk \d from CP rank \d"):
        simulate(lost, cluster(), SHAPE)


def test_receives_before_sends_all_around_a_ring_never_end():
    """Every pair matches, but each rank finishes its receive before it sends."""
    kv = Payload.KV

    def steps(rank):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        return Step((recv(kv, before, before),), (Block(rank, before),)), Step((send(kv, rank, after),))

    with pytest.raises(PlanError, match="rank 0 waits for ever in step 0: receive KV chunk 2 from CP rank 2"):
        simulate(replace(ring(3), explicit={rank: steps(rank) for rank in range(3)}), cluster(), SHAPE)


@pytest.mark.parametrize("every", [False, True], ids=["representatives", "every rank"])
def test_representatives_keep_apart_whom_they_talk_to(every):
    """The first batch sends one rank on and receives from two ranks back, the second the reverse: no pair meets."""
    kv = Payload.KV
    steps = (
        Step((send(kv, 0, 1), recv(kv, -2, -2)), (Block(0, 0),)),
        Step((send(kv, 0, 2), recv(kv, -1, -1)), (Block(0, 0),)),
    )
    plan = Plan(TileShape(1, 5), FORWARD, "direct", steps, depth=2)
    with pytest.raises(PlanError, match="rank 0 waits for ever in step 1"):
        simulate(every_rank(plan) if every else plan, cluster(), SHAPE)


def test_many_that_send_to_one_share_its_port_in():
    kv = Payload.KV
    into = Step(tuple(recv(kv, peer, peer) for peer in (1, 2, 3)), (Block(0, 0),))
    steps = {0: (into,)} | {rank: (Step((send(kv, rank, 0),), (Block(rank, rank),)),) for rank in (1, 2, 3)}
    plan = replace(ring(4), explicit=steps)
    assert simulate(plan, cluster(flops=1e20), SHAPE).seconds == pytest.approx(3 * CHUNK / 100e9)
    assert simulate(plan, cluster(1, flops=1e20), SHAPE).seconds == pytest.approx(3 * CHUNK / 10e9)


def test_a_queue_is_first_in_first_out_over_both_channels_where_they_share_a_link():
    """Two KV batches at once take turns; Q waits behind them on a shared link only."""
    both = (recv(Payload.KV, 1, 1), send(Payload.KV, 0, -1)), (recv(Payload.KV, 2, 2), send(Payload.KV, 0, -2))
    q = (recv(Payload.Q, 1, 1), send(Payload.Q, 0, -1))
    blocks = tuple(Block(x, y) for x in range(2) for y in range(3))
    plan = Plan(TileShape(2, 3), FORWARD, "direct", (Step(both[0]), Step(both[1]), Step(q, blocks)), depth=4)
    c = cluster(2, flops=1e20, inter=100e9)

    def times(links):
        spans = simulate(replace(plan, links=links), c, SHAPE, spans_of=[0]).spans[0]
        return {s.label: (s.start, s.end) for s in spans if "<-" in s.label and s.lane != "wait"}

    t = CHUNK / 100e9
    apart, shared = times(2), times(1)
    assert apart["KV 2 <- 2"] == shared["KV 2 <- 2"] == pytest.approx((0, t))
    assert apart["KV 4 <- 4"] == shared["KV 4 <- 4"] == pytest.approx((t, 2 * t))
    assert apart["Q 1 <- 1"] == pytest.approx((0, t))
    assert shared["Q 1 <- 1"] == pytest.approx((2 * t, 3 * t))


def costs_of(c, shape, direction, links):
    size = {p: shape.message_bytes(p) / c.intra.bandwidth for p in Payload}
    return Costs(
        row_in=size[direction.row_input],
        column_in=size[Payload.KV],
        row_result=size[direction.row_result],
        column_result=size[Payload.DKV],
        block=c.block_seconds(shape, BlockKind.FULL, direction),
        links=links,
    )


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_uniform_costs_are_the_simulation_of_one_node_on_one_link(direction, exchange):
    for tile in all_tiles(12):
        for flops in (1e13, 1e14, 1e15):
            c = cluster(16, flops=flops)
            plan = replace(make_plan(tile, direction, exchange), links=1)
            found = simulate_with(plan, costs_of(c, SHAPE, direction, 1), spans_of=[7])
            real = simulate(plan, c, SHAPE, causal=False, spans_of=[7])
            assert found.seconds == pytest.approx(real.seconds)
            assert found.compute == pytest.approx(real.compute)
            assert found.wait == pytest.approx(real.wait, abs=1e-12)
            busy = [sorted(s.label for s in t.spans[7] if s.lane != "wait") for t in (found, real)]
            assert busy[0] == busy[1]


def test_uniform_costs_by_hand():
    plan = Plan(TileShape(2, 2), FORWARD, "direct", SQUARE, links=2)
    costs = Costs(row_in=2.0, column_in=5.0, row_result=3.0, column_result=0.0, block=1.0, links=2)
    # Blocks (0, 0) 0..1, (1, 0) 2..3, (1, 1) 5..6, (0, 1) 6..7, while O is under way 6..9.
    assert simulate_with(plan, costs).seconds == 9
    assert simulate_with(plan, costs).wait == 1 + 2 + 2
    # On one link KV comes after Q, 2..7: (1, 1) 7..8, O 8..11.
    assert simulate_with(replace(plan, links=1), costs).seconds == 11
    with pytest.raises(ValueError, match="explicit"):
        simulate_with(every_rank(plan), costs)


def test_a_batch_of_uniform_costs_takes_the_larger_of_its_sends_and_receives():
    batch = (recv(Payload.Q, 1, 1), recv(Payload.Q, 2, 2), send(Payload.Q, 0, -1), send(Payload.Q, 0, -2))
    plan = Plan(TileShape(3, 1), FORWARD, "direct", (Step(batch), Step(blocks=(Block(0, 0),))))
    costs = Costs(row_in=2.0, column_in=0.0, row_result=3.0, column_result=0.0, block=1.0, links=2)
    assert simulate_with(plan, costs).seconds == 4.0 + 1.0 - min(4.0, 1.0), "the block runs meanwhile"


@pytest.mark.parametrize(("tile", "limit"), [("16x16", 1.0), ("32x32", 4.0), ("32x32t", 4.0)])
def test_large_plans_are_quick(tile, limit):
    plan = make_plan(TileShape.parse(tile), BACKWARD)
    start = time.perf_counter()
    simulate(plan, cluster(), SHAPE)
    assert time.perf_counter() - start < limit


def test_bandwidth_of_ranks_that_send_together():
    assert [Network(cluster(8, 4), 1).inter_bandwidth(k) for k in (1, 2, 8)] == [10e9, 5e9, 5e9]
    assert [Network(cluster(8, 8), 4).inter_bandwidth(k) for k in (1, 2)] == [10e9, 10e9]
    assert [Network(cluster(8, 1), 2).inter_bandwidth(k) for k in (1, 2, 4)] == [5e9, 2.5e9, 1.25e9]
