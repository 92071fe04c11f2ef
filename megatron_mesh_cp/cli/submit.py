"""`mesh-cp submit CONFIG.yaml --nodes N [...]`: check a recipe for N nodes, write its SLURM job file and submit it.

What is wrong is told here, before the job waits in a queue. The job file only names what was asked; the work is done by
scripts/slurm/pretrain.sbatch of the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_mesh_cp.cli.launch import Launch
from megatron_mesh_cp.cli.nodes import Nodes
from megatron_mesh_cp.cli.options import Whole
from megatron_mesh_cp.cli.pretrain import plan_launch, summary

TAKES_MORE_FLAGS = True  # what this command does not know is a Megatron flag; read by cli/main.py
_CHECKOUT = Path(__file__).resolve().parents[2]
_SCRIPT = Path("scripts", "slurm", "pretrain.sbatch")


def add_parser(subparsers) -> None:
    """Add `submit` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "submit",
        allow_abbrev=False,  # --lr must stay Megatron's and never mean an option of ours
        help="check a recipe for several nodes and submit it as a SLURM job",
        usage="mesh-cp submit CONFIG.yaml --nodes N [options] [more Megatron flags, which win over the recipe]",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="recipe: ENV_VARS, MODEL_ARGS, RANKS")
    parser.add_argument("--nodes", action=Whole, required=True, metavar="N", help="number of nodes")
    parser.add_argument("--gpus-per-node", action=Whole, least=0, default=8, metavar="G", help="(%(default)s)")
    parser.add_argument("--nproc-per-node", action=Whole, metavar="M", help="ranks on a node (default: one a GPU)")
    parser.add_argument("--time", help="time limit, as sbatch takes it: 8:00:00, 2-0 (default: the partition's)")
    parser.add_argument("--partition", help="partition (default: SLURM's)")
    parser.add_argument("--account", help="account to charge (default: SLURM's)")
    parser.add_argument("--job-name", help="(default: the name of the recipe)")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="logs, job file and ${RUN_DIR} of the recipe (default: a new runs/NAME-001)"
    )
    parser.add_argument("--container", metavar="IMAGE", help="with pyxis: run in this image")
    parser.add_argument("--container-mounts", metavar="FROM:TO,...", help="with pyxis: what is seen in it")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="more for sbatch, as --sbatch=--qos=high; repeat",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job file; write and submit nothing")


def run(args: argparse.Namespace) -> int:
    """Check, write and submit; 0, or a ValueError of one line."""
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ValueError("no sbatch on PATH: log in to a node of the cluster, or see the job file with --dry-run")
    if not (_CHECKOUT / _SCRIPT).is_file():
        raise ValueError(f"no {_SCRIPT} in {_CHECKOUT}: submit from a checkout, installed with pip install -e")
    per_node = args.nproc_per_node or args.gpus_per_node
    if per_node == 0:
        raise ValueError("--gpus-per-node 0 without --nproc-per-node: how many ranks are to run on a node?")
    name = args.job_name or Path(args.config).stem
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"--job-name {name!r}: letters, digits and . _ + - only, since files are named so")
    folder = Path(os.path.abspath(args.run_dir or os.environ.get("RUN_DIR") or _next_folder(name)))
    nodes = Nodes(args.nodes, 0, per_node, "localhost", 1)
    environ = {**os.environ, "RUN_DIR": str(folder)}
    launch = plan_launch(args.config, args.more, environ=environ, nodes=nodes, elsewhere=True)
    _check_folder(folder, launch)
    text = job_file(args, name, folder, per_node)
    print(summary(launch), file=sys.stderr)
    if args.dry_run:
        print(text, end="")
        return 0
    _submit(name, folder, text)
    return 0


def job_file(args: argparse.Namespace, name: str, folder: Path, per_node: int) -> str:
    """The text of the job file."""
    options = [
        *(f"--job-name={name}", f"--nodes={args.nodes}", "--ntasks-per-node=1"),
        *([f"--gpus-per-node={args.gpus_per_node}"] if args.gpus_per_node else []),
        *("--exclusive", "--mem=0", "--signal=B:USR1@300", "--requeue", "--open-mode=append"),
        *(f"--{flag}={value}" for flag in ("time", "partition", "account") if (value := getattr(args, flag))),
        f"--chdir={Path.cwd()}",
        f"--output={str(folder).replace('%', '%%')}/logs/job-%j.log",
        *args.sbatch,
    ]
    variables = {"MESH_CP_HOME": _CHECKOUT, "RUN_DIR": folder, "NPROC_PER_NODE": per_node}
    if args.container:
        variables["MESH_CP_CONTAINER"] = args.container
        if args.container_mounts:
            variables["MESH_CP_CONTAINER_MOUNTS"] = args.container_mounts
    elif args.container_mounts:
        raise ValueError(f"--container-mounts {args.container_mounts} without --container: name the image too")
    elif sys.prefix != sys.base_prefix:  # the environment that has checked the recipe
        variables["MESH_CP_VENV"] = os.environ.get("MESH_CP_VENV", sys.prefix)
    command = [str(_CHECKOUT / _SCRIPT), os.path.abspath(args.config), *args.more]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Written by `mesh-cp submit`; `sbatch` takes it again.",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            *(f"export {key}={shlex.quote(str(value))}" for key, value in variables.items()),
            f"exec bash {shlex.join(command)}",
            "",
        ]
    )


def _next_folder(name: str) -> Path:
    """The first of runs/NAME-001, runs/NAME-002, ... after all that are there."""
    there = [re.fullmatch(re.escape(name) + r"-(\d+)", path.name) for path in Path("runs").glob(f"{name}-*")]
    return Path("runs", f"{name}-{max((int(m[1]) for m in there if m), default=0) + 1:03d}")


def _check_folder(folder: Path, launch: Launch) -> None:
    """As of --save: a folder that holds something is another run's, unless this one resumes what lies in it."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"--run-dir {folder}: is a file, not a folder; give another one")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    save, load = (os.path.realpath(path) if path else None for path in (launch.args.save, launch.args.load))
    if save is not None and save == load and Path(save).is_relative_to(os.path.realpath(folder)):
        return
    raise ValueError(
        f"--run-dir {folder}: the folder is in use, and --save and --load do not name one folder in it, as they would "
        "to resume the run there; give a new folder"
    )


def _submit(name: str, folder: Path, text: str) -> None:
    made = [path for path in (folder / "logs", folder) if not path.exists()]
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = _write_new(folder, name, text)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        path.unlink()
        for made_folder in made:
            with contextlib.suppress(OSError):
                made_folder.rmdir()
        raise ValueError(f"sbatch refuses the job: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    job = done.stdout.strip().split(";")[0]  # a cluster's name may follow
    print(done.stderr, file=sys.stderr, end="")
    print(f"submitted job {job}: {path}")
    print(f"log of the job:    {folder}/logs/job-{job}.log")
    print(f"logs of the nodes: {folder}/logs/node-<rank>.log")


def _write_new(folder: Path, name: str, text: str) -> Path:
    """NAME.sbatch, or NAME-2.sbatch and so on for a resume: no file is ever overwritten."""
    number = 1
    while True:
        path = folder / (f"{name}.sbatch" if number == 1 else f"{name}-{number}.sbatch")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1
