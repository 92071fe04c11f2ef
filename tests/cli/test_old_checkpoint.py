"""The checkpoint of --load against the flags, before a rank starts; and that nothing in it changes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_mesh_cp.megatron.old_checkpoint import check_old_checkpoint

SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 4,
}


def checkpoint(folder: Path, kind: str) -> Path:
    """A checkpoint of iteration 7 as far as the check looks."""
    step = folder / "iter_0000007"
    path = {"torch_dist": step / "common.pt", "torch": step / "mp_rank_00" / "model_optim_rng.pt"}[kind]
    path.parent.mkdir(parents=True)
    torch.save({"args": Namespace(**SIZES), "iteration": 7}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def flags(load: Path, **changed: int) -> Namespace:
    return Namespace(load=str(load), **{**SIZES, **changed})


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_the_same_sizes_and_other_context_parallel_ones_are_fine(tmp_path, kind):
    folder = checkpoint(tmp_path, kind)
    check_old_checkpoint(flags(folder))
    check_old_checkpoint(flags(folder, context_parallel_size=1))


def test_torch_dist_resumes_at_other_parallel_sizes(tmp_path):
    folder = checkpoint(tmp_path, "torch_dist")
    check_old_checkpoint(flags(folder, tensor_model_parallel_size=1, pipeline_model_parallel_size=4))


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_the_format_torch_does_not_and_says_what_differs(tmp_path, name):
    folder = checkpoint(tmp_path, "torch")
    with pytest.raises(ValueError) as error:
        check_old_checkpoint(flags(folder, **{name: 8}))
    flag, old = "--" + name.replace("_", "-"), SIZES[name]
    assert f"(iter_0000007) was saved with {flag} {old}, got {flag} 8" in str(error.value)
    assert f"give {old}" in str(error.value)


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads"])
def test_another_model_is_refused(tmp_path, kind, name):
    folder = checkpoint(tmp_path, kind)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="that is another model"):
        check_old_checkpoint(flags(folder, **{name: 128}))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_tracker_that_names_a_folder_that_is_gone_says_so(tmp_path):
    folder = checkpoint(tmp_path, "torch_dist")
    (folder / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(ValueError, match="iter_0000008, which is not there"):
        check_old_checkpoint(flags(folder))


def test_no_checkpoint_and_an_unreadable_one_are_left_to_megatron(tmp_path):
    check_old_checkpoint(flags(tmp_path / "absent"))
    check_old_checkpoint(Namespace(load=None, **SIZES))
    folder = checkpoint(tmp_path, "torch_dist")
    (folder / "iter_0000007" / "common.pt").write_bytes(b"something else")
    check_old_checkpoint(flags(folder, num_layers=5))
