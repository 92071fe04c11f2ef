"""hook: `--context-parallel-algo mesh` in a stock Megatron-LM script, with no change to its code.

`megatron_mesh_cp.megatron.run` calls it for an unpatched checkout, the insertions of `patches/` call it in the script
itself. All supported releases (core_v0.16 to core_v0.19) pass the same two functions of `megatron.training.arguments`:
`parse_args`, whoever calls it, and then `validate_args`, once the arguments of a checkpoint are taken over and before
any process group is made. Flags go on the parser in the first, the algorithm is installed in the second.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType

from .args import ALGO_FLAG, add_args
from .cpu import enable_cpu_ranks
from .install import install
from .rank_life import die

# Megatron's imports are inside the functions: on CPU ranks they must come after enable_cpu_ranks().

# What stock scripts offer, mesh has not been tried with, and no other check catches: attribute, flag, what it is.
_REFUSED = (
    ("use_legacy_models", "--use-legacy-models", "models from before megatron.core have no core attention to swap"),
    ("inprocess_restart", "--inprocess-restart", "in-process restart has not been tried"),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", "this schedule has not been tried"),
    ("hybrid_attention_ratio", "--hybrid-attention-ratio", "only patterns have been tried (--hybrid-override-pattern)"),
)


def hook() -> None:
    """Put the flags on Megatron's parser, and have `install` called with what is parsed; harmless to call again.

    Call it before the script imports Megatron, so that CPU ranks work too (see `enable_cpu_ranks`). The Megatron is
    the one that an import finds. A rank whose script fails with mesh on ends at once, as in `megatron.pretrain`.

    Raises ModuleNotFoundError where there is no megatron.training.
    """
    enable_cpu_ranks(training=True)
    import megatron.training.arguments as arguments

    if hasattr(arguments.parse_args, "mesh_cp"):
        return
    _replace_everywhere(arguments, "parse_args", _parse_with_our_flags)
    _replace_everywhere(arguments, "validate_args", _install_before_validating)


def _replace_everywhere(module: ModuleType, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Wrap a function of Megatron in its module and wherever Megatron has imported it by value (0.16, 0.17)."""
    original = getattr(module, name)
    wrapped = wrap(original)
    wrapped.mesh_cp = True
    for other_name, other in list(sys.modules.items()):
        if other_name.partition(".")[0] == "megatron" and getattr(other, name, None) is original:
            setattr(other, name, wrapped)


def _parse_with_our_flags(parse_args: Callable) -> Callable:
    @functools.wraps(parse_args)
    def parse(extra_args_provider=None, *rest, **named):
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return _add_args_last(parser)

        args = parse_args(provider, *rest, **named)
        if getattr(args, "yaml_cfg", None) and not hasattr(args, "context_parallel_algo"):
            _refuse_yaml()
        return args

    return parse


def _add_args_last(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Have the parser get our flags at the moment it parses: after whatever others add, in whatever order they come.

    MindSpeed adds its own --context-parallel-algo in a provider around this one, replacing what is there.
    """
    parse_known_args = parser.parse_known_args  # parse_args() goes through it as well

    def add_and_parse(*args, **kwargs):
        add_args(parser)
        _repair_help(parser)
        return parse_known_args(*args, **kwargs)

    parser.parse_known_args = add_and_parse
    return parser


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Let --help print texts with a bare % in them: one of 0.18's and 0.19's makes argparse fail."""
    for action in parser._actions:
        try:
            _ = action.help and action.help % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def _refuse_yaml() -> None:
    # Megatron has put the contents of the file in the place of what was on the command line.
    typed = [text for text in sys.argv[1:] if text.startswith((ALGO_FLAG, "--mesh-"))]
    if typed:
        raise ValueError(
            f"--yaml-cfg with {typed[0]}: arguments from a YAML file pass none of mesh's checks; give the model's "
            "flags on the command line"
        )


def _install_before_validating(validate_args: Callable) -> Callable:
    @functools.wraps(validate_args)
    def validate(args, *rest, **named):
        turn_on(args)
        return validate_args(args, *rest, **named)

    return validate


def turn_on(args: argparse.Namespace) -> bool:
    """Install what the parsed arguments ask for; False where they ask for Megatron's own context parallelism.

    Raises ValueError, naming the flag and a way out, for whatever mesh cannot do, in some script or release.
    """
    if install(args) is None:
        return False
    _refuse_scripts_features(args)
    if args.context_parallel_size > 1:  # else Transformer Engine's attention runs as it is
        _check_models_when_built()
    _end_at_once_on_failure()
    return True


def _refuse_scripts_features(args: argparse.Namespace) -> None:
    for attribute, flag, why in _REFUSED:
        if getattr(args, attribute, None):
            raise ValueError(f"{flag} with {ALGO_FLAG} mesh: {why}; leave {flag} out")
    if hasattr(args, "freeze_LM"):  # a flag that only Megatron's vision-language scripts have
        raise ValueError(
            f"pretrain_vlm.py with {ALGO_FLAG} mesh: vision-language models hand packed sequences to attention, which "
            f"mesh does not support; use {ALGO_FLAG} megatron"
        )


def _check_models_when_built() -> None:
    from megatron.training import training

    from .built import check_built_models

    original = training.setup_model_and_optimizer
    if hasattr(original, "mesh_cp"):
        return

    @functools.wraps(original)
    def setup_model_and_optimizer(*args, **kwargs):
        made = original(*args, **kwargs)
        check_built_models(made[0])
        return made

    setup_model_and_optimizer.mesh_cp = True
    training.setup_model_and_optimizer = setup_model_and_optimizer


def _end_at_once_on_failure() -> None:
    sys.excepthook = lambda kind, error, trace: die(error)
