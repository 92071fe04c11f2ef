"""The only file that calls torch.distributed point-to-point: the row and the column channel of a CP rank.

A channel carries one batch of transfers at a time, receives posted before sends (on gloo the other way round doubles
the time of a pairwise exchange), grouped into one call as NCCL wants it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from .plan import Transfer


class CommError(RuntimeError):
    """A transfer failed: a peer died, hung past the time limit, or the network broke."""


@dataclass
class Counters:
    """What one rank's channels have done since the last `reset`.

    sent: bytes handed to torch.distributed, by (direction, channel), e.g. ("forward", "row"); received likewise.
    messages: sends; waited: seconds spent waiting for transfers to finish.
    """

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    received: dict[tuple[str, str], int] = field(default_factory=dict)
    messages: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0

    def reset(self) -> None:
        self.sent.clear()
        self.received.clear()
        self.calls.clear()
        self.messages, self.waited = 0, 0.0

    def sent_in(self, direction: str) -> int:
        """Bytes sent in "forward" or "backward", both channels."""
        return sum(size for (which, _), size in self.sent.items() if which == direction)


class ChannelComm:
    """One channel of one CP rank: a process group, and who is who in it.

    Args:
        name: "row" or "column", for counters and errors.
        group: a process group that holds the row or column: its own, or the whole CP group.
        members: global rank of every member of the row or column, by CP rank.
        rank: this process's CP rank.
        counters: where bytes and waiting time are added.
        timeout: seconds that one batch may take; None leaves it to the process group's own limit.

    Misuse (a second batch while one is in flight, a finish with none, a message to oneself or out of the group, a
    buffer that is not contiguous) raises RuntimeError or ValueError.
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
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._global = dict(members)
        self._flying: list[tuple[dist.Work, list[Transfer]]] | None = None
        self._where = ""

    def start(self, batch: list[tuple[Transfer, torch.Tensor]], where: str, direction: str) -> None:
        """Post a batch, receives first. `where` ("forward step 2") and the transfers' names go into errors."""
        if self._flying is not None:
            raise RuntimeError(f"{self.name} channel: a batch is in flight ({self._where}); finish it first")
        ordered = sorted(batch, key=lambda item: item[0].send)
        ops = [self._op(transfer, buffer, direction) for transfer, buffer in ordered]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._error([transfer for transfer, _ in ordered], where, error) from error
        named = [[transfer] for transfer, _ in ordered]
        if len(works) != len(named):  # NCCL gives one Work for the whole group of operations
            named = [[transfer for transfer, _ in ordered]] * len(works)
        self._flying = list(zip(works, named, strict=True))
        self._where = where

    def finish(self) -> None:
        """Wait for the batch in flight. Raises CommError, naming the transfer and the peer, if it fails."""
        if self._flying is None:
            raise RuntimeError(f"{self.name} channel: there is no batch to finish")
        flying, self._flying = self._flying, None
        begin = time.perf_counter()
        for work, transfers in flying:
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise self._error(transfers, self._where, error) from error
        self.counters.waited += time.perf_counter() - begin

    def _op(self, transfer: Transfer, buffer: torch.Tensor, direction: str) -> dist.P2POp:
        if transfer.peer == self.rank or transfer.peer not in self._global:
            raise ValueError(f"{self.name} channel of CP rank {self.rank} {sorted(self._global)}: cannot {transfer}")
        if not buffer.is_contiguous():
            raise ValueError(f"{self.name} channel: the buffer to {transfer} is not contiguous")
        key, size = (direction, self.name), buffer.numel() * buffer.element_size()
        counted = self.counters.sent if transfer.send else self.counters.received
        counted[key] = counted.get(key, 0) + size
        self.counters.messages += transfer.send
        return dist.P2POp(dist.isend if transfer.send else dist.irecv, buffer, self._global[transfer.peer], self.group)

    def abandon(self) -> None:
        """Forget a batch in flight after a failure, buffers and all."""
        self._flying = None

    def _error(self, transfers: list[Transfer], where: str, error: Exception) -> CommError:
        named = " or ".join(f"{t} (global rank {self._global[t.peer]})" for t in transfers)
        return CommError(
            f"CP rank {self.rank}: could not {named} over the {self.name} channel in {where}. That rank, or one it "
            f"waits for, has died or hangs. Cause: {error}"
        )


def warm_up(group: dist.ProcessGroup) -> None:
    """One collective over a group when it is built, so that no communicator is made lazily in mid-step."""
    # "cpu:gloo,cuda:nccl" is one group with a backend for each type of device.
    for device in sorted({device.type for device in group._device_types}):
        if device == "cpu":
            dist.all_reduce(torch.zeros(1), group=group)
        elif device == "cuda" and torch.cuda.is_available():
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
