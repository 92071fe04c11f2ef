"""Beside MindSpeed: its parser has a --context-parallel-algo of its own, with companions."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import types

import pytest
from test_args import BASE

from megatron_mesh_cp.megatron import stock
from megatron_mesh_cp.megatron.args import add_args, resolve_args
from megatron_mesh_cp.megatron.mindspeed import COMPANIONS

ALGORITHMS = ["ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo"]
SWITCHES = [
    "use-cp-send-recv-overlap",
    "use-fused-ring-attention-update",
    "megatron-cp-in-bnsd",
    "attention-mask-on-cpu",
    "adaptive-cp-without-coarse",
    "adaptive-cp-dynamic-attn-mask",
    "adaptive-cp-only-reschedule",
    "adaptive-cp-manually-set-mask-list",
    "use-ulysses-allgather-kv",
    "use-fusion-attn-v2",
    "tp-2d",
]
NUMBERS = {
    "ulysses-degree-in-cp": None,
    "cp-window-size": 1,
    "context-parallel-cache-interval": 0,
    "sparse-mode": 0,
    "pre-tockens": 65536,
    "next-tockens": 0,
    "alibi-fusion-attn-type": None,
}
CHOICES = {
    "attention-mask-type": ("causal", ["causal", "general"]),
    "cp-attention-mask-type": ("causal", ["causal", "full"]),
    "context-parallel-kv-cache-policy": (None, ["full", "half"]),
}


def add_mindspeed_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Stands for MindSpeed's: its option names and defaults; it too replaces what others added under these names."""
    parser.conflict_handler = "resolve"
    group = parser.add_argument_group("MindSpeed")
    group.add_argument("--context-parallel-algo", type=str, default="ulysses_cp_algo", choices=ALGORITHMS)
    for name in SWITCHES:
        group.add_argument(f"--{name}", action="store_true")
    for name, default in NUMBERS.items():
        group.add_argument(f"--{name}", type=int, default=default)
    for name, (default, choices) in CHOICES.items():
        group.add_argument(f"--{name}", type=str, default=default, choices=choices)
    group.add_argument("--kv-head-repeat-before-uly-alltoall", action="store_true", default=True)
    return parser


def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def hooked(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return stock._add_args_last(parser)


# name -> how the parser came to be; the last two are what happens under stock.hook()
ORDERS = {
    "MindSpeed first": lambda p: add_args(add_mindspeed_args(p)),
    "ours twice around it": lambda p: add_args(add_mindspeed_args(add_args(p))),
    "hook, MindSpeed inside": lambda p: hooked(add_mindspeed_args(p)),
    "hook, MindSpeed around": lambda p: add_mindspeed_args(hooked(p)),
    "hook, the script adds ours too": lambda p: add_mindspeed_args(hooked(add_args(p))),
}


@pytest.fixture(scope="module", params=ORDERS.values(), ids=ORDERS)
def parse(request):
    parser = request.param(megatron_parser())
    return lambda flags: parser.parse_args(shlex.split(flags))


@pytest.fixture(scope="module")
def both() -> argparse.ArgumentParser:
    return add_args(add_mindspeed_args(megatron_parser()))


def with_base(algo: str, more: str = "") -> str:
    return f"{BASE.replace('algo mesh', f'algo {algo}')} {more}"


@pytest.mark.parametrize("algo", ["mesh", "mesh_cp_algo"])
def test_mesh_and_its_alias_are_one_more_choice_in_whatever_order_the_flags_came(parse, algo):
    """MindSpeed's flag has no `type` that would map an alias."""
    assert str(resolve_args(parse(with_base(algo, "--mesh-exchange shift"))).tile) == "2x2"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_mindspeeds_algorithms_keep_their_meaning(parse, algo):
    args = parse(with_base(algo, "--ulysses-degree-in-cp 2 --use-cp-send-recv-overlap"))
    before = dict(vars(args))
    assert args.context_parallel_algo == algo
    assert resolve_args(args) is None
    assert vars(args) == before


def test_its_default_stays_its_default(parse):
    assert parse("").context_parallel_algo == "ulysses_cp_algo"
    assert resolve_args(parse("")) is None


@pytest.mark.parametrize("algo", ["megatron_cp_algo", "hybrid_cp_algo"])
def test_rejects_a_mesh_flag_with_one_of_its_algorithms(parse, algo):
    with pytest.raises(ValueError, match=f"--mesh-tile-shape 2x2 has no effect with --context-parallel-algo {algo}"):
        resolve_args(parse(with_base(algo, "--mesh-tile-shape 2x2")))


def test_rejects_an_unknown_algorithm(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--context-parallel-algo meshh")
    assert "meshh" in capsys.readouterr().err


SET = {name: "" for name in SWITCHES} | {name: " 2" for name in NUMBERS}
SET |= {name: f" {choices[-1]}" for name, (_, choices) in CHOICES.items()}


@pytest.mark.parametrize(("name", "value"), SET.items(), ids=SET)
def test_rejects_each_companion_that_mesh_would_ignore(both, name, value):
    with pytest.raises(ValueError, match=f"--{name}{value or ' True'} with --context-parallel-algo mesh.*leave it out"):
        resolve_args(both.parse_args(shlex.split(with_base("mesh", f"--{name}{value}"))))


def test_the_companions_are_no_flags_of_megatrons_own_and_all_are_in_the_stand_in():
    own = {action.dest for action in megatron_parser()._actions}
    assert not own & set(COMPANIONS)
    assert {name.replace("-", "_") for name in SET} == set(COMPANIONS)


def test_a_flag_that_mindspeed_has_on_by_default_is_let_through(both):
    assert resolve_args(both.parse_args(shlex.split(with_base("mesh", "--kv-head-repeat-before-uly-alltoall"))))


def test_rejects_a_run_in_which_mindspeed_cuts_the_sequence(monkeypatch):
    """Its get_batch_on_this_cp_rank does not cut at all for an algorithm that it does not know."""
    importlib.import_module("megatron.training.utils")
    name = "get_batch_on_this_cp_rank"
    replaced = types.FunctionType((lambda batch: batch).__code__, {"__name__": "mindspeed.core.context_parallel.utils"})
    monkeypatch.setattr(sys.modules["megatron.training.utils"], name, replaced, raising=False)
    parser = add_args(megatron_parser())
    with pytest.raises(ValueError, match="MindSpeed has replaced megatron.training.utils.get_batch_on_this_cp_rank"):
        resolve_args(parser.parse_args(shlex.split(BASE)))
    alone = BASE.replace("context-parallel-size 4", "context-parallel-size 1")
    assert resolve_args(parser.parse_args(shlex.split(alone)))


def test_a_provider_that_mindspeed_wraps_around_the_hooked_one_comes_before_ours(monkeypatch):
    def parse_args(extra_args_provider=None):  # as MindSpeed leaves it: its own flags after those of the provider
        return add_mindspeed_args(extra_args_provider(argparse.ArgumentParser())).parse_args()

    monkeypatch.setattr(sys, "argv", ["script", "--context-parallel-algo", "mesh"])
    assert stock._parse_with_our_flags(parse_args)().context_parallel_algo == "mesh"
