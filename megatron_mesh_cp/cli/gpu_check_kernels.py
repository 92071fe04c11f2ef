"""One kernel of scripts/gpu_check.sh, in a process of its own: errors, rates, host synchronisations of one rank.

Errors: a sequence is cut for two CP ranks as Megatron does, and its four blocks are computed and merged as the executor
does, so every kind of block (layout.BlockKind) is met, and the backward has the GLOBAL lse and delta of rows that two
blocks share. Each block is compared with its part of the dense fp64 attention, what is merged with the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from megatron_mesh_cp.cli.gpu_check_dense import Case, Dense, torch_errors
from megatron_mesh_cp.cli.gpu_check_rows import ABSENT, FAIL, Error, Row, Tally
from megatron_mesh_cp.cli.gpu_check_speed import rate_rows
from megatron_mesh_cp.cli.gpu_check_streams import one_rank_rows
from megatron_mesh_cp.executor import live_part
from megatron_mesh_cp.kernels import Kernel, select_kernel, unavailable
from megatron_mesh_cp.layout import BlockKind, block_kind, chunk_positions
from megatron_mesh_cp.merge import NEG_INF, clean_lse, merge_, row_delta, stand_in_out

DTYPES = (torch.bfloat16, torch.float16)
_RANKS = 2
_BLOCKS = {
    BlockKind.CAUSAL: "causal block",
    BlockKind.FULL: "full block",
    BlockKind.Q_SECOND_HALF: "second half of Q, all of KV",
    BlockKind.KV_FIRST_HALF: "all of Q, first half of KV",
}


@dataclass(frozen=True)
class KernelJob:
    """kernel: its name; device: "cuda" or "cpu"."""

    kernel: str
    device: str
    quick: bool

    @property
    def cases(self) -> list[Case]:
        """Both dtypes, orders in memory, MHA and GQA, masks; 400 tokens make blocks that no kernel's tiles divide."""
        sizes = [(400, 64), (1024, 128)]
        if self.device == "cpu":
            sizes = [(72, 32)]
        elif self.quick:
            sizes = [(400, 128)]
        return [
            Case(length, dim, heads, kv_heads, dtype, causal, memory)
            for (length, dim), (heads, kv_heads), dtype, causal, memory in product(
                sizes, ((4, 4), (8, 2)), DTYPES, (True, False), ("sbhd", "bshd")
            )
        ]


def check_kernel(_rank: int, job: KernelJob) -> list[Row]:
    """All rows of a kernel; one row where it is not on this machine."""
    if why := unavailable(job.kernel, job.device):
        return [Row("kernel", job.kernel, ABSENT, why)]
    device = torch.device(job.device)
    rows, kernels = [], {}
    for dtype in DTYPES:
        case = next(case for case in job.cases if case.dtype == dtype)
        try:
            kernels[dtype] = select_kernel(
                job.kernel, dtype=dtype, device_type=job.device, head_dim=case.head_dim, v_head_dim=case.head_dim
            )
        except ValueError as error:
            rows.append(Row(f"kernel {dtype}".replace("torch.", ""), job.kernel, ABSENT, str(error)))
    bf16 = kernels.get(torch.bfloat16)
    if kernels:
        rows += _attempt("blocks", job.kernel, lambda: _error_rows(job, kernels, device))
    if bf16 is not None:
        rows += _attempt("rates", job.kernel, lambda: rate_rows(bf16, job.kernel, device, job.quick))
        rows += _attempt("host synchronisations", job.kernel, lambda: one_rank_rows(job.kernel, device))
    return rows


def _attempt(check: str, kernel: str, rows: Callable[[], list[Row]]) -> list[Row]:
    """The rows, or one that says what was raised: a kernel that fails in one part may still be looked at in others."""
    try:
        return rows()
    except Exception as error:
        return [Row(check, kernel, FAIL, f"{type(error).__name__}: {error}".split("\n")[0])]


def usable(rows: list[Row]) -> bool:
    """Whether `check_kernel` found the kernel here, in bf16, which is what the ranks run with."""
    return not any(row.result == ABSENT and row.check in ("kernel", "kernel bfloat16") for row in rows)


def _error_rows(job: KernelJob, kernels: dict[torch.dtype, Kernel], device: torch.device) -> list[Row]:
    passes = ("forward", "backward")
    tallies = {f"{name}, {way}": Tally() for name, way in product((*_BLOCKS.values(), "two blocks merged"), passes)}
    for case in job.cases:
        if case.dtype not in kernels:
            continue
        _measure(kernels[case.dtype], case, device, tallies)
    return [tally.row(check, job.kernel) for check, tally in tallies.items()]


def _measure(kernel: Kernel, case: Case, device: torch.device, tallies: dict[str, Tally]) -> None:
    """The four blocks of a case, forward and backward; errors go into the tallies."""
    dense = Dense(case, device)
    yardstick = torch_errors(case, device, dense)
    where = [chunk_positions(rank, _RANKS, case.length) for rank in range(_RANKS)]
    whole = case.inputs(device)
    own = [[case.heads_first(case.tokens(x, positions)) for x in whole] for positions in where]
    kinds = {(i, j): block_kind(i, j, causal=case.causal, layout="zigzag") for i, j in product(range(_RANKS), repeat=2)}
    live = {block: live_part(kind, case.length // _RANKS) for block, kind in kinds.items()}
    at = {(i, j): (where[i][rows], where[j][columns]) for (i, j), (rows, columns) in live.items()}

    def compare(block: tuple[int, int], way: str, got: tuple[torch.Tensor, ...]) -> None:
        tally = tallies[f"{_BLOCKS[kinds[block]]}, {way}"]
        if way == "forward":
            out, lse = dense.forward(*at[block])
            tally.add(f"out, {case}", Error.of(got[0], out), None, case.eps)
            tally.add_lse(str(case), Error.of(clean_lse(got[1]), lse))
            return
        for name, part, want in zip(("dq", "dk", "dv"), got, dense.gradients(*at[block]), strict=True):
            tally.add(f"{name}, {case}", Error.of(part, want), None, case.eps)

    shape = (case.batch, case.heads, case.length, case.head_dim)
    merged = torch.zeros(shape, device=device), torch.full(shape[:3], NEG_INF, device=device)
    for (i, j), (rows, columns) in live.items():
        q, (_, k, v, _) = own[i][0], own[j]
        part = kernel.forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], kinds[i, j] is BlockKind.CAUSAL, case.scale
        )
        compare((i, j), "forward", part)
        into = [x[:, :, at[i, j][0]] for x in merged]
        merge_(*into, *part)
        for x, new in zip(merged, into, strict=True):
            x[:, :, at[i, j][0]] = new
    out, lse = merged[0].to(case.dtype), merged[1]
    grads = [torch.zeros(x.shape, device=device) for x in (out, dense.dk, dense.dv)]
    for (i, j), (rows, columns) in live.items():
        (q, _, _, dout), (_, k, v, _) = own[i], own[j]
        delta = row_delta(dout, out[:, :, where[i]])
        row = dout, q, stand_in_out(dout, delta) if kernel.wants_out else None, lse[:, :, where[i]], delta
        grad, query, stand_in, stats, delta = (x if x is None else x[:, :, rows] for x in row)
        mask = kinds[i, j] is BlockKind.CAUSAL
        parts = kernel.backward(
            grad, query, k[:, :, columns], v[:, :, columns], stand_in, stats, delta, mask, case.scale
        )
        compare((i, j), "backward", parts)
        for total, part, positions in zip(grads, parts, (at[i, j][0], *[at[i, j][1]] * 2), strict=True):
            total[:, :, positions] += part
    forward, backward = (tallies[f"two blocks merged, {way}"] for way in ("forward", "backward"))
    said = f"{case}, {'causal' if case.causal else 'full'}"
    forward.add(f"out, {said}", Error.of(out, dense.out), yardstick["out"], case.eps)
    forward.add_lse(said, Error.of(lse, dense.lse))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        error = Error.of(grad.to(case.dtype), getattr(dense, name))
        backward.add(f"{name}, {said}", error, yardstick[name], case.eps)
