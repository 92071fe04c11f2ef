"""What the documents show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_mesh_cp.draw import describe
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.tile import TileShape

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tile", "direction", "exchange"),
    [((2, 2), "forward", "direct"), ((2, 2), "backward", "direct"), ((3, 2), "backward", "shift")],
)
def test_the_drawn_schedules_are_the_plans(tile, direction, exchange):
    """TE #2484: a user could not tell whether a dKV hop was a bug."""
    text = describe(make_plan(TileShape(*tile), Direction(direction), exchange), 0)
    assert text in (ROOT / "docs" / "schedule.md").read_text()


def test_no_placeholder_is_left_in_the_documents():
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        assert not re.findall(r"^[A-Z]+(?:_[A-Z]+)+$|TODO|FIXME", path.read_text(), re.MULTILINE), path


def readme_example(code: str) -> list[int]:
    """Run the README's example on this rank, which is one of four."""
    import torch

    scope: dict = {}
    exec(code, scope)
    assert torch.isfinite(scope["q"].grad).all()
    return list(scope["out"].shape)


def test_the_readmes_python_example_runs_on_four_ranks(ranks):
    """TE #1368: the documented example is executed in CI."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert ranks(4).run(readme_example, code) == [[256, 1, 8, 64]] * 4


def test_the_readmes_table_of_refusals_quotes_errors_that_exist():
    """MLM #2797, #4878: the list of what is not supported, each with the error text it gives."""
    import argparse
    import shlex

    from megatron.training.arguments import add_megatron_arguments
    from test_args import BASE, REFUSED

    from megatron_mesh_cp.megatron.args import add_args, resolve_args

    parser = add_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    dense_mask = BASE.replace("--no-create-attention-mask-in-dataloader", "")
    lines = [f"{BASE} {flags}" for flags, _ in REFUSED.values()] + [dense_mask, "--mesh-tile-shape 2x2"]
    errors = []
    for line in lines:
        with pytest.raises(ValueError) as caught:
            resolve_args(parser.parse_args(shlex.split(line)))
        errors.append(str(caught.value))
    table = (ROOT / "README.md").read_text().split("| refused |")[1].split("\n\n")[0]
    quotes = re.findall(r"\| `([^|]*)` \|$", table, re.MULTILINE)
    assert len(quotes) >= 18
    for quote in quotes:
        parts = [part.strip() for part in quote.split("...")]
        assert any(all(part in error for part in parts) for error in errors), quote


def test_the_readmes_second_table_of_refusals_quotes_texts_of_the_code():
    """Those need other packages, a checkout or a model: their texts are looked up here, their tests are elsewhere."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "megatron_mesh_cp").rglob("*.py")))
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)  # a text over several lines
    code = code.replace("{ALGO_FLAG}", "--context-parallel-algo")
    table = (ROOT / "README.md").read_text().split("| refused elsewhere |")[1].split("\n\n")[0]
    quotes = re.findall(r"\| `([^|]*)` \|$", table, re.MULTILINE)
    assert len(quotes) >= 9
    for quote in quotes:
        for part in quote.split("..."):
            assert part.strip() in code, quote
