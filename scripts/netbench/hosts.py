"""Network namespaces as hosts: each has a link of its own to a switch, limited in both directions, like a NIC.

    host 0   10.99.0.1  eth0 --- v0 \\
    host 1   10.99.0.2  eth0 --- v1 -- bridge in a namespace of its own
    ...

A token bucket at each end of a link lets through `rate` bits a second: at eth0 what the host sends, at its end on the
switch what it receives. Ranks of the same host talk over the loopback, at the speed of memory. Needs root, and
`ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_mesh_cp.cli.gloo_ranks import Namespaces

MOST_HOSTS = 254
_PREFIX = "meshcp-"
_NETNS = Path("/run/netns")
_PORT = 29500
_MTU = 9000
# One burst of large packets; a queue that holds what TCP has under way (a shorter one drops, and TCP slows down).
_BUCKET = "burst 64kb latency 400ms"
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_CLONE_NEWNET = 0x40000000
# Long transfers at a steady rate, and no slow start after a pause for a block.
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}


class HostsError(RuntimeError):
    """The namespaces could not be made."""


def parse_rate(text: str, flag: str = "--rate") -> int:
    """Bits per second of a rate as `tc` writes it: 100mbit. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", text.strip().lower())
    if match is None or float(match[1]) * _UNITS[match[2]] < 1e6:
        raise ValueError(f"{flag} {text}: not a rate; write it as 100mbit or 1gbit, at least 1mbit")
    return round(float(match[1]) * _UNITS[match[2]])


def check_can_make() -> None:
    """Raise ValueError where this process cannot make network namespaces, with what it takes."""
    if os.geteuid() != 0:
        raise ValueError(
            "the network bench makes network namespaces, which needs root: run it with sudo, or in a container as root"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not found; install iproute2 (apt install iproute2)")


@dataclass(frozen=True)
class Hosts:
    """Namespaces that are there; see `hosts`.

    count: hosts; ranks_per_host: rank g lives on host g // ranks_per_host.
    """

    name: str
    count: int
    ranks_per_host: int

    def host(self, number: int) -> str:
        return f"{self.name}h{number}"

    @property
    def switch(self) -> str:
        return f"{self.name}sw"

    @property
    def places(self) -> Namespaces:
        return Namespaces(partial(_enter_as, self), _address(0), _PORT)

    def limit(self, rate: int) -> None:
        """Limit every link to `rate` bits a second, each way."""
        for number in range(self.count):
            for namespace, device in ((self.host(number), "eth0"), (self.switch, f"v{number}")):
                _run("tc", "-n", namespace, *f"qdisc replace dev {device} root tbf rate {rate}bit {_BUCKET}".split())


@contextlib.contextmanager
def hosts(count: int, ranks_per_host: int = 1) -> Iterator[Hosts]:
    """Make `count` hosts, and take them away again, however the block ends.

    What an earlier process left behind that was killed is taken away first. Raises HostsError where the kernel refuses
    (a container without CAP_NET_ADMIN and CAP_SYS_ADMIN).
    """
    _remove_abandoned()
    made = Hosts(f"{_PREFIX}{os.getpid()}-", count, ranks_per_host)
    try:
        _make(made)
        yield made
    finally:
        _remove(made.name)


def left_behind(pid: int | None = None) -> list[str]:
    """Names of namespaces that processes of this bench made (those of one process) and that are still there."""
    start = _PREFIX if pid is None else f"{_PREFIX}{pid}-"
    return sorted(path.name for path in _NETNS.glob(f"{start}*"))


def _address(number: int) -> str:
    return f"10.99.0.{number + 1}"


def _mac(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"


def _make(made: Hosts) -> None:
    switch = made.switch
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", switch, *f"link set br0 mtu {_MTU} up".split())
    for number in range(made.count):
        host = made.host(number)
        _run("ip", "netns", "add", host)
        _run(
            "ip",
            "-n",
            switch,
            *f"link add v{number} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {host}".split(),
        )
        _run("ip", "-n", switch, *f"link set v{number} master br0 up".split())
        _run("ip", "-n", host, *f"link set eth0 address {_mac(number)}".split())
        _run("ip", "-n", host, *f"addr add {_address(number)}/24 dev eth0".split())
        for device in ("lo", "eth0"):
            _run("ip", "-n", host, "link", "set", device, "up")
        # The kernel's table of neighbours is one for all namespaces, and too small for what 64 hosts would find out of
        # each other ("No route to host"). Entries that are given for good do not count.
        others = (k for k in range(made.count) if k != number)
        lines = [f"neigh replace {_address(k)} lladdr {_mac(k)} dev eth0 nud permanent\n" for k in others]
        _run("ip", "-n", host, "-batch", "-", text="".join(lines))
        _set_tcp(host)


def _set_tcp(host: str) -> None:
    """Set the TCP switches of a namespace: a process sees those of its own under /proc."""
    writes = "; ".join(f"echo {value} >/proc/sys/net/ipv4/{name}" for name, value in _TCP.items())
    _run("ip", "netns", "exec", host, "sh", "-ec", writes)


def _remove_abandoned() -> None:
    for name in left_behind():
        owner = re.match(rf"{_PREFIX}([0-9]+)-", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(owner[0])


def _remove(start: str) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        for path in sorted(_NETNS.glob(f"{start}*")):
            with contextlib.suppress(HostsError):
                _run("ip", "netns", "del", path.name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(*command: str, text: str = "") -> None:
    # A session of its own: a Ctrl-C at the terminal must not end the commands that take the hosts away.
    how = {"input": text, "capture_output": True, "text": True, "timeout": 60, "start_new_session": True}
    try:
        done = subprocess.run(command, **how)
    except subprocess.TimeoutExpired:
        raise HostsError(f"`{' '.join(command)}` did not end within 60 s") from None
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def _enter_as(made: Hosts, rank: int) -> None:
    """Move this process into the namespace of the host of a rank; gloo shall use its link."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(_NETNS / made.host(rank // made.ranks_per_host)) as namespace:
        if library.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of rank {rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
