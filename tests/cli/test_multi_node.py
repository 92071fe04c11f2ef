"""`mesh-cp pretrain` as one of several nodes: what is missing or cannot be reached, and a signal that ends nothing."""

import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from megatron_mesh_cp.cli import nodes
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cli.nodes import Nodes, check_own_name, check_port, reach_head
from megatron_mesh_cp.cli.pretrain import plan_launch

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
FOUR = ["--nnodes", "4", "--nproc-per-node", "1"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data set as far as the launcher looks, a recipe of any number of ranks, and an empty working folder."""
    for end in (".bin", ".idx"):
        (tmp_path / f"text{end}").touch()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("MESH_CP_DATA", str(tmp_path / "text"))
    (tmp_path / "recipe.yaml").write_text(
        CONFIG.read_text().replace("RANKS: 4\n", "").replace("micro-batch-size: 4", "micro-batch-size: 1")
    )
    return tmp_path


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def error_of(capsys, *argv) -> str:
    assert main(["pretrain", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mesh-cp: error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes", "4"], "--nnodes 4 without --node-rank, --nproc-per-node, --master-addr, --master-port"),
        (["--master-addr", "h"], "--master-addr h without --nnodes, --node-rank, --nproc-per-node, --master-port"),
        ([*FOUR, "--ranks", "4"], "--ranks 4 is for one machine"),
        ([*FOUR, "--node-rank", "4", "--master-addr", "h", "--master-port", "9"], "--node-rank 4 with --nnodes 4"),
        ([*FOUR, "--node-rank", "0", "--master-addr", "h", "--master-port", "70000"], "--master-port 70000"),
        (["--check", "--nnodes", "0", "--nproc-per-node", "1"], "--nnodes 0: must be 1 or more"),
        (["--check", *FOUR, "--head-timeout", "0"], "--head-timeout 0: must be a positive"),
        (
            ["--check", "--nnodes", "2", "--nproc-per-node", "8"],
            "--nnodes 2 x --nproc-per-node 8 = 16 ranks but RANKS: 4",
        ),
    ],
)
def test_rejects_half_a_description_of_the_nodes(data, capsys, flags, says):
    assert says in error_of(capsys, CONFIG, *flags)


def test_rejects_other_nodes_than_the_recipe_claims(data, capsys):
    path = data / "recipe.yaml"
    path.write_text("RANKS_PER_NODE: 4\n" + path.read_text())
    err = error_of(capsys, path, "--check", "--nnodes", "4", "--nproc-per-node", "2")
    assert "--nnodes 4 x --nproc-per-node 2 = 8 ranks, but RANKS_PER_NODE: 4 in" in err


def test_rejects_a_world_that_the_parallel_sizes_do_not_divide(data, capsys):
    err = error_of(capsys, data / "recipe.yaml", "--check", "--nnodes", "3", "--nproc-per-node", "2")
    assert "--nnodes 3 x --nproc-per-node 2 = 6 ranks is not divisible by" in err
    assert "= 4; counts that work are 4, 8 and 12" in err


def test_check_says_what_the_job_is_and_starts_nothing(data, capsys):
    assert main(["pretrain", str(data / "recipe.yaml"), "--check", "--nnodes", "2", "--nproc-per-node", "4"]) == 0
    job, memory = capsys.readouterr().out.splitlines()
    assert job.startswith("ok: 8 ranks on 2 nodes x 4 = TP 1 x PP 1 x CP 4 x DP 2; mesh 2x2; 512 tokens")
    assert memory.startswith("planned memory of a rank: 0.0")
    assert not any(Path.cwd().iterdir())


def test_torchrun_gets_a_static_rendezvous(data):
    launch = plan_launch(data / "recipe.yaml", nodes=Nodes(2, 1, 4, "head", 29400))
    assert launch.ranks == 8
    words = " ".join(launch.command)
    assert (
        "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr head --master-port 29400 --max-restarts 0" in words
    )
    assert "--standalone" not in words


def test_a_port_that_is_taken_is_named(port):
    check_port(Nodes(2, 0, 1, "head", port))
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", port))
        holder.listen(1)
        with pytest.raises(ValueError, match=rf"port {port} on head is taken .*--master-port"):
            check_port(Nodes(2, 0, 1, "head", port))


def test_waits_for_a_head_that_starts_later(port):
    listener = socket.socket()

    def listen():
        time.sleep(1.5)
        listener.bind(("127.0.0.1", port))
        listener.listen(1)

    threading.Thread(target=listen).start()
    reach_head(Nodes(2, 1, 1, "127.0.0.1", port, timeout=20))
    listener.close()


def test_a_head_that_cannot_be_reached_is_one_message(port, monkeypatch):
    here = socket.gethostname()
    with pytest.raises(ValueError, match=rf"node 1 \({here}\) cannot reach the head 127.0.0.1 port {port}: .* refused"):
        reach_head(Nodes(2, 1, 1, "127.0.0.1", port, timeout=1.5))
    with pytest.raises(ValueError, match="the head nowhere.invalid port 9: the name does not resolve"):
        reach_head(Nodes(2, 1, 1, "nowhere.invalid", 9, timeout=2))
    for error, says in (
        (OSError(113, "No route to host"), "no route to 127.0.0.1 for 0.5 s"),
        (TimeoutError("timed out"), "did not answer for 0.5 s .*firewall"),
    ):
        monkeypatch.setattr(socket.socket, "connect", lambda self, address, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(ValueError, match=says):
            reach_head(Nodes(2, 1, 1, "127.0.0.1", 9, timeout=0.5))


def test_a_host_name_of_the_loopback_needs_an_interface(monkeypatch):
    """Debian's /etc/hosts gives a machine's own name 127.0.1.1: gloo would send the other nodes to themselves."""
    several = Nodes(2, 1, 1, "head", 9)
    monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ValueError, match="resolves to 127.0.1.1.*GLOO_SOCKET_IFNAME"):
        check_own_name(several, {})
    check_own_name(several, {"GLOO_SOCKET_IFNAME": "eth0"})
    check_own_name(Nodes(1, 0, 2, "head", 9), {})
    monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("10.0.0.7", 0))])
    check_own_name(several, {})


def test_a_taken_port_and_an_absent_head_end_the_launcher_before_torchrun(data, port, capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    flags = [data / "recipe.yaml", *FOUR, "--master-addr", "127.0.0.1", "--master-port", port]
    assert "refused" in error_of(capsys, *flags, "--node-rank", "2", "--head-timeout", "1")
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", port))
        holder.listen(1)
        assert f"port {port} on 127.0.0.1 is taken" in error_of(capsys, *flags, "--node-rank", "0")


def resumed(data, *flags: str) -> list[str]:
    return list(plan_launch(data / "recipe.yaml", flags, resume=True).flags)


def test_resume_goes_on_from_the_save_folder_once_a_checkpoint_is_there(data, capsys):
    save = ["--save", "run", "--save-interval", "10"]
    assert resumed(data)[-2:] != ["--load", "run"]
    assert "no --save" in capsys.readouterr().err
    assert resumed(data, *save)[-2:] == ["--load", "run"]
    base = [*save, "--load", "base", "--finetune", "--no-load-optim", "--no-load-rng"]
    assert resumed(data, *base)[-5:] == ["--load", "base", "--finetune", "--no-load-optim", "--no-load-rng"]
    Path("run", "iter_0000010").mkdir(parents=True)
    Path("run", "latest_checkpointed_iteration.txt").write_text("10")
    flags = resumed(data, *base)
    assert flags[-6:] == [*save, "--load", "run"]
    assert not {"base", "--finetune", "--no-load-optim", "--no-load-rng"} & set(flags)
    assert "--load run instead of base" in capsys.readouterr().err


# A launcher whose torchrun is a script: it starts a rank that becomes able to hear the signal only after a while.
_LAUNCHER = """
    import os, signal, sys
    from types import SimpleNamespace
    from megatron_mesh_cp.cli.launch import EndSoon, Launch, run_ranks

    class Script(Launch):
        command = [sys.executable, "-c", {torchrun!r}]

    args = SimpleNamespace(save={save!r}, exit_signal_handler=True, exit_signal=signal.SIGUSR2)
    with EndSoon() as end_soon:
        os.kill(os.getpid(), signal.SIGUSR1)  # even before the ranks are started
        sys.exit(run_ranks(Script(1, (), dict(os.environ), args), end_soon=end_soon))
"""
_TORCHRUN = """
    import subprocess, sys
    rank = subprocess.Popen([sys.executable, "-c", {rank!r}])
    sys.exit(rank.wait())
"""
_RANK = """
    import os, signal, subprocess, sys, time
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    time.sleep(1.5)
    os.killpg(0, signal.SIGUSR1)  # as SLURM, to every process
    heard = []
    signal.signal(signal.SIGUSR2, lambda *a: heard.append(1))
    end = time.monotonic() + {seconds}
    while not heard and time.monotonic() < end:
        time.sleep(0.1)
    print("heard" if heard else "not heard", "helper", helper.poll())
    helper.kill()
"""


@pytest.mark.parametrize(("save", "says"), [("run", "heard helper None"), (None, "not heard helper None")])
def test_sigusr1_ends_nothing_and_reaches_ranks_that_still_start(save, says):
    """The helper is what a checkpoint is written through: SLURM's signal to every process ended it, and so the job."""
    rank = textwrap.dedent(_RANK).format(seconds=20 if save else 4)
    torchrun = textwrap.dedent(_TORCHRUN).format(rank=rank)
    code = textwrap.dedent(_LAUNCHER).format(torchrun=torchrun, save=save)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == says
    assert done.stderr.count("SIGUSR1") == 1
    assert ("told to save and end" in done.stderr) == (save is not None)


def test_a_rank_that_has_saved_ignores_the_signal_that_still_comes():
    from argparse import Namespace
    from signal import SIG_IGN, SIGUSR2, getsignal, signal

    from megatron_mesh_cp.megatron.pretrain import _hear_no_more

    before = signal(SIGUSR2, lambda number, frame: None)
    try:
        _hear_no_more(Namespace(exit_signal_handler=False, exit_signal=SIGUSR2))
        assert getsignal(SIGUSR2) is not SIG_IGN
        _hear_no_more(Namespace(exit_signal_handler=True, exit_signal=SIGUSR2))
        assert getsignal(SIGUSR2) is SIG_IGN  # the only kind of handler that the end of an interpreter leaves alone
    finally:
        signal(SIGUSR2, before)
