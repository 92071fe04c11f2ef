"""YAML recipes in Megatron's own form: `ENV_VARS:` and `MODEL_ARGS:`, whose keys are command-line flags.

    ENV_VARS:
      CUDA_DEVICE_MAX_CONNECTIONS: 1
    RANKS: 4                            # ours, optional: the number of ranks the recipe is written for
    RANKS_PER_NODE: 8                   # ours, optional: how many of them share a node
    ROW_IN_NODE: true                   # ours, optional: the tile's group on consecutive ranks stays inside a node
    MODEL_ARGS:
      --seq-length: 131072              # --seq-length 131072
      --bf16: true                      # --bf16
      --sequence-parallel: false        # left out
      --data-path: [0.5, a, 0.5, b]     # --data-path 0.5 a 0.5 b
      --save: ${RUN_DIR}/checkpoint     # filled from ENV_VARS and the environment; ${VAR:-default} too

Values reach Megatron as they are written: `1e-4`, `010` and `2x2` stay text, whatever YAML would make of
them. This file needs neither torch nor Megatron; a parser that knows the flags is handed in by the caller.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

TOP_LEVEL_KEYS = ("ENV_VARS", "MODEL_ARGS", "RANKS", "RANKS_PER_NODE", "ROW_IN_NODE")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^${}]*))?\}")
_YAML_TAG = "tag:yaml.org,2002:"


class RecipeError(ValueError):
    """A recipe that cannot be used as it is written; the text names the file, the line and the key."""


@dataclass(frozen=True)
class Recipe:
    """One recipe, ready for a command line.

    `flags` holds the arguments in the order of the file; `ranks` and `ranks_per_node` are None where the recipe does
    not say. `row_in_node` is a claim that the launcher checks: the consecutive group of the tile, times the
    tensor-parallel size, lies inside a node.
    """

    path: Path
    env: dict[str, str]
    flags: tuple[str, ...]
    ranks: int | None
    ranks_per_node: int | None = None
    row_in_node: bool = False


def load_recipe(
    path: str | os.PathLike,
    parser: argparse.ArgumentParser | None = None,
    environ: Mapping[str, str] | None = None,
) -> Recipe:
    """Read a recipe and check it.

    Args:
        path: the YAML file.
        parser: knows every flag; with it an unknown flag, a value for a bare flag and a bare flag for a value
            are errors. Without it only the form of the file is checked.
        environ: where `${VAR}` is looked up, after ENV_VARS; `os.environ` by default.

    Raises:
        RecipeError: names the file, the line, the key and, for a misspelling, the nearest known one.
    """
    path = Path(path)
    environ = os.environ if environ is None else environ
    top = _mapping(path, _compose(path), "a recipe")
    for key, (at, _) in top.items():
        if key not in TOP_LEVEL_KEYS:
            hint = nearest(key, TOP_LEVEL_KEYS)
            if key.startswith("-"):
                hint = "; flags belong under MODEL_ARGS:"
            allowed = ", ".join(TOP_LEVEL_KEYS)
            raise _error(path, at, f"unknown top-level key {key!r}, allowed are {allowed}{hint}")
    if "MODEL_ARGS" not in top:
        raise RecipeError(f"{path}: no MODEL_ARGS: in this file; put the flags there, as `--seq-length: 4096`")

    env = {}
    for key, (_, node) in _mapping(path, _value(top, "ENV_VARS"), "ENV_VARS").items():
        if _is_null(node):
            raise _error(path, node, f"ENV_VARS {key} has no value; give one, or quote it to mean the empty text")
        env[key] = _text(path, key, node, environ)

    flags = []
    known = {**environ, **env}
    for key, (at, node) in _mapping(path, _value(top, "MODEL_ARGS"), "MODEL_ARGS").items():
        action = _known_flag(path, key, at, parser)
        flags += _arguments(path, key, node, known, action)

    ranks, per_node = (_count(path, key, _value(top, key)) for key in ("RANKS", "RANKS_PER_NODE"))
    row_in_node = _row_in_node(path, _value(top, "ROW_IN_NODE"), per_node)
    if ranks is not None and per_node is not None:
        check_nodes(ranks, per_node, f"{path}: RANKS: {ranks}", "; change one of the two")
    return Recipe(path, env, tuple(flags), ranks, per_node, row_in_node)


def check_nodes(ranks: int, per_node: int, said: str, way_out: str) -> None:
    """Raise RecipeError where `ranks` need more than one node and do not fill the last; said: where they are from."""
    if ranks > per_node and ranks % per_node:
        whole = ranks // per_node
        raise RecipeError(
            f"{said} with RANKS_PER_NODE: {per_node} leaves a node partly empty: {whole} nodes hold "
            f"{whole * per_node} ranks, {whole + 1} hold {(whole + 1) * per_node}{way_out}"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name closest to `name`, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _compose(path: Path) -> yaml.Node:
    # Nodes, not Python objects: they carry line numbers and the text as written, and show a key given twice.
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as e:
        raise RecipeError(f"cannot read the recipe {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file in UTF-8") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not valid YAML: {getattr(e, 'problem', None) or e}") from None
    if node is None:
        raise RecipeError(f"{path}: the file is empty; a recipe has MODEL_ARGS: with flags below it")
    return node


def _error(path: Path, node: yaml.Node, message: str) -> RecipeError:
    return RecipeError(f"{path}:{node.start_mark.line + 1}: {message}")


def _is_null(node: yaml.Node) -> bool:
    return node.tag == _YAML_TAG + "null"


def _mapping(path: Path, node: yaml.Node | None, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Key to (key node, value node) in the order of the file; empty where the mapping is absent or empty."""
    if node is None or (_is_null(node) and what != "a recipe"):
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise _error(path, node, f"{what} must be a mapping of `key: value` lines")
    entries = {}
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _error(path, key_node, f"a key of {what} must be plain text")
        key = key_node.value
        if key in entries:
            first = entries[key][0].start_mark.line + 1
            raise _error(path, key_node, f"{key} is given twice, first on line {first}; keep one of them")
        entries[key] = (key_node, value)
    return entries


def _value(top: dict[str, tuple[yaml.Node, yaml.Node]], key: str) -> yaml.Node | None:
    return top[key][1] if key in top else None


def _known_flag(
    path: Path, key: str, node: yaml.Node, parser: argparse.ArgumentParser | None
) -> argparse.Action | None:
    options = {} if parser is None else parser._option_string_actions
    if not key.startswith("--"):
        right = "--" + key.lstrip("-").replace("_", "-")
        if options and right not in options:
            right = next(iter(difflib.get_close_matches(right, options, n=1)), right)
        raise _error(path, node, f"{key} is not a flag: write it with its dashes, {right}:")
    if parser is None:
        return None
    if key not in options:
        hint = nearest(key, options) or "; see `mesh-cp pretrain --megatron-help` for all flags"
        raise _error(path, node, f"unknown flag {key}{hint}")
    return options[key]


def _arguments(
    path: Path, key: str, node: yaml.Node, environ: Mapping[str, str], action: argparse.Action | None
) -> list[str]:
    if _is_null(node):
        raise _error(path, node, f"{key} has no value; give one, or `true` for a bare flag, or remove the line")
    if isinstance(node, yaml.SequenceNode):
        if action is not None and action.nargs in (None, 0):
            raise _error(path, node, f"{key} takes {_takes(action)}, not a list")
        if not node.value:
            raise _error(path, node, f"{key} has an empty list; give its values or remove the line")
        return [key, *(_text(path, key, item, environ) for item in node.value)]

    truth = _truth(path, key, node)
    if truth is None:
        value = _text(path, key, node, environ)
        if action is not None and action.nargs == 0:
            raise _error(path, node, f"{key} takes no value, got {value!r}; write true or false")
        # argparse takes a value such as -x for a flag unless it is tied to its own
        return [f"{key}={value}"] if value.startswith("-") else [key, value]

    if action is not None and action.nargs not in (0, "*", "?"):
        raise _error(path, node, f"{key} takes {_takes(action)}, got {node.value}")
    if truth:
        return [key]
    # Left out means the default, and for these flags the default is on.
    if isinstance(action, argparse.BooleanOptionalAction) and action.default and not key.startswith("--no-"):
        off = "--no-" + key[2:]
        raise _error(path, node, f"{key} is on unless turned off, and `false` only leaves it out; write {off}: true")
    return []


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "no value (write true or false)"
    if action.nargs is None:
        return "one value"
    return f"{action.nargs} values (write a list)" if isinstance(action.nargs, int) else "one or more values"


def _truth(path: Path, key: str, node: yaml.Node) -> bool | None:
    """True or False for a YAML boolean, None for anything else."""
    if node.tag != _YAML_TAG + "bool":
        return None
    if node.value.lower() not in ("true", "false"):
        raise _error(path, node, f"{key}: {node.value} is ambiguous; write true, false, or quote it to mean the word")
    return node.value.lower() == "true"


def _text(path: Path, key: str, node: yaml.Node, environ: Mapping[str, str]) -> str:
    """The text of one value, with every `${VAR}` filled."""
    if not isinstance(node, yaml.ScalarNode) or not node.tag.startswith(_YAML_TAG):
        raise _error(path, node, f"{key} must be plain text, a number, true, false or a list of those")
    if _is_null(node):
        raise _error(path, node, f"{key} has a list with an empty entry; give its value or remove it")

    def fill(match: re.Match) -> str:
        name, default = match["name"], match["default"]
        value = environ.get(name) if default is None else (environ.get(name) or default)
        if value is None:
            raise _error(path, node, f"{key} needs ${{{name}}}, which is not set; `export {name}=...` first")
        return value

    filled = _VARIABLE.sub(fill, node.value)
    if "${" in _VARIABLE.sub("", node.value):
        raise _error(path, node, f"{key} has a ${{...}} that cannot be read: {node.value!r}; write ${{NAME}}")
    return filled


def _count(path: Path, key: str, node: yaml.Node | None) -> int | None:
    if node is None:
        return None
    if not isinstance(node, yaml.ScalarNode) or not re.fullmatch(r"[1-9][0-9]*", node.value):
        raise _error(path, node, f"{key} must be a whole number from 1 up, got {getattr(node, 'value', node)!r}")
    return int(node.value)


def _row_in_node(path: Path, node: yaml.Node | None, per_node: int | None) -> bool:
    if node is None:
        return False
    claimed = _truth(path, "ROW_IN_NODE", node) if isinstance(node, yaml.ScalarNode) else None
    if claimed is None:
        raise _error(path, node, f"ROW_IN_NODE must be true or false, got {getattr(node, 'value', node)!r}")
    if claimed and per_node is None:
        raise _error(path, node, "ROW_IN_NODE: true without RANKS_PER_NODE: how large a node is must be known; add it")
    return claimed
