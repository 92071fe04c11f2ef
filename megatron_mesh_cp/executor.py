"""The executor: runs one rank's part of a Plan, forward or backward, on any torch device.

It takes every decision of order from the Plan's program (Note [Reading a plan] in plan.py); what is here is only what
each event does. Inside, tensors are [b, h, s, d] views, row statistics [b, h, s].
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from .groups import MeshGroups
from .kernels import Kernel
from .layout import BlockKind, block_kind
from .merge import NEG_INF, clean_lse, merge_, stand_in_out, stats_dtype
from .plan import Block, Direction, Event, EventKind, Item, Payload, Transfer
from .wire import Parts, Wire, in_memory_order

Tensors = tuple[torch.Tensor, ...]
_ALL = slice(None)


@dataclass(frozen=True)
class Problem:
    """What is to be computed: over which groups, by which program and kernel."""

    groups: MeshGroups
    program: tuple[Event, ...]  # this rank's part of a verified plan
    kernel: Kernel
    causal: bool
    scale: float
    layout: str
    memory: str = "bhsd"  # how the caller's [b, h, s, d] views lie in memory: "sbhd" or "bshd"


class _Run:
    """What forward and backward share: buffers, channels and the walk over the program's events."""

    direction: Direction

    def __init__(
        self,
        problem: Problem,
        own: dict[Item, Tensors],
        messages: dict[Payload, Parts],
    ) -> None:
        self.p = problem
        self.rank = problem.groups.rank
        self.inputs = dict(own)  # chunks that blocks can read
        self.wires = {payload: Wire(parts, problem.memory) for payload, parts in messages.items()}
        self.partials: dict[Item, Tensors] = {}  # accumulators of results
        self.chunks: dict[Item, torch.Tensor] = {}  # input messages: own packed, received, or under way
        self.results: dict[Transfer, torch.Tensor] = {}  # result messages under way, to here or to their owner
        self._callers = {t.untyped_storage().data_ptr() for parts in own.values() for t in parts}
        first = next(iter(own.values()))[0]
        self.device, self.acc = first.device, stats_dtype(first.dtype)

    # What differs between forward and backward.
    def compute(self, block: Block, kind: BlockKind) -> None:
        raise NotImplementedError

    def add_result(self, item: Item, parts: Tensors) -> None:
        """Add a received partial result to the accumulator."""
        raise NotImplementedError

    def execute(self) -> None:
        """Run the program of this rank, event by event."""
        self.p.groups.check_usable()
        try:
            self._execute()
        except BaseException as error:
            self.p.groups.mark_broken(error)
            raise

    def _execute(self) -> None:
        watcher = self.p.groups.watcher
        counters = self.p.groups.counters
        counters.calls[self.direction.value] = counters.calls.get(self.direction.value, 0) + 1
        for number, event in enumerate(self.p.program):
            if event.kind is EventKind.START:
                self._start(event)
            elif event.kind is EventKind.FINISH:
                self._finish(event)
            else:
                self._compute(event.block)
            if watcher is not None:
                watcher(self.direction, number, self._held_bytes())
            self._release(event)

    def _start(self, event: Event) -> None:
        batch = []
        for t in event.transfers:
            item = (t.payload, t.chunk)
            wire = self.wires[t.payload]
            if t.payload.is_result:
                buffer = self.results[t] = wire.pack(self.partials[item]) if t.send else wire.alloc(self.device)
            elif t.send and item in self.chunks:
                buffer = self.chunks[item]
            else:  # a chunk comes in, or the own chunk is sent for the first time
                buffer = self.chunks[item] = wire.pack(self.inputs[item]) if t.send else wire.alloc(self.device)
            batch.append((t, buffer))
        where = f"step {event.step} of the {self.direction.value}"
        self._channel(event).start(batch, where, self.direction.value)

    def _finish(self, event: Event) -> None:
        self._channel(event).finish()
        for t in event.transfers:
            item = (t.payload, t.chunk)
            if t.send:
                continue
            if t.payload.is_result:
                self.add_result(item, self.wires[t.payload].views(self.results[t]))
            else:
                self.inputs[item] = self.wires[t.payload].views(self.chunks[item])

    def _compute(self, block: Block) -> None:
        kind = block_kind(block.q, block.kv, causal=self.p.causal, layout=self.p.layout)
        recorder = self.p.groups.counters.recorder
        if recorder is None:
            self.compute(block, kind)
            return
        begin = time.perf_counter()
        self.compute(block, kind)
        recorder("compute", f"block ({block.q}, {block.kv})", begin, time.perf_counter())

    def _release(self, event: Event) -> None:
        for t in event.transfers:
            item = (t.payload, t.chunk)
            if not t.payload.is_result:
                continue
            if event.kind is EventKind.FINISH:
                del self.results[t]
            elif t.send:
                del self.partials[item]
        for item in event.frees:
            self.chunks.pop(item, None)
            self.inputs.pop(item, None)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.zeros(math.prod(shape), dtype=self.acc, device=self.device)
        return in_memory_order(flat, shape, self.p.memory)

    def _channel(self, event: Event):
        return self.p.groups.channel(self.direction, event.transfers[0].payload.channel)

    def _held(self) -> list[torch.Tensor]:
        """Every tensor that outlives an event but for the caller's own: messages and accumulators."""
        parts = [t for box in (self.inputs, self.partials) for parts in box.values() for t in parts]
        return [*self.chunks.values(), *self.results.values(), *parts]

    def _held_bytes(self) -> int:
        """Memory behind what is held, each piece once however many views there are of it."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._held()}
        return sum(size for pointer, size in storages.items() if pointer not in self._callers)


class ForwardRun(_Run):
    """One attention forward: q [b, hq, s, d], k [b, hkv, s, d], v [b, hkv, s, dv] of this rank's chunk."""

    direction = Direction.FORWARD

    def __init__(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rank, acc = problem.groups.rank, stats_dtype(q.dtype)
        out_shape = (*q.shape[:3], v.shape[-1])
        messages = {
            Payload.Q: ((tuple(q.shape), q.dtype),),
            Payload.KV: ((tuple(k.shape), k.dtype), (tuple(v.shape), v.dtype)),
            Payload.O: ((out_shape, q.dtype), (out_shape[:3], acc)),
        }
        super().__init__(problem, {(Payload.Q, rank): (q,), (Payload.KV, rank): (k, v)}, messages)
        self.out_shape = out_shape

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [b, hq, s, dv] in the accumulation dtype, lse [b, hq, s]."""
        self.execute()
        out, lse = self.partials[(Payload.O, self.rank)]
        return out, lse

    def compute(self, block: Block, kind: BlockKind) -> None:
        (q,), (k, v) = self.inputs[(Payload.Q, block.q)], self.inputs[(Payload.KV, block.kv)]
        item = (Payload.O, block.q)
        if kind is BlockKind.EMPTY:
            self._partial(item)
            return
        rows, columns = live_part(kind, q.shape[2])
        out, lse = self.p.kernel.forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], kind is BlockKind.CAUSAL, self.p.scale
        )
        if item not in self.partials and rows == _ALL:
            self.partials[item] = (out.to(self.acc), clean_lse(lse).to(self.acc))  # the kernel's own new tensors
            return
        total, total_lse = self._partial(item)
        merge_(total[:, :, rows], total_lse[:, :, rows], out, lse)

    def add_result(self, item: Item, parts: Tensors) -> None:
        merge_(*self._partial(item), *parts)

    def _partial(self, item: Item) -> Tensors:
        if item not in self.partials:
            self.partials[item] = (
                self._zeros(self.out_shape),
                torch.full(self.out_shape[:3], NEG_INF, dtype=self.acc, device=self.device),
            )
        return self.partials[item]


class BackwardRun(_Run):
    """One attention backward; shapes as in ForwardRun, dout [b, hq, s, dv], lse and delta [b, hq, s]."""

    direction = Direction.BACKWARD

    def __init__(
        self,
        problem: Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
    ) -> None:
        rank = problem.groups.rank
        q_part, k_part, v_part = ((tuple(x.shape), x.dtype) for x in (q, k, v))
        stat = (tuple(lse.shape), lse.dtype)
        messages = {
            Payload.QDO: (q_part, (tuple(dout.shape), q.dtype), stat, stat),
            Payload.KV: (k_part, v_part),
            Payload.DQ: (q_part,),
            Payload.DKV: (k_part, v_part),
        }
        super().__init__(problem, {(Payload.QDO, rank): (q, dout, lse, delta), (Payload.KV, rank): (k, v)}, messages)
        self._stand_ins: dict[int, torch.Tensor] = {}

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq [b, hq, s, d], dk [b, hkv, s, d], dv [b, hkv, s, dv] in the accumulation dtype."""
        self.execute()
        (dq,) = self.partials[(Payload.DQ, self.rank)]
        dk, dv = self.partials[(Payload.DKV, self.rank)]
        return dq, dk, dv

    def compute(self, block: Block, kind: BlockKind) -> None:
        row, (k, v) = self.inputs[(Payload.QDO, block.q)], self.inputs[(Payload.KV, block.kv)]
        items = (Payload.DQ, block.q), (Payload.DKV, block.kv)
        if kind is BlockKind.EMPTY:
            for item in items:
                self._partial(item)
            return
        rows, columns = live_part(kind, k.shape[2])
        out = self._stand_in(block.q)
        q, dout, lse, delta = (x[:, :, rows] for x in row)
        dq, dk, dv = self.p.kernel.backward(
            dout,
            q,
            k[:, :, columns],
            v[:, :, columns],
            None if out is None else out[:, :, rows],
            lse,
            delta,
            kind is BlockKind.CAUSAL,
            self.p.scale,
        )
        self._add(items[0], rows, (dq,))
        self._add(items[1], columns, (dk, dv))

    def add_result(self, item: Item, parts: Tensors) -> None:
        for total, grad in zip(self._partial(item), parts, strict=True):
            total.add_(grad)

    def _stand_in(self, row: int) -> torch.Tensor | None:
        """The stand-in for `out` of a row, made once; O itself does not travel, only delta does."""
        if not self.p.kernel.wants_out:
            return None
        if row not in self._stand_ins:
            _, dout, _, delta = self.inputs[(Payload.QDO, row)]
            self._stand_ins[row] = stand_in_out(dout, delta)
        return self._stand_ins[row]

    def _held(self) -> list[torch.Tensor]:
        return [*super()._held(), *self._stand_ins.values()]

    def _release(self, event: Event) -> None:
        super()._release(event)
        gone = {chunk for payload, chunk in event.frees if payload is Payload.QDO}
        gone |= {t.chunk for t in event.transfers if t.payload is Payload.DQ and t.send}  # the row is complete
        for chunk in gone:
            self._stand_ins.pop(chunk, None)

    def _add(self, item: Item, part: slice, grads: Tensors) -> None:
        if item not in self.partials and part == _ALL:
            self.partials[item] = tuple(grad.to(self.acc) for grad in grads)  # the kernel's own new tensors
            return
        for total, grad in zip(self._partial(item), grads, strict=True):
            total[:, :, part].add_(grad)

    def _partial(self, item: Item) -> Tensors:
        if item not in self.partials:
            self.partials[item] = tuple(self._zeros(shape) for shape, _ in self.wires[item[0]].parts)
        return self.partials[item]


def live_part(kind: BlockKind, length: int) -> tuple[slice, slice]:
    """Rows of Q and of KV that a block of chunks of `length` tokens computes; see Note [Zigzag] in layout.py."""
    rows = slice(length // 2, None) if kind is BlockKind.Q_SECOND_HALF else _ALL
    columns = slice(None, length // 2) if kind is BlockKind.KV_FIRST_HALF else _ALL
    return rows, columns
