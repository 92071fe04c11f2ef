"""The other algorithms: their bytes are the table of the communication model, their times are hand arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mesh_cp.closed_forms import Job, ring_seconds
from megatron_mesh_cp.cluster import Cluster, KernelRates, Link
from megatron_mesh_cp.cost import AttentionShape, mesh_bytes
from megatron_mesh_cp.peers import (
    attention2d,
    burst,
    compare_peers,
    double_ring,
    ring,
    startrail,
    travelling_plan,
    ulysses,
    usp,
)
from megatron_mesh_cp.plan import Direction, Payload
from megatron_mesh_cp.simulate import simulate
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.verify import verify

FORWARD, BACKWARD = Direction
EPS = 2 / 128  # one fp32 row statistic of a bf16 chunk with D = 128


def cluster(gpus=8, nics=None, intra=100e9, inter=10e9, latency=(0.0, 0.0), flops=1e14):
    rates = [(flops,), (flops / 2,)] * 2
    links = Link(intra, latency[0]), Link(inter, latency[1])
    return Cluster("test", "GPU", gpus, nics or gpus, *links, KernelRates((1,), *rates), flops, 10**11)


def shape(heads=32, kv_heads=32, seq_local=1024):
    return AttentionShape(seq_local, 1, heads, kv_heads, 128)


def units(peer, s):
    chunk = s.message_bytes(Payload.Q)
    return peer.bytes_forward / chunk, peer.bytes_backward / chunk


@pytest.mark.parametrize("kv_heads", [32, 16, 8])
@pytest.mark.parametrize("n", [2, 8, 32])
def test_bytes_are_the_table_of_the_communication_model(n, kv_heads):
    s, g = shape(kv_heads=kv_heads), kv_heads / 32
    job = Job(n, s, cluster(8))
    assert units(ring(job), s) == pytest.approx((2 * g * (n - 1), 4 * g * (n - 1)))
    assert units(double_ring(job), s) == pytest.approx((2 * g * (n - 1), 4 * g * (n - 1)))
    assert units(burst(job), s) == pytest.approx((2 * g * (n - 1), (n - 1) * (3 + 2 * EPS)))
    if kv_heads % n == 0:
        assert units(ulysses(job), s) == pytest.approx([(2 + 2 * g) * (n - 1) / n] * 2)
    u, m = (int(x.split()[-1]) for x in usp(job).note.split("x"))
    assert u * m == n
    assert u > 1
    a2a = (2 + 2 * g) * (u - 1) / u
    assert units(usp(job), s) == pytest.approx((a2a + 2 * g * (m - 1), a2a + 4 * g * (m - 1)))
    for a in (1, 2, n):
        b = n // a
        found = units(attention2d(job, TileShape(a, b)), s)
        assert found[0] == pytest.approx((a - 1) * (2 + EPS) + 2 * g * (b - 1))
        assert found[1] == pytest.approx((a - 1) * (3 + 2 * EPS) + 4 * g * (b - 1))


@pytest.mark.parametrize(("n", "c"), [(16, 2), (16, 4), (64, 8), (32, 4)])
def test_startrail_sends_what_its_paper_says(n, c):
    """arXiv 2407.00611: 2 B N H (P - C^2) / (C P) around the rings, 4 B N H (C-1) / P in collectives, with MHA.

    And the C chunks that a ring begins with, which come from another team.
    """
    s, job = shape(), Job(n, shape(), cluster(8))
    whole = n * s.message_bytes(Payload.Q)  # B N H
    paper = 2 * whole * (n - c * c) / (c * n) + 4 * whole * (c - 1) / n
    statistics = (c - 1) * EPS * whole / n  # lse goes along with O
    placed = c * 2 * whole / n
    assert startrail(job, c).bytes_forward == pytest.approx(paper + statistics + placed)
    backward = (c - 1) * (3 + 4 + 2 * EPS) + n / c * (3 + 2 * EPS)
    assert units(startrail(job, c), s)[1] == pytest.approx(backward)


def test_startrail_with_teams_of_one_sends_what_burst_sends():
    job = Job(16, shape(kv_heads=8), cluster())
    assert units(startrail(job, 1), job.shape) == pytest.approx(units(burst(job), job.shape))


@pytest.mark.parametrize(
    ("direction", "q"), [(FORWARD, False), (BACKWARD, False), (BACKWARD, True)], ids=["ring", "ring back", "burst back"]
)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_rings_are_plans_that_may_run(n, direction, q):
    plan = travelling_plan(n, direction, q=q)
    report = verify(plan)
    assert report.blocks == n * n
    assert report.transfers == n * (n - 1) * (1 if direction is FORWARD else 2)


@pytest.mark.parametrize("flops", [3e12, 1e14, 1e15], ids=["compute-bound", "between", "link-bound"])
@pytest.mark.parametrize(("n", "gpus", "tp"), [(16, 8, 1), (16, 16, 1), (64, 8, 1), (64, 8, 2), (16, 8, 8), (6, 8, 2)])
def test_closed_form_of_the_ring_agrees_with_its_simulation(n, gpus, tp, flops):
    c, s = cluster(gpus, gpus // 2, latency=(2e-6, 5e-6), flops=flops), shape(8, 8)
    job = Job(n, s, c, tp)
    for q, payload, result in ((False, Payload.KV, Payload.DKV), (True, Payload.QDO, Payload.DQ)):
        for d in (BACKWARD,) if q else Direction:
            moved = job.size(payload), job.size(result) if d is BACKWARD else 0
            closed = ring_seconds(n, job.blocks(d), job.hop(1), *moved)
            found = simulate(travelling_plan(n, d, q=q), c, s, tp=tp).seconds
            assert closed == pytest.approx(found, rel=0.03)


def test_ring_by_hand():
    """Four GPUs of a node, links that are the bottleneck: a message a step, then the last block, then dKV home."""
    c, s = cluster(flops=1e18), shape()
    hop = s.message_bytes(Payload.KV) / 100e9
    found = ring(Job(4, s, c))
    assert found.seconds_forward == pytest.approx(3 * hop, rel=1e-2)
    # KV | KV | KV + dKV | dKV | dKV
    assert found.seconds_backward == pytest.approx(6 * hop, rel=1e-2)
    assert found.wait_share == pytest.approx(1, abs=0.02)


def test_double_ring_uses_all_nics_where_the_ring_uses_one():
    """Two nodes of 8, links that are the bottleneck: every chunk through one NIC, or one through each."""
    c, s = cluster(intra=1e15, flops=1e18), shape()
    hop = s.message_bytes(Payload.KV) / 10e9
    one, two = ring(Job(16, s, c)), double_ring(Job(16, s, c))
    assert one.seconds_forward == pytest.approx(15 * hop, rel=1e-2)
    assert two.seconds_forward == pytest.approx(hop, rel=1e-2)
    shared = double_ring(Job(16, s, cluster(nics=2, intra=1e15, flops=1e18)))
    assert shared.seconds_forward == pytest.approx(4 * hop, rel=1e-2), "four ranks share a NIC"
    assert (one.bytes_forward, one.bytes_backward) == (two.bytes_forward, two.bytes_backward)


def test_double_ring_is_the_ring_in_one_node_and_over_nodes_of_one_rank():
    s = shape()
    for n, tp in ((8, 1), (4, 2), (16, 8)):
        job = Job(n, s, cluster(latency=(1e-6, 5e-6)), tp)
        for name in ("seconds_forward", "seconds_backward"):
            assert getattr(double_ring(job), name) == pytest.approx(getattr(ring(job), name))


def test_double_ring_hides_the_links_between_nodes_behind_the_blocks_of_a_turn():
    """A message between nodes takes three blocks, a turn has eight: only the ring waits."""
    s = shape()
    c = cluster(intra=1e15)
    block = Job(32, s, c).blocks(FORWARD)[1]
    c = replace(c, inter=Link(s.message_bytes(Payload.KV) / (3 * block), 0.0))
    job = Job(32, s, c)
    assert double_ring(job).seconds_forward == pytest.approx(job.compute(FORWARD))
    assert ring(job).seconds_forward == pytest.approx(31 * 3 * block + block)


def test_ulysses_by_hand():
    """Eight GPUs of a node: 7/8 of Q, K, V out and in, one causal call on the whole sequence, 7/8 of O back."""
    s = shape(8, 8)
    job = Job(8, s, cluster())
    found = ulysses(job)
    flops = 4 * 0.5 * (8 * 1024) ** 2 * 128
    expected = flops / 0.5e14 + 4 * s.message_bytes(Payload.Q) * 7 / 8 / 100e9
    assert found.seconds_forward == pytest.approx(expected)
    assert found.wait_share == pytest.approx(
        1 - 3.5 * flops / 0.5e14 / (found.seconds_forward + found.seconds_backward)
    )
    over_nodes = ulysses(Job(8, s, cluster(gpus=4, intra=1e15)))
    expected = flops / 0.5e14 + 4 * s.message_bytes(Payload.Q) * 4 / 8 / 10e9
    assert over_nodes.seconds_forward == pytest.approx(expected, rel=1e-3), "half of it goes to the other node"
    shared = ulysses(Job(8, s, cluster(gpus=4, nics=2, intra=1e15)))
    expected += 4 * s.message_bytes(Payload.Q) * 4 / 8 / 10e9
    assert shared.seconds_forward == pytest.approx(expected, rel=1e-3), "all ranks of a node at once, two on a NIC"


def test_usp_by_hand():
    """All-to-all over 2, then rings over 8 whose hops pass the boundary two at once, through one NIC for four ranks."""
    s = shape(2, 2)
    found = usp(Job(16, s, cluster(nics=2, intra=1e15, flops=1e18)))
    assert found.note == "a2a 2 x ring 8"
    assert found.seconds_forward == pytest.approx(7 * s.message_bytes(Payload.KV) * 2 / 10e9, rel=1e-2)
    slow = Job(16, s, cluster(flops=1e12))
    first, rest = slow.blocks(FORWARD, replace(s, seq_local=2048, heads=1, kv_heads=1))
    a2a = 4 * s.message_bytes(Payload.Q) / 2 / 100e9
    found = usp(slow)
    assert found.seconds_forward == pytest.approx(first + 7 * rest + a2a)
    last = s.message_bytes(Payload.DKV) / 10e9
    total = found.seconds_forward + found.seconds_backward
    assert found.wait_share == pytest.approx((2 * a2a + last) / total)


def test_attention2d_by_hand():
    """Tile 8x2 over two nodes of 8: rows inside a node, columns over NICs, nothing behind compute."""
    s, c = shape(8, 8), cluster()
    job = Job(16, s, c)
    q, kv, o = (s.message_bytes(p) for p in (Payload.Q, Payload.KV, Payload.O))
    expected = job.compute(FORWARD) + 7 * (q + o) / 100e9 + kv / 10e9
    assert attention2d(job, TileShape(8, 2)).seconds_forward == pytest.approx(expected)
    # Transposed: a column is two neighbours of a node, a row has four ranks in each node: two rows share eight NICs.
    expected = job.compute(FORWARD) + 7 * (q + o) * 2 / 8 / 10e9 + kv / 100e9
    assert attention2d(job, TileShape(8, 2, transposed=True)).seconds_forward == pytest.approx(expected)


def test_attention2d_of_tensor_parallel_ranks_fills_the_nics_of_a_node():
    """Tile 4x4, TP 4, two CP ranks a node: a column of each and half a row, each rank with four GPUs on four NICs."""
    s = shape(8, 8)
    job = Job(16, s, cluster(nics=4, intra=1e15, flops=1e18), tp=4)
    q, kv, o = (s.message_bytes(p) for p in (Payload.Q, Payload.KV, Payload.O))
    expected = (3 * (q + o) * 4 + 3 * kv * 8) / 4 / 10e9
    assert attention2d(job, TileShape(4, 4)).seconds_forward == pytest.approx(expected, rel=1e-2)


def test_attention2d_leaves_out_tiles_whose_groups_straddle_nodes():
    assert Job(24, shape(), cluster()).inside(3, 8) is None
    assert Job(24, shape(), cluster()).inside(2, 12) == (2, 4)
    assert Job(24, shape(), cluster()).inside(24, 1) == (8, 1)
    assert Job(6, shape(), cluster()).inside(3, 2) == (3, 2)


def test_attention2d_takes_the_fastest_tile():
    job = Job(64, shape(), cluster())
    best = attention2d(job)
    tile = TileShape.parse(best.note.removeprefix("tile "))
    assert (best.bytes_forward, best.bytes_backward) == tuple(
        sum(mesh_bytes(tile, d, job.shape).values()) for d in Direction
    )
    for other in (TileShape(8, 8), TileShape(1, 64), TileShape(64, 1)):
        found = attention2d(job, other)
        total = found.seconds_forward + found.seconds_backward
        assert best.seconds_forward + best.seconds_backward <= total


def test_startrail_by_hand():
    """Teams of 4 in two nodes of 8: one turn, no ring; gather, placing and reduction, none of them overlapped."""
    s, job = shape(8, 8), Job(16, shape(8, 8), cluster())
    q, kv, o = (s.message_bytes(p) for p in (Payload.Q, Payload.KV, Payload.O))
    expected = job.compute(FORWARD) + 3 * (q + kv + o) / 100e9 + 4 * kv / 10e9
    assert startrail(job, 4).seconds_forward == pytest.approx(expected)
    # Teams of 2: four turns of four blocks; three messages of two chunks, of two ranks at once, each with its NIC.
    job = replace(job, cluster=cluster(flops=1e18))
    expected = (q + kv + o) / 100e9 + (3 + 1) * 2 * kv / 10e9
    assert startrail(job, 2).seconds_forward == pytest.approx(expected, rel=1e-2)
    # Backward: Q, dO, statistics and dQ go around; a boundary is passed by two ranks of a node at once, and all eight
    # of them place their chunks at once, through one NIC.
    qdo, dq, dkv = (s.message_bytes(p) for p in (Payload.QDO, Payload.DQ, Payload.DKV))
    job = replace(job, cluster=cluster(nics=1, flops=1e18))
    expected = (qdo + kv + dq + dkv) / 100e9 + 2 * (3 * 2 * (qdo + dq)) / 10e9
    expected += 8 * 2 * (qdo + dq) / 10e9
    assert startrail(job, 2).seconds_backward == pytest.approx(expected, rel=1e-2)


def test_tensor_parallel_ranks_share_nics_and_nodes():
    """With TP 8 every hop is between nodes; the eight GPUs of a rank share four NICs."""
    s = shape(8, 8)
    found = ring(Job(4, s, cluster(nics=4, flops=1e18), tp=8))
    assert found.seconds_forward == pytest.approx(3 * s.message_bytes(Payload.KV) * 2 / 10e9, rel=1e-2)


IMPOSSIBLE = {
    "ulysses": (32, 1, shape(kv_heads=8), "8 KV heads on a tensor-parallel rank cannot be split over 32 CP ranks"),
    "usp": (16, 1, shape(kv_heads=1), "1 KV heads on a tensor-parallel rank cannot be split over 2 CP ranks"),
    "double-ring": (12, 1, shape(), "12 is not a multiple of the 8 CP ranks of a node"),
    "startrail": (6, 1, shape(), "no team of 2 or more whose square divides context_parallel_size 6"),
}


@pytest.mark.parametrize(("algo", "case"), IMPOSSIBLE.items(), ids=IMPOSSIBLE)
def test_says_why_an_algorithm_cannot_run(algo, case):
    n, tp, s, reason = case
    found = {p.algo: p for p in compare_peers(n, s, cluster(), tp=tp)}[algo]
    assert reason in found.impossible
    assert found.seconds_forward is None
    assert found.bytes_forward is None


def test_usp_has_no_degree_inside_a_node_of_one_rank():
    assert "1 CP ranks of a node" in usp(Job(16, shape(), cluster(), tp=8)).impossible


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "tp"), [(1, 1), (2, 1), (8, 4), (64, 1)])
def test_every_algorithm_waits_between_nothing_and_all_of_its_time(n, tp, causal):
    s = shape(32, 8)
    found = compare_peers(n, s, cluster(latency=(1e-6, 5e-6)), tp=tp, causal=causal)
    assert [p.algo for p in found] == ["ring", "burst", "double-ring", "ulysses", "usp", "attention2d", "startrail"]
    for p in found:
        if not p.impossible:
            assert 0 <= p.wait_share < 1
            assert p.peak_bytes > 0
            assert 0 < p.seconds_forward < p.seconds_backward


def test_one_rank_sends_nothing():
    s = shape()
    for p in compare_peers(1, s, cluster()):
        if not p.impossible:
            assert (p.bytes_forward, p.bytes_backward) == (0, 0)
            assert p.wait_share == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "tp", "says"), [(0, 1, "context_parallel_size"), (4, 3, "tp 3 with 8 GPUs")])
def test_rejects_sizes_that_make_no_sense(n, tp, says):
    with pytest.raises(ValueError, match=says):
        compare_peers(n, shape(), cluster(), tp=tp)
