"""Protects a run's outputs: `--save` never lands in a folder that holds something, unless the run resumes it.

Megatron writes checkpoints into whatever folder `--save` names: a second run started with the first one's
folder overwrites its iterations one by one and mixes two runs' checkpoints. Only the standard library is used
and nothing is written, so every rank can check before the ranks know of each other.
"""

import os
from argparse import Namespace
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = "iter_"


def check_save_folder(args: Namespace) -> None:
    """Refuse a `--save` folder that is in use.

    Allowed are: no `--save`; a folder that does not exist or is empty; a folder that `--load` names too (a
    resume). What this very run puts there before its first checkpoint (`--tensorboard-dir` and
    `--wandb-save-dir` inside the save folder) does not count: the last rank creates it while slower ranks
    are still on their way here.

    Args:
        args: Megatron's arguments; `save` and `load` are read, and `tensorboard_dir`, `wandb_save_dir`,
            `wandb_project`.

    Raises:
        ValueError: the folder is in use, or is a file. The message names the folder, what it holds and the
            ways out.
    """
    if args.save is None:
        return
    folder = Path(args.save)
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ValueError(f"--save {args.save}: is a file, not a folder; give --save another folder")
    if args.load is not None and os.path.realpath(args.load) == os.path.realpath(folder):
        if getattr(args, "finetune", False) and any(folder.iterdir()):
            raise ValueError(
                f"--save {args.save} and --load {args.load} with --finetune: the run would start at iteration 0 and "
                "write over the checkpoints that it loads; give --save a new folder"
            )
        return
    entries = sorted(entry.name for entry in folder.iterdir() if not _is_logging_of_this_run(entry, args))
    if not entries:
        return
    loads = "there is no --load" if args.load is None else f"--load names another folder, {args.load}"
    raise ValueError(
        f"--save {args.save}: the folder already holds {_describe(folder, entries)}, and {loads}. To resume "
        f"that run add --load {args.save}; to start a new run give --save a new or empty folder; or move the "
        "old folder away first."
    )


def has_checkpoint(folder: str | os.PathLike) -> bool:
    """Is there a finished checkpoint in `folder`, as Megatron tells it?"""
    return (Path(folder) / _TRACKER).is_file()


def last_iteration(folder: str | os.PathLike) -> str:
    """What the tracker file in `folder` says: a number, or `release`."""
    return (Path(folder) / _TRACKER).read_text(errors="replace").strip()[:40]


def _describe(folder: Path, entries: list[str]) -> str:
    if _TRACKER in entries:
        return f"a checkpoint of iteration {last_iteration(folder)}"
    iterations = [name for name in entries if name.startswith(_ITERATION)]
    if iterations:
        return f"a checkpoint ({iterations[-1]}) without {_TRACKER}"
    shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'} ({shown})"


def _is_logging_of_this_run(entry: Path, args: Namespace) -> bool:
    """Is `entry` (in the save folder) a logging folder given by this run's flags, or on the way to it?"""
    folders = [getattr(args, "tensorboard_dir", None), getattr(args, "wandb_save_dir", None)]
    if getattr(args, "wandb_project", None):
        folders.append(os.path.join(args.save, "wandb"))  # Megatron's default
    path = os.path.realpath(entry)
    for folder in filter(None, folders):
        logs = os.path.realpath(folder)
        if logs == os.path.dirname(path):  # the logging folder is the save folder itself
            if entry.name.startswith("events.out.tfevents."):
                return True
        elif logs == path or logs.startswith(path + os.sep):
            return True
    return False
