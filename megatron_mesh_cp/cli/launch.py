"""Start the ranks of a checked job with torchrun, pass their output on, and end them all when told to.

SIGUSR1 is a job scheduler's "the time is nearly over". SLURM sends it to every process of a job, so all ignore it: it
would end torchrun, and helpers that the ranks have started, in the middle of a checkpoint. The launcher alone hears it
and sends the ranks, and only those, the signal that they listen to (Megatron's --exit-signal-handler --exit-signal
SIGUSR2); again and again, since a rank that still starts ignores that too.
"""

from __future__ import annotations

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

from megatron_mesh_cp.cli.nodes import Nodes, note

if TYPE_CHECKING:
    from megatron_mesh_cp.megatron.config import MeshConfig

ENTRY = "megatron_mesh_cp.megatron.pretrain"
_AGAIN_SECONDS = 5.0
_ENDING = (signal.SIGUSR1, signal.SIGUSR2)
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
    nodes: Nodes | None = None
    mesh: MeshConfig | None = None
    validated: argparse.Namespace | None = None

    @property
    def command(self) -> list[str]:
        where = self.nodes.torchrun if self.nodes else ["--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, "-m", "torch.distributed.run", *where, "-m", ENTRY, *self.flags]


class EndSoon:
    """SIGUSR1 of this launcher; entered before the ranks start, so that it never ends the launcher.

    It asks the ranks to save and end where they were told to listen for it, and is noted and ignored where not.
    """

    def __init__(self) -> None:
        self.asked = False
        self._said = False
        self._next = 0.0

    def __enter__(self) -> EndSoon:
        self._previous = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGUSR1, self._previous)

    def _ask(self, signum, frame) -> None:
        self.asked = True

    def start(self, launch: Launch, **options) -> subprocess.Popen:
        """Start torchrun with both signals ignored, as all of its descendants inherit it."""
        # Ours is a handler, and exec would turn that into the default, which is death.
        return subprocess.Popen(launch.command, env=launch.env, preexec_fn=_ignore_ending, **options)

    def pass_on(self, launch: Launch, torchrun: subprocess.Popen) -> None:
        """Called once a second: tell the ranks, the children of torchrun, every few seconds until they have ended."""
        if not self.asked or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _AGAIN_SECONDS
        args = launch.args
        listens = args.save is not None and args.exit_signal_handler and args.exit_signal in _ENDING
        if not self._said:
            self._said = True
            note(
                "SIGUSR1: the ranks are told to save and end; they do after the iteration they are in, or, if they "
                "still start, after their first"
                if listens
                else "SIGUSR1: ignored, since the job has no --save or not --exit-signal-handler --exit-signal SIGUSR2"
            )
        if listens:
            with contextlib.suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(torchrun.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.send_signal(args.exit_signal)


def _ignore_ending() -> None:
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)


def run_ranks(
    launch: Launch,
    log: Path | None = None,
    show: Callable[[str], bool] | None = None,
    end_soon: EndSoon | None = None,
) -> int:
    """Start the ranks, pass their output on, and return their exit code.

    With `log`, stdout and stderr of the ranks go into that file, and the lines that `show` picks (all,
    without it) to our stdout. SIGINT, SIGTERM and SIGHUP end all ranks, a second one at once; the exit code
    is then 128 + the signal. `end_soon`: already entered, where SIGUSR1 may come before the ranks are started.
    """
    if end_soon is None:
        with EndSoon() as end_soon:
            return run_ranks(launch, log, show, end_soon)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if log else {}
    # A session of its own: a Ctrl-C reaches torchrun once, through us, and not also from the terminal.
    process = end_soon.start(launch, start_new_session=True, **piped)
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
            end_soon.pass_on(launch, process)
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
