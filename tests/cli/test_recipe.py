"""Recipes: what a YAML file becomes on the command line, and what is refused."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mesh_cp.megatron.recipe import Recipe, RecipeError, load_recipe

CHECKOUT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def small_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--reuse", action=argparse.BooleanOptionalAction, default=True)
    return parser


def test_flags_come_out_in_the_order_and_spelling_of_the_file(tmp_path):
    path = write(
        tmp_path,
        """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1, DEBUG: true}
RANKS: 4
MODEL_ARGS:
  --seq-length: 131072
  --bf16: true
  --sequence-parallel: false
  --lr: 1e-4
  --mesh-tile-shape: 2x2
  --seed: 010
  --loss-scale: -1
  --words: "true"
  --data-path: [0.5, a, 0.5, b]
""",
    )
    assert load_recipe(path, environ={}) == Recipe(
        path=path,
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "DEBUG": "true"},
        flags=(
            *(
                "--seq-length",
                "131072",
                "--bf16",
                "--lr",
                "1e-4",
                "--mesh-tile-shape",
                "2x2",
                "--seed",
                "010",
            ),
            *("--loss-scale=-1", "--words", "true", "--data-path", "0.5", "a", "0.5", "b"),
        ),
        ranks=4,
    )


def test_variables_are_filled_from_the_environment_and_from_env_vars(tmp_path):
    path = write(
        tmp_path,
        """
ENV_VARS: {RUN: '${HERE}/run'}
MODEL_ARGS:
  --save: ${RUN}/checkpoint
  --data-path: ['${HERE}/a', '${OTHER:-none}']
  --name: $RUN
""",
    )
    recipe = load_recipe(path, environ={"HERE": "/x"})
    assert recipe.env == {"RUN": "/x/run"}
    assert recipe.flags == ("--save", "/x/run/checkpoint", "--data-path", "/x/a", "none", "--name", "$RUN")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("MODEL_ARG:\n  --bf16: true", ["recipe.yaml:1", "'MODEL_ARG'", "did you mean MODEL_ARGS?"]),
        ("--bf16: true", ["'--bf16'", "belong under MODEL_ARGS"]),
        ("RANKS: 4", ["no MODEL_ARGS"]),
        ("MODEL_ARGS:\n  --bf-16: true", ["recipe.yaml:2", "unknown flag --bf-16", "did you mean --bf16?"]),
        ("MODEL_ARGS:\n  seq_length: 4", ["seq_length is not a flag", "--seq-length:"]),
        ("MODEL_ARGS:\n  -seq-lenth: 4", ["-seq-lenth is not a flag", "--seq-length:"]),
        ("MODEL_ARGS:\n  --bf16: true\n  --bf16: false", ["recipe.yaml:3", "given twice", "line 2"]),
        ("RANKS: 2\nMODEL_ARGS:\nRANKS: 4", ["recipe.yaml:3", "RANKS is given twice"]),
        ("MODEL_ARGS:\n  --seq-length:", ["--seq-length has no value"]),
        ("MODEL_ARGS:\n  --seq-length: ~", ["--seq-length has no value"]),
        ("MODEL_ARGS:\n  --seq-length: true", ["--seq-length takes one value", "got true"]),
        ("MODEL_ARGS:\n  --seq-length: [1, 2]", ["--seq-length takes one value, not a list"]),
        ("MODEL_ARGS:\n  --bf16: 1", ["--bf16 takes no value, got '1'", "true or false"]),
        ("MODEL_ARGS:\n  --bf16: yes", ["--bf16: yes is ambiguous"]),
        ("MODEL_ARGS:\n  --reuse: false", ["--reuse is on unless turned off", "--no-reuse: true"]),
        ("MODEL_ARGS:\n  --data-path: []", ["--data-path has an empty list"]),
        ("MODEL_ARGS:\n  --data-path: [a, ]\n  --seq-length: {a: 1}", ["--seq-length must be plain text"]),
        ("MODEL_ARGS:\n  --data-path: ['${NOWHERE}/x']", ["--data-path needs ${NOWHERE}", "export NOWHERE="]),
        ("ENV_VARS:\n  A: ${NOWHERE}\nMODEL_ARGS: {}", ["A needs ${NOWHERE}"]),
        ("MODEL_ARGS:\n  --data-path: ['${A-b}']", ["--data-path has a ${...} that cannot be read"]),
        ("RANKS: four\nMODEL_ARGS: {}", ["RANKS must be a whole number", "'four'"]),
        ("RANKS: 0\nMODEL_ARGS: {}", ["RANKS must be a whole number", "'0'"]),
        ("MODEL_ARGS: [--bf16]", ["MODEL_ARGS must be a mapping"]),
        ("MODEL_ARGS:\n  --a: [", ["not valid YAML"]),
        ("", ["is empty"]),
    ],
)
def test_rejects_what_it_cannot_mean(tmp_path, text, says):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, text), small_parser(), environ={})
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_names_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*none\.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_reading_a_recipe_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_mesh_cp.megatron.recipe import load_recipe; "
        "load_recipe(sys.argv[1], environ={'MESH_CP_DATA': 'x'}); "
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, CHECKOUT / "configs" / "quickstart.yaml"], check=True, timeout=60)
