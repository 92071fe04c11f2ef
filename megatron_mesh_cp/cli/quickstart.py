"""`mesh-cp quickstart`: train a small GPT on real text by the mesh, then shortly by a ring and by CP=1.

All three see the same data, seed and learning rates, so their losses must agree wherever they all have one.
"""

import argparse
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_mesh_cp.cli.run_log import read_log, worth_showing

CHECKOUT = Path(__file__).resolve().parents[2]
_SHORT_RUN = 3  # length of the two comparison runs, in lines of Megatron's log


@dataclass(frozen=True)
class Run:
    """One of the three runs: its name, its tile as the table shows it, and what makes it differ."""

    name: str
    tile: str
    flags: tuple[str, ...]
    ranks: int
    without: tuple[str, ...] = ()


def add_parser(subparsers) -> None:
    """Add `quickstart` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "quickstart",
        help="train a small GPT on real text on this machine and compare mesh, ring and CP=1",
        description="Train a byte-level GPT on Python's own sources with Mesh-Attention over CPU ranks, "
        "then set it beside a short ring run and a short CP=1 run. "
        "Nothing is overwritten: each start makes a new run folder.",
    )
    parser.add_argument(
        "--output", type=Path, default=CHECKOUT / "quickstart", help="folder for data and runs (%(default)s)"
    )
    parser.add_argument("--iterations", type=int, help="length of the main run (default: the recipe's)")
    parser.add_argument(
        "--config", type=Path, default=CHECKOUT / "configs" / "quickstart.yaml", help="recipe (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the quick start; returns the exit code of the first run that fails, else 0."""
    from megatron_mesh_cp.megatron.recipe import load_recipe

    if not args.config.is_file():
        raise ValueError(
            f"no recipe at {args.config}; the installed package has none: name configs/quickstart.yaml of a "
            "checkout with --config"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU job by design: this release has no fused GPU kernel
    prefix = args.output.resolve() / "data" / "text"
    environ = {**os.environ, "MESH_CP_DATA": str(prefix)}
    load_recipe(args.config, environ=environ)

    from megatron_mesh_cp.megatron.text_data import build_text_dataset

    try:
        build_text_dataset(prefix)
    except OSError as e:
        raise ValueError(f"--output {args.output}: cannot build the data set there: {e}") from None

    from rich.console import Console

    from megatron_mesh_cp.cli.launch import run_ranks
    from megatron_mesh_cp.cli.run_report import comparison, plot_losses

    print("checking the flags of the three runs ...", flush=True)
    folder = next_run_folder(args.output.resolve())
    launches = _plan(args, environ, folder)
    folder.mkdir()  # fails, rather than mix two runs, if another start has just taken the name
    logs = {}
    for run, launch in launches.items():
        path = folder / f"{run.name.lower().replace('=', '')}.log"
        print(
            f"\n=== {run.name} on {run.ranks} rank(s), tile {run.tile}; the whole output is in {path}",
            flush=True,
        )
        start = time.monotonic()
        code = run_ranks(launch, path, worth_showing)
        if code:
            print(*path.read_text(errors="replace").splitlines()[-30:], sep="\n", file=sys.stderr)
            print(f"mesh-cp: the {run.name} run failed with exit code {code}; see {path}", file=sys.stderr)
            return code
        logs[run] = read_log(path)
        print(f"=== {run.name}: {time.monotonic() - start:.0f} s", flush=True)
    table = comparison(logs)
    console = Console()
    console.print(table)
    with open(folder / "table.txt", "w") as file:
        Console(file=file, width=80).print(table)
    print(f"loss curves: {plot_losses(logs, folder / 'loss.png')}")
    print(f"checkpoint:  {folder / 'checkpoint'}")
    return 0


def next_run_folder(output: Path) -> Path:
    """The first of run-001, run-002, ... after all that are there."""
    numbers = [int(m[1]) for path in output.glob("run-*") if (m := re.fullmatch(r"run-(\d+)", path.name))]
    return output / f"run-{max(numbers, default=0) + 1:03d}"


def _plan(args: argparse.Namespace, environ: dict[str, str], folder: Path) -> dict:
    """Check all three runs before the first one starts."""
    from megatron_mesh_cp.cli.pretrain import plan_launch

    main = plan_launch(args.config, environ=environ)
    iterations = main.args.train_iters if args.iterations is None else args.iterations
    every = main.args.log_interval
    if iterations < every:
        raise ValueError(f"--iterations {iterations}: must be at least --log-interval {every} of {args.config}")
    cp = main.args.context_parallel_size
    # One schedule for all: the short runs stop early instead of training for fewer iterations.
    same = (
        *("--train-iters", str(iterations), "--lr-decay-iters", str(iterations)),
        *("--lr-warmup-iters", str(iterations // 20), "--eval-interval", str(iterations)),
    )
    short = ("--exit-interval", str(min(_SHORT_RUN * every, iterations - iterations % every)))
    save = ("--save", str(folder / "checkpoint"), "--save-interval", str(iterations))
    # A mesh flag that is not at its default is refused without mesh, and the ring is to be a plain one.
    plain = (
        *("--mesh-tile-shape-backward", "same", "--mesh-exchange", "auto", "--mesh-kernel", "auto"),
        *("--mesh-cluster", "auto"),
    )
    limit = ("--mesh-memory-limit",)
    single = (
        *plain,
        *("--context-parallel-size", "1", "--context-parallel-algo", "megatron", "--mesh-tile-shape", "auto"),
    )
    runs = (
        Run("mesh", str(main.args.mesh_tile_shape), save, main.ranks),
        Run("ring", f"1x{cp}", (*short, *plain, "--mesh-tile-shape", f"1x{cp}"), main.ranks, without=limit),
        Run("CP=1", "-", (*short, *single), main.ranks // cp, without=("--mesh-log-comm", *limit)),
    )
    return {
        run: plan_launch(args.config, (*same, *run.flags), run.ranks, environ, without=run.without, any_ranks=True)
        for run in runs
    }
