"""The other context-parallel algorithms, on the same clusters and with the same block times, to compare with.

`ring` and `burst` are Plans and are simulated; the others are closed forms (closed_forms.py) that overlap with compute
only what the algorithm overlaps. Where a choice is open (degree of an all-to-all, tile, team) the fastest is taken. In
units of one Q chunk, g = KV heads / Q heads, eps = fp32 row statistics:

                        bytes forward                      bytes backward
    ring, double-ring   2g(n-1)                            4g(n-1)
    burst               2g(n-1)                            (n-1)(3 + 2 eps)
    ulysses             (2 + 2g)(n-1)/n                    the same
    usp                 (2 + 2g)(u-1)/u + 2g(n/u - 1)      (2 + 2g)(u-1)/u + 4g(n/u - 1)
    attention2d         (a-1)(2 + eps) + 2g(b-1)           (a-1)(3 + 2 eps) + 4g(b-1)
    startrail           see `startrail`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .closed_forms import Job, ring_seconds
from .cluster import Cluster
from .cost import AttentionShape, mesh_bytes
from .plan import Block, Direction, Payload, Plan, Step, Transfer, live_bytes
from .simulate import simulate
from .tile import TileShape, all_tiles

FORWARD, BACKWARD = Direction


@dataclass(frozen=True)
class Peer:
    """What one algorithm costs a CP rank for one attention call.

    seconds, bytes (sent by a rank): forward and backward; wait_share: part of both that is not spent in blocks;
    peak_bytes: estimate of what it holds beyond the caller's tensors (chunks, messages, partial results); note: what
    was chosen. Where the algorithm cannot run, `impossible` says why and the figures are None.
    """

    algo: str
    seconds_forward: float | None = None
    seconds_backward: float | None = None
    bytes_forward: int | None = None
    bytes_backward: int | None = None
    wait_share: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    impossible: str = ""


def compare_peers(
    n: int, shape: AttentionShape, cluster: Cluster, *, tp: int = 1, causal: bool = True
) -> tuple[Peer, ...]:
    """Every other algorithm for one attention call; shape: of one CP rank, heads divided by tp."""
    job = Job(n, shape, cluster, tp, causal)
    return tuple(algorithm(job) for algorithm in (ring, burst, double_ring, ulysses, usp, attention2d, startrail))


def travelling_plan(n: int, direction: Direction, *, q: bool = False) -> Plan:
    """The ring as Transformer Engine runs it, n ranks, one step a block, one batch in flight.

    KV (q: what belongs to Q) passes from neighbour to neighbour. In the backward the partial result of a chunk travels
    along, one step behind: it starts at the rank of offset 1, each rank adds its share and passes it on, and after n-1
    messages it is with its owner:

        step   in     out       block    and, in the backward, in     out
        0      KV 1   KV 0      KV 0
        1      KV 2   KV 1      KV 1
        2      KV 3   KV 2      KV 2                           dKV 2  dKV 1
        ...
        n                                                      dKV 0  dKV n-1
    """
    payload = direction.row_input if q else Payload.KV
    result = direction.row_result if q else direction.column_result
    results = direction is BACKWARD and n > 1
    steps = []
    for s in range(n + 1 if results else n):
        transfers: list[Transfer] = []
        if s < n - 1:
            transfers += [Transfer(payload, s + 1, 1, send=False), Transfer(payload, s, -1, send=True)]
        if results and s >= 2:
            transfers += [Transfer(result, s % n, 1, send=False), Transfer(result, s - 1, -1, send=True)]
        blocks = (Block(s, 0) if q else Block(0, s),) if s < n else ()
        steps.append(Step(tuple(transfers), blocks))
    return Plan(TileShape(n, 1) if q else TileShape(1, n), direction, "shift", tuple(steps))


def ring(job: Job) -> Peer:
    """Ring attention of Megatron and Transformer Engine (cp_comm_type p2p); arXiv 2310.01889."""
    return _travelling(job, "ring", q_in_backward=False)


def burst(job: Job) -> Peer:
    """BurstAttention (arXiv 2403.09347): the ring's forward; Q, dO, row statistics and dQ travel in the backward."""
    return _travelling(job, "burst", q_in_backward=True)


def _travelling(job: Job, algo: str, q_in_backward: bool) -> Peer:
    (forward, peak), (backward, peak_backward) = (
        _simulated(job, FORWARD, False),
        _simulated(job, BACKWARD, q_in_backward),
    )
    tiles = TileShape(1, job.n), TileShape(job.n, 1) if q_in_backward else TileShape(1, job.n)
    sent = [sum(mesh_bytes(*item, job.shape).values()) for item in zip(tiles, Direction, strict=True)]
    return _peer(job, algo, (forward, backward), sent, max(peak, peak_backward))


@lru_cache(maxsize=64)
def _simulated(job: Job, direction: Direction, q: bool) -> tuple[float, int]:
    """Seconds of a travelling plan, and the most bytes of messages and partial results that a rank holds at once."""
    plan = travelling_plan(job.n, direction, q=q)
    message = {p: job.shape.message_bytes(p) for p in Payload}
    live = live_bytes(plan, 0, message, {p: job.shape.partial_bytes(p) for p in Payload})
    return simulate(plan, job.cluster, job.shape, tp=job.tp, causal=job.causal).seconds, max(live)


def _peer(
    job: Job,
    algo: str,
    seconds: Sequence[float],
    sent: Sequence[int],
    peak: int,
    note: str = "",
    compute: float | None = None,
) -> Peer:
    """compute: seconds of blocks forward and backward; default those of n blocks of a chunk."""
    if compute is None:
        compute = sum(map(job.compute, Direction))
    return Peer(algo, *seconds, *sent, max(0.0, 1 - compute / sum(seconds)), peak, note)


def double_ring(job: Job) -> Peer:
    """Double-Ring-Attention of LoongTrain (arXiv 2406.18485): as many bytes as the ring, better placed.

    Rings of w ranks inside each node; meanwhile every rank sends the chunk it started the inner ring with to its
    counterpart in the next node, so that all NICs work and have the time of w blocks.
    """
    n, w = job.n, job.in_node
    if n % w:
        reason = f"context_parallel_size {n} is not a multiple of the {w} CP ranks of a node"
        return Peer("double-ring", impossible=reason)
    kv, dkv, inner, outer = job.size(Payload.KV), job.size(Payload.DKV), job.hop(1, inside=True), job.hop(w)
    seconds = []
    for direction, result in ((FORWARD, 0), (BACKWARD, dkv)):
        first, rest = job.blocks(direction)
        home = inner(result) if result and w > 1 else 0.0  # hides behind the next turn, but for the last one
        turns = [ring_seconds(w, (block, rest), inner, kv, result) - home for block in (first, rest)]
        seconds.append(ring_seconds(n // w, (turns[0], turns[1]), outer, kv, result) + home)
    peak = _simulated(job, BACKWARD, False)[1] + (kv + dkv) * (n > w)
    return _peer(job, "double-ring", seconds, ((n - 1) * kv, (n - 1) * (kv + dkv)), peak, f"{w} CP ranks a node")


def ulysses(job: Job) -> Peer:
    """DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all from a part of the sequence to a part of the heads and back."""
    n = job.n
    if job.shape.kv_heads % n:
        return Peer("ulysses", impossible=_heads(job, n))
    return _heads_and_ring(job, "ulysses", n, "")


def usp(job: Job) -> Peer:
    """USP (arXiv 2405.07719), Megatron's a2a+p2p: all-to-all over u ranks of a node, a ring over n/u."""
    n, w, heads = job.n, job.in_node, job.shape.kv_heads
    degrees = [u for u in range(2, w + 1) if n % u == 0 and w % u == 0]
    fitting = [u for u in degrees if heads % u == 0]
    if not degrees:
        return Peer("usp", impossible=f"no all-to-all degree of 2 or more divides the {w} CP ranks of a node and {n}")
    if not fitting:
        return Peer("usp", impossible=_heads(job, degrees[0]))
    return min((_heads_and_ring(job, "usp", u, f"a2a {u} x ring {n // u}") for u in fitting), key=_seconds)


def _heads(job: Job, u: int) -> str:
    return f"{job.shape.kv_heads} KV heads on a tensor-parallel rank cannot be split over {u} CP ranks"


def _heads_and_ring(job: Job, algo: str, u: int, note: str) -> Peer:
    """All-to-all over u consecutive ranks, not overlapped, around u rings over n/u that cross a boundary together."""
    s, m = job.shape, job.n // u
    part = replace(s, seq_local=s.seq_local * u, heads=s.heads // u, kv_heads=s.kv_heads // u)
    qkv, kv, hop = job.size(Payload.Q, Payload.KV), job.size(Payload.KV), job.hop(u)
    around = job.all_to_all(u, qkv) + job.all_to_all(u, job.o_bytes) if u > 1 else 0.0
    seconds, compute = [], 0.0
    for direction, result in ((FORWARD, 0), (BACKWARD, job.size(Payload.DKV))):
        first, rest = job.blocks(direction, part)
        seconds.append(around + ring_seconds(m, (first, rest), hop, kv, result))
        compute += first + (m - 1) * rest
    moved = (qkv + job.o_bytes) * (u - 1) // u
    peak = 2 * (qkv + job.o_bytes)  # Q, K, V, O by heads, and their gradients
    if m > 1:
        peak += 2 * job.size(Payload.KV, Payload.DKV)
    return _peer(job, algo, seconds, (moved + kv * (m - 1), moved + 2 * kv * (m - 1)), peak, note, compute)


def attention2d(job: Job, tile: TileShape | None = None) -> Peer:
    """Attention2D (arXiv 2503.15758): Q gathered along rows, K and V along columns, O reduced along rows.

    The same tiles and bytes as the mesh, by collectives one after the other, none of them behind compute. The backward
    likewise: Q, dO, statistics and KV gathered, dQ and dK, dV reduced. tile: default the fastest, either placement.
    """
    if tile is None:
        tiles = [t for square in all_tiles(job.n) for t in (square, replace(square, transposed=True))]
        return min((attention2d(job, t) for t in tiles if job.inside(*t.levels)), key=_seconds)
    inside = job.inside(*tile.levels)
    row_inside, column_inside = inside[::-1] if tile.transposed else inside
    seconds, peaks = [], []
    for d in Direction:
        row = [job.gather(tile.a, row_inside, job.size(p)) for p in (d.row_input, d.row_result)]
        columns = [Payload.KV] if d is FORWARD else [Payload.KV, Payload.DKV]
        column = [job.gather(tile.b, column_inside, job.size(p)) for p in columns]
        seconds.append(sum(row) + sum(column) + job.compute(d))
        peak = tile.a * (job.size(d.row_input) + job.shape.partial_bytes(d.row_result)) + tile.b * job.size(Payload.KV)
        peaks.append(peak + (0 if d is FORWARD else tile.b * job.shape.partial_bytes(Payload.DKV)))
    sent = [sum(mesh_bytes(tile, d, job.shape).values()) for d in Direction]
    return _peer(job, "attention2d", seconds, sent, max(peaks), f"tile {tile}")


def startrail(job: Job, team: int | None = None) -> Peer:
    """StarTrail (arXiv 2407.00611, NeurIPS 2025): teams of C ranks, rings of n/C^2 between them.

    A team gathers its Q, K and V; each of its ranks then sees the K, V of n/C^2 teams, C chunks a message, and O is
    reduced in the team. The paper's volumes (from a summary of it, not from its text) for sequence length N, hidden
    size H, batch B, P = n ranks are 2 B N H (P - C^2) / (C P) around the rings and 4 B N H (C-1) / P for the
    collectives. Each rank of a team has a ring of its own, which begins with the K, V of another team, so C chunks go
    there first; that is n/C chunks in all. With KV heads counted, and row statistics that go along with O and with Q:

        forward     (C-1)(2 + 2g + eps)      + (n/C) 2g
        backward    (C-1)(3 + 4g + 2 eps)    + (n/C)(3 + 2 eps)

    In its backward K, V and their gradients stay and dQ travels. The volume is our reading, with the roles so swapped:
    a team gathers Q, dO, statistics, K and V and reduces dQ, dK and dV; Q, dO, statistics and dQ go around.
    team: C, default the fastest.
    """
    n, w = job.n, job.in_node
    if team is None:
        fits = [c for c in range(2, n + 1) if n % (c * c) == 0 and job.inside(c, n // c)]
        if not fits:
            reason = f"no team of 2 or more whose square divides context_parallel_size {n} fits the nodes"
            return Peer("startrail", impossible=reason)
        return min((startrail(job, c) for c in fits), key=_seconds)
    c, turns, inside = team, n // team**2, job.inside(team, n // team)[0]
    hop = job.hop(min(c, w))  # the ranks of a team pass a node boundary together
    spread = job.hop(w)  # to the teams where the rings begin: all ranks of a node leave it at once
    q, kv, o, qdo, dq, dkv = map(job.size, (Payload.Q, Payload.KV, Payload.O, Payload.QDO, Payload.DQ, Payload.DKV))
    seconds, sent = [], []
    for direction, gathered, travels, result, reduced in (
        (FORWARD, q + kv, kv, 0, o),
        (BACKWARD, qdo + kv, qdo, dq, dq + dkv),
    ):
        turn = job.compute(direction) / turns
        around = (turns - 1) * max(turn, hop(c * (travels + result))) + turn
        collectives = job.gather(c, inside, gathered) + job.gather(c, inside, reduced)
        placed = c if c > 1 else 0
        there, back = (spread(size) if size else 0.0 for size in (placed * travels, c * result if n > 1 else 0))
        seconds.append(collectives + there + around + back)
        sent.append((c - 1) * (gathered + reduced) + (n // c - c + placed) * (travels + result))
    partial = job.shape.partial_bytes
    peaks = (
        c * (q + kv + partial(Payload.O) + 2 * kv * (turns > 1)),
        c * (qdo + kv + partial(Payload.DQ) + partial(Payload.DKV) + 2 * (qdo + dq) * (turns > 1)),
    )
    return _peer(job, "startrail", seconds, sent, max(peaks), f"teams of {c}")


def _seconds(peer: Peer) -> float:
    return peer.seconds_forward + peer.seconds_backward
