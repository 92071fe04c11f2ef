"""The only file that calls torch.distributed point-to-point: the row and the column channel of a CP rank.

A channel carries its batches in order, one at a time, receives posted before sends (on gloo the other way round doubles
the time of a pairwise exchange), grouped into one call as NCCL wants it.

Note [Queues]
~~~~~~~~~~~~~
A batch begins when those before it in its queue are complete, also while a block is being computed. NCCL's streams do
that by themselves: a batch is posted at once and runs after the one before (see streams.py). On gloo every batch that
is posted shares the link with all others, and nothing would post the next one in the middle of a block; there a thread
of the queue posts a batch, waits for it, and takes the next. Kernels run without the interpreter's lock, so it wakes
when it must. CUDA tensors over gloo (several ranks that share one GPU) go through host memory on the same thread.

A thread that wants the interpreter's lock while the interpreter shuts down ends the process with an abort, not with its
own exit code. So threads are ended before, and a little time is given to transfers under way. Where a peer never comes,
nothing can wake the thread up (gloo has no way to), and the group that it waits on is kept alive to the end.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from . import streams
from .plan import Transfer

# Told of everything a rank does: lane ("row", "column", "compute", "wait"), label, start and end (time.perf_counter).
Recorder = Callable[[str, str, float, float], None]
Batch = list[tuple[Transfer, torch.Tensor]]
_LEAVE_SECONDS = 5.0  # that the end of the process waits for transfers under way


class CommError(RuntimeError):
    """A transfer failed: a peer died, hung past the time limit, or the network broke."""


@dataclass
class Counters:
    """What one rank's channels have done since the last `reset`.

    sent: bytes handed to torch.distributed, by (direction, channel), e.g. ("forward", "row"); received likewise.
    sends: messages, likewise; waited: seconds spent waiting for transfers to finish; busy: seconds in which a batch was
    under way, by (direction, channel): the achieved rate of a link is sent / busy. Where CUDA streams carry the
    batches the host knows neither, and both are what the clock has measured, if there is one. recorder: see `Recorder`.
    """

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    received: dict[tuple[str, str], int] = field(default_factory=dict)
    sends: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    busy: dict[tuple[str, str], float] = field(default_factory=dict)
    clock: streams.StreamClock | None = None
    recorder: Recorder | None = None

    def reset(self) -> None:
        self.sent.clear()
        self.received.clear()
        self.sends.clear()
        self.calls.clear()
        self.busy.clear()
        self.waited = 0.0

    def add_busy(self, key: tuple[str, str], seconds: float) -> None:
        """Add to `busy`."""
        self.busy[key] = self.busy.get(key, 0.0) + seconds

    def read_clock(self) -> None:
        """Add what the clock has measured by now, without waiting for the GPU."""
        if self.clock is not None:
            waited, busy = self.clock.read()
            self.waited += waited
            for key, seconds in busy.items():
                self.add_busy(key, seconds)

    @property
    def messages(self) -> int:
        """Messages sent, all directions and channels."""
        return sum(self.sends.values())

    def sent_in(self, direction: str) -> int:
        """Bytes sent in "forward" or "backward", both channels."""
        return sum(size for (which, _), size in self.sent.items() if which == direction)


class TransferQueue:
    """Runs jobs in order on a thread of its own, which ends when the queue is dropped; see Note [Queues].

    After a job that failed, all later ones fail with the same text. order: for batches that CUDA streams carry.
    """

    def __init__(self) -> None:
        self.order = streams.StreamOrder()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Future:
        """Queue a job; its Future is done when the job is."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="mesh-cp queue", daemon=True)
            self._thread.start()
        future: Future = Future()
        self._jobs.put((job, future))
        return future

    def end(self, seconds: float) -> bool:
        """End the thread once its jobs are done; False where that takes longer than `seconds`."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _run_jobs(jobs: queue.SimpleQueue[tuple[Callable[[], None], Future] | None]) -> None:
    failed = ""
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            if failed:
                raise CommError(failed)
            job()
        except Exception as error:
            failed = str(error)  # the error itself would keep its frames' buffers alive
            future.set_exception(error)
        else:
            future.set_result(None)
        del entry, job, future  # their buffers


class ChannelComm:
    """One channel of one CP rank: a process group, and who is who in it.

    Args:
        name: "row" or "column", for counters and errors.
        group: a process group that holds the row or column: its own, or the whole CP group.
        members: global rank of every member of the row or column, by CP rank.
        rank: this process's CP rank.
        counters: where bytes and waiting time are added.
        timeout: seconds that one batch may take; None leaves it to the process group's own limit.

    Attributes:
        queue: in which its batches run; two channels that share a link share it.

    Misuse (a finish with nothing outstanding, a message to oneself or out of the group, a buffer that is not
    contiguous) raises RuntimeError or ValueError.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        members: Mapping[int, int],
        rank: int,
        counters: Counters,
        timeout: float | None = None,
    ) -> None:
        missing = set(members.values()) - set(dist.get_process_group_ranks(group))
        if missing:
            raise ValueError(f"{name} channel of CP rank {rank}: the process group lacks ranks {sorted(missing)}")
        self.name, self.group, self.rank, self.counters = name, group, rank, counters
        self.queue = TransferQueue()
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._global = dict(members)
        # How to wait for a batch, what it is, its buffers.
        self._outstanding: deque[tuple[Callable[[], object], str, Batch, streams.Route]] = deque()
        self._abandoned = False
        _channels.add(self)

    def start(self, batch: Batch, where: str, direction: str) -> None:
        """Put a batch into the queue. `where` ("forward step 2") and the transfers' names go into errors."""
        ordered = sorted(batch, key=lambda item: item[0].send)  # receives first
        for transfer, buffer in ordered:
            if transfer.peer == self.rank or transfer.peer not in self._global:
                raise ValueError(
                    f"{self.name} channel of CP rank {self.rank} {sorted(self._global)}: cannot {transfer}"
                )
            if not buffer.is_contiguous():
                raise ValueError(f"{self.name} channel: the buffer to {transfer} is not contiguous")
        device = ordered[0][1].device
        route = streams.route_of(device, self.group)
        if route is streams.Route.STREAM:
            works = self.queue.order.after_others(self, lambda: self._post(ordered, where, direction), _wait_all)
            done = lambda: self._wait(works, where)  # noqa: E731
            if (clock := self.counters.clock) is not None:
                clock.posted((direction, self.name), [work for work, _ in works])
                done = functools.partial(clock.waited_for, done)
        elif route is streams.Route.THREAD:
            done = self.queue.submit(lambda: self._carry(ordered, where, direction)).result
        else:
            staged = streams.Staged(device, [(t.send, buffer) for t, buffer in ordered])
            done = self.queue.submit(lambda: self._carry_staged(staged, ordered, where, direction)).result
        # The buffers stay alive until the batch is waited for: no memory is handed out again under a transfer.
        self._outstanding.append((done, _label(t for t, _ in ordered), ordered, route))

    def finish(self) -> None:
        """Wait for the oldest batch outstanding. Raises CommError, naming the transfer and the peer, if it fails."""
        if not self._outstanding:
            raise RuntimeError(f"{self.name} channel: there is no batch to finish")
        done, label, _buffers, route = self._outstanding.popleft()
        begin = time.perf_counter()
        done()
        end = time.perf_counter()
        if route is not streams.Route.STREAM:  # there the host only says that a stream shall wait
            self.counters.waited += end - begin
        if self.counters.recorder is not None:
            self.counters.recorder("wait", label, begin, end)

    def abandon(self) -> None:
        """After a failure: forget the batches outstanding. Those that are not posted yet never will be."""
        self._abandoned = True
        self._outstanding.clear()

    def _carry(self, batch: Batch, where: str, direction: str) -> None:
        """Post a batch and wait for it; on the queue's thread."""
        if self._abandoned:
            raise CommError(f"CP rank {self.rank}: the {self.name} channel was abandoned after a failure")
        begin = time.perf_counter()
        self._wait(self._post(batch, where, direction), where)
        self.counters.add_busy((direction, self.name), time.perf_counter() - begin)
        if self.counters.recorder is not None:
            self.counters.recorder(self.name, _label(t for t, _ in batch), begin, time.perf_counter())

    def _carry_staged(self, staged: streams.Staged, batch: Batch, where: str, direction: str) -> None:
        """Carry a batch of CUDA tensors through host memory; on the queue's thread."""
        with staged.host_buffers() as buffers:
            self._carry([(t, buffer) for (t, _), buffer in zip(batch, buffers, strict=True)], where, direction)

    def _post(self, batch: Batch, where: str, direction: str) -> list[tuple[dist.Work, list[Transfer]]]:
        """Hand a batch to torch.distributed, and count it."""
        ops = [
            dist.P2POp(dist.isend if t.send else dist.irecv, buffer, self._global[t.peer], self.group)
            for t, buffer in batch
        ]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._error([t for t, _ in batch], where, error) from error
        key = direction, self.name
        for transfer, buffer in batch:
            counted = self.counters.sent if transfer.send else self.counters.received
            counted[key] = counted.get(key, 0) + buffer.numel() * buffer.element_size()
        self.counters.sends[key] = self.counters.sends.get(key, 0) + sum(t.send for t, _ in batch)
        named = [[transfer] for transfer, _ in batch]
        if len(works) != len(named):  # NCCL gives one Work for the whole group of operations
            named = [[transfer for transfer, _ in batch]] * len(works)
        return list(zip(works, named, strict=True))

    def _wait(self, works: list[tuple[dist.Work, list[Transfer]]], where: str) -> None:
        for work, transfers in works:
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise self._error(transfers, where, error) from error

    def _error(self, transfers: list[Transfer], where: str, error: Exception) -> CommError:
        named = " or ".join(f"{t} (global rank {self._global[t.peer]})" for t in transfers)
        return CommError(
            f"CP rank {self.rank}: could not {named} over the {self.name} channel in {where}. That rank, or one it "
            f"waits for, has died or hangs. Cause: {error}"
        )


_channels: weakref.WeakSet[ChannelComm] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """See Note [Queues]."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    channels = list(_channels)
    for channel in channels:
        channel.abandon()
    for channel in channels:
        if not channel.queue.end(max(0.0, deadline - time.monotonic())):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel.group))


def _wait_all(works: list[tuple[dist.Work, list[Transfer]]]) -> None:
    for work, _ in works:
        work.wait()


def _label(transfers: Iterable[Transfer]) -> str:
    """A batch in short: "KV 3 <- 3, KV 0 -> 1"."""
    return ", ".join(t.label for t in transfers)


def warm_up(group: dist.ProcessGroup) -> None:
    """One collective over a group when it is built, so that no communicator is made lazily in mid-step."""
    # "cpu:gloo,cuda:nccl" is one group with a backend for each type of device; gloo's is one for both.
    for device in sorted({device.type for device in group._device_types}):
        if device == "cpu":
            dist.all_reduce(torch.zeros(1), group=group)
        elif device == "cuda" and streams.backend_of(torch.device("cuda"), group) == "nccl":
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def check_timeout(group: dist.ProcessGroup, timeout: float | None) -> None:
    """Raise ValueError for a limit of its own on a batch where NCCL carries it: the host would wait for every one."""
    cuda = any(device.type == "cuda" for device in group._device_types)
    if timeout is not None and cuda and streams.backend_of(torch.device("cuda"), group) == "nccl":
        raise ValueError(
            f"timeout {timeout} with NCCL: its transfers are waited for on the GPU, where the group's own limit "
            "applies; leave it out and pass init_process_group(timeout=...)"
        )
