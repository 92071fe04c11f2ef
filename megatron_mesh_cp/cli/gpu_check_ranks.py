"""Mesh attention over several ranks: the third part of scripts/gpu_check.sh, and what only NCCL can show.

With a GPU for every rank they talk over NCCL, otherwise all share the GPUs there are and talk over gloo.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention
from megatron_mesh_cp.cli import gpu_check_streams as streams
from megatron_mesh_cp.cli.gpu_check_dense import NAMES, Case, Dense, torch_errors
from megatron_mesh_cp.cli.gpu_check_rows import FAIL, OK, TIMES_TORCH_RANKS, Error, Row, Sums, Tally, sums
from megatron_mesh_cp.comm import warm_up
from megatron_mesh_cp.cost import nominal_costs
from megatron_mesh_cp.layout import chunk_positions
from megatron_mesh_cp.plan import Direction

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SAME_TILE = "2x2"  # the only one here whose rank has both channels


@dataclass(frozen=True)
class RankJob:
    """What some ranks do with one kernel.

    device: "cuda" or "cpu"; nccl: a GPU for every rank; gpus: how many there are; connections: what
    CUDA_DEVICE_MAX_CONNECTIONS was set to when the check was started.
    """

    ranks: int
    kernel: str
    device: str
    nccl: bool = False
    gpus: int = 0
    quick: bool = False
    connections: str | None = None

    @property
    def tiles(self) -> tuple[str, ...]:
        return ("1x2", "2x1") if self.ranks == 2 else ("1x4", "2x2", "4x1")

    @property
    def over(self) -> str:
        if self.nccl:
            return "NCCL"
        return "gloo" if self.device == "cpu" else f"gloo, {self.ranks} ranks share {self.gpus} GPU(s)"

    @property
    def deterministic(self) -> bool:
        """Whether the kernel is asked to be. Transformer Engine cannot be on every GPU, and has its own switch."""
        return self.kernel != "te" or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"

    @property
    def cases(self) -> tuple[tuple[Case, str], ...]:
        """What every tile runs, each with its exchange."""
        length, dim = (512, 64) if self.quick else (1024, 128)
        length, dim = (64, 32) if self.device == "cpu" else (length, dim)
        causal = Case(length, dim, 8, 2, torch.bfloat16, True)
        return (causal, "direct"), (replace(causal, causal=False, memory="bshd"), "shift")


def check_ranks(rank: int, job: RankJob) -> list[Row]:
    """All rows of a kernel over some ranks; run on each of them, with gloo up."""
    started = torch.cuda.is_initialized()
    device, group = _place(rank, job)
    rows = [_connections_row(job, started)] if job.device == "cuda" else []
    known = {}
    for case, _ in job.cases:
        dense = Dense(case, device)
        known[case] = dense.whole(), torch_errors(case, device, dense)
    built = [(f"tile {tile}", MeshGroups.build(group, TileShape.parse(tile))) for tile in job.tiles]
    if _SAME_TILE in job.tiles:
        built.append((f"tile {_SAME_TILE}, one link, two communicators", _two_communicators(job, group)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that know no deterministic way
        # It also fills new memory with NaN, so that a buffer that is read before its data is there shows.
        torch.use_deterministic_algorithms(job.deterministic, warn_only=True)
        rows += [_tile_row(f"{name} over {job.over}", job, groups, device, known) for name, groups in built]
        torch.use_deterministic_algorithms(False)
    if job.nccl:
        for name, groups in built:
            rows += streams.sync_rows(f"{name} over NCCL", job.kernel, groups, device)
    return rows


def check_overlap(rank: int, job: RankJob) -> list[Row]:
    """The row on overlap: a profiler's trace of chunks so long that blocks take longer than transfers. NCCL only."""
    device, group = _place(rank, job)
    tile = _SAME_TILE if _SAME_TILE in job.tiles else job.tiles[0]
    groups = MeshGroups.build(group, TileShape.parse(tile))
    local = 8192 if job.quick else 16384
    case = Case(local * job.ranks, 128, 32, 8, torch.bfloat16, True, batch=1)
    call = streams.attention_call(case, groups, device, job.kernel)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    said: list[float | str] = [0.0] * job.ranks
    dist.all_gather_object(said, _share_of(trace))
    check = f"overlap, tile {tile} over NCCL, {local} tokens a rank"
    if lacking := next((share for share in said if isinstance(share, str)), None):
        return [Row(check, job.kernel, FAIL, lacking)]
    return [streams.overlap_row(check, job.kernel, said)]


def _share_of(trace: profile) -> float | str:
    """The hidden share of this rank's trace, or what it lacks: the other ranks wait for an answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        spans = streams.kernel_spans(json.loads(path.read_text(encoding="utf-8")))
    try:
        return streams.hidden_share(spans)
    except ValueError as error:
        return str(error)


def _place(rank: int, job: RankJob) -> tuple[torch.device, dist.ProcessGroup]:
    """This rank's device, and the CP group."""
    if job.device == "cpu":
        return torch.device("cpu"), dist.group.WORLD
    device = torch.device("cuda", rank % job.gpus)
    torch.cuda.set_device(device)
    return device, dist.new_group(backend="nccl") if job.nccl else dist.group.WORLD


def _two_communicators(job: RankJob, cp_group: dist.ProcessGroup) -> MeshGroups:
    """Row and column groups of their own, as Megatron makes them, and a plan for one link."""
    tile = TileShape.parse(_SAME_TILE)
    own: list[dist.ProcessGroup] = []
    for group_of in (tile.row_group, tile.column_group):
        for members in dict.fromkeys(group_of(rank) for rank in range(job.ranks)):
            group = dist.new_group(list(members), backend="nccl" if job.nccl else "gloo")  # on all ranks, in one order
            if dist.get_rank() in members:
                warm_up(group)
                own.append(group)
    costs = {direction: replace(nominal_costs(direction), links=1) for direction in Direction}
    return MeshGroups(cp_group, tile, {tile: tuple(own)}, costs=costs)


def _connections_row(job: RankJob, started: bool) -> Row:
    """CUDA reads the variable once, when it starts in a process: it must have come here, and before that."""
    said: list[tuple[str | None, bool]] = [(None, False)] * job.ranks
    dist.all_gather_object(said, (os.environ.get(CONNECTIONS), started))
    right = all(value == job.connections and not late for value, late in said)
    figure = ", ".join(dict.fromkeys(f"{value or 'not set'}{', too late' * late}" for value, late in said))
    return Row(
        f"{CONNECTIONS}, {job.ranks} ranks", job.kernel, OK if right else FAIL, figure, job.connections or "not set"
    )


def _tile_row(check: str, job: RankJob, groups: MeshGroups, device: torch.device, known: dict) -> Row:
    """Errors over all ranks, each case run twice and compared bit for bit."""
    tally, equal = Tally(TIMES_TORCH_RANKS), True
    for case, exchange in job.cases:
        want, yardstick = known[case]
        positions = chunk_positions(groups.rank, groups.size, case.length)
        first, again = (_run(case, exchange, groups, device, job.kernel, positions) for _ in range(2))
        equal &= all(map(torch.equal, first, again))
        mine = [sums(got, want[name][:, :, positions]) for name, got in zip(NAMES, first, strict=True)]
        said: list[tuple[bool, list[Sums]]] = [(True, [])] * job.ranks
        dist.all_gather_object(said, (equal, mine))
        equal = all(same for same, _ in said)
        for name, parts in zip(NAMES, zip(*(parts for _, parts in said), strict=True), strict=True):
            where = f"{name}, {case.memory}, {'causal' if case.causal else 'full'}, {exchange}"
            tally.add(where, Error.together(parts), yardstick[name], case.eps)
    if not job.deterministic:
        return tally.row(
            check, job.kernel, more="; bit-equality not asked for: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 does"
        )
    row = tally.row(check, job.kernel, more="; twice bit-equal" if equal else "; NOT bit-equal when run twice")
    return replace(row, result=row.result if equal else FAIL, bound=f"{row.bound}; bit-equal")


def _run(
    case: Case, exchange: str, groups: MeshGroups, device: torch.device, kernel: str, positions: list[int]
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv [b, h, s, d] of this rank's chunk."""
    q, k, v, dout = (case.tokens(x, positions) for x in case.inputs(device))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = mesh_attention(q, k, v, groups, case.causal, qkv_format=case.memory, kernel=kernel, exchange=exchange)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return tuple(case.heads_first(x.detach()) for x in (out, *grads))
