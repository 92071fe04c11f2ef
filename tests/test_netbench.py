"""scripts/netbench.sh: real hosts (network namespaces), real links, our ring, a tile and Transformer Engine's ring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netbench import command, hosts

from megatron_mesh_cp.cost import AttentionShape, total_bytes
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(network, number):
    process = start(*SMALL, "--repeats", "1000", start_new_session=True)
    _wait_for_ranks(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert hosts.left_behind(process.pid) == []
    assert _of_session(process.pid) == []


@pytest.mark.timeout(120)
def test_the_next_start_takes_away_what_a_killed_one_left(network):
    process = start(*SMALL, "--repeats", "1000", start_new_session=True)
    _wait_for_ranks(process)
    process.kill()
    process.wait()
    assert hosts.left_behind(process.pid)
    with hosts.hosts(1):
        assert hosts.left_behind(process.pid) == []
    deadline = time.monotonic() + 20
    while _of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _of_session(process.pid) == []  # the ranks saw that the command was gone


def _wait_for_ranks(process: subprocess.Popen) -> None:
    """Until the ranks are there and at work."""
    deadline = time.monotonic() + 60
    while len(_of_session(process.pid)) < 6:  # the command, the fork server, 4 ranks
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)


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


def test_a_failing_rank_is_an_error_and_leaves_nothing(network):
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
