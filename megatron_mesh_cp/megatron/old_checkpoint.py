"""The checkpoint that `--load` names, before a rank starts: does it fit the model, and the parallel sizes?

Megatron says so by an assertion of every rank, after minutes of start-up. It compares the same fields
(`megatron.training.checkpointing.check_checkpoint_args`). Its `torch_dist` checkpoints resume at other tensor-,
pipeline-, context- and data-parallel sizes; its older `torch` ones at other context- and data-parallel sizes only.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

from .run_folder import has_checkpoint, last_iteration

_MODEL = ("num_layers", "hidden_size", "num_attention_heads")
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def check_old_checkpoint(args: argparse.Namespace) -> None:
    """Raise ValueError, naming what differs, where the checkpoint of `--load` cannot be resumed with these flags.

    Args: args as Megatron parsed them. What cannot be read here (other storage, unknown formats) is left to Megatron.
    """
    if args.load is None or not has_checkpoint(args.load):
        return
    step = last_iteration(args.load)
    folder = Path(args.load, "release" if step == "release" else f"iter_{step.zfill(7)}")
    if not folder.is_dir():
        raise ValueError(
            f"--load {args.load}: its last checkpoint is said to be {folder.name}, which is not there; restore the "
            "folder, or write the number of one that is there into latest_checkpointed_iteration.txt"
        )
    legacy = sorted(folder.glob("mp_rank_0*/model_optim_rng.pt"))
    saved = _saved_args(legacy[0] if legacy else folder / "common.pt")
    if saved is None:
        return
    where = f"--load {args.load} ({folder.name})"
    for name in (*_MODEL, *(_PARALLEL if legacy else ())):
        old, new = getattr(saved, name, None), getattr(args, name, None)
        if old is None or new is None or old == new:
            continue
        flag = "--" + name.replace("_", "-")
        if name in _MODEL:
            raise ValueError(
                f"{where} was saved with {flag} {old}, got {flag} {new}: that is another model; give {old}"
            )
        raise ValueError(
            f"{where} was saved with {flag} {old}, got {flag} {new}: a checkpoint in the format torch resumes at the "
            f"same tensor- and pipeline-parallel size only; give {old}, or resume once with that and "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )


def _saved_args(path: Path) -> argparse.Namespace | None:
    import torch

    try:
        # Megatron's own file holds its arguments as Python objects, so that it loads it like this too.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True).get("args")
    except (OSError, RuntimeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError):
        return None
