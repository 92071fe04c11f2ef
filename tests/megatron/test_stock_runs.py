"""A stock script with mesh context parallelism, through the runner and through the patch, on real gloo ranks.

The script is a stand-in of the project's own; real releases are checked by scripts/stock_check.py.
"""

from __future__ import annotations

import shlex

import pytest
from launch import run_pretrain
from standin_checkout import apply_patches, make_checkout, make_patches

RUNNER = ("-m", "megatron_mesh_cp.megatron.run")
FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --lr-decay-iters 3 --train-iters 3 --log-interval 1
    --eval-interval 3 --eval-iters 1 --mock-data --vocab-size 257 --split 80,10,10 --num-workers 0
    --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader --clip-grad 0.5 --seed 7
    --context-parallel-size 2 --context-parallel-algo mesh --mesh-tile-shape 2x1
""")
TOKENIZER = ["--tokenizer-type", "NullTokenizer"]  # the stand-in has it as a default


@pytest.fixture
def checkout(tmp_path):
    return make_checkout(tmp_path / "Megatron-LM")


def figures(run) -> list[tuple[float, float]]:
    run.check()
    assert run.stdout.count("[mesh-cp] Mesh-Attention is on: CP 2, tile 2x1") == 1
    assert len(run.iterations) == 3
    return [(entry.lm_loss, entry.grad_norm) for entry in run.iterations]


def test_runner_and_patched_script_train_as_the_projects_own_entry(checkout, tmp_path):
    script = str(checkout / "pretrain_gpt.py")
    start = {"ranks": 2, "timeout": 150, "cwd": tmp_path, "launcher": "torchrun"}
    through_runner = run_pretrain(FLAGS, entry=(*RUNNER, script), **start)
    want = figures(run_pretrain(FLAGS + TOKENIZER, ranks=2, timeout=150, cwd=tmp_path))
    assert figures(through_runner) == want
    assert f"[standin] argv {script} False" in through_runner.stdout  # no group is made before the script makes it

    assert apply_patches(checkout, "--patches", make_patches(tmp_path / "patches")).returncode == 0
    assert figures(run_pretrain(FLAGS, entry=(script,), **start)) == want


def test_rejects_a_model_whose_layer_spec_bypasses_mesh(checkout, tmp_path):
    entry = (*RUNNER, str(checkout / "pretrain_gpt.py"))
    run = run_pretrain(
        [*FLAGS, "--own-layer-spec"], entry=entry, ranks=2, timeout=150, cwd=tmp_path, launcher="torchrun"
    )
    assert run.returncode not in (0, None)
    assert not run.timed_out
    assert "1 attention layers of the model were built without it" in run.stderr
    assert "(OwnAttention)" in run.stderr
    assert not run.iterations


def test_a_failing_rank_of_a_patched_script_ends_the_run_at_once(checkout, tmp_path):
    assert apply_patches(checkout, "--patches", make_patches(tmp_path / "patches")).returncode == 0
    entry, env = (str(checkout / "pretrain_gpt.py"),), {"TEST_FAIL_ON_RANK": "1"}
    run = run_pretrain(FLAGS, entry=entry, ranks=2, timeout=150, cwd=tmp_path, env=env, launcher="torchrun")
    assert run.returncode not in (0, None)
    assert not run.timed_out
    assert "[rank 1] RuntimeError: this rank fails while the others wait for it" in run.stderr
