"""mesh-cp doctor: what this machine has of what mesh context parallelism needs, and what is in the way."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
from typing import TYPE_CHECKING

from megatron_mesh_cp.cli.report import console, new_table, spinner

if TYPE_CHECKING:
    from megatron_mesh_cp.cli.doctor_checks import Check

STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}
ESSENTIAL = ("python", "torch")  # without these nothing of mesh works; all else leaves something that does


def add_parser(subparsers) -> None:
    from megatron_mesh_cp.cli.main import COMMANDS

    parser = subparsers.add_parser(
        "doctor",
        help=COMMANDS["doctor"],
        description="Check Python, torch, CUDA, NCCL, Megatron, the attention kernels, Apex, environment variables and "
        "GPUs of this machine. ok: as it should be; warn: works, but look at it; fail: is there and cannot be used; "
        f"absent: is not there. Exit code 1 where {' or '.join(ESSENTIAL)} fails, since nothing works then; else 0.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: checks with name, status and detail"
    )
    parser.add_argument(
        "--short", action="store_true", help="print one line: how many checks are ok, and which are not"
    )


def run(args: argparse.Namespace) -> int:
    """Print the checks; 1 where mesh context parallelism cannot work at all, else 0."""
    from megatron_mesh_cp.cli.doctor_checks import all_checks

    # Packages print when they are imported, and stdout is for the result.
    with spinner("importing packages"), contextlib.redirect_stdout(sys.stderr):
        checks = all_checks()
    if args.json and args.short:
        raise ValueError("--json and --short are two forms of one output; leave one out")
    if args.short:
        print(short_line(checks))
    elif args.json:
        print(json.dumps({"checks": [vars(check) for check in checks]}))
    else:
        from rich.text import Text

        table = new_table("mesh-cp doctor", {"check": "left", "status": "left", "detail": "left"})
        for check in checks:
            table.add_row(check.name, Text(check.status, STYLES[check.status]), Text(check.detail))
        console().print(table)
    return int(any(check.status == "fail" for check in checks if check.name in ESSENTIAL))


def short_line(checks: list[Check]) -> str:
    """`mesh1: 9 ok; warn: apex; absent: cuda, nccl`: for a list of many machines."""
    groups = {status: [check.name for check in checks if check.status == status] for status in STYLES}
    count = len(groups.pop("ok"))
    named = [f"{status}: {', '.join(names)}" for status, names in groups.items() if names]
    return f"{socket.gethostname()}: " + "; ".join([f"{count} ok", *named])
