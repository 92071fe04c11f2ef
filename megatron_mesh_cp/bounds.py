"""What no schedule of a tile can beat on a cluster, whatever its order."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .cost import AttentionShape
from .layout import BlockKind
from .network import Network
from .plan import Direction, Payload, Place
from .schedule import transfers_of
from .simulate import representatives_of
from .tile import TileShape

if TYPE_CHECKING:
    from .cluster import Cluster

Port = tuple[str, int]


def lower_bound(
    tile: TileShape,
    direction: Direction,
    exchange: str,
    cluster: Cluster,
    shape: AttentionShape,
    *,
    tp: int = 1,
    causal: bool = True,
) -> float:
    """Seconds; the largest of

    * the blocks of one rank;
    * the messages of each port (Note [Links] in network.py), of all ranks that use it;
    * for each rank, its own KV inputs and then its row results, since no O or dQ can leave before all KV are in;
      likewise its row inputs and then its dK and dV.
    """
    network = Network(cluster, tp)
    count = representatives_of(tile, network.ranks_per_node)
    transfers = transfers_of(tile, direction, exchange)
    message = {payload: shape.message_bytes(payload) for payload in Payload}
    ports: dict[Port, float] = defaultdict(float)
    longest = 0.0
    for rank in range(count):
        own: dict[tuple[Payload, bool], dict[Port, float]] = defaultdict(lambda: defaultdict(float))
        for t in Place(tile, rank).transfers(transfers):
            way = network.way(rank, t.peer, count) if t.send else network.way(t.peer, rank, count)
            end = 0 if t.send else 1
            seconds = message[t.payload] * way.weights[end] / way.bandwidth
            ports[way.ports[end]] += seconds
            own[t.payload, t.send][way.ports[end]] += seconds
        chains = [(Payload.KV, direction.row_result), (direction.row_input, direction.column_result)]
        longest = max(longest, *(_most(own[i, False]) + _most(own[r, True]) for i, r in chains if r is not None))
    return max(longest, _most(ports), block_total(tile, direction, cluster, shape, causal))


def block_total(
    tile: TileShape, direction: Direction, cluster: Cluster, shape: AttentionShape, causal: bool = True
) -> float:
    """Seconds of all blocks of one rank: the own one on the diagonal, all others half (or every one full)."""
    others = tile.size - 1
    first, other = (BlockKind.CAUSAL, BlockKind.KV_FIRST_HALF) if causal else (BlockKind.FULL, BlockKind.FULL)
    own = cluster.block_seconds(shape, first, direction)
    return own + others * cluster.block_seconds(shape, other, direction)


def _most(seconds: dict[Port, float]) -> float:
    return max(seconds.values(), default=0.0)
