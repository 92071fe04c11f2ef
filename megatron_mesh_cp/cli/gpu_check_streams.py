"""Host synchronisations and overlap: the fourth and fifth part of scripts/gpu_check.sh.

Note [Two ways to see a host that waits]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch warns of synchronizing calls of its own (`torch.cuda.set_sync_debug_mode`), and says where. It does not see waits
in NCCL, cuDNN or an event. So the same call also runs behind a kernel that keeps the GPU busy for about a second: a
host that is back before the GPU has even begun has waited for nothing on that stream, whoever would have waited.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention
from megatron_mesh_cp.cli.gpu_check_dense import Case
from megatron_mesh_cp.cli.gpu_check_rows import FAIL, NOT_APPLICABLE, OK, Row

OVERLAP = 0.5  # share of NCCL's time that must be hidden behind attention
_BUSY_CYCLES = 2_000_000_000  # of the GPU's clock, about a second
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
_NCCL = re.compile(r"nccl", re.IGNORECASE)


@contextmanager
def sync_warnings(device: torch.device) -> Iterator[list[str]]:
    """Collects torch's warnings of synchronizing CUDA calls, those of the backward's threads too."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def ran_ahead(call: Callable[[], object]) -> bool:
    """Whether the host is back from a call before the GPU has begun it; CUDA only. See the Note above."""
    busy = torch.cuda.Event()
    torch.cuda._sleep(_BUSY_CYCLES)
    busy.record()
    call()
    ahead = not busy.query()
    torch.cuda.synchronize()
    return ahead


def attention_call(case: Case, groups: MeshGroups, device: torch.device, kernel: str) -> Callable[[], None]:
    """A forward and backward of mesh attention over `case`; every rank has the same tokens, which is all one here."""
    local = replace(case, length=case.length // groups.size).inputs(device)
    q, k, v = (x.requires_grad_() for x in local[:3])

    def call() -> None:
        out = mesh_attention(q, k, v, groups, case.causal, qkv_format=case.memory, kernel=kernel)
        torch.autograd.grad(out, (q, k, v), local[3])

    return call


def sync_rows(what: str, kernel: str, groups: MeshGroups, device: torch.device) -> list[Row]:
    """The two rows of a tile, from the second call on; over all ranks of `groups`, each of which calls this."""
    check = f"host synchronisations, forward + backward, {what}", f"host ahead of the GPU, {what}"
    if device.type != "cuda":
        return [Row(name, kernel, NOT_APPLICABLE, "not applicable on CPU") for name in check]
    case = Case(512 * groups.size, 128, 8, 2, torch.bfloat16, True)
    call = attention_call(case, groups, device, kernel)
    call()  # plans, packages, cuDNN's own plans, memory
    torch.cuda.synchronize()
    with sync_warnings(device) as found:
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    said: list[tuple[list[str], bool]] = [([], False)] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(said, (found, ran_ahead(call)))
    places = [place for found, _ in said for place in found]
    behind = [str(rank) for rank, (_, ahead) in enumerate(said) if not ahead]
    more = f", first at {places[0]}" if places else ""
    return [
        Row(check[0], kernel, FAIL if places else OK, f"{len(places)} in 3 calls, all ranks{more}", "0"),
        Row(
            *(check[1], kernel, FAIL if behind else OK),
            f"waits on rank {', '.join(behind)}" if behind else "returns before the GPU has begun",
            "returns before the GPU has begun",
        ),
    ]


def one_rank_rows(kernel: str, device: torch.device) -> list[Row]:
    """Host synchronisations of the executor alone: a group of this one rank, which every machine can have."""
    return sync_rows("one rank (1x1)", kernel, MeshGroups.build(dist.group.WORLD, TileShape(1, 1)), device)


@dataclass(frozen=True)
class Span:
    """A kernel on the GPU, in microseconds."""

    name: str
    start: float
    end: float


def kernel_spans(trace: dict) -> list[Span]:
    """The GPU kernels of a torch.profiler trace in Chrome's format."""
    kernels = (e for e in trace.get("traceEvents", ()) if e.get("ph") == "X" and e.get("cat") == "kernel")
    return [Span(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels]


def hidden_share(spans: Iterable[Span]) -> float:
    """Share of the time of NCCL's kernels during which an attention kernel runs too.

    Raises ValueError where the trace has none of either: then it shows nothing.
    """
    spans = list(spans)
    transfers = [span for span in spans if _NCCL.search(span.name)]
    blocks = _union(s for s in spans if _ATTENTION.search(s.name) and not _NCCL.search(s.name))
    total = sum(span.end - span.start for span in transfers)
    if not total or not blocks:
        raise ValueError(f"the trace has {len(transfers)} NCCL and {len(blocks)} attention kernels among {len(spans)}")
    both = (max(0.0, min(t.end, end) - max(t.start, start)) for t in transfers for start, end in blocks)
    return sum(both) / total


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Times at which at least one of the spans runs, in order."""
    out: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        if out and span.start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], span.end)
        else:
            out.append((span.start, span.end))
    return out


def overlap_row(check: str, kernel: str, shares: list[float]) -> Row:
    """The verdict on the hidden shares of all ranks."""
    least = min(shares)
    figure = f"{least:.0%} of NCCL's time hidden on the worst rank, {max(shares):.0%} on the best"
    return Row(check, kernel, OK if least >= OVERLAP else FAIL, figure, f"at least {OVERLAP:.0%}")
