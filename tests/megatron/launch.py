"""Starts pretraining runs for tests and reads what Megatron printed.

Two launchers run the same `megatron_mesh_cp.megatron.pretrain.run()` in every rank:

- "fork" (the default): `fork_server.py` imports torch and Megatron once, then forks the ranks of each run.
- "torchrun": what users type; each rank imports everything by itself (about 6 s of CPU time each).
"""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ENTRY = "megatron_mesh_cp.megatron.pretrain"
_FORK_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass(frozen=True)
class Iteration:
    """One line of Megatron's training log; `values` holds every number on it under its printed name."""

    iteration: int
    values: dict[str, float]

    @property
    def lm_loss(self) -> float:
        return self.values["lm loss"]

    @property
    def grad_norm(self) -> float:
        return self.values["grad norm"]


@dataclass(frozen=True)
class PretrainRun:
    """What a run printed; `stdout` and `stderr` hold the ranks' texts one after the other, rank 0 first.

    Megatron does not reset its sums after the first line that a process prints: the second line shows the
    mean loss of the iterations of both. So a resumed run repeats the uninterrupted one but for that line.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    iterations: list[Iteration] = field(init=False)
    validation: dict[str, float] = field(init=False)  # "iteration 4", "... on test set" -> lm loss

    def __post_init__(self):
        object.__setattr__(self, "iterations", parse_iterations(self.stdout))
        object.__setattr__(self, "validation", parse_validation(self.stdout))

    @property
    def losses(self) -> list[float]:
        return [entry.lm_loss for entry in self.iterations]

    @property
    def grad_norms(self) -> list[float]:
        return [entry.grad_norm for entry in self.iterations]

    @property
    def exact(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each iteration in full; with the fork launcher only."""
        lines = re.findall(r"^\[exact\] (\d+) (\S+) (\S+)$", self.stdout, re.MULTILINE)
        return {int(number): (float(loss), float(norm)) for number, loss, norm in lines}

    def check(self) -> "PretrainRun":
        """Return self, or raise with the end of the ranks' stderr if the run did not succeed."""
        if self.returncode != 0:
            ended = "ran out of time" if self.timed_out else f"exit code {self.returncode}"
            raise AssertionError(f"pretraining: {ended}\n{self.stdout[-1500:]}\n{self.stderr[-6000:]}")
        return self


def parse_iterations(text: str) -> list[Iteration]:
    lines = re.findall(r"^ \[[^\]]+\] iteration +(\d+)/ *\d+ \|(.*)$", text, re.MULTILINE)
    return [Iteration(int(number), _numbers(rest)) for number, rest in lines]


def parse_validation(text: str) -> dict[str, float]:
    lines = re.findall(r"^ validation loss at (.+?) \| lm loss value: (\S+) \|", text, re.MULTILINE)
    return {where: float(loss) for where, loss in lines}


def _numbers(rest: str) -> dict[str, float]:
    values = {}
    for part in rest.split("|"):
        name, _, value = part.rpartition(":")
        with contextlib.suppress(ValueError):
            values[name.strip()] = float(value)
    return values


def run_pretrain(
    flags: list[str],
    *,
    ranks: int,
    timeout: float,
    cwd: Path,
    env: dict[str, str] | None = None,
    launcher: str = "fork",
    entry: tuple[str, ...] = ("-m", ENTRY),
) -> PretrainRun:
    """Run the pretraining entry on `ranks` CPU ranks and wait for it.

    Args:
        flags: the entry's flags.
        timeout: seconds, after which every process of the run is killed and `timed_out` is set.
        cwd: working folder of the ranks; their output goes to a new folder `ranks-*` in it.
        env: variables to add. With "fork" they come after the imports, with "torchrun" before.
        launcher: "fork" or "torchrun".
        entry: with "torchrun", what it starts: a script with its words, or -m and a module.
    """
    cwd = Path(cwd)
    logs = cwd / f"ranks-{time.time_ns()}"
    logs.mkdir(parents=True)
    if launcher == "fork":
        return _server().run(flags, ranks, timeout, cwd, env or {}, logs)
    if launcher == "torchrun":
        return _torchrun([*entry, *flags], ranks, timeout, cwd, env or {}, logs)
    raise ValueError(f"launcher must be fork or torchrun, got {launcher!r}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _cpu_environment() -> dict[str, str]:
    # PYTHONWARNINGS: Megatron tells each rank at import that Apex is absent.
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def _torchrun(start, ranks, timeout, cwd, env, logs) -> PretrainRun:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), "--log-dir", str(logs), "--redirects", "3"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *start],
        cwd=cwd,
        env=_cpu_environment() | env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timed_out = False
    try:
        _, own_stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        # torchrun gives each rank a session of its own: take the ranks first, by their parent.
        _kill_tree(process.pid)
        _, own_stderr = process.communicate()
    seconds = time.monotonic() - began
    out, err = (
        "".join(path.read_text() for path in sorted(logs.rglob(name), key=lambda path: int(path.parent.name)))
        for name in ("stdout.log", "stderr.log")
    )
    return PretrainRun(process.returncode, out, err + own_stderr, seconds, timed_out)


def _kill_tree(pid: int) -> None:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    pids = children.read_text().split() if children.exists() else []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in pids:
        _kill_tree(int(child))


class _ForkServer:
    """The client's end: one JSON object a line to the server's stdin, one back from its stdout."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(_FORK_SERVER)],
            env=_cpu_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(self, flags, ranks, timeout, cwd, env, logs) -> PretrainRun:
        request = {"flags": flags, "ranks": ranks, "timeout": timeout, "cwd": str(cwd), "env": env}
        print(json.dumps(request | {"logs": str(logs)}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended with exit code {self.process.wait()}")
        reply = json.loads(line)
        out, err = ("".join((logs / f"{rank}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err"))
        return PretrainRun(reply["returncode"], out, err, reply["seconds"], reply["timed_out"])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


_servers: list[_ForkServer] = []


def _server() -> _ForkServer:
    if not _servers or _servers[0].process.poll() is not None:
        _servers[:] = [_ForkServer()]
    return _servers[0]
