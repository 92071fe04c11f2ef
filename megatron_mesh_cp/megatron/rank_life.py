"""The life of one rank: it returns on success, and a rank that fails is gone at once.

Leaving the interpreter the usual way runs the tear-down of the process groups, which waits for peers that wait for
this rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch


def live(main: Callable[[], object]) -> None:
    """Run `main` as the whole life of this rank: return on success, end the process on any failure."""
    try:
        main()
    except SystemExit as stop:  # Megatron's way to stop early (--exit-interval, a signal), argparse's too
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        if stop.code not in (None, 0):
            _end_process(stop.code if isinstance(stop.code, int) else 1)
        leave_group()
    except BaseException as error:
        die(error)


def die(error: BaseException) -> NoReturn:
    """Say what went wrong and end the process, without waiting for anybody."""
    _print_failure(error)
    _end_process(1)


def leave_group() -> None:
    """Leave torch.distributed together with all other ranks, where it is still on."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # rank 0 may hold the store that the others still read
        torch.distributed.destroy_process_group()


def _print_failure(error: BaseException) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or torch.distributed.is_initialized():
        text = "".join(traceback.format_exception(error))
    else:  # a mistake in the flags, which rank 0 tells in full
        text = "".join(traceback.format_exception_only(error))
    print(f"[rank {rank}] {text}", file=sys.stderr, end="")


def _end_process(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
