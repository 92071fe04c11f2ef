"""A job on several machines: one launcher a node, which torchrun joins by static rendezvous on the head (node rank 0).

What would otherwise be a hang or a traceback of torchrun is found here first: a head that cannot be reached, a port
that is taken, a host name that leads the ranks of a node to themselves.
"""

from __future__ import annotations

import argparse
import errno
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

_FLAGS = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")  # torchrun's names
_RETRY_SECONDS = 1.0
_ATTEMPT_SECONDS = 5.0  # a host that drops packets never answers, and one lost packet costs 1 s or 3 s
HEAD_TIMEOUT = 300.0


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of `per_node` ranks each, seen from node `rank`; the head listens on `addr`:`port`.

    Node ranks in SLURM's order keep the ranks of a node, and so of a tensor- or context-parallel group, together.
    """

    count: int
    rank: int
    per_node: int
    addr: str
    port: int
    timeout: float = HEAD_TIMEOUT

    def __post_init__(self) -> None:
        for flag, value in (("--nnodes", self.count), ("--nproc-per-node", self.per_node)):
            if value < 1:
                raise ValueError(f"{flag} {value}: must be 1 or more")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"--node-rank {self.rank} with --nnodes {self.count}: must be 0 to {self.count - 1}")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--master-port {self.port}: must be 1 to 65535")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"--head-timeout {self.timeout:g}: must be a positive number of seconds")

    @property
    def world(self) -> int:
        return self.count * self.per_node

    @property
    def described(self) -> str:
        """The world size as the user gave it, for the texts of errors."""
        return f"--nnodes {self.count} x --nproc-per-node {self.per_node} = {self.world} ranks"

    @property
    def torchrun(self) -> list[str]:
        """The options of torchrun. A rank that fails ends the job: what to do then is the scheduler's to decide."""
        return [
            *("--nnodes", str(self.count), "--node-rank", str(self.rank), "--nproc-per-node", str(self.per_node)),
            *("--master-addr", self.addr, "--master-port", str(self.port), "--max-restarts", "0"),
            *("--rdzv-conf", f"timeout={max(1, round(self.timeout))}"),
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `mesh-cp pretrain` that say which node of how many this is."""
    group = parser.add_argument_group("several nodes (all five together)")
    group.add_argument("--nnodes", type=int, metavar="N", help="number of nodes")
    group.add_argument("--node-rank", type=int, metavar="K", help="rank of this node, 0 to N-1; the head is 0")
    group.add_argument("--nproc-per-node", type=int, metavar="M", help="ranks to start on each node")
    group.add_argument("--master-addr", metavar="HOST", help="name or address of the head, as the other nodes see it")
    group.add_argument("--master-port", type=int, metavar="P", help="a port that is free on the head")
    group.add_argument(
        "--head-timeout",
        type=float,
        default=HEAD_TIMEOUT,
        metavar="SECONDS",
        help="how long to try to reach the head, which needs some seconds to start (%(default)g)",
    )


def read_nodes(args: argparse.Namespace) -> Nodes | None:
    """The node that the options describe, None without any. With --check the size of the job is enough.

    Raises ValueError naming what is missing or out of range.
    """
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in _FLAGS}
    if all(value is None for value in given.values()):
        return None
    if args.ranks is not None:
        raise ValueError(
            f"--ranks {args.ranks} is for one machine; with several nodes say --nnodes and --nproc-per-node"
        )
    needed = ("--nnodes", "--nproc-per-node") if args.check else _FLAGS
    missing = [flag for flag in needed if given[flag] is None]
    if missing:
        there = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise ValueError(f"{there} without {', '.join(missing)}: a job on several nodes needs {', '.join(needed)}")
    return Nodes(
        *(args.nnodes, args.node_rank or 0, args.nproc_per_node),
        *(args.master_addr or "localhost", args.master_port or 1, args.head_timeout),
    )


def check_port(nodes: Nodes) -> None:
    """On the head: can torchrun listen on the port? Raises ValueError where another process has it."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As torch's store binds: connections of a job that has just ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, nodes.port))
                probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 on this machine
                continue
            why = "is taken by another process" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
            raise ValueError(
                f"port {nodes.port} on {nodes.addr} {why}; choose another with --master-port, the same on every node"
            ) from None


def reach_head(nodes: Nodes) -> None:
    """On the other nodes: wait until the head answers on the port, `nodes.timeout` seconds at most.

    Raises ValueError naming this node, the head, the port, what failed last and what to check.
    """
    deadline = time.monotonic() + nodes.timeout
    why, hint = "", ""
    for _ in _turns(deadline):
        try:
            found = socket.getaddrinfo(nodes.addr, nodes.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            why = f"the name does not resolve ({error.strerror})"
            hint = "give --master-addr a name or an address that this node knows"
            if error.errno != socket.EAI_AGAIN:
                break
            continue
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(max(0.1, min(_ATTEMPT_SECONDS, deadline - time.monotonic())))
                try:
                    probe.connect(address)
                    return
                except OSError as error:
                    why, hint = _reason(error, address[0], nodes)
    here = f"node {nodes.rank} ({socket.gethostname()})"
    raise ValueError(f"{here} cannot reach the head {nodes.addr} port {nodes.port}: {why}; {hint}")


def _turns(deadline: float) -> Iterator[None]:
    """One turn at least, then one after each pause until the deadline."""
    yield
    while time.monotonic() + _RETRY_SECONDS < deadline:
        time.sleep(_RETRY_SECONDS)
        yield


def _reason(error: OSError, address: str, nodes: Nodes) -> tuple[str, str]:
    after = f"for {nodes.timeout:g} s (--head-timeout)"
    if isinstance(error, ConnectionRefusedError):
        return f"{address} refused the connection {after}", (
            "nothing listens there: check that node rank 0 runs on that machine with the same --master-port, and read "
            "its log"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no route to {address} {after}", "check the address, and that both nodes are on one network"
    if isinstance(error, TimeoutError):
        return f"{address} did not answer {after}: timed out", (
            "check that the machine is up and that no firewall drops this port between the nodes"
        )
    return f"{address}: {error.strerror or error} {after}", "check the address and the network between the nodes"


def check_own_name(nodes: Nodes, env: dict[str, str]) -> None:
    """Gloo tells its peers the address of this host's name: one of the loopback leads each node to itself.

    Raises ValueError where the name resolves to the loopback and GLOO_SOCKET_IFNAME names no interface.
    """
    if nodes.count == 1 or env.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except socket.gaierror:
        found = set()
    if all(address.startswith("127.") or address == "::1" for address in found):
        leads = f"resolves to {', '.join(sorted(found))}" if found else "does not resolve"
        raise ValueError(
            f"node {nodes.rank}: the name of this machine, {name}, {leads}, where the other nodes cannot reach it; "
            "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface that joins the nodes, such as eth0 "
            "(MESH_CP_IFNAME of scripts/slurm/pretrain.sbatch does both), or correct /etc/hosts"
        )


def note(text: str) -> None:
    """One line of the launcher in the log of its node."""
    print(f"[mesh-cp] {text}", file=sys.stderr, flush=True)
