"""A pool of long-lived gloo ranks, so that hundreds of distributed cases take seconds each to none.

Ranks are forked from a server that has imported torch once. A case is a module-level function that every rank calls;
its results come back in rank order. A case past its time limit, or one that raises on any rank, fails with the ranks'
tracebacks, and the pool is replaced, so that a hang is a failure and never a stuck run.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "megatron_mesh_cp.attention"])


class RankFailure(AssertionError):
    """A case failed on at least one rank, or ran past its time limit."""


class Leave(Exception):
    """Raised by a case: its text is the answer, and the rank's process ends, as a failed rank's does."""


@contextmanager
def passing_groups() -> Iterator[None]:
    """In a case: process groups made inside are destroyed at its end. Each keeps three threads, which poll.

    Megatron makes dozens of them whenever it is initialized.
    """
    from torch.distributed import distributed_c10d as c10d

    before = set(c10d._world.pg_map)
    yield
    destroy_groups(before)


def destroy_groups(but: set[dist.ProcessGroup]) -> None:
    """Called by all ranks, once nobody uses those groups any more."""
    from torch.distributed import distributed_c10d as c10d

    gc.collect()
    c10d.barrier()
    for group in set(c10d._world.pg_map) - but:
        c10d.destroy_process_group(group)


class RankPool:
    def __init__(self, size: int) -> None:
        self.size = size
        port = _free_port()
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)
        self.broken = False

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 120.0, may_fail: bool = False) -> list[Any]:
        """`case(*args)` on every rank; results in rank order. may_fail: exceptions come back as their text."""
        for pipe in self._pipes:
            pipe.send((case, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            left = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise RankFailure(f"ranks {sorted(left.values())} did not end within {timeout} s; {_failures(answers)}")
            for pipe in ready:
                try:
                    answers[left[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[left[pipe]] = (False, "the process is gone")
            if not may_fail and any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 5)  # the others may hang now
        if not all(ok for ok, _ in answers.values()):
            self.kill()
            if not may_fail:
                raise RankFailure(_failures(answers))
        return [answers[rank][1] for rank in range(self.size)]

    def kill(self) -> None:
        self.broken = True
        for process in self._ranks:
            process.kill()
            process.join()


def _failures(answers: dict[int, tuple[bool, Any]]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok)


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, case(*args))
        except Leave as leave:
            pipe.send((True, str(leave)))
            os._exit(1)
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
