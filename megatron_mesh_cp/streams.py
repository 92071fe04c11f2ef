"""CUDA streams under the channels: which way a batch goes, in which order, and through which memory.

Note [Streams]
~~~~~~~~~~~~~~
Blocks are launched on the caller's stream. NCCL runs each communicator's batches one after the other on a stream of
its own, which first waits for what the caller's stream was given before: a batch begins when the data it sends is
there, and runs beside the blocks that are launched after it. `Work.wait()` makes the caller's stream wait and returns
at once, so the host runs ahead of the GPU and never synchronizes with it.

Memory: a buffer is made on the caller's stream, and its channel holds it until the caller's stream has waited for the
batch. Then the transfer is in that stream's past, so whoever is given the memory next comes after it. Streams of our
own (below) are recorded on what they touch.

Order: all ranks run the same sequence of events (a plan is one template for all), so batches are posted to the row and
the column communicator in the same order everywhere. With CUDA_DEVICE_MAX_CONNECTIONS=1, where everything a process
launches stands in one line, another order could deadlock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist

Posted = TypeVar("Posted")


class Route(Enum):
    """How a batch travels: posted by the queue's thread, by CUDA streams, or by the thread through host memory."""

    THREAD = "thread"
    STREAM = "stream"
    STAGED = "staged"


def backend_of(device: torch.device, group: dist.ProcessGroup) -> str:
    """The name of the backend that carries tensors of a device, "unknown" where the group has none."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return "unknown"


def route_of(device: torch.device, group: dist.ProcessGroup) -> Route:
    """Raises ValueError where no way is known."""
    if device.type == "cpu":
        return Route.THREAD
    backend = backend_of(device, group) if device.type == "cuda" else ""
    if backend not in ("nccl", "gloo"):
        raise ValueError(
            f"mesh attention on {device.type} tensors with backend {backend or 'unknown'}: use CPU tensors, or CUDA "
            "tensors with NCCL or gloo"
        )
    return Route.STREAM if backend == "nccl" else Route.STAGED


class StreamOrder:
    """Keeps the batches of channels that share a link in order, where each channel's communicator has its own stream.

    Two communicators know nothing of each other. So a batch that follows one of another channel is posted from a stream
    that has waited for that one; the caller's stream, with its blocks, does not wait.
    """

    def __init__(self) -> None:
        self._last: tuple[object, object] | None = None  # channel, what it posted
        self._stream: torch.cuda.Stream | None = None

    def after_others(self, channel: object, post: Callable[[], Posted], wait: Callable[[Posted], None]) -> Posted:
        """Call `post` so that what it posts comes after the last batch of any other channel; returns its result."""
        if self._last is None or self._last[0] is channel:
            posted = post()
        else:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                wait(self._last[1])
                posted = post()
        self._last = channel, posted
        return posted


class StreamClock:
    """How long the caller's stream waits for batches on CUDA streams, and how long these are under way.

    Waiting: by two CUDA events around each wait, on the stream that waits anyhow. Under way: what NCCL itself has timed
    (TORCH_NCCL_ENABLE_TIMING=1, else nothing). A stream of ours that waits for transfers only to time them would hold
    up every block behind it where CUDA_DEVICE_MAX_CONNECTIONS is 1. All is read once it has happened: nothing waits for
    the GPU.
    """

    def __init__(self) -> None:
        self.times_transfers = os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._works: deque[tuple[Hashable, dist.Work]] = deque()

    def posted(self, key: Hashable, works: Iterable[dist.Work]) -> None:
        """A batch was posted; NCCL has one Work for all of it."""
        if self.times_transfers:
            self._works.extend((key, work) for work in works)

    def waited_for(self, wait: Callable[[], None]) -> None:
        """Have the current stream wait for a batch."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        wait()
        end.record()
        self._waits.append((begin, end))

    def read(self) -> tuple[float, dict[Hashable, float]]:
        """Seconds waited, and seconds under way by key, of what has happened since the last call."""
        waited, busy = 0.0, {}
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            waited += begin.elapsed_time(end) / 1e3
        while self._works and self._works[0][1].is_completed():
            key, work = self._works.popleft()
            busy[key] = busy.get(key, 0.0) + work._get_duration() / 1e3
        return waited, busy


class Staged:
    """A batch of CUDA tensors on its way through host memory, for gloo, which takes CPU tensors only.

    Made on the caller's stream when the batch is started; carried on another thread.

    Args: device of all buffers; (is it sent?, buffer) for each message.
    """

    def __init__(self, device: torch.device, batch: Sequence[tuple[bool, torch.Tensor]]) -> None:
        self._batch = batch
        self._stream, self._ready = None, None
        if device.type == "cuda":
            self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))

    @contextmanager
    def host_buffers(self) -> Iterator[list[torch.Tensor]]:
        """CPU buffers in the order of the batch, filled where they are sent; copied back where they are received.

        On leaving, everything has arrived on the device.
        """
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if self._stream:
                self._stream.wait_event(self._ready)
                for _, buffer in self._batch:
                    buffer.record_stream(self._stream)
            host = [buffer.cpu() if send else torch.empty_like(buffer, device="cpu") for send, buffer in self._batch]
            yield host
            for (send, buffer), copy in zip(self._batch, host, strict=True):
                if not send:
                    buffer.copy_(copy)
            if self._stream:
                self._stream.synchronize()
