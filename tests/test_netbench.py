"""scripts/netbench.sh: real hosts (network namespaces), real links, our ring, a tile and Transformer Engine's ring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from netbench import command, hosts, report
from netbench.measure import Measured
from netbench.problem import Problem, _dense

from megatron_mesh_cp.cli.gloo_ranks import RanksError
from megatron_mesh_cp.cost import AttentionShape, total_bytes
from megatron_mesh_cp.layout import chunk_positions
from megatron_mesh_cp.tile import TileShape

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SMALL = "--hosts 4 --tiles 1x4,2x2 --rate 200mbit --heads 8 --head-dim 64 --seq-len 128 --repeats 1".split()  # noqa: SIM905


@pytest.fixture
def network():
    try:
        hosts.check_can_make()
        with hosts.hosts(1):
            pass
    except (ValueError, hosts.HostsError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def start(*arguments: str, **how) -> subprocess.Popen:
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "netbench", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def parsed(*arguments: str):
    return command.checked_jobs(command._parser().parse_args([*SMALL, *arguments]))


@pytest.mark.timeout(200)
def test_ring_tile_and_transformer_engine_on_real_links(network, tmp_path):
    table, picture = tmp_path / "net.json", tmp_path / "net.png"
    process = start(*SMALL, "--kv-heads", "8,2", "--peer", "te-p2p", "--json", str(table), "--plot", str(picture))
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert hosts.left_behind(process.pid) == []
    result = json.loads(table.read_text())
    rows = {(row["algo"], row["kv_heads"]): row for row in result["rows"]}
    assert set(rows) == {(algo, kv) for algo in ("ring", "mesh", "te-p2p") for kv in (8, 2)}
    for (algo, kv), row in rows.items():
        assert row["tile"] == {"ring": [1, 4], "mesh": [2, 2], "te-p2p": None}[algo]
        shape = AttentionShape(32, 1, 8, kv, 64, item_bytes=4)
        assert row["bytes"] == total_bytes(TileShape(*(row["tile"] or (1, 4))), shape)
        assert row["seconds"] > 0 and row["predicted_seconds"] > 0  # noqa: PT018
        assert 0 <= row["wait_share"] <= 1
        assert row["max_error"] < 1e-4
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["seconds"] - 1)
    errors = [abs(row["error"]) for row in result["rows"]]
    assert result["simulator"]["cells"] == len(errors)
    assert result["simulator"]["mean_error"] == pytest.approx(sum(errors) / len(errors))
    assert result["simulator"]["worst_error"] == pytest.approx(max(errors))
    assert "simulator: off by" in out
    assert picture.stat().st_size > 10_000


@pytest.mark.timeout(60)
def test_a_link_lets_through_what_it_is_limited_to(network):
    """10 Mbit/s each way: 1 MB takes 0.8 s, whoever is limited."""
    with hosts.hosts(2) as net:
        net.limit(hosts.parse_rate("10mbit"))
        receiver = ["ip", "netns", "exec", net.host(0), sys.executable, "-c", _RECEIVE]
        sender = ["ip", "netns", "exec", net.host(1), sys.executable, "-c", _SEND]
        with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as process:
            subprocess.run(sender, check=True, timeout=30)
            seconds = float(process.communicate(timeout=30)[0])
    assert 0.7 < seconds < 2.0


_RECEIVE = """
import socket, time
with socket.create_server(("10.99.0.1", 5000)) as server:
    connection, _ = server.accept()
    begin, got = time.monotonic(), 0
    while part := connection.recv(1 << 16):
        got += len(part)
    assert got == 10**6
    print(time.monotonic() - begin)
"""
_SEND = """
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(("10.99.0.1", 5000), timeout=10)
        break
    except OSError:
        time.sleep(0.1)
connection.sendall(bytes(10**6))
"""


@pytest.mark.timeout(60)
def test_one_host_of_several_ranks_has_no_links(network, tmp_path):
    flags = [*SMALL, "--hosts", "1", "--ranks-per-host", "4", "--json", str(tmp_path / "one.json")]
    process = start(*flags)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert [row["hosts"] for row in json.loads((tmp_path / "one.json").read_text())["rows"]] == [1, 1]


def test_a_result_that_lacks_a_block_is_far_above_what_is_believed():
    problem = Problem(4, 64, 1, 2, 1, 16, torch.float32, causal=False)
    q, k, v, _ = (torch.cat([problem.chunk(r)[n] for r in range(4)]).double() for n in range(4))
    scores = torch.einsum("sbhd,tbgd->bhst", q, k) * problem.scale
    right = torch.einsum("bhst,tbgd->sbhd", scores.softmax(-1), v)[:16]
    scores[..., 16:32] = float("-inf")  # the chunk of rank 1
    wrong = torch.einsum("bhst,tbgd->sbhd", scores.softmax(-1), v)[:16]
    rest = [part[list(chunk_positions(0, 4, 64))] for part in _dense(problem, 0)[1:]]
    assert problem.error(0, [right, *rest]) < 1e-9
    assert problem.error(0, [wrong, *rest]) > 2 * max(report._MAX_ERROR.values())
    with pytest.raises(report.Refused, match="the result is refused"):
        report.Row.of(Measured(problem, TileShape(2, 2), "direct", 1.0, 0.5, 10, 0.2), None, 4, "1gbit")


def test_what_was_measured_before_a_failure_is_reported(monkeypatch, tmp_path, capsys):
    row = report.Row("mesh", [2, 2], False, "direct", 4, 4, "50mbit", 8, 128, 1.0, 10, 0.5, 1.0, 0.5, 1e-6)

    def measure(net, rate, job, peer):
        if rate == "100mbit":
            raise RanksError("rank 3 died")
        return [row]

    monkeypatch.setattr(command, "measure_network", measure)
    monkeypatch.setattr(command, "check_can_make", lambda: None)
    monkeypatch.setattr(command, "hosts", lambda *args: nullcontext(SimpleNamespace(count=4, limit=lambda rate: None)))
    table = tmp_path / "part.json"
    assert command.main([*SMALL, "--rate", "50mbit,100mbit", "--json", str(table)]) == 1
    assert "rank 3 died" in capsys.readouterr().err
    assert [r["rate"] for r in json.loads(table.read_text())["rows"]] == ["50mbit"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(network, number):
    process = start(*SMALL, "--repeats", "1000", start_new_session=True)
    _wait_for_ranks(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert hosts.left_behind(process.pid) == []
    _wait_until_gone(process.pid)


@pytest.mark.timeout(120)
def test_the_next_start_takes_away_what_a_killed_one_left(network):
    process = start(*SMALL, "--repeats", "1000", start_new_session=True)
    _wait_for_ranks(process)
    process.kill()
    process.wait()
    assert hosts.left_behind(process.pid)
    with hosts.hosts(1):
        assert hosts.left_behind(process.pid) == []
    _wait_until_gone(process.pid)  # the ranks see that the command is gone


def _wait_for_ranks(process: subprocess.Popen) -> None:
    """Until the ranks are there and at work."""
    deadline = time.monotonic() + 60
    while len(_of_session(process.pid)) < 6:  # the command, the fork server, 4 ranks
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)


def _wait_until_gone(session: int) -> None:
    """What multiprocessing starts to fork and to track resources ends by itself, a moment after the command."""
    deadline = time.monotonic() + 20
    while _of_session(session) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _of_session(session) == []


def _of_session(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_time_limit_is_an_error_and_leaves_nothing(network):
    process = start(*SMALL, "--time-limit", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--time-limit 1 s" in err
    assert hosts.left_behind(process.pid) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rate 100", "--rate 100: not a rate; write it as 100mbit"),
        ("--rate 10kbit", "--rate 10kbit: not a rate"),
        ("--tiles 2x4", "--tiles 2x4: none has 4 ranks"),
        ("--tiles 1x4,2x4", "--tiles 2x4: fits none of --hosts 4 x 1 ranks"),
        ("--tiles 4", "--tiles"),
        ("--hosts 0", "--hosts '0'"),
        ("--hosts 300", "--hosts 300: at most 254"),
        ("--hosts 1", "--hosts 1 x --ranks-per-host 1: 2 to 256 ranks"),
        ("--seq-len 129", "--seq-len"),
        ("--kv-heads 3", "--kv-heads"),
        ("--exchange auto", "--exchange"),
        ("--time-limit 0", "--time-limit 0"),
    ],
)
def test_rejects(arguments, words):
    with pytest.raises(ValueError) as error:
        parsed(*arguments.split())
    assert words in str(error.value)


def test_each_number_of_hosts_runs_the_tiles_that_fit_it():
    networks = parsed("--hosts", "4,8", "--tiles", "1x4,2x4,auto", "--rate", "50mbit,100mbit")
    assert [(count, rate, job.tiles) for count, rate, job in networks] == [
        (4, "50mbit", ("1x4", "auto")),
        (4, "100mbit", ("1x4", "auto")),
        (8, "50mbit", ("2x4", "auto")),
        (8, "100mbit", ("2x4", "auto")),
    ]


def test_without_root_it_says_so_and_makes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(SMALL) == 2
    assert "needs root" in capsys.readouterr().err


def test_a_bad_output_is_refused_before_a_host_is_made(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "_make", lambda made: pytest.fail("made hosts"))
    assert command.main([*SMALL, "--plot", "picture.txt"]) == 2
    assert "--plot picture.txt" in capsys.readouterr().err
