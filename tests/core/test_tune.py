"""The automatic tile: least predicted time on a cluster, fewest bytes without one, within a memory limit."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from megatron_mesh_cp.bounds import block_total, lower_bound
from megatron_mesh_cp.cluster import Link, load_cluster
from megatron_mesh_cp.cost import AttentionShape, mesh_bytes
from megatron_mesh_cp.layout import BlockKind
from megatron_mesh_cp.plan import EXCHANGES, Direction, Payload, live_bytes
from megatron_mesh_cp.simulate import simulate
from megatron_mesh_cp.tile import TileShape, all_tiles
from megatron_mesh_cp.tune import (
    TIE,
    MemoryLimitError,
    best_tile,
    costs_for,
    decide,
    evaluate,
    rank_candidates,
    tiles_for,
)
from megatron_mesh_cp.verify import verify

SLOW = load_cluster("h800-hdr-1nic")
FAST = load_cluster("h100-ndr")


def shape(n: int, seq_len: int = 262144, heads: int = 32, kv_heads: int = 32) -> AttentionShape:
    return AttentionShape(seq_len // n, 1, heads, kv_heads, 128)


def seconds(decision) -> float:
    return decision.forward.seconds + decision.backward.seconds


@pytest.mark.parametrize("cluster", [SLOW, FAST], ids=lambda c: c.name)
@pytest.mark.parametrize("kv_heads", [32, 4])
def test_auto_is_as_fast_as_the_best_of_all_tiles(cluster, kv_heads):
    """The search leaves tiles out; the full list shows that nothing better was among them."""
    s = shape(32, kv_heads=kv_heads)
    decision = decide(32, s, cluster, backward="auto")
    for chosen in (decision.forward, decision.backward):
        every = rank_candidates(32, s, chosen.direction, cluster)
        assert len(every) == len(tiles_for(32, 8)) * len(EXCHANGES)
        assert chosen.seconds <= min(c.seconds for c in every) * (1 + TIE)
        verify(chosen.plan)


def test_one_tile_for_both_directions_is_the_best_for_their_sum():
    s = shape(16)
    decision = decide(16, s, SLOW)
    assert decision.forward.tile == decision.backward.tile
    by_tile = {}
    for direction in Direction:
        best: dict[TileShape, float] = {}
        for c in rank_candidates(16, s, direction, SLOW):
            best[c.tile] = min(best.get(c.tile, float("inf")), c.seconds)
        for tile, value in best.items():
            by_tile[tile] = by_tile.get(tile, 0.0) + value
    assert seconds(decision) <= min(by_tile.values()) * (1 + TIE)


def test_equally_fast_tiles_are_told_apart_by_bytes():
    """On links that cost nothing every tile takes the time of its blocks."""
    free = replace(FAST, intra=Link(1e15, 0.0), inter=Link(1e15, 0.0))
    chosen = decide(16, shape(16), free).forward
    assert chosen.bytes == min(sum(mesh_bytes(t, Direction.FORWARD, shape(16)).values()) for t in all_tiles(16))


def test_without_a_cluster_the_fewest_bytes_decide():
    for kv_heads in (32, 8, 4):
        decision = decide(64, shape(64, kv_heads=kv_heads))
        assert decision.forward.tile == decision.backward.tile == best_tile(64, shape(64, kv_heads=kv_heads))
        assert decision.forward.seconds is None
        assert "no cluster is known" in decision.why


def test_slow_links_between_nodes_make_the_tuner_keep_traffic_inside():
    """The same model on the same GPUs: other links, other tile or placement, and never more waiting than the ring."""
    slow, fast = (decide(64, shape(64), cluster) for cluster in (SLOW, FAST))
    assert (slow.forward.tile, slow.forward.exchange) != (fast.forward.tile, fast.forward.exchange)
    ring = evaluate(TileShape(1, 64), Direction.FORWARD, "shift", shape(64), SLOW)
    assert slow.forward.seconds < ring.seconds


def test_the_memory_limit_is_kept_and_the_smallest_need_is_named():
    s = shape(32)
    free = decide(32, s, FAST)
    need = max(free.forward.peak_bytes, free.backward.peak_bytes)
    tight = decide(32, s, FAST, memory_limit=need - 1)
    assert max(tight.forward.peak_bytes, tight.backward.peak_bytes) < need
    assert f"at most {(need - 1) / 1e9:.4g} GB held" in tight.why
    with pytest.raises(MemoryLimitError, match="the smallest need is ([0-9]+) bytes a rank, of tile") as caught:
        decide(32, s, FAST, memory_limit=1)
    smallest = caught.value.smallest
    assert decide(32, s, FAST, memory_limit=smallest).forward.peak_bytes <= smallest
    with pytest.raises(MemoryLimitError):
        decide(32, s, FAST, memory_limit=smallest - 1)


def test_a_given_tile_that_needs_more_than_the_limit_is_refused():
    with pytest.raises(MemoryLimitError, match="tile 8x4 needs [0-9]+; the smallest need is [0-9]+ bytes a rank, of"):
        decide(32, shape(32), FAST, tile="8x4", memory_limit=1000)


def test_a_given_tile_and_exchange_are_kept():
    decision = decide(32, shape(32), FAST, tile="4x8t", backward="2x16", exchange="shift")
    assert (str(decision.forward), str(decision.backward)) == ("4x8t shift", "2x16 shift")
    with pytest.raises(ValueError, match=r"--mesh-tile-shape 3x3 = 9: a\*b must be 32"):
        decide(32, shape(32), FAST, tile="3x3")
    with pytest.raises(ValueError, match="'ring'.*direct, shift"):
        decide(32, shape(32), FAST, exchange="ring")


def test_figures_of_a_candidate_are_those_of_its_plan():
    s = shape(16, kv_heads=8)
    c = evaluate(TileShape(4, 4), Direction.BACKWARD, "direct", s, SLOW)
    timeline = simulate(c.plan, SLOW, s)
    message, partial = ({p: f(p) for p in Payload} for f in (s.message_bytes, s.partial_bytes))
    assert (c.seconds, c.wait) == (timeline.seconds, timeline.wait)
    assert c.bytes == sum(mesh_bytes(c.tile, c.direction, s).values())
    assert c.peak_bytes == max(live_bytes(c.plan, 0, message, partial))
    assert c.costs == costs_for(SLOW, s, c.tile, c.direction)


def test_costs_know_which_link_a_channel_uses():
    s = shape(64, kv_heads=8)
    unit = s.message_bytes(Payload.Q)
    kv = s.message_bytes(Payload.KV)
    inside = costs_for(FAST, s, TileShape(8, 8), Direction.FORWARD)
    assert inside.links == 2  # rows over NVLink, columns over the NICs
    assert inside.row_in == pytest.approx(unit / FAST.intra.bandwidth + FAST.intra.latency)
    assert inside.column_in == pytest.approx(kv / FAST.inter.bandwidth + FAST.inter.latency)
    assert inside.block == FAST.block_seconds(s, BlockKind.KV_FIRST_HALF, Direction.FORWARD)
    # All GPUs of a node at once on one NIC; a row over two nodes: `shift` waits for the boundary hop alone.
    assert costs_for(SLOW, s, TileShape(8, 8), Direction.FORWARD).column_in == pytest.approx(
        8 * kv / SLOW.inter.bandwidth + SLOW.inter.latency
    )
    wide = costs_for(SLOW, s, TileShape(16, 4), Direction.FORWARD, exchange="shift")
    assert wide.row_in == pytest.approx(unit / SLOW.inter.bandwidth + SLOW.inter.latency)
    assert wide.links == 1  # both wait for NICs
    one_node = costs_for(FAST, shape(8), TileShape(4, 2), Direction.FORWARD)
    assert one_node.links == 1  # both over NVLink
    # TP 8: one CP rank a node, nothing inside it.
    spread = costs_for(FAST, s, TileShape(8, 8), Direction.FORWARD, tp=8)
    assert spread.row_in == pytest.approx(unit / FAST.inter.bandwidth + FAST.inter.latency)


def test_a_decision_for_1024_ranks_is_made_in_the_time_of_a_launch():
    begin = time.process_time()
    decide(1024, shape(1024, 1 << 20, kv_heads=4), FAST)
    assert time.process_time() - begin < 60


@pytest.mark.parametrize("cluster", [SLOW, FAST, load_cluster("h800-hdr")], ids=lambda c: c.name)
@pytest.mark.parametrize(("n", "kv_heads", "tp"), [(8, 32, 1), (12, 8, 1), (32, 32, 1), (32, 4, 4)])
def test_no_simulated_schedule_beats_the_lower_bound(cluster, n, kv_heads, tp):
    """Every tile, placement, exchange and direction; and the bound is not idle: some schedules reach it."""
    s = AttentionShape(65536 // n, 1, 32 // tp, kv_heads // tp, 128)
    ratios = []
    for direction in Direction:
        for c in rank_candidates(n, s, direction, cluster, tp=tp):
            ratios.append(c.seconds / c.bound)
            assert ratios[-1] >= 1 - 1e-9, (str(c), direction)
    assert min(ratios) < 1.02


def test_the_lower_bound_by_hand():
    """Tile 2x2 on one node: three links' worth of KV in, O out; two nodes of one NIC each: all GPUs share it."""
    s = shape(4, 8192)
    q, kv, o = (s.message_bytes(p) for p in (Payload.Q, Payload.KV, Payload.O))
    blocks = block_total(TileShape(2, 2), Direction.FORWARD, FAST, s)
    port = (q + kv + o) / FAST.intra.bandwidth
    assert lower_bound(TileShape(2, 2), Direction.FORWARD, "direct", FAST, s) == pytest.approx(max(blocks, port))
    slow = replace(FAST, intra=Link(1e9, 0.0))
    port = (q + kv + o) / 1e9
    assert lower_bound(TileShape(2, 2), Direction.FORWARD, "direct", slow, s) == pytest.approx(port)
    s = shape(16, 8192)
    nic = 8 * s.message_bytes(Payload.KV) / SLOW.inter.bandwidth
    assert lower_bound(TileShape(8, 2), Direction.FORWARD, "direct", SLOW, s) == pytest.approx(nic)
