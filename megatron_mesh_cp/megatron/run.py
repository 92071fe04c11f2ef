"""Run a stock script of an unpatched Megatron-LM checkout with `--context-parallel-algo mesh` among its flags.

    torchrun --nproc-per-node 4 -m megatron_mesh_cp.megatron.run PATH/pretrain_gpt.py \\
        --context-parallel-size 4 --context-parallel-algo mesh <the script's flags>

The checkout is the one that holds the script. Nothing in it is changed.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from .rank_life import leave_group, live
from .versions import check_megatron

USAGE = """usage: torchrun ... -m megatron_mesh_cp.megatron.run SCRIPT [FLAGS]

Runs SCRIPT, for example Megatron-LM/pretrain_gpt.py of an unpatched checkout, with its own FLAGS and those of mesh
context parallelism (--context-parallel-algo mesh, --mesh-...). `... run SCRIPT --help` lists them all."""


def main(argv: list[str] | None = None) -> None:
    """Run the script as `__main__`, with Megatron's argument parsing hooked.

    Args: argv: the script and its flags; None takes the process's own.

    Raises SystemExit with one clear message where there is no such script or checkout, or its release is not known.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        raise SystemExit(0 if argv else 2)
    if argv[0].startswith("-"):
        raise SystemExit(f"megatron_mesh_cp.megatron.run: the script comes before its flags, got {argv[0]}\n{USAGE}")
    script = _script(argv[0])
    use_checkout(script)
    sys.argv = [argv[0], *argv[1:]]

    from .stock import hook

    hook()
    runpy.run_path(str(script), run_name="__main__")
    leave_group()


def use_checkout(script: Path) -> Path:
    """Put the checkout that holds `script` first on sys.path, as `python script` would; returns its root.

    Raises SystemExit where there is none, its release is not supported, or another megatron hides it.
    """
    root = next((folder for folder in script.parents if (folder / "megatron/core/package_info.py").is_file()), None)
    if root is None:
        raise SystemExit(
            f"{script}: not in a Megatron-LM checkout (no megatron/core/package_info.py beside it or above); give the "
            "path of a script inside one, or use `-m megatron_mesh_cp.megatron.pretrain`, which needs no checkout"
        )
    if not (root / "megatron/training").is_dir():
        raise SystemExit(f"{root}: no megatron/training, this is not a whole Megatron-LM checkout")
    sys.path[:0] = dict.fromkeys((str(script.parent), str(root)))
    spec = find_spec("megatron")
    first = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if first != str(root / "megatron"):
        raise SystemExit(f"the megatron of {root} is hidden by {first or spec}; remove that one from the environment")
    try:
        check_megatron()
    except ValueError as error:
        raise SystemExit(f"{root}: {error}") from None
    return root


def _script(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        kind = "is a folder; give the script in it, for example" if path.is_dir() else "no such script; try"
        raise SystemExit(f"{text}: {kind} PATH/TO/Megatron-LM/pretrain_gpt.py")
    return path.resolve()


if __name__ == "__main__":
    live(main)
