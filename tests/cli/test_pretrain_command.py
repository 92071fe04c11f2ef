"""`mesh-cp pretrain`: a mistake is one line and exit code 2 before a rank starts; a signal ends all ranks."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_mesh_cp.cli.launch import Launch, run_ranks
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cli.pretrain import plan_launch

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data set as far as the launcher looks, and a working folder that must stay empty."""
    (tmp_path / "data").mkdir()
    for end in (".bin", ".idx"):
        (tmp_path / "data" / f"text{end}").touch()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("MESH_CP_DATA", str(tmp_path / "data" / "text"))
    return tmp_path


def error_of(capsys, *argv: str) -> str:
    assert main(["pretrain", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mesh-cp: error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--ranks", "8"], ["--ranks 8", "RANKS: 4", "quickstart.yaml"]),
        (["--ranks", "0"], ["--ranks 0"]),
        (["--seq-lenght", "512"], ["unknown flag --seq-lenght", "did you mean --seq-length?"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["stray"], ["'stray' belongs to no flag"]),
        (["--mesh-tile-shape", "3x2"], ["4", "3x2", "2x2"]),
        (["--mesh-tile-shape", "2by2"], ["--mesh-tile-shape", "2by2", "AxB"]),
        (["--seq-length", "100"], ["100", "8"]),
        (["--attention-dropout", "0.1"], ["--attention-dropout 0.1"]),
        (["--context-parallel-size", "3"], ["RANKS: 4", "= 3", "3, 6 and 9"]),
        (["--pipeline-model-parallel-size", "0"], ["--pipeline-model-parallel-size 0"]),
        (["--data-path", "/nope/text"], ["--data-path /nope/text", "/nope/text.bin"]),
        (["--global-batch-size", "7"], ["Megatron refuses", "7"]),
        (["--yaml-cfg", "x.yaml"], ["--yaml-cfg", "MODEL_ARGS"]),
        (["--sft"], ["--sft"]),
    ],
)
def test_rejects_bad_flags_with_one_line(data, capsys, more, says):
    err = error_of(capsys, CONFIG, *more)
    for words in says:
        assert words in err
    assert not any(Path.cwd().iterdir())


def test_rejects_a_save_folder_of_another_run(data, capsys):
    run = data / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    assert f"--save {run}" in error_of(capsys, CONFIG, "--save", run, "--save-interval", "10")
    assert [path.name for path in run.iterdir()] == ["latest_checkpointed_iteration.txt"]


def test_rejects_an_unset_variable_and_an_unknown_flag_of_the_recipe(data, capsys, monkeypatch):
    config = data / "recipe.yaml"
    config.write_text(CONFIG.read_text().replace("--num-layers", "--num-layer"))
    assert "did you mean --num-layers?" in error_of(capsys, config)
    monkeypatch.delenv("MESH_CP_DATA")
    assert "${MESH_CP_DATA}" in error_of(capsys, CONFIG)
    assert "no recipe given" in error_of(capsys)
    assert "cannot read the recipe" in error_of(capsys, "nowhere.yaml")


def test_unknown_command_is_one_line(capsys):
    assert main(["pretrian"]) == 2
    assert "pretrian" in capsys.readouterr().err


def test_megatron_help_lists_megatrons_flags_and_ours(capsys):
    """Some of Megatron's help texts hold a bare %, on which argparse itself stumbles."""
    assert main(["pretrain", "--megatron-help"]) == 0
    out = capsys.readouterr().out
    assert "--num-layers" in out
    assert "--mesh-tile-shape" in out


def test_later_flags_win_and_ranks_follow_the_recipe(data):
    launch = plan_launch(CONFIG, ["--train-iters", "7"])
    assert (launch.ranks, launch.args.train_iters, launch.args.context_parallel_size) == (4, 7, 4)
    assert launch.command[-2:] == ["--train-iters", "7"]
    assert launch.env["OMP_NUM_THREADS"]


def test_ranks_without_ranks_in_the_recipe_are_tp_pp_cp(data):
    config = data / "recipe.yaml"
    config.write_text(CONFIG.read_text().replace("RANKS: 4\n", ""))
    assert plan_launch(config).ranks == 4
    assert plan_launch(config, ["--pipeline-model-parallel-size", "2"]).ranks == 8
    assert plan_launch(config, ["--micro-batch-size", "2"], ranks=8).ranks == 8
    with pytest.raises(ValueError, match=r"--ranks 6 is not divisible by .* = 4; counts that work are 4, 8 and 12"):
        plan_launch(config, ranks=6)


@dataclass(frozen=True)
class Script(Launch):
    """A launch of a Python script instead of ranks."""

    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


def script(code: str) -> Script:
    return Script(ranks=1, flags=(), env=dict(os.environ), args=None, code=code)


def test_exit_code_is_handed_on_and_output_is_logged(tmp_path, capfd):
    code = run_ranks(
        script("import sys; print('seen'); print('hidden', file=sys.stderr); sys.exit(7)"),
        tmp_path / "log",
        lambda line: "seen" in line,
    )
    assert code == 7
    assert capfd.readouterr().out == "seen\n"
    assert sorted((tmp_path / "log").read_text().split()) == ["hidden", "seen"]


def test_exit_code_of_a_killed_launcher_is_not_zero():
    assert run_ranks(script("import os; os.kill(os.getpid(), 9)")) == 137


_RANKS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print(child.pid, flush=True)
import signal
{on_term}
time.sleep(60)
"""
_LAUNCHER = """
import sys
sys.path.insert(0, {here!r})
from test_pretrain_command import run_ranks, script
sys.exit(run_ranks(script({code!r})))
"""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(signum, times):
    """Once: torchrun ends its ranks. Twice: a torchrun that does not react is killed with them."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    polite = "signal.signal(signal.SIGTERM, lambda *a: (child.kill(), sys.exit(1)))"
    code = _RANKS.format(on_term=polite if times == 1 else stubborn)
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER.format(here=str(Path(__file__).parent), code=code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = psutil.Process(int(launcher.stdout.readline()))
    time.sleep(1.5)  # the launcher looks for ranks once a second
    for _ in range(times):
        launcher.send_signal(signum)
        time.sleep(0.5)
    assert launcher.wait(timeout=20) == 128 + signum
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    launcher.stdout.close()
