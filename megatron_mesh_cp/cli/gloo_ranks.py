"""Start gloo ranks on this machine, run one function on all of them, and leave none behind, however it ends.

Or be one rank among those that srun or torchrun has started, on any number of machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_HOST = "127.0.0.1"
Work = Callable[[int, Any], Any]


@dataclass(frozen=True)
class Namespaces:
    """Where ranks live that are not all on this host: network namespaces, which stand for hosts.

    enter: puts the calling process into the namespace of a rank; head: address of rank 0 there; port: free on it.
    """

    enter: Callable[[int], None]
    head: str
    port: int


class RanksError(RuntimeError):
    """A rank failed, or the ranks did not end within the time limit."""


def run_ranks(work: Work, job: Any, ranks: int, limit: float, lower: str, places: Namespaces | None = None) -> Any:
    """Run work(rank, job) on gloo ranks of one thread each, and return what rank 0 returns.

    Args:
        work: a function at the top of a module, which the ranks import.
        limit: seconds until hanging ranks are ended.
        lower: the flags that would make the job smaller, for the error of a job that takes longer.
        places: where the ranks live; by default all on the loopback of this machine.

    Raises: RanksError where a rank fails or the time limit passes; SystemExit on SIGTERM. No rank is left behind.
    """
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        if places is not None:
            return _run_ranks(work, job, ranks, limit, lower, places)
        # Port 0: the system picks a free one, and it is ours from then on.
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit))
        return _run_ranks(work, job, ranks, limit, lower, store.port)
    finally:
        signal.signal(signal.SIGTERM, previous)


@dataclass(frozen=True)
class Place:
    """Which rank of how many this process is."""

    rank: int
    ranks: int


def find_place(environ: Mapping[str, str]) -> Place:
    """What torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID, SLURM_NTASKS) has said. Raises ValueError without."""
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if all(name in environ for name in names):
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
            if missing:
                raise ValueError(f"--join: {', '.join(missing)} not set: where do the ranks of this world meet?")
            return Place(*(int(environ[name]) for name in names))
    raise ValueError(
        "--join: this process is not one of a world that was started: run it by torchrun, or by srun with MASTER_ADDR "
        "and MASTER_PORT; or leave --join out, and ranks are started on this machine"
    )


def join_ranks(work: Work, job: Any, place: Place, limit: float) -> Any:
    """Run work(rank, job) as one rank of a world that something else has started; its result, None but on rank 0.

    Raises RanksError where this rank fails; the process ends where it hangs for `limit` seconds.
    """
    watch = threading.Timer(limit, _give_up, args=(place, limit))
    watch.daemon = True
    watch.start()
    stdout = os.dup(1)
    os.dup2(2, 1)  # gloo greets on stdout, which belongs to the table or the JSON
    torch.set_num_threads(1)
    timeout = timedelta(seconds=limit)
    try:
        dist.init_process_group("gloo", init_method="env://", rank=place.rank, world_size=place.ranks, timeout=timeout)
        result = work(place.rank, job)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        raise RanksError(f"rank {place.rank} of {place.ranks} ({socket.gethostname()}): {error}") from None
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        watch.cancel()
    return result


def _give_up(place: Place, limit: float) -> None:
    print(
        f"mesh-cp: bench: rank {place.rank} of {place.ranks} ({socket.gethostname()}) did not end within --time-limit "
        f"{limit:g} s",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _run_ranks(work: Work, job: Any, ranks: int, limit: float, lower: str, meet: Namespaces | int) -> Any:
    # A server imports torch once, and the ranks are its forks: importing it in every rank takes longer than a bench.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    receiver, sender = context.Pipe(duplex=False)
    parent, held = context.Pipe(duplex=False)  # held here: the ranks see its end when this process is gone
    # An interrupt between two starts would leave ranks that nobody knows: it is kept until all have started.
    interrupts: list[int] = []
    held_back = (signal.SIGINT, signal.SIGTERM)
    previous = {n: signal.signal(n, lambda number, frame: interrupts.append(number)) for n in held_back}
    try:
        started = mp.start_processes(
            _rank,
            args=(work, job, ranks, limit, meet, sender, parent),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    sender.close()
    parent.close()
    deadline = time.monotonic() + limit
    try:
        if signal.SIGTERM in interrupts:
            sys.exit(128 + signal.SIGTERM)
        if interrupts:
            raise KeyboardInterrupt
        answers = []
        while not started.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            if not answers and receiver.poll():  # a large answer holds rank 0 until it is read
                with contextlib.suppress(EOFError):  # rank 0 is gone without one
                    answers.append(receiver.recv())
            if time.monotonic() > deadline:
                raise RanksError(
                    f"the ranks did not end within --time-limit {limit:g} s; they were ended. If they were not "
                    f"hanging but slow, raise --time-limit, or lower {lower}"
                )
        return answers[0] if answers else receiver.recv()
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RanksError(f"rank {error.error_index} failed:\n{error}") from None
    finally:
        for process in started.processes:
            process.kill()
            process.join()
        held.close()


def _rank(
    rank: int,
    work: Work,
    job: Any,
    ranks: int,
    limit: float,
    meet: Namespaces | int,
    sender: Connection,
    parent: Connection,
) -> None:
    if isinstance(meet, Namespaces):
        meet.enter(rank)  # before there is any thread: each thread has a namespace of its own
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # gloo greets on stdout, which belongs to the table or the JSON
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    timeout = timedelta(seconds=limit)
    store = _store(rank, meet, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    result = work(rank, job)
    if rank == 0:
        sender.send(result)
    dist.barrier()  # rank 0 answers before any rank, and with it a connection, goes
    dist.destroy_process_group()


def _store(rank: int, meet: Namespaces | int, timeout: timedelta) -> dist.TCPStore:
    """Where the ranks meet: a store of the process that started them, or of rank 0 where that one cannot be reached."""
    if isinstance(meet, int):
        return dist.TCPStore(_HOST, meet, is_master=False, timeout=timeout)
    return dist.TCPStore(meet.head, meet.port, is_master=rank == 0, wait_for_workers=False, timeout=timeout)


def _die_with(parent: Connection) -> None:
    """End this rank when the command is gone, even by SIGKILL: the fork server that made us would outlive it."""
    parent.poll(None)  # nothing is ever sent: only the end of the pipe wakes us
    os._exit(1)
