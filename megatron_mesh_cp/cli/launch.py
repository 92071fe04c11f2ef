"""Start the ranks of a checked job with torchrun, pass their output on, and end them all when told to."""

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from megatron_mesh_cp.megatron.config import MeshConfig

ENTRY = "megatron_mesh_cp.megatron.pretrain"
_GRACE_SECONDS = 45  # torchrun gives its ranks 30 s after SIGTERM before it kills them


@dataclass(frozen=True)
class Launch:
    """A checked job: what to run, on how many ranks, in which environment; `args` as Megatron parsed it.

    mesh: what mesh context parallelism resolves to, None without it. validated: `args` after Megatron's own checks,
    which fill in defaults. Both are None with --use-checkpoint-args, where only a rank knows the flags.
    """

    ranks: int
    flags: tuple[str, ...]
    env: dict[str, str]
    args: argparse.Namespace
    mesh: "MeshConfig | None" = None
    validated: argparse.Namespace | None = None

    @property
    def command(self) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(self.ranks), "-m", ENTRY, *self.flags]


def run_ranks(launch: Launch, log: Path | None = None, show: Callable[[str], bool] | None = None) -> int:
    """Start the ranks, pass their output on, and return their exit code.

    With `log`, stdout and stderr of the ranks go into that file, and the lines that `show` picks (all,
    without it) to our stdout. SIGINT, SIGTERM and SIGHUP end all ranks, a second one at once; the exit code
    is then 128 + the signal.
    """
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if log else {}
    # A session of its own: a Ctrl-C reaches torchrun once, through us, and not also from the terminal.
    process = subprocess.Popen(launch.command, env=launch.env, start_new_session=True, **piped)
    signals: list[int] = []
    children: list[psutil.Process] = []

    def end(signum, frame):
        signals.append(signum)
        if len(signals) == 1:
            process.terminate()
        else:
            _kill(process, children)

    previous = {s: signal.signal(s, end) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        copier = _copy_output(process, log, show) if log else None
        deadline = None
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True) or children
            if signals:
                deadline = deadline or time.monotonic() + _GRACE_SECONDS
                if time.monotonic() > deadline:
                    _kill(process, children)
        _kill(process, children)  # a torchrun that was killed from outside leaves its ranks behind
        if copier:
            copier.join(timeout=5)
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
    if signals:
        return 128 + signals[0]
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _copy_output(process: subprocess.Popen, log: Path, show: Callable[[str], bool] | None) -> threading.Thread:
    def copy() -> None:
        with open(log, "wb") as file:
            for line in iter(process.stdout.readline, b""):
                file.write(line)
                file.flush()
                text = line.decode("utf-8", "replace")
                if show is None or show(text):
                    sys.stdout.write(text)
                    sys.stdout.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _kill(process: subprocess.Popen, children: list) -> None:
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if process.poll() is None:
        process.kill()
