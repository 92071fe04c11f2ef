"""A real SLURM on this machine: a controller and nodes, each in network, host-name, mount and process namespaces.

No namespace has a name and every process dies with the one that started it, so whatever ends the tests, even SIGKILL,
leaves nothing behind but a scratch folder. Nothing outside that folder is written. Debian's packages `slurm-wlm`,
`munge` and `iproute2`, and root.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux's prctl
_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "unshare", "nsenter")
# Every host: its own name, /etc/hosts and network; then it waits for its cable. Process 1 takes in orphans.
_BOOT = """
hostname "$0"; mount --bind {base}/hosts /etc/hosts; ip link set lo up
read -r _
{daemons}
while :; do wait -n; sleep 0.2; done
"""
_CONF = """
ClusterName=test
SlurmctldHost=hub({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge/socket,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/spool/%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=2
ReturnToService=2
JobRequeue=1
SlurmdTimeout={timeout}
KillWait=5
MessageTimeout=10
SlurmdParameters=config_overrides
NodeName={names} CPUs=8 RealMemory=16000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
"""


def why_not() -> str:
    """What this machine lacks for a cluster; empty where it has all."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"no SLURM for tests: {', '.join(missing)} not found; apt-get install slurm-wlm munge iproute2"
    if os.geteuid() != 0:
        return "no SLURM for tests: it takes root"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "ip",
            "link",
            "add",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
    )
    return f"no SLURM for tests: no namespaces here ({tried.stderr.strip()[:200]})" if tried.returncode else ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


class SlurmCluster:
    """`with SlurmCluster(folder) as cluster`: nodes n1, n2, ... that idle; commands run on the host `hub`.

    folder: a scratch folder that is there, with a short path (a socket lies in it).
    """

    def __init__(self, base: Path, nodes: int = 4, slurmd_timeout: int = 10):
        self.base = base
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._timeout = slurmd_timeout
        # A network in a namespace of its own meets no other, but its addresses show in logs: one a test run.
        self._subnet = f"10.231.{os.getpid() % 250 + 1}"
        self._hosts: dict[str, subprocess.Popen] = {}
        self._first: dict[str, int] = {}  # process 1 of each host, as seen from here
        self._env = os.environ | {"SLURM_CONF": str(base / "slurm.conf"), "PATH": _path(), "SLURM_TIME_FORMAT": "%s"}

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._boot_hub()
            for name in self.names:
                self.power_on(name)
            self.wait_for(lambda: len(self.idle()) == len(self.names), 30, "all nodes to be idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self._hosts.values():
            host.kill()
            host.wait()

    def _configure(self) -> None:
        for folder in ("munge", "state", "spool"):
            (self.base / folder).mkdir()
        (self.base / "munge").chmod(0o700)
        key = self.base / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        addresses = {"hub": 1} | {name: 10 + number for number, name in enumerate(self.names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{self._subnet}.{last} {name}" for name, last in addresses.items())]
        (self.base / "hosts").write_text("\n".join(lines) + "\n")
        names = f"n[1-{len(self.names)}]"
        conf = _CONF.format(base=self.base, subnet=self._subnet, names=names, timeout=self._timeout)
        (self.base / "slurm.conf").write_text(conf)

    def _boot(self, name: str, daemons: str) -> None:
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = _BOOT.format(base=self.base, daemons=daemons)
        with open(self.base / f"{name}.out", "ab") as out:
            host = subprocess.Popen(
                ["unshare", *flags, "bash", "-c", script, name],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )
        self._hosts[name] = host
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
        self.wait_for(lambda: host.poll() is not None or children.read_text().strip(), 5, f"{name} to start")
        if host.poll() is not None:
            raise RuntimeError(f"{name} did not start: {(self.base / f'{name}.out').read_text()[-500:]}")
        self._first[name] = int(children.read_text().split()[0])

    def _boot_hub(self) -> None:
        munge = self.base / "munge"
        files = f"--key-file={munge}/key --socket={munge}/socket --pid-file={munge}/pid --seed-file={munge}/seed"
        self._boot("hub", f"munged --foreground --force {files} --log-file={munge}/log &\nslurmctld -D &")
        self._net("hub", "link add br0 type bridge", f"addr add {self._subnet}.1/24 dev br0", "link set br0 up")
        self._go("hub")
        self.wait_for(lambda: (munge / "socket").exists(), 10, "munged")

    def power_on(self, name: str) -> None:
        """Boot a node; its cable is the pair v-<name> on the hub, eth0 on the node."""
        number = self.names.index(name) + 1
        (self.base / "spool" / name).mkdir(exist_ok=True)
        self._boot(name, f"slurmd -D -N {name} &")
        self._net("hub", f"link add v-{name} type veth peer name eth0 netns {self._first[name]}")
        self._net("hub", f"link set v-{name} master br0 up")
        self._net(name, f"addr add {self._subnet}.{10 + number}/24 dev eth0", "link set eth0 up")
        self._go(name)

    def power_off(self, name: str) -> None:
        """The node loses its power. Its peers see their connections end, as if the switch told them."""
        self._hosts[name].kill()  # process 1 dies with it, and with that all processes and the network
        self._hosts[name].wait()

    def _net(self, name: str, *commands: str) -> None:
        for command in commands:
            subprocess.run(
                ["nsenter", f"--net=/proc/{self._first[name]}/ns/net", "ip", *command.split()],
                check=True,
                env=self._env,
            )

    def _go(self, name: str) -> None:
        self._hosts[name].stdin.write(b"\n")
        self._hosts[name].stdin.flush()

    def run(
        self,
        *command: str,
        on: str = "hub",
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 20,
    ) -> subprocess.CompletedProcess:
        """A command on a host, its output as text."""
        # A change of the mount namespace would leave it in /.
        enter = [
            "nsenter",
            f"--wd={cwd or self.base}",
            "-t",
            str(self._first[on]),
            "--net",
            "--uts",
            "--mount",
            "--pid",
        ]
        return subprocess.run(
            [*enter, "--", *map(str, command)],
            env=self._env | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            preexec_fn=_die_with_parent,
        )

    def submit(self, *words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """sbatch; the job id."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        text = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def ended(self, job: str, limit: float) -> dict[str, str]:
        """Wait until a job has ended, also after requeues; what SLURM knows of it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.job(job).get("JobState") in over, limit, f"job {job} to end")
        return self.job(job)

    def idle(self) -> list[str]:
        """Nodes with nothing to do."""
        return sorted(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()))

    def wait_for(self, true: object, limit: float, what: str) -> None:
        """Ask again and again; raises TimeoutError with the state of the cluster."""
        deadline = time.monotonic() + limit
        while not true():
            if time.monotonic() > deadline:
                state = (
                    self.run("bash", "-c", "squeue; sinfo -N -l; tail -5 slurmctld.log").stdout if self._first else ""
                )
                raise TimeoutError(f"waited {limit:g} s for {what}\n{state}")
            time.sleep(0.2)


if __name__ == "__main__":  # a shell on a cluster, for trying things by hand
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mcs-") as folder, SlurmCluster(Path(folder)) as cluster:
        print(f"nodes {cluster.idle()}, files in {folder}")
        shell = ["nsenter", "-t", str(cluster._first["hub"]), "--net", "--uts", "--mount", "--pid", *sys.argv[1:]]
        subprocess.run(shell if sys.argv[1:] else [*shell, "bash"], env=cluster._env)
