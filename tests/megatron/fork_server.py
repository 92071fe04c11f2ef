"""The server behind `launch.run_pretrain(launcher="fork")`: imports once, forks the ranks of every run.

It reads one JSON object a line from stdin and answers each with one on stdout; it ends when stdin closes, and
its ranks end with it. See `launch._ForkServer` for the other end.
"""

import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import socket
import sys
import time

_GRACE = 5.0  # seconds other ranks get to end by themselves after the first one failed
_PDEATHSIG = 1  # Linux prctl option PR_SET_PDEATHSIG


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no reply
    _die_with_parent()
    from megatron_mesh_cp.megatron.cpu import enable_cpu_ranks

    enable_cpu_ranks(training=True)
    import torch
    import torch._dynamo  # a run comes to need it, and it takes 2 s

    torch.set_num_threads(1)
    from megatron_mesh_cp.megatron import args, gpt_job, install  # noqa: F401  imported once, for all ranks

    _print_exact_figures()
    # readline() of sys.stdin would read ahead and hide a closed pipe from select() in _wait().
    with os.fdopen(0, "rb", buffering=0, closefd=False) as requests:
        for line in iter(requests.readline, b""):
            print(json.dumps(_run_ranks(json.loads(line))), file=replies, flush=True)


def _print_exact_figures() -> None:
    """Have Megatron print each iteration's loss and gradient norm in full, beside its own rounded line.

    Its line shows the norm with three decimals, and the mean loss of two iterations after a resume.
    """
    from megatron.training import training

    original = training.training_log

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        losses, iteration, grad_norm = args[0], args[3], args[7]
        if losses and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            print(f"[exact] {iteration} {float(losses['lm loss'])!r} {float(grad_norm)!r}", flush=True)
        return original(*args, **kwargs)

    training.training_log = training_log


def _put_in_faults(env: dict[str, str]) -> None:
    """What a test asks for by variables of this rank's environment.

    TEST_KILL "iteration:rank:direction": that rank is killed in the middle of an attention of that iteration.
    TEST_LOSS_ON_TOKEN: only this token of each sequence has a loss.
    """
    if "TEST_KILL" in env:
        _kill_later(*env["TEST_KILL"].split(":"))
    if "TEST_LOSS_ON_TOKEN" in env:
        from megatron_mesh_cp.megatron import gpt_job

        cut = gpt_job.get_batch_on_this_cp_rank

        def with_one_token(batch, *args, **kwargs):
            mask = batch["loss_mask"].clone().zero_()
            mask[:, int(env["TEST_LOSS_ON_TOKEN"])] = 1
            return cut({**batch, "loss_mask": mask}, *args, **kwargs)

        gpt_job.get_batch_on_this_cp_rank = with_one_token


def _kill_later(iteration: str, rank: str, direction: str) -> None:
    from megatron.training import training

    from megatron_mesh_cp.megatron.groups import all_shared_groups

    original = training.training_log

    def kill(which, number, held) -> None:
        if which.value == direction and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        if str(args[3]) == iteration and os.environ["RANK"] == rank:
            for groups in all_shared_groups():
                groups.watcher = kill
        return original(*args, **kwargs)

    training.training_log = training_log


def _run_ranks(request: dict) -> dict:
    began = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(request, rank, port)
        pids.append(pid)
    codes = _wait(pids, began + request["timeout"])
    timed_out = codes is None
    failed = [code for code in codes or [] if code != 0]
    return {
        "returncode": -signal.SIGKILL if timed_out else (failed[0] if failed else 0),
        "seconds": time.monotonic() - began,
        "timed_out": timed_out,
    }


def _wait(pids: list[int], deadline: float) -> list[int] | None:
    """Exit codes in the order in which the ranks ended; None when time ran out. No rank outlives the call."""
    alive, codes, first_failure = set(pids), [], None
    try:
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in alive:
                alive.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
                if codes[-1] != 0 and first_failure is None:
                    first_failure = time.monotonic()
                continue
            now = time.monotonic()
            if now > deadline:
                return None
            if first_failure is not None and now > first_failure + _GRACE:
                return codes
            if select.select([0], [], [], 0.01)[0]:  # no request comes while one runs: the client is gone
                raise SystemExit(1)
        return codes
    finally:
        for pid in pids:  # the groups of the dead too: their data loader workers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
            os.waitpid(pid, 0)


def _be_rank(request: dict, rank: int, port: int) -> None:
    """The life of a forked rank: it takes the environment torchrun would give it and never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        os.chdir(request["cwd"])
        for fd, name in ((1, "out"), (2, "err")):
            log = os.open(f"{request['logs']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ranks = str(request["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **request["env"])
        sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
        from megatron_mesh_cp.megatron.pretrain import run

        _put_in_faults(request["env"])
        run(request["flags"])
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Have Linux kill this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
