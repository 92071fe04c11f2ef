"""A plan as text: the third reader of a Plan, beside the executor and the simulator."""

from __future__ import annotations

from .plan import EventKind, Plan


def describe(plan: Plan, rank: int) -> str:
    """What CP rank `rank` does, one line an event, with the buffers that are free after it."""
    title = f"{plan.direction.value}, tile {plan.tile}, {plan.exchange} exchange, CP rank {rank}"
    rows = plan.tile.row_group(rank)
    columns = plan.tile.column_group(rank)
    lines = [f"{title}: row group {_list(rows)}, column group {_list(columns)}"]
    for event in plan.program(rank):
        if event.kind is EventKind.COMPUTE:
            what = f"block (Q {event.block.q}, KV {event.block.kv})"
        else:
            what = "; ".join(map(str, event.transfers))
        freed = ", ".join(f"{payload.value.upper()} {chunk}" for payload, chunk in event.frees)
        lines.append(f"step {event.step}  {event.kind.value:7}  {what}" + (f"   [then free: {freed}]" if freed else ""))
    return "\n".join(lines)


def _list(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))
