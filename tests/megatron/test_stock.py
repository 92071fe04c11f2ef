"""stock.hook and -m megatron_mesh_cp.megatron.run: what they refuse, and how they get into Megatron's argument parsing.

Runs with ranks are in test_stock_runs.py.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import types

import pytest
import torch
from standin_checkout import make_checkout
from test_args import BASE

from megatron_mesh_cp import uninstall
from megatron_mesh_cp.megatron import built, run, stock
from megatron_mesh_cp.megatron.args import add_args


@pytest.fixture
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.mark.usefixtures("_path")
class TestRun:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["no/such/pretrain_gpt.py", "--bf16"], "no/such/pretrain_gpt.py: no such script; try PATH/TO/Megatron-LM"),
            (["/"], "/: is a folder; give the script in it"),
            (["--bf16", "pretrain_gpt.py"], "the script comes before its flags, got --bf16"),
        ],
    )
    def test_rejects_a_script_that_is_not_there(self, words, message):
        with pytest.raises(SystemExit, match=message):
            run.main(words)

    def test_rejects_a_script_outside_a_checkout(self, tmp_path):
        script = tmp_path / "pretrain_gpt.py"
        script.write_text("")
        with pytest.raises(SystemExit, match="not in a Megatron-LM checkout.*megatron_mesh_cp.megatron.pretrain"):
            run.main([str(script)])

    def test_rejects_a_checkout_without_megatron_training(self, tmp_path):
        (make_checkout(tmp_path) / "megatron" / "training").rmdir()
        with pytest.raises(SystemExit, match="no megatron/training"):
            run.main([str(tmp_path / "pretrain_gpt.py")])

    @pytest.mark.parametrize("version", ["0.15.2", "0.20.0"])
    def test_rejects_a_release_out_of_range(self, tmp_path, version):
        make_checkout(tmp_path, version)
        with pytest.raises(SystemExit, match=f"megatron-core {version} is not supported.*0.16 up to.*0.20"):
            run.main([str(tmp_path / "pretrain_gpt.py")])

    def test_rejects_a_checkout_that_another_megatron_hides(self, tmp_path):
        """A package with an __init__.py goes before a folder without one, wherever it is on the path."""
        make_checkout(tmp_path / "checkout")
        (tmp_path / "other" / "megatron").mkdir(parents=True)
        (tmp_path / "other" / "megatron" / "__init__.py").write_text("")
        code = (
            f"import sys; sys.path.append({str(tmp_path / 'other')!r})\n"
            "from megatron_mesh_cp.megatron.run import main; main(sys.argv[1:])"
        )
        words = [sys.executable, "-c", code, str(tmp_path / "checkout" / "pretrain_gpt.py")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert f"is hidden by {tmp_path}/other/megatron" in done.stderr

    def test_script_folder_and_checkout_come_first_on_the_path(self, tmp_path):
        folder = make_checkout(tmp_path) / "examples" / "multimodal"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text("")
        assert run.use_checkout(folder / "train.py") == tmp_path
        assert sys.path[:2] == [str(folder), str(tmp_path)]

    @pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
    def test_without_a_script_it_says_how_to_use_it(self, capsys, words, code):
        with pytest.raises(SystemExit) as stop:
            run.main(words)
        assert stop.value.code == code
        captured = capsys.readouterr()
        assert "run SCRIPT [FLAGS]" in captured.out + captured.err


def test_parsing_gives_mesh_flags_beside_the_scripts_own(monkeypatch):
    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser()
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    def own(parser):
        parser.add_argument("--own")
        return parser

    hooked = stock._parse_with_our_flags(parse_args)
    monkeypatch.setattr(sys, "argv", shlex.split("script --context-parallel-algo mesh --mesh-tile-shape 2x2"))
    assert hooked().mesh_tile_shape == "2x2"  # no provider, by name, by position, and one that adds ours as well
    assert hooked(None, True).context_parallel_algo == "mesh"
    assert hooked(own).own is None
    assert hooked(extra_args_provider=lambda parser: add_args(own(parser))).context_parallel_algo == "mesh"


def test_help_prints_all_flags_although_a_text_of_megatrons_has_a_bare_percent_sign(capsys):
    """Megatron 0.18 and 0.19: ValueError: unsupported format character, for --help of any script."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with pytest.raises(SystemExit) as stop:
        stock._add_args_last(parser).parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--context-parallel-size", "--context-parallel-algo {megatron,mesh}", "--mesh-tile-shape", "= 10%)"):
        assert flag in text


def test_rejects_a_yaml_file_of_arguments_in_place_of_ours(monkeypatch):
    hooked = stock._parse_with_our_flags(lambda provider: argparse.Namespace(yaml_cfg="model.yaml"))
    monkeypatch.setattr(sys, "argv", ["script", "--yaml-cfg", "model.yaml"])
    assert hooked().yaml_cfg
    monkeypatch.setattr(sys, "argv", ["script", "--yaml-cfg", "model.yaml", "--context-parallel-algo=mesh"])
    with pytest.raises(ValueError, match="--yaml-cfg with --context-parallel-algo=mesh"):
        hooked()


def test_a_function_that_megatron_imported_by_value_is_replaced_there_too(monkeypatch):
    """megatron.training.initialize of 0.16 and 0.17 has its own parse_args and validate_args."""

    def original():
        return 1

    home, other, stranger = (types.ModuleType(name) for name in ("megatron.a", "megatron.b", "megatronic"))
    for module in (home, other, stranger):
        module.parse_args = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    stock._replace_everywhere(home, "parse_args", lambda function: lambda: function() + 1)
    assert [module.parse_args() for module in (home, other, stranger)] == [2, 2, 1]


@pytest.fixture
def megatron_args(monkeypatch):
    """megatron_args(flags): parsed as in a script; what turn_on changes is put back."""
    from megatron.training import arguments, training

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(training, "setup_model_and_optimizer", training.setup_model_and_optimizer)

    def parse(flags: str) -> argparse.Namespace:
        parser = add_args(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
        return parser.parse_args(shlex.split(flags))

    yield parse
    uninstall()


def test_turning_on_installs_and_has_the_model_checked_when_it_is_built(megatron_args, monkeypatch):
    from megatron.training import training

    monkeypatch.setattr(training, "setup_model_and_optimizer", lambda *args: ("model", "optimizer", "scheduler"))
    checked = []
    monkeypatch.setattr(built, "check_built_models", checked.append)
    args = megatron_args(BASE)
    assert stock.turn_on(args)
    assert stock.turn_on(args)
    assert (args.cp_comm_type, args.hierarchical_context_parallel_sizes) == (["mesh"], [2, 2])
    assert training.setup_model_and_optimizer(1) == ("model", "optimizer", "scheduler")
    assert checked == ["model"]


def test_without_mesh_nothing_is_touched(megatron_args):
    from megatron.training import training

    before = (training.setup_model_and_optimizer, sys.excepthook)
    args = megatron_args("--context-parallel-size 4")
    known = dict(vars(args))
    assert not stock.turn_on(args)
    assert (training.setup_model_and_optimizer, sys.excepthook) == before
    assert vars(args) == known


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("use_legacy_models", True, "--use-legacy-models with --context-parallel-algo mesh: .*leave"),
        ("inprocess_restart", True, "--inprocess-restart with"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm with"),
        ("hybrid_attention_ratio", 0.5, "--hybrid-attention-ratio with .*--hybrid-override-pattern"),
        ("hybrid_override_pattern", "M*-", "--hybrid-override-pattern M.*--transformer-impl local: hybrid models"),
        ("hybrid_layer_pattern", "M*-", "--hybrid-layer-pattern M.*--transformer-impl local: hybrid models"),
        ("spec", ["module", "spec"], "--spec .*its own layer specs only.*leave the flag out"),
        ("freeze_LM", False, "pretrain_vlm.py with .*packed sequences.*--context-parallel-algo megatron"),
    ],
)
def test_rejects_by_name_what_other_scripts_and_releases_offer(megatron_args, attribute, value, message):
    args = megatron_args(BASE)
    setattr(args, attribute, value)
    with pytest.raises(ValueError, match=message):
        stock.turn_on(args)


class Attention(torch.nn.Module):
    """Stands for Megatron's: a configuration and a core attention."""

    def __init__(self, core: torch.nn.Module, cp: int = 4, comm_type: str | list[str] = "mesh"):
        super().__init__()
        self.core_attention = core
        self.config = types.SimpleNamespace(context_parallel_size=cp, cp_comm_type=comm_type)


class Core(torch.nn.Module):
    def __init__(self, cp_comm_type: str | None = None):
        super().__init__()
        self.cp_comm_type = cp_comm_type


@pytest.fixture
def check(monkeypatch):
    """check(model parts of rank 0, of rank 1, ...): as rank 0 sees it."""
    from megatron.core.transformer import attention

    monkeypatch.setattr(attention, "Attention", Attention)

    def run(*ranks: list[torch.nn.Module]) -> None:
        others = [[built._attention_of(part) for part in parts] for parts in ranks[1:]]
        seen = [(sum(n for n, _ in parts), [t for _, names in parts for t in names]) for parts in others]

        def all_gather_object(every, own):
            every[:] = [own, *seen]

        monkeypatch.setattr(built.dist, "get_world_size", lambda: len(ranks))
        monkeypatch.setattr(built.dist, "all_gather_object", all_gather_object)
        built.check_built_models(ranks[0])

    return run


def test_allows_stages_without_attention_and_encoders_without_context_parallelism(check):
    mesh = torch.nn.Sequential(Attention(Core("mesh")))
    check([mesh], [torch.nn.Linear(1, 1)])
    check([torch.nn.Linear(1, 1)], [mesh])
    check([torch.nn.Sequential(Attention(Core(), cp=1), Attention(Core("mesh")))])


def test_at_context_parallel_size_1_models_are_not_checked(megatron_args):
    """Transformer Engine's attention then runs as it is."""
    from megatron.training import training

    before = training.setup_model_and_optimizer
    assert stock.turn_on(megatron_args(f"{BASE} --context-parallel-size 1"))
    assert training.setup_model_and_optimizer is before


def test_allows_another_type_of_communication_where_it_was_asked_for(check):
    types = ["mesh", "p2p"]
    check([torch.nn.Sequential(Attention(Core("mesh"), comm_type=types), Attention(Core("p2p"), comm_type=types))])
    with pytest.raises(ValueError, match="built without it"):
        check([torch.nn.Sequential(Attention(Core("mesh"), comm_type=types), Attention(Core("a2a"), comm_type=types))])


@pytest.mark.parametrize("where", [0, 1])
def test_rejects_on_every_rank_an_attention_that_was_built_without_mesh(check, where):
    mesh, mixed = torch.nn.Sequential(Attention(Core("mesh"))), torch.nn.Sequential(Attention(Core("p2p")))
    with pytest.raises(ValueError, match=r"1 attention layers of the model were built without it.*0 \(Core\)"):
        check(*([[mixed], [mesh]] if where == 0 else [[mesh], [mixed]]))


def test_rejects_a_model_without_any_mesh_attention(check):
    with pytest.raises(ValueError, match="built without any mesh attention layer"):
        check([torch.nn.Linear(1, 1)], [Attention(Core(), cp=1)])
