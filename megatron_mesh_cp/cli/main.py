"""`mesh-cp`: one console script, one file a sub-command, each imported only when it is asked for."""

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

from megatron_mesh_cp.version import __version__

# Name and one line of help; the module cli/NAME.py has add_parser(subparsers) and run(args) -> int.
COMMANDS = {
    "quickstart": "train a small GPT on real text on this machine and compare mesh, ring and CP=1",
    "pretrain": "run a YAML recipe on the ranks of this machine",
    "submit": "check a recipe for several nodes and submit it as a SLURM job",
    "plan": "show the plan of a tile: bytes, time, memory, a picture, a trace",
    "tune": "rank all tiles on a cluster and choose one",
    "compare": "set mesh beside ring, Ulysses and the others: bytes, time, memory",
    "bench": "measure attention alone: bytes, seconds and error of several tiles",
    "doctor": "check this machine: torch, CUDA, Megatron, kernels, Apex, environment variables",
    "calibrate": "measure the links and the attention kernel of this machine, and write a cluster file",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ValueErrors, so that every user error leaves by the same door."""

    def error(self, message: str):
        raise ValueError(f"{message}; see `{self.prog} --help`")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of `mesh-cp`; only the options of `command` are filled in, the other commands stay names."""
    parser = Parser(prog="mesh-cp", description="Mesh-Attention context parallelism for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"mesh-cp {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        module = f"megatron_mesh_cp.cli.{name}"
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
        elif importlib.util.find_spec(module) is not None:
            subparsers.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a ValueError is one line on stderr and exit code 2, the project's error style."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # What comes before the command are options of mesh-cp itself, and none of those takes a value.
    command = next((word for word in argv if not word.startswith("-")), None)
    debug = "--debug" in argv[: argv.index(command)] if command else False
    try:
        parser = build_parser(command)
        args, rest = parser.parse_known_args(argv)
        module = importlib.import_module(f"megatron_mesh_cp.cli.{args.command}")
        if getattr(module, "TAKES_MORE_FLAGS", False):
            args.more = rest
        elif rest:
            raise ValueError(f"unrecognized arguments: {' '.join(rest)}; see `mesh-cp {args.command} --help`")
        return module.run(args)
    except ValueError as e:
        if debug:
            traceback.print_exc()
        print(f"mesh-cp: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mesh-cp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has gone; a flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
