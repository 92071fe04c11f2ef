"""Where CP ranks live on a cluster, and what their messages share; see Note [Links].

Note [Links]
~~~~~~~~~~~~
CP rank g lives on GPUs g*tp .. g*tp + tp-1, so a node holds gpus_per_node / tp CP ranks. All GPUs of a CP
rank move the same bytes at the same time, each for its own heads, so that one of them, the first, is looked at. Every
GPU has a port out to the other GPUs of its node and a port in; every NIC has a port out and a port in, and GPU k of a
node uses NIC k * nics_per_node // gpus_per_node. A message inside a node goes through the GPU ports of its ends, one
between nodes through their NIC ports:

    rate = min over the two ports of  bandwidth / (messages on it, each counted once for every GPU of its CP rank there)

With 8 GPUs, 4 NICs and tp = 2 (two CP ranks drawn):

    GPU   0   1   2   3        CP rank 0 has GPUs 0, 1 and CP rank 1 has GPUs 2, 3;
          |   |   |   |        a message of CP rank 0 to another node sees half of NIC 0, since
    NIC   +-0-+   +-1-+        that of the other GPU of CP rank 0 goes through it as well
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .cluster import Cluster


class Way(NamedTuple):
    """The ports of a message (out at its sender, in at its receiver), how often it counts on each, and their speed.

    ports: (kind, number) each; bandwidth: bytes/s of a port; latency: seconds.
    """

    ports: tuple[tuple[str, int], tuple[str, int]]
    weights: tuple[int, int]
    bandwidth: float
    latency: float


class Network:
    """The links between the CP ranks of a cluster.

    ranks_per_node: CP ranks of a node. Raises ValueError where `tp` does not fit a node.
    """

    def __init__(self, cluster: Cluster, tp: int = 1) -> None:
        self.ranks_per_node = check_tp(tp, cluster.gpus_per_node)
        self.tp = tp
        self.cluster = cluster
        nics = [k * cluster.nics_per_node // cluster.gpus_per_node for k in range(cluster.gpus_per_node)]
        # By place in the node: the NIC of the rank's first GPU, and how many of the rank's GPUs share it.
        self._nic = nics[::tp]
        self._sharing = [nics[k : k + tp].count(nics[k]) for k in range(0, len(nics), tp)]
        self._gpus_per_nic = max(nics.count(nic) for nic in nics)

    def way(self, source: int, target: int, count: int) -> Way:
        """The way from CP rank to CP rank, where rank g % count stands for rank g in the names of the ports."""
        w = self.ranks_per_node
        if source // w == target // w:
            link = self.cluster.intra
            return Way((("gpu out", source % count), ("gpu in", target % count)), (1, 1), link.bandwidth, link.latency)
        link = self.cluster.inter
        weights = self._sharing[source % w], self._sharing[target % w]
        ports = ("nic out", self._nic_port(source % count)), ("nic in", self._nic_port(target % count))
        return Way(ports, weights, link.bandwidth, link.latency)

    def inter_bandwidth(self, ranks: int) -> float:
        """Bytes/s of each of `ranks` consecutive CP ranks of a node that all send to other nodes at once."""
        return self.cluster.inter.bandwidth / min(ranks * self.tp, self._gpus_per_nic)

    def _nic_port(self, rank: int) -> int:
        node, place = divmod(rank, self.ranks_per_node)
        return node * self.cluster.nics_per_node + self._nic[place]


def check_tp(tp: int, gpus_per_node: int, flag: str = "tp") -> int:
    """CP ranks of a node. Raises ValueError unless groups of `tp` GPUs fill a node."""
    if not 1 <= tp <= gpus_per_node or gpus_per_node % tp:
        fits = ", ".join(str(k) for k in range(1, gpus_per_node + 1) if gpus_per_node % k == 0)
        raise ValueError(f"{flag} {tp} with {gpus_per_node} GPUs a node: it must divide them; it could be {fits}")
    return gpus_per_node // tp
