"""Megatron's training loop with `--transformer-impl transformer_engine`: mesh for some layers, for all, for none."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import PretrainRun, run_pretrain

SCRIPT = Path(__file__).with_name("te_pretrain.py")
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --lr-decay-iters 20
    --train-iters 4 --log-interval 1 --eval-interval 20 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 257
    --mock-data --num-workers 0 --transformer-impl transformer_engine --distributed-backend gloo --no-rope-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader --seed 7 --bf16
    --context-parallel-size 2
"""
MESH = "--mesh-tile-shape 2x1 --mesh-kernel te --mesh-log-comm"


def train(flags: str, folder: Path) -> PretrainRun:
    if find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    return run_pretrain(
        shlex.split(f"{FLAGS} {flags}"), ranks=2, timeout=240, cwd=folder, launcher="torchrun", entry=(str(SCRIPT),)
    )


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> PretrainRun:
    """Transformer Engine's own ring in both layers."""
    return train("--cp-comm-type p2p", tmp_path_factory.mktemp("ring")).check()


def calls(run: PretrainRun) -> list[dict[str, int]]:
    """What the attention kernel was given, by rank: "fwd 32 x 16 NO_MASK" to a number of calls."""
    return [json.loads(text) for _, text in sorted(re.findall(r"\[calls\] (\d+) (.*)", run.stdout))]


def off_diagonal(run: PretrainRun, rank: int) -> tuple[int, int]:
    """Forward calls for half of Q, and for half of KV. Rank 0 of a ring computes the former, of tile 2x1 the latter."""
    found = calls(run)[rank]
    return found.get("fwd 16 x 32 NO_MASK", 0), found.get("fwd 32 x 16 NO_MASK", 0)


def assert_same_training(run: PretrainRun, reference: PretrainRun) -> None:
    assert len(reference.losses) == 4
    assert run.losses == pytest.approx(reference.losses, rel=1e-3)  # bf16; without attention's share it is 1e-2 off
    assert run.grad_norms == pytest.approx(reference.grad_norms, rel=2e-2)


def bytes_sent(run: PretrainRun) -> set[str]:
    return set(re.findall(r"bytes per rank and layer: (forward \d+ backward \d+)", run.stdout))


def test_mesh_in_one_layer_of_two_trains_as_transformer_engines_ring_does(ring, tmp_path):
    run = train(f"--cp-comm-type p2p mesh {MESH}", tmp_path).check()
    assert_same_training(run, ring)
    halves = [[off_diagonal(r, rank) for r in (ring, run)] for rank in (0, 1)]
    ring_0, ring_1 = halves[0][0], halves[1][0]
    assert sorted([ring_0, ring_1]) == [(0, 16), (16, 0)]  # 2 layers, 4 iterations, 2 microbatches
    assert [halves[0][1], halves[1][1]] == [(8, 8), (8, 8)]
    assert "kernel te, bfloat16; chosen: as given; in 1 of 2 layers" in run.stdout
    # Counted where they are handed to torch.distributed: Q + O and lse; Q, dO, lse, delta + dQ (2 x 32 x 4 x 16).
    assert bytes_sent(run) == {"forward 17408 backward 26624"}


def test_mesh_in_all_layers_trains_as_transformer_engines_ring_does(ring, tmp_path):
    run = train(f"--context-parallel-algo mesh {MESH}", tmp_path).check()
    assert_same_training(run, ring)
    assert [off_diagonal(run, rank) for rank in (0, 1)] == [off_diagonal(ring, rank) for rank in (1, 0)]
    assert "in 1 of 2 layers" not in run.stdout
    assert bytes_sent(run) == {"forward 17408 backward 26624"}
    assert "mesh-cp" not in ring.stdout
