"""`mesh-cp pretrain CONFIG.yaml [more Megatron flags]`: a recipe on the ranks of this machine, by torchrun.

On several machines it is started once a node, with --nnodes and the rest; see nodes.py. Everything that can be known
to be wrong is found here, in the launcher, before a rank starts, a folder is made or a file is written.
"""

import argparse
import contextlib
import copy
import io
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

from megatron_mesh_cp.cli.launch import EndSoon, Launch, run_ranks
from megatron_mesh_cp.cli.nodes import (
    Nodes,
    add_options,
    check_own_name,
    check_port,
    note,
    reach_head,
    read_nodes,
)
from megatron_mesh_cp.megatron.recipe import Recipe, load_recipe, nearest
from megatron_mesh_cp.megatron.row_in_node import check_row_in_node
from megatron_mesh_cp.megatron.run_folder import has_checkpoint

if TYPE_CHECKING:
    from megatron_mesh_cp.megatron.config import MeshConfig

_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
TAKES_MORE_FLAGS = True  # what this command does not know is a Megatron flag; read by cli/main.py


def add_parser(subparsers) -> None:
    """Add `pretrain` to the sub-commands of `mesh-cp`."""
    parser = subparsers.add_parser(
        "pretrain",
        allow_abbrev=False,  # --lr must stay Megatron's and never mean an option of ours
        help="run a YAML recipe on the ranks of this machine",
        usage="mesh-cp pretrain CONFIG.yaml [--ranks N] [--check] [more Megatron flags, which win over the recipe]\n"
        "       mesh-cp pretrain CONFIG.yaml --nnodes N --node-rank K --nproc-per-node M --master-addr HOST "
        "--master-port P [more Megatron flags]   (on each of N nodes; in a SLURM job scripts/slurm/pretrain.sbatch)",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="recipe: ENV_VARS, MODEL_ARGS, RANKS")
    parser.add_argument("--ranks", type=int, help="ranks to start (default: RANKS of the recipe, else TP*PP*CP)")
    parser.add_argument("--check", action="store_true", help="check the whole job, say what it is, and start nothing")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="for a job that is run again: go on from a checkpoint in --save, if there is one, whatever --load says",
    )
    add_options(parser)
    parser.add_argument("--megatron-help", action="store_true", help="list every Megatron flag and leave")


def run(args: argparse.Namespace) -> int:
    """Check and run the recipe; returns the exit code of the ranks."""
    if args.megatron_help:
        megatron_parser().print_help()
        return 0
    if args.config is None:
        raise ValueError("no recipe given; for instance `mesh-cp pretrain configs/quickstart.yaml`")
    here = read_nodes(args)
    if args.check:
        launch = plan_launch(args.config, args.more, args.ranks, nodes=here, resume=args.resume, elsewhere=True)
        print(summary(launch))
        return 0
    with EndSoon() as end_soon:  # from here on: a job may be told to end while it still starts
        launch = plan_launch(args.config, args.more, args.ranks, nodes=here, resume=args.resume)
        if here is not None:
            _meet(launch)
        return run_ranks(launch, end_soon=end_soon)


def _meet(launch: Launch) -> None:
    """Before torchrun, which would hang or say it by a traceback: can this node and the head come together?"""
    here, args = launch.nodes, launch.args
    if args.distributed_backend == "gloo" or args.use_gloo_process_groups:
        check_own_name(here, launch.env)
    if here.rank == 0:
        check_port(here)
    else:
        reach_head(here)


def summary(launch: Launch) -> str:
    """For people: the ranks of a checked job, how they are divided, attention, length, checkpoints; planned memory."""
    args, at = launch.args, launch.nodes
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    data = launch.ranks // math.prod(sizes)
    where = f" on {at.count} node{'s' * (at.count > 1)} x {at.per_node}" if at else ""
    algo = args.context_parallel_algo
    if launch.mesh is not None:
        tile, backward = launch.mesh.tile, launch.mesh.tile_backward
        algo = f"mesh {tile}" + (f", backward {backward}" if backward != tile else "")
    kept = f"saved to {args.save}" if args.save else "not saved (no --save)"
    start = f", from {args.load}" if args.load else ""
    return (
        f"ok: {launch.ranks} ranks{where} = TP {sizes[0]} x PP {sizes[1]} x CP {sizes[2]} x DP {data}; {algo}; "
        f"{args.seq_length} tokens, {args.train_iters} iterations; {kept}{start}\n{_memory(launch)}"
    )


def _memory(launch: Launch) -> str:
    """What a GPU is planned to hold, beside what it has where the cluster is known."""
    from megatron_mesh_cp.cluster import load_cluster
    from megatron_mesh_cp.megatron.planned_memory import MARGIN, planned_memory

    if launch.validated is None:
        return "planned memory: not known, the sizes of the model are in the checkpoint (--use-checkpoint-args)"
    try:
        planned = planned_memory(launch.validated, launch.mesh, launch.ranks)
    except ValueError as error:
        return f"planned memory: not known: {error}"
    known = launch.mesh is not None and launch.args.mesh_cluster != "auto"
    cluster = load_cluster(launch.args.mesh_cluster, "--mesh-cluster") if known else None
    text = f"planned memory of a rank: {planned.text(cluster)}"
    if cluster is None or planned.fits(cluster):
        return text
    return (
        f"{text}\nwarning: less than {MARGIN:.0%} of the GPU is left for what is not counted here; use more tensor, "
        "pipeline or context parallelism, or recompute more"
    )


def plan_launch(
    config: str | os.PathLike,
    more: Sequence[str] = (),
    ranks: int | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    without: Collection[str] = (),
    any_ranks: bool = False,
    elsewhere: bool = False,
    nodes: Nodes | None = None,
    resume: bool = False,
) -> Launch:
    """Read the recipe, add the flags `more` (they win), and check the whole job without starting it.

    Args:
        config: the recipe.
        more: Megatron flags as on a command line.
        ranks: number of ranks; by default RANKS of the recipe, else TP*PP*CP.
        environ: the environment of the ranks, before ENV_VARS of the recipe; `os.environ` by default.
        without: flags of the recipe to leave out, with their values, which no later flag could undo.
        any_ranks: let `ranks` differ from RANKS.
        elsewhere: the job will run on other machines: nothing is asked of this one's devices and kernels.
        nodes: the nodes of a job on several machines, instead of `ranks`.
        resume: load from --save where a checkpoint is there, as a job must that is run again.

    Raises:
        ValueError: names the flag or key, both values and a way out; nothing has been written.
    """
    environ = dict(os.environ if environ is None else environ)
    recipe = load_recipe(config, environ=environ)
    source = nodes.described if nodes else f"--ranks {ranks}"
    ranks = nodes.world if nodes else ranks
    if not any_ranks:
        _check_ranks(ranks, source, recipe)
    if nodes and recipe.ranks_per_node not in (None, nodes.per_node):
        raise ValueError(
            f"{nodes.described}, but RANKS_PER_NODE: {recipe.ranks_per_node} in {recipe.path}; start "
            f"{recipe.ranks_per_node} on each node, or change RANKS_PER_NODE, and with it what must share a node"
        )
    parser = megatron_parser()  # takes seconds, so what is wrong without it has been told by now
    recipe = load_recipe(config, parser, environ)
    flags = (*_leave_out(recipe.flags, without), *more)
    args = _parse(parser, flags)
    if resume:
        flags = _resumed(flags, args)
        args = _parse(parser, flags)
    _check_data(args)
    ranks = _rank_count(args, recipe, ranks, source)
    env = {**environ, **recipe.env}
    mesh, validated = _check_job(args, ranks, env, elsewhere)
    check_row_in_node(recipe, ranks, args.tensor_model_parallel_size, mesh)

    if not elsewhere:
        _fit_here(nodes.per_node if nodes else ranks, env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return Launch(ranks, flags, env, args, nodes, mesh, validated)


def _fit_here(ranks: int, env: dict[str, str]) -> None:
    """What depends on the machine that the ranks start on: `ranks` of them."""
    import torch

    if not torch.cuda.is_available():
        env.setdefault("OMP_NUM_THREADS", "1")  # the ranks already fill the cores
    elif ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks but {torch.cuda.device_count()} GPUs on this machine; one rank takes one GPU")


# How a run starts from another one's checkpoint; none of it holds once it has a checkpoint of its own.
_OF_THE_FIRST_START = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step")


def _resumed(flags: Sequence[str], args: argparse.Namespace) -> tuple[str, ...]:
    """For a job that is run again: --load is --save, once that folder has a checkpoint or there is no --load."""
    if args.save is None:
        note("--resume: no --save, so nothing was saved, and the run begins anew")
        return tuple(flags)
    there = has_checkpoint(args.save)
    if args.load is not None and (not there or os.path.realpath(args.load) == os.path.realpath(args.save)):
        return tuple(flags)
    flags = tuple(_leave_out(flags, _OF_THE_FIRST_START if there else ("--exit-on-missing-checkpoint",)))
    note(f"--resume: --load {args.save}" + (f" instead of {args.load}" if args.load else ""))
    return (*_leave_out(flags, ("--load",)), "--load", args.save)


class _MegatronParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


class _MegatronHelp(argparse.HelpFormatter):
    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):  # a bare % in some of Megatron's help texts
            return action.help


def _leave_out(flags: Sequence[str], without: Collection[str]) -> Iterator[str]:
    """Flags and their values, but for those named."""
    left_out = False
    for word in flags:
        if word.startswith("--"):
            left_out = word.split("=")[0] in without
        if not left_out:
            yield word


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own parser with our flags added; takes seconds, since it imports Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional GPU packages; the ranks tell them where they matter
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no CUDA
        try:
            with mock.patch("torch.compile", _as_it_is):
                from megatron.training.arguments import add_megatron_arguments
        except ImportError as e:
            raise ValueError(
                f"training needs a megatron-core that ships megatron.training ({e}); "
                "`pip install megatron-core==0.19.2`"
            ) from None
        from megatron_mesh_cp.megatron.args import add_args

        # as megatron.training.arguments.parse_args makes it
        parser = _MegatronParser(
            prog="mesh-cp pretrain",
            description="Megatron-LM Arguments",
            formatter_class=_MegatronHelp,
            allow_abbrev=False,
        )
        return add_args(add_megatron_arguments(parser))


def _as_it_is(model=None, **options):
    """Instead of torch.compile: Megatron's fused functions are not called here, and the compiler takes seconds."""
    return model if model is not None else _as_it_is


def _parse(parser: argparse.ArgumentParser, flags: Sequence[str]) -> argparse.Namespace:
    try:
        args, unknown = parser.parse_known_args(list(flags))
    except (
        AssertionError,
        KeyError,
    ) as e:  # some of Megatron's own types raise these, which argparse lets through
        raise ValueError(f"a flag has a value that Megatron cannot read: {e!r}") from None
    if unknown:
        flag = next((word for word in unknown if word.startswith("--")), None)
        if flag is None:
            raise ValueError(f"{unknown[0]!r} belongs to no flag; flags are written --name value")
        raise ValueError(f"unknown flag {flag}{nearest(flag.split('=')[0], parser._option_string_actions)}")
    if args.yaml_cfg is not None:
        raise ValueError("--yaml-cfg would replace every other flag; put the flags into the recipe's MODEL_ARGS")
    return args


def _check_ranks(ranks: int | None, source: str, recipe: Recipe) -> None:
    if ranks is not None and ranks < 1:
        raise ValueError(f"{source}: must be 1 or more")
    if ranks is not None and recipe.ranks not in (None, ranks):
        leave = f"leave {source.split()[0]} out" if source.startswith("--ranks") else "start so many"
        raise ValueError(
            f"{source} but RANKS: {recipe.ranks} in {recipe.path}; the recipe is written for "
            f"{recipe.ranks} ranks: {leave}, or change RANKS together with the parallel sizes"
        )


def _rank_count(args: argparse.Namespace, recipe: Recipe, ranks: int | None, source: str) -> int:
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    for flag, size in (("tensor-model", tp), ("pipeline-model", pp), ("context", cp)):
        if size < 1:
            raise ValueError(f"--{flag}-parallel-size {size}: must be 1 or more")
    model = tp * pp * cp
    count = ranks or recipe.ranks or model
    if count % model:
        source = source if ranks else f"RANKS: {recipe.ranks} in {recipe.path}"
        raise ValueError(
            f"{source} is not divisible by tensor {tp} * pipeline {pp} * context {cp} = {model}; "
            f"counts that work are {model}, {2 * model} and {3 * model}"
        )
    return count


def _check_data(args: argparse.Namespace) -> None:
    """Every data set that is named must be there: Megatron would tell it by a traceback from each rank."""
    named = {flag: getattr(args, flag.replace("-", "_")[2:]) for flag in _DATA_FLAGS}
    files = [args.data_args_path, args.per_split_data_args_path]
    if not (args.mock_data or any(named.values()) or any(files)):
        raise ValueError("no data: give --data-path PREFIX (for PREFIX.bin and PREFIX.idx) or --mock-data")
    for flag, words in named.items():
        prefixes = [w for w in words or () if not _is_number(w) and not re.match(r"[a-z0-9]+://", w)]
        for prefix in prefixes:
            missing = [prefix + end for end in (".bin", ".idx") if not os.path.exists(prefix + end)]
            if missing:
                raise ValueError(f"{flag} {prefix}: no file {missing[0]}; give a data set as its prefix, without .bin")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_job(
    args: argparse.Namespace, ranks: int, env: Mapping[str, str], elsewhere: bool
) -> tuple["MeshConfig | None", argparse.Namespace | None]:
    """The checks that each rank makes too, in the same order; see Launch.mesh and Launch.validated."""
    from megatron_mesh_cp.megatron.args import resolve_args
    from megatron_mesh_cp.megatron.install import apply
    from megatron_mesh_cp.megatron.old_checkpoint import check_old_checkpoint
    from megatron_mesh_cp.megatron.pretrain import refuse_unsupported
    from megatron_mesh_cp.megatron.run_folder import check_save_folder

    refuse_unsupported(args)
    check_save_folder(args)
    if args.use_checkpoint_args:  # the rest of the flags is in the checkpoint, which only a rank reads
        return None, None
    check_old_checkpoint(args)
    mesh = resolve_args(args, elsewhere=elsewhere)
    checked = copy.deepcopy(args)
    if mesh is not None:
        apply(mesh, checked)
    _megatron_validates(checked, ranks, env)
    return mesh, checked


def _megatron_validates(args: argparse.Namespace, ranks: int, env: Mapping[str, str]) -> None:
    """Run Megatron's own checks on `args`, which they change, after what its parse_args() would add."""
    import torch
    from megatron.training.arguments import validate_args

    args.rank, args.world_size = 0, ranks
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, env, clear=True))  # some checks read ENV_VARS
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if not torch.cuda.is_available():  # as megatron/cpu.py does for the ranks, but not for good
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", _no_gpu))
        try:
            validate_args(args, {})
        except SystemExit:
            reason = said.getvalue().strip().splitlines()[-1:]
            raise ValueError(f"Megatron refuses these flags: {' '.join(reason)}") from None
        except Exception as e:
            # many of its asserts have no text; the line of source then says what it wants
            reason = str(e) or traceback.extract_tb(e.__traceback__)[-1].line
            raise ValueError(f"Megatron refuses these flags: {' '.join(reason.split())}") from e


def _no_gpu(device=None) -> SimpleNamespace:
    return SimpleNamespace(name="cpu", major=10, minor=0)
