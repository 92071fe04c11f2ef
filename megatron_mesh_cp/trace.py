"""Spans as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The trace event format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): one complete event
(ph X) a span, ts and dur in microseconds; a process (pid) is a CP rank, a thread (tid) is a lane. Complete events of
one thread must not overlap unless one holds the other, so the transfers that run side by side get lanes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulate import Span

LANES = ("row", "column", "compute", "wait")


@dataclass(frozen=True)
class Run:
    """What the ranks did from `start` on (seconds): simulated or measured, with a name such as "forward 4x4"."""

    name: str
    start: float
    spans: Mapping[int, Sequence[Span]]


def lanes(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by lane, in the order to show them, so that the spans of a lane follow one another.

    The channels have lanes for what is received and what is sent, "row in", "row out"; where several run at once there
    are more of them, "row in 2". A span that is both, such as a batch that was measured as a whole, is in lane "row".
    """
    found: dict[tuple[int, str, int], list[Span]] = {}
    # One starts where the other ends, but for rounding.
    touch = 1e-9 * max((span.end for span in spans), default=0.0)
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        name = span.lane
        if name in ("row", "column"):
            ways = [way for arrow, way in (("<-", " in"), ("->", " out")) if arrow in span.label]
            name += ways[0] if len(ways) == 1 else ""
        order, number = LANES.index(span.lane), 1
        while (order, name, number) in found and found[order, name, number][-1].end > span.start + touch:
            number += 1
        found.setdefault((order, name, number), []).append(span)
    return {name if number == 1 else f"{name} {number}": spans for (_, name, number), spans in sorted(found.items())}


def chrome_trace(runs: Sequence[Run]) -> dict:
    """The trace of the runs, an object to be written as JSON."""
    events: list[dict] = []
    tids: dict[str, int] = {}
    by_run = [(run, rank, lanes(spans)) for run in runs for rank, spans in run.spans.items()]
    for name in sorted({name for _, _, found in by_run for name in found}, key=_lane_order):
        tids[name] = len(tids)
    for rank in sorted({rank for _, rank, _ in by_run}):
        events.append(_metadata("process_name", rank, 0, {"name": f"CP rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        for name in sorted({name for _, r, found in by_run for name in found if r == rank}, key=_lane_order):
            events.append(_metadata("thread_name", rank, tids[name], {"name": name}))
            events.append(_metadata("thread_sort_index", rank, tids[name], {"sort_index": tids[name]}))
    for run, rank, found in by_run:
        for name, spans in found.items():
            events += [
                {
                    "name": span.label,
                    "cat": f"{span.lane},{run.name}",
                    "ph": "X",
                    "ts": 1e6 * (run.start + span.start),
                    "dur": 1e6 * (span.end - span.start),
                    "pid": rank,
                    "tid": tids[name],
                    "args": {"run": run.name},
                }
                for span in spans
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lane_order(name: str) -> tuple[int, str, int]:
    lane, *rest = name.split()
    number = int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return LANES.index(lane), " ".join(rest[:1]), number


def _metadata(name: str, pid: int, tid: int, args: dict) -> dict:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
