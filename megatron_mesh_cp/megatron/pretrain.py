"""GPT pretraining with Megatron's own `pretrain()` and the choice of a context-parallel algorithm.

    torchrun --nproc-per-node 4 -m megatron_mesh_cp.megatron.pretrain \\
        --context-parallel-size 4 --context-parallel-algo mesh <Megatron's flags>

It does for GPT models (dense, MoE, multi-token prediction; tensor, pipeline, data, expert and context
parallel) what stock `pretrain_gpt.py` does, and needs only the megatron-core wheel. What it cannot do is
refused with a ValueError. It runs on GPUs and, through `megatron_mesh_cp.megatron.cpu`, on CPU ranks.
"""

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import torch

from megatron_mesh_cp.megatron.cpu import enable_cpu_ranks
from megatron_mesh_cp.megatron.rank_life import leave_group, live
from megatron_mesh_cp.megatron.run_folder import check_save_folder, has_checkpoint, last_iteration

# Megatron's imports are inside the functions: on CPU ranks they must come after enable_cpu_ranks().

# What stock pretrain_gpt.py (or another of Megatron's scripts) does with the same parser and this entry does
# not: attribute of the arguments, flag, what it is.
_UNSUPPORTED = (
    ("sft", "--sft", "supervised fine-tuning on packed sequences"),
    ("fim_data", "--fim-data", "fill-in-the-middle data"),
    ("dataloader_inter_document_masking", "--dataloader-inter-document-masking", "packed sequences"),
    ("hybrid_context_parallel", "--hybrid-context-parallel", "a context-parallel size for each sequence"),
    ("logits_load_dir", "--logits-load-dir", "distillation from saved logits"),
    ("logits_save_dir", "--logits-save-dir", "saving logits for distillation"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path", "layers that differ"),
    ("heterogeneous_layers_config_encoded_json", "--heterogeneous-layers-config-encoded-json",
     "layers that differ"),
    ("hybrid_layer_pattern", "--hybrid-layer-pattern", "hybrid Mamba models"),
    ("hybrid_override_pattern", "--hybrid-override-pattern", "hybrid Mamba models"),
    ("perform_rl_step", "--perform-rl-step", "reinforcement learning"),
    ("inprocess_restart", "--inprocess-restart", "in-process restart"),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", "the schedule-plan forward"),
    ("yaml_cfg", "--yaml-cfg", "Megatron's experimental YAML arguments"),
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Pretrain as one rank of a job; the environment says which (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...).

    Args:
        argv: the flags, Megatron's and this project's; None takes the process's own.

    Raises:
        ValueError: a flag asks for what is not supported, or `--save` names a folder in use.
        ModuleNotFoundError: the installed megatron-core ships no `megatron.training`.
    """
    _require_megatron_training()
    if enable_cpu_ranks(training=True) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share one machine's cores
    _skip_absent_makefile()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_mesh_cp.megatron import gpt_job

    args = _configure(argv)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            gpt_job.datasets_provider,
            ModelType.encoder_or_decoder,
            gpt_job.forward_step,
            get_embedding_ranks=gpt_job.embedding_ranks,
        )
    except SystemExit as stop:  # on a signal, --exit-interval, --exit-duration-in-mins: after a checkpoint
        _hear_no_more(args)
        if not stop.code:
            _say_ended_early(args)
        raise
    _hear_no_more(args)
    leave_group()


def _hear_no_more(args: Namespace) -> None:
    """Ignore the signal that asks to save and end, once training has ended.

    The launcher repeats it until the process is gone, and an interpreter that shuts down takes its handlers away first:
    the process would die of the next one, after all was saved. What is ignored stays ignored.
    """
    if args.exit_signal_handler:
        signal.signal(args.exit_signal, signal.SIG_IGN)


def _say_ended_early(args: Namespace) -> None:
    """One line by which a person, and scripts/slurm/pretrain.sbatch, know that the run can go on."""
    if os.environ.get("RANK", "0") == "0" and args.save is not None and has_checkpoint(args.save):
        done = last_iteration(args.save)
        print(f"[mesh-cp] ended early: iteration {done} of {args.train_iters} is saved in {args.save}", flush=True)


def run(argv: list[str] | None = None) -> None:
    """`main()` as a rank's whole life: it returns on success and ends the process on any failure."""
    live(lambda: main(argv))


def _configure(argv: list[str] | None) -> Namespace:
    """Parse and check the flags, install the context-parallel algorithm, set Megatron's global variables."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    from megatron_mesh_cp.megatron.args import add_args
    from megatron_mesh_cp.megatron.install import install

    if argv is not None:
        sys.argv = [sys.argv[0], *argv]  # parse_args() reads no other list
    args = parse_args(extra_args_provider=add_args)
    refuse_unsupported(args)
    check_save_folder(args)
    if args.use_checkpoint_args:
        _take_checkpoint_args(args)
    install(args)
    validate_args(args, {})
    set_global_variables(args)
    return args


def refuse_unsupported(args: Namespace) -> None:
    for attribute, flag, what in _UNSUPPORTED:
        if getattr(args, attribute, None):
            raise ValueError(
                f"{flag} ({what}) is not supported by megatron_mesh_cp.megatron.pretrain; drop {flag}, or "
                "launch the Megatron script that supports it"
            )


def _take_checkpoint_args(args: Namespace) -> None:
    from megatron.training.checkpointing import load_args_from_checkpoint

    if args.load is None and args.pretrained_checkpoint is None:
        raise ValueError("--use-checkpoint-args requires --load or --pretrained-checkpoint, got neither")
    load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    load_args_from_checkpoint(args)


def _require_megatron_training() -> None:
    from importlib.util import find_spec

    if find_spec("megatron") is None or find_spec("megatron.training") is None:
        raise ModuleNotFoundError(
            "pretraining needs megatron.training: install megatron-core 0.19 (Python 3.12 or newer; older "
            "wheels ship megatron.core only), or put a Megatron-LM checkout on PYTHONPATH",
            name="megatron.training",
        )


def _skip_absent_makefile() -> None:
    """Skip `make` for the data set helpers where there is nothing to make.

    The wheel holds the compiled helpers but not the Makefile that `pretrain()` runs on rank 0.
    """
    import megatron.core.datasets.utils as data_utils

    folder = Path(data_utils.__file__).parent
    if not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp.*")):
        data_utils.compile_helpers = lambda: None


if __name__ == "__main__":
    run()
