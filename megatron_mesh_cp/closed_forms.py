"""Closed forms on the links of a cluster, for algorithms that are not plans: hops, rings, all-to-alls, gathers.

A closed form takes the slowest hop of a ring for all of its steps, and lets messages that cross a node boundary
together share the NICs they use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .cluster import Cluster
from .cost import AttentionShape
from .layout import BlockKind
from .network import Network
from .plan import Direction, Payload


@dataclass(frozen=True)
class Job:
    """One attention call over n CP ranks: its shape on one of them (heads divided by tp), the machine, the mask.

    Raises ValueError where n is not positive or tp does not fit a node.
    """

    n: int
    shape: AttentionShape
    cluster: Cluster
    tp: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"context_parallel_size must be at least 1, got {self.n}")
        _ = self.network

    @cached_property
    def network(self) -> Network:
        return Network(self.cluster, self.tp)

    @property
    def in_node(self) -> int:
        """CP ranks of this call in one node."""
        return min(self.n, self.network.ranks_per_node)

    @property
    def o_bytes(self) -> int:
        """Bytes of one O chunk without row statistics."""
        return self.shape.rows * (self.shape.v_head_dim or self.shape.head_dim) * self.shape.item_bytes

    def size(self, *payloads: Payload) -> int:
        """Bytes of one message of each payload, together."""
        return sum(map(self.shape.message_bytes, payloads))

    def blocks(self, direction: Direction, shape: AttentionShape | None = None) -> tuple[float, float]:
        """Seconds of the diagonal block and of any other."""
        kinds = (BlockKind.CAUSAL, BlockKind.KV_FIRST_HALF) if self.causal else (BlockKind.FULL, BlockKind.FULL)
        first, rest = (self.cluster.block_seconds(shape or self.shape, kind, direction) for kind in kinds)
        return first, rest

    def compute(self, direction: Direction) -> float:
        """Seconds of the n blocks of a rank."""
        first, rest = self.blocks(direction)
        return first + (self.n - 1) * rest

    def hop(self, crossing: int, inside: bool | None = None) -> Callable[[int], float]:
        """Seconds of a message by its bytes, where `crossing` ranks of a node send to the next one at once.

        inside: the message stays in the node; default: where all ranks are in one node.
        """
        intra, inter = self.cluster.intra, self.cluster.inter
        if self.n <= self.network.ranks_per_node if inside is None else inside:
            return lambda size: intra.latency + size / intra.bandwidth
        bandwidth = self.network.inter_bandwidth(crossing)
        return lambda size: inter.latency + size / bandwidth

    def all_to_all(self, u: int, size: int) -> float:
        """Seconds in which u consecutive ranks give each other their parts of `size` bytes, on all links at once."""
        inside = min(u, self.in_node)
        part = size / u
        seconds = [self.hop(1, inside=True)((inside - 1) * part)] if inside > 1 else [0.0]
        if u > inside:
            seconds.append(self.hop(self.in_node, inside=False)((u - inside) * part))
        return max(seconds)

    def gather(self, m: int, inside: int, size: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes a rank, by bandwidth-optimal rings.

        The group has m ranks, `inside` of them in each node; each of its rings enters and leaves a node once, and the
        groups of a node do so together through all of its NICs.
        """
        moved = (m - 1) * size
        seconds, latency = 0.0, self.cluster.intra.latency
        if inside > 1:
            seconds = moved / self.cluster.intra.bandwidth
        if m > inside:
            out = moved * self.tp * (self.in_node // inside)
            seconds = max(seconds, out / (self.cluster.nics_per_node * self.cluster.inter.bandwidth))
            latency = self.cluster.inter.latency
        return seconds + (m - 1) * latency

    def inside(self, consecutive: int, strided: int) -> tuple[int, int] | None:
        """How many ranks of a consecutive and of a strided group share a node; None where groups straddle nodes."""
        w = self.network.ranks_per_node
        if self.n <= w:
            return consecutive, strided
        if consecutive % w and w % consecutive:
            return None
        return min(consecutive, w), max(1, w // consecutive)


def ring_seconds(m: int, blocks: tuple[float, float], hop: Callable[[int], float], size: int, result: int = 0) -> float:
    """Closed form of `travelling_plan`: each step takes its block or its messages, whichever is longer.

    size, result: bytes of a chunk and of the partial result that follows it (0: forward).
    """
    seconds = 0.0
    for s in range(m):
        moved = size * (s < m - 1) + result * (s >= 2)
        seconds += max(blocks[s > 0], hop(moved) if moved else 0.0)
    return seconds + (hop(result) if result and m > 1 else 0.0)
