"""Real text, Megatron's own training loop: mesh context parallelism trains as CP=1 with stock attention does."""

from __future__ import annotations

import re
import shlex

import pytest
from launch import PretrainRun, run_pretrain

from megatron_mesh_cp.megatron.text_data import build_text_dataset

ITERATIONS = 20
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --lr-decay-iters 20
    --train-iters {ITERATIONS} --log-interval 1 --eval-interval 20 --eval-iters 1 --tokenizer-type NullTokenizer
    --vocab-size 257 --split 80,10,10 --num-workers 0 --transformer-impl local --distributed-backend gloo
    --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-create-attention-mask-in-dataloader --clip-grad 0.5 --seed 7
"""
GQA = "--group-query-attention --num-query-groups 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("text") / "text"
    build_text_dataset(prefix, max_bytes=1_000_000, progress=False)
    return prefix


@pytest.fixture(scope="module")
def train(data, tmp_path_factory):
    """train(flags, ranks): a finished run on the text; the same run is not started twice."""
    known: dict[tuple[str, int, str], PretrainRun] = {}
    folder = tmp_path_factory.mktemp("runs")

    def run(flags: str = GQA, ranks: int = 1, *, check: bool = True, **env: str) -> PretrainRun:
        key = (" ".join(flags.split()), ranks, str(env))
        if key not in known:
            every = shlex.split(f"{FLAGS} --data-path {data} --data-cache-path {data.parent}/cache {flags}")
            known[key] = run_pretrain(every, ranks=ranks, timeout=280, cwd=folder, env=env)
        return known[key].check() if check else known[key]

    return run


def mesh(cp: int, tile: str, more: str = "") -> str:
    return f"--context-parallel-size {cp} --context-parallel-algo mesh --mesh-tile-shape {tile} {more}"


def assert_same_training(run: PretrainRun, reference: PretrainRun, tolerance: float = 1e-5) -> None:
    """Loss and gradient norm of every iteration, printed and in full, and the validation loss."""
    assert list(reference.exact) == list(range(1, ITERATIONS + 1))
    assert run.losses == pytest.approx(reference.losses, rel=tolerance)
    for iteration, (loss, norm) in run.exact.items():
        want_loss, want_norm = reference.exact[iteration]
        assert loss == pytest.approx(want_loss, rel=tolerance), iteration
        # The norm of one iteration: some updates on, the rounding of fp32 alone moves it by 2e-5 (the loss by 1e-7).
        assert norm == pytest.approx(want_norm, rel=3 * tolerance), iteration
    assert run.validation == pytest.approx(reference.validation, rel=tolerance)
    assert reference.validation
    assert run.losses[-1] < run.losses[0] - 0.3  # it learns, so gradients matter
    worst = [max(abs(a - b) / b for a, b in zip(x, y, strict=True)) for x, y in _pairs(run, reference)]
    print(f"largest relative differences: loss {worst[0]:.1e}, gradient norm {worst[1]:.1e}")


def _pairs(run, reference):
    return [[[entry[i] for entry in r.exact.values()] for r in (run, reference)] for i in (0, 1)]


TILES = {
    "CP2 1x2": (2, "1x2", ""),
    "CP2 2x1": (2, "2x1", ""),
    "CP4 1x4": (4, "1x4", ""),
    "CP4 2x2": (4, "2x2", ""),
    "CP4 4x1": (4, "4x1", ""),
    "CP4 auto shift": (4, "auto", "--mesh-exchange shift --mesh-kernel reference"),
    "CP4 2x2 backward 1x4": (4, "2x2", "--mesh-tile-shape-backward 1x4 --mesh-log-comm"),
    "CP4 2x2t backward 4x1": (4, "2x2t", "--mesh-tile-shape-backward 4x1"),
    "CP4 auto on a cluster": (4, "auto", "--mesh-tile-shape-backward auto --mesh-cluster cpu-gloo"),
}


@pytest.mark.parametrize(("cp", "tile", "more"), TILES.values(), ids=TILES)
def test_mesh_prints_the_losses_and_gradient_norms_of_cp_1_with_stock_attention(train, cp, tile, more):
    """MLM #673, #906 (loss times cp_size), transformers PR #48167 (eval loss times cp)."""
    run = train(f"{GQA} {mesh(cp, tile, more)}", cp)
    receipts = [line for line in run.stdout.splitlines() if line.startswith("[mesh-cp] Mesh-Attention is on")]
    assert len(receipts) == 1
    assert f"CP {cp}, tile " in receipts[0]
    if tile != "auto":
        assert f"tile {tile} " in receipts[0]
    reason = "least predicted time on cpu-gloo" if "--mesh-cluster" in more else "no cluster is known"
    assert reason in receipts[0] or tile != "auto"
    assert_same_training(run, train())


def test_log_comm_prints_and_writes_what_was_really_sent(train, tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    board = tmp_path / "board"
    flags = f"--mesh-tile-shape-backward 1x4 --mesh-log-comm --tensorboard-dir {board}"
    run = train(f"{GQA} {mesh(4, '2x2', flags)}", 4)
    lines = [line for line in run.stdout.splitlines() if line.startswith("[mesh-cp] comm iteration")]
    assert len(lines) == ITERATIONS
    # 16 local tokens, batch 2, 4 heads and 2 KV heads of 16, fp32: forward 2x2, backward 1x4
    q, kv, stat = 16 * 2 * 4 * 16 * 4, 16 * 2 * 2 * 32 * 4, 16 * 2 * 4 * 4
    for line in lines:
        assert f"bytes per rank and layer: forward {2 * q + stat + kv} backward {6 * kv}" in line
        # 2 layers, 2 microbatches; the validation at the end comes after the last line
        assert f"an iteration: {4 * (2 * q + stat + 7 * kv)} bytes, waited " in line
        assert re.search(r"link rate: row [0-9.e-]+ GB/s column [0-9.e-]+ GB/s$", line)
    written = event_accumulator.EventAccumulator(str(board)).Reload()
    for name in ("bytes-per-iteration", "exposed-wait-ms", "link-rate-row-GB-s", "link-rate-column-GB-s"):
        values = written.Scalars(f"mesh-cp/{name}")
        assert [value.step for value in values] == list(range(1, ITERATIONS + 1))
        assert all(value.value > 0 for value in values)


SIDE_BY_SIDE = {
    "data parallel 2 x CP 2": (4, GQA, GQA, 1),
    "tensor parallel 2 x CP 2": (4, f"{GQA} --tensor-model-parallel-size 2", None, 2),
    "pipeline 2 x CP 2": (4, f"{GQA} --pipeline-model-parallel-size 2", None, 2),
    "MoE, expert parallel 2 x CP 2": (
        2,
        f"{GQA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
        "--expert-model-parallel-size 2",
        None,
        2,  # data parallel 2: experts draw their first weights by expert-parallel rank
    ),
    "unequal token counts": (4, f"{GQA} --eod-mask-loss --calculate-per-token-loss", None, 1),
    "MHA, full recompute": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "",
        1,
    ),
    "selective recompute": (2, f"{GQA} --recompute-granularity selective", GQA, 1),
    "per-token loss": (2, f"{GQA} --calculate-per-token-loss", None, 1),
    "query-key layer scaling": (2, f"{GQA} --apply-query-key-layer-scaling --attention-softmax-in-fp32", None, 1),
}


@pytest.mark.parametrize(("ranks", "flags", "same_at_cp1", "ranks_cp1"), SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_mesh_trains_as_cp_1_beside_other_parallelism(train, ranks, flags, same_at_cp1, ranks_cp1):
    reference = train(flags if same_at_cp1 is None else same_at_cp1, ranks_cp1)
    assert_same_training(train(f"{flags} {mesh(2, '2x1')}", ranks), reference)


@pytest.mark.parametrize("token", [0, 24], ids=["first shard", "last shard"])
def test_a_loss_on_a_single_token_trains_as_at_cp_1(train, token):
    """MLM #7452, PR #7513: one valid token gave half the gradient at CP 2. With --calculate-per-token-loss it counts
    once; without, Megatron divides each shard's loss by the shard's own count, which mesh refuses for --eod-mask-loss.
    """
    flags = f"{GQA} --calculate-per-token-loss --clip-grad 0"
    run = train(f"{flags} {mesh(4, '2x2')}", 4, TEST_LOSS_ON_TOKEN=str(token))
    reference = train(flags, 1, TEST_LOSS_ON_TOKEN=str(token))
    for iteration, figures in run.exact.items():
        assert figures == pytest.approx(reference.exact[iteration], rel=1e-4), iteration
    assert run.exact[1] == pytest.approx(reference.exact[1], rel=1e-5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_killed_in_the_middle_of_training_ends_the_run(train, direction):
    run = train(f"{GQA} {mesh(4, '2x2')}", 4, check=False, TEST_KILL=f"3:2:{direction}")
    assert run.returncode != 0
    assert not run.timed_out
    assert len(run.exact) in (3, 4)
    assert re.search(r"CP rank \d: could not .*global rank \d.*in step \d+ of the (forward|backward)", run.stderr)


def test_the_core_attention_of_multi_token_prediction_is_swapped_too(train):
    """Megatron weighs the MTP loss of each shard by the shard's own token count, and the last token has no target:
    under any CP that loss differs from CP=1 by its third digit. So the main loss is compared with the MTP loss
    scaled down, and the MTP loss itself within what that leaves.
    """
    flags = f"{GQA} --mtp-num-layers 1 --mtp-loss-scaling-factor 1e-3"
    run, reference = train(f"{flags} {mesh(2, '2x1')}", 2), train(flags, 1)
    assert_same_training(run, reference)
    mtp = [[entry.values["mtp_1 loss"] for entry in r.iterations] for r in (run, reference)]
    assert mtp[0] == pytest.approx(mtp[1], rel=2e-3)
    assert mtp[0][-1] < mtp[0][0] - 0.3


@pytest.fixture(scope="module")
def half_way(train, tmp_path_factory):
    """A checkpoint of CP=4, tile 2x2, after 10 of 20 iterations."""
    folder = tmp_path_factory.mktemp("checkpoint") / "half"
    first = train(f"{GQA} {mesh(4, '2x2')} --exit-interval 10 --save {folder} --save-interval 10", 4)
    assert len(first.iterations) == 10
    return folder


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, ""),
        (2, mesh(2, "2x1")),
        (4, mesh(4, "1x4")),
        # The padded vocabulary must stay 384: of more rows Megatron makes new ones at random, and the loss is another.
        (4, mesh(2, "1x2", "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 192")),
    ],
    ids=["CP1 stock", "CP2 2x1", "CP4 1x4", "TP2 x CP2"],
)
def test_a_checkpoint_of_cp_4_resumes_at_other_sizes_with_the_losses_of_the_uninterrupted_run(
    train, half_way, ranks, how
):
    """MLM #3132: the module adds no keys to a checkpoint and needs no groups of its own to load one."""
    rest = train(f"{GQA} {how} --load {half_way}", ranks)
    assert list(rest.exact) == list(range(11, ITERATIONS + 1))
    for iteration, (loss, norm) in rest.exact.items():
        want_loss, want_norm = train().exact[iteration]
        assert loss == pytest.approx(want_loss, rel=1e-5), iteration
        assert norm == pytest.approx(want_norm, rel=3e-5), iteration
