"""A rank that dies or hangs in the middle: the others end soon, with an error that names the transfer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mesh_cases import Case, mesh_groups, run_mesh
from rank_pool import Leave, RankPool

from megatron_mesh_cp.comm import CommError
from megatron_mesh_cp.plan import Direction


def die_in(case: Case, direction: str, victim: int, how: str) -> str:
    groups = mesh_groups(case.tile)
    run_mesh(case, groups)  # connections are up
    if groups.rank == victim:
        what = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        at = Direction(direction)

        def end(direction: Direction, number: int, held: int) -> None:
            if direction is at and number == 1:
                os.kill(os.getpid(), what)

        groups.watcher = end
    begin = time.monotonic()
    try:
        run_mesh(case, groups)
    except CommError as error:
        raise Leave(f"{time.monotonic() - begin:.1f} {error}") from None
    return "no error"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tile", ["1x4", "2x2", "4x1"])
def test_a_killed_rank_ends_the_others_within_30_s_naming_the_transfer(tile, direction):
    pool = RankPool(4)
    begin = time.monotonic()
    case = Case(s=4096, heads=4, kv_heads=4, d=32, dv=32, tile=tile, dtype=torch.float32)
    try:
        answers = pool.run(die_in, case, direction, 2, "killed", timeout=60, may_fail=True)
    finally:
        pool.kill()
    assert time.monotonic() - begin < 45  # start of the pool included
    assert answers[2] == "the process is gone"
    # A rank may need nothing more from the dead one; those next to it must say what they could not do.
    failed = [a for i, a in enumerate(answers) if i != 2 and "no error" not in a]
    assert failed
    for text in failed:
        assert float(text.split()[0]) < 30
        assert "could not" in text
        assert "global rank" in text
        assert re.search(r"in step \d+ of the (forward|backward)", text)  # peers may notice one pass later
    assert any("CP rank 2 (global rank 2)" in text for text in failed)


def hang_with_timeout(case: Case) -> str:
    """A stopped peer keeps its connections: only a time limit ends the wait."""
    import torch.distributed as dist

    from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention

    groups = MeshGroups.build(dist.group.WORLD, TileShape.parse(case.tile), timeout=3)
    q = torch.randn(8, 1, 2, 8)
    mesh_attention(q, q, q, groups)
    if groups.rank == 1:
        return "sleeps"
    begin = time.monotonic()
    try:
        mesh_attention(q, q, q, groups)
    except CommError as error:
        return f"{time.monotonic() - begin:.1f} {error}"
    return "no error"


@pytest.mark.timeout(120)
def test_a_hanging_rank_ends_the_wait_after_the_time_limit():
    pool = RankPool(2)
    try:
        answers = pool.run(hang_with_timeout, Case(s=16, tile="1x2"), timeout=60, may_fail=True)
    finally:
        pool.kill()
    assert 2.5 < float(answers[0].split()[0]) < 20
    assert "could not receive KV chunk 1 from CP rank 1" in answers[0]


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
dist.init_process_group("gloo")
from test_failures import Case, die_in, torch
die_in(Case(s=2048, d=32, dv=32, tile="2x2", dtype=torch.float32), {direction!r}, 2, "killed")
dist.barrier()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_launcher_exits_non_zero_within_30_s_of_a_kill(tmp_path, direction):
    script = tmp_path / "job.py"
    here = Path(__file__).parent
    script.write_text(SCRIPT.format(tests=str(here), direction=direction))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(script),
    ]
    begin = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert time.monotonic() - begin < 60  # start and imports of four ranks included
    assert "-9" in done.stderr or "could not" in done.stderr


FAILS_AND_LEAVES = """
import sys, time, torch, torch.distributed as dist
from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention

dist.init_process_group("gloo")
groups = MeshGroups.build(dist.group.WORLD, TileShape(2, 2))
q = torch.randn(64, 1, 4, 8)
mesh_attention(q, q, q, groups)
if dist.get_rank() > 0:
    time.sleep({delay})  # rank 0 waits for them
q = torch.randn(64, 64, 64, 64)  # 64 MiB: on their way for a while
groups.watcher = lambda direction, event, held: 1 / 0 if event == {event} else None
try:
    mesh_attention(q, q, q, groups)
except ZeroDivisionError:
    sys.exit(3)
"""


@pytest.mark.parametrize("delay", [0, 60], ids=["peers come", "peers never come"])
@pytest.mark.parametrize("event", [0, 1])
def test_a_rank_that_fails_in_the_middle_of_a_transfer_leaves_with_its_own_exit_code(tmp_path, event, delay):
    """Its queue is in a transfer then; the interpreter's end must not turn that into an abort."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_AND_LEAVES.format(event=event, delay=delay))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(4)
    ]
    try:
        _, text = ranks[0].communicate(timeout=90)
        assert ranks[0].returncode == 3, text
        assert "terminate called" not in text
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
