"""`scripts/gpu_check.sh`: everything about a GPU that a machine without one cannot show, in one table.

Every kernel, and every number of ranks with every kernel, runs in processes of its own with a time limit: a crash or a
hang is a failed row, and the rest goes on. `--device cpu` runs what a CPU can, for the tests of these very files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from megatron_mesh_cp.cli.gloo_ranks import RanksError, run_ranks
from megatron_mesh_cp.cli.gpu_check_kernels import KernelJob, check_kernel, usable
from megatron_mesh_cp.cli.gpu_check_ranks import CONNECTIONS, RankJob, check_overlap, check_ranks
from megatron_mesh_cp.cli.gpu_check_rows import FAIL, NOT_APPLICABLE, Row
from megatron_mesh_cp.cli.options import check_output
from megatron_mesh_cp.cli.report import console, new_table
from megatron_mesh_cp.kernels import KERNELS

NO_GPU = 2  # exit code; 1: a check failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; 0 where all passed, 1 where one failed, 2 for bad input or no CUDA GPU."""
    args = _parser().parse_args(argv)
    try:
        path = check_output(args.json, "--json", (".json",)) if args.json is not None else None
        if args.time_limit <= 0:
            raise ValueError(f"--time-limit {args.time_limit:g}: must be a positive number of seconds")
    except ValueError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu_check: no CUDA GPU for torch {torch.__version__} on this machine; nothing was checked",
            file=sys.stderr,
        )
        return NO_GPU
    rows = all_rows(args)
    failed = sum(row.result == FAIL for row in rows)
    title = f"{_machine(args.device)}: {f'{failed} of {len(rows)} checks FAILED' if failed else 'no check failed'}"
    if path:
        content = {"machine": _machine(args.device), "failed": failed, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    table = new_table(title, dict.fromkeys(("check", "kernel", "result", "figure", "bound"), "left"))
    for row in rows:
        table.add_row(*asdict(row).values())
    console().print(table)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Check kernels, ranks, host synchronisations and overlap on a CUDA machine."
    )
    parser.add_argument("--json", metavar="FILE.json", help="also write the rows there")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=600,
        metavar="SECONDS",
        help="for the processes of one kernel; they are ended then, and that is a failure (%(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser


def all_rows(args: argparse.Namespace) -> list[Row]:
    """Every row of the table, in its order."""
    rows, kernels = [], []
    for name in KERNELS[1:]:
        job = KernelJob(name, args.device, args.quick)
        found = guarded(check_kernel, job, 1, "all checks of the kernel", name, args.time_limit)
        rows += found
        if usable(found):
            kernels.append(name)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    for ranks in (2, 4):
        job = RankJob(ranks, "", args.device, gpus >= ranks, gpus, args.quick, os.environ.get(CONNECTIONS))
        for name in kernels:
            rows += guarded(check_ranks, replace(job, kernel=name), ranks, f"{ranks} ranks", name, args.time_limit)
    rows += _only_nccl(args, gpus)
    return rows


def _only_nccl(args: argparse.Namespace, gpus: int) -> list[Row]:
    """What only NCCL can show, or why it was not looked at."""
    if gpus >= 2:
        ranks = 4 if gpus >= 4 else 2
        job = RankJob(ranks, "auto", args.device, True, gpus, args.quick)
        return guarded(check_overlap, job, ranks, "overlap", "auto", args.time_limit)
    shared = args.device == "cuda"
    why = "gloo stages through the host" if shared else "on CPU"
    checks = ("host synchronisations, several ranks", "overlap over NCCL", *([] if shared else [CONNECTIONS]))
    need = "a GPU for each of 2 ranks or more" if shared else ""
    return [Row(check, "all", NOT_APPLICABLE, f"not applicable: {why}", need) for check in checks]


def guarded(work: Callable, job: object, ranks: int, check: str, kernel: str, limit: float) -> list[Row]:
    """Rows of `work` on ranks of their own; where they fail, crash or hang, one row that says so."""
    print(f"gpu_check: {check}, {kernel}", file=sys.stderr)
    try:
        return run_ranks(work, job, ranks, limit, lower="the work with --quick")
    except (RanksError, EOFError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        last = str(error).strip().splitlines()[-1] if str(error).strip() else "the process ended without an answer"
        return [Row(check, kernel, FAIL, last)]


def _machine(device: str) -> str:
    """What the figures are of."""
    if device == "cpu":
        return f"CPU, torch {torch.__version__}"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{listed}, torch {torch.__version__}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
