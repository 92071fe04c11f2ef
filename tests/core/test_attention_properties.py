"""What else must hold on real ranks: bits, bytes, memory, precision, groups, recompute, and clear refusals."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from mesh_cases import NAMES, Case, dense, errors, inputs, local_part, mesh_groups, run_mesh
from rank_pool import RankPool

from megatron_mesh_cp import MeshGroups, TileShape, mesh_attention
from megatron_mesh_cp.comm import CommError
from megatron_mesh_cp.cost import Costs, mesh_bytes
from megatron_mesh_cp.groups import verified_plan
from megatron_mesh_cp.layout import chunk_positions
from megatron_mesh_cp.plan import EXCHANGES, Channel, Direction, Payload, live_bytes, sent_messages
from megatron_mesh_cp.tile import all_tiles

TILES_4 = ("1x4", "2x2", "4x1")


def twice(case: Case) -> bool:
    groups = mesh_groups(case.tile)
    one, two = run_mesh(case, groups), run_mesh(case, groups)
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [4, 6, 8])
def test_two_runs_are_bit_equal(ranks, n, exchange):
    """MLM #2369, AReaL PR #1544: nondeterminism under CP."""
    for tile in all_tiles(n):
        case = Case(s=14 * n, tile=str(tile), exchange=exchange, kv_heads=2, dtype=torch.bfloat16)
        assert all(ranks(n).run(twice, case))


def counted(case: Case) -> tuple[dict, dict]:
    groups = mesh_groups(case.tile, case.tile_backward)
    run_mesh(case, groups)
    return groups.counters.sent, groups.counters.received


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.compat), 6, 8])
def test_bytes_handed_to_torch_distributed_are_the_formulas(ranks, n, exchange):
    """Row statistics included, forward and backward, on every rank."""
    for tile in all_tiles(n):
        for dtype in (torch.float64, torch.bfloat16):
            case = Case(s=6 * n, b=2, tile=str(tile), exchange=exchange, heads=8, kv_heads=2, d=16, dtype=dtype)
            case = replace(case, dv=16 if dtype == torch.float64 else 8)
            want = {
                (d.value, c.value): size
                for d in Direction
                for c, size in mesh_bytes(tile, d, case.shape(n)).items()
                if size
            }
            for sent, received in ranks(n).run(counted, case):
                assert sent == want
                assert received == want


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [8, 16])
def test_bytes_handed_to_torch_distributed_are_the_plans(ranks, n, exchange):
    """Every tile in both placements: what a rank sends is what its part of the plan lists, message by message."""
    tiles = [*all_tiles(n), *(TileShape(t.a, t.b, transposed=True) for t in all_tiles(n))]
    for tile in tiles:
        case = Case(s=2 * n, tile=str(tile), exchange=exchange, heads=4, kv_heads=2)
        shape = case.shape(n)
        for rank, (sent, _) in enumerate(ranks(n).run(counted, case)):
            want: dict[tuple[str, str], int] = {}
            for d in Direction:
                for payload, count in sent_messages(verified_plan(tile, d, exchange), rank).items():
                    key = d.value, payload.channel.value
                    want[key] = want.get(key, 0) + count * shape.message_bytes(payload)
            assert sent == want, tile


def watched(case: Case, costs: dict[Direction, Costs] | None = None) -> list[tuple[str, int, int, int]]:
    """(direction, event, bytes held, bytes planned) for each event of a forward and a backward."""
    groups = MeshGroups.build(dist.group.WORLD, TileShape.parse(case.tile), costs=costs)
    shape = case.shape(groups.size)
    message = {p: shape.message_bytes(p) for p in Payload}
    partial = {p: shape.partial_bytes(p) for p in Payload}
    planned = {
        d: live_bytes(
            verified_plan(groups.tile_of(d), d, case.exchange, (costs or {}).get(d)), groups.rank, message, partial
        )
        for d in Direction
    }
    seen = []
    groups.watcher = lambda d, number, held: seen.append((d.value, number, held, planned[d][number]))
    run_mesh(case, groups)
    return seen


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("block", [None, 0.05, 5.0], ids=["nominal", "transfers dominate", "blocks dominate"])
def test_live_buffers_stay_within_the_plans_bound_at_each_event(ranks, n, exchange, block):
    """TE #952, PR #3411: every received KV chunk was kept alive."""
    costs = block and {
        Direction.FORWARD: Costs(1, 0.5, 1, 0, block, 1),
        Direction.BACKWARD: Costs(2, 0.5, 1, 0.5, block, 2),
    }
    for tile in all_tiles(n):
        case = Case(s=8 * n, tile=str(tile), exchange=exchange, dtype=torch.bfloat16, qkv_format="sbhd")
        for seen in ranks(n).run(watched, case, costs):
            assert len(seen) > 2 * (tile.size - 1)
            assert all(held <= planned for _, _, held, planned in seen), seen
            peak = max(held for _, _, held, _ in seen)
            assert peak >= 0.7 * max(planned for _, _, _, planned in seen)  # and the bound is not idle


def half_results(case: Case) -> list[torch.Tensor]:
    return [x.double() for x in run_mesh(case, mesh_groups(case.tile))]


def single_process(case: Case) -> tuple[torch.Tensor, ...]:
    """One aten call in the case's dtype over the whole sequence: out, dq, dk, dv [s, b, h, d]."""
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in inputs(case))
    scale = case.d**-0.5
    op = torch.ops.aten
    out, lse = op._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal, scale=scale)
    grads = op._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, case.causal, scale=scale
    )
    return tuple(x.permute(2, 0, 1, 3).double() for x in (out, *grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.compat), 6, 8])
def test_half_precision_is_within_1_5_of_one_single_process_call(ranks, n, dtype):
    for causal, kernel in ((True, "sdpa"), (False, "sdpa"), (True, "reference")):
        whole = Case(s=64 * n, heads=4, kv_heads=2, d=32, dv=32, dtype=dtype, causal=causal, kernel=kernel)
        exact = dict(zip(NAMES, dense(whole), strict=True))
        single = dict(zip(("out", "dq", "dk", "dv"), single_process(whole), strict=True))
        for tile in all_tiles(n):
            for exchange in EXCHANGES:
                parts = ranks(n).run(half_results, replace(whole, tile=str(tile), exchange=exchange))
                for name in single:
                    got = torch.empty_like(exact[name])
                    for rank, part in enumerate(parts):
                        got[chunk_positions(rank, n, whole.s)] = part[NAMES.index(name)]
                    error, bar = (got - exact[name]).norm(), (single[name] - exact[name]).norm()
                    print(f"{dtype} n={n} {tile} {exchange} causal={causal} {name}: {error / bar:.2f} of one call")
                    assert error <= 1.5 * bar, (tile, exchange, causal, name, (error / bar).item())


def grad_dtypes(case: Case) -> list[torch.dtype]:
    return [x.dtype for x in run_mesh(case, mesh_groups(case.tile))]


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_inputs_dtype_and_lse_is_fp32(ranks, dtype):
    """RFA ring_flash_attn.py: dq cast to bf16 whatever the input."""
    lse = torch.float64 if dtype == torch.float64 else torch.float32
    for got in ranks(4).run(grad_dtypes, Case(s=16, tile="2x2", dtype=dtype)):
        assert got == [dtype, lse, dtype, dtype, dtype]


def own_chunk_without_dout(case: Case) -> dict[str, float]:
    """diffusers #14265: dO is 0 on the own chunk, so own dK, dV come from other ranks' rows alone."""
    groups = mesh_groups(case.tile)
    found = {}
    for silent in range(groups.size):
        dout = inputs(case)[3]
        dout[chunk_positions(silent, groups.size, case.s)] = 0
        got = run_mesh(case, groups, dout)
        want = local_part(dense(case, dout), case, groups)
        if groups.rank == silent and (not got[3].any() or not got[4].any()):
            found[f"rank {silent}: no dK or dV"] = 1.0
        found[f"silent {silent}"] = max((g - w).abs().max().item() for g, w in zip(got, want, strict=True))
    return found


@pytest.mark.parametrize("tile", TILES_4)
def test_gradients_of_keys_come_from_other_ranks_rows(ranks, tile):
    for found in ranks(4).run(own_chunk_without_dout, Case(s=64, tile=tile, causal=False)):
        assert max(found.values()) < 1e-10, found


def one_token_counts(case: Case) -> float:
    groups = mesh_groups(case.tile)
    worst = 0.0
    for token in (0, case.s // 2, case.s - 1):
        dout = torch.zeros_like(inputs(case)[3])
        dout[token] = inputs(case)[3][token]
        got, want = run_mesh(case, groups, dout), local_part(dense(case, dout), case, groups)
        worst = max(worst, *((g - w).abs().max().item() for g, w in zip(got, want, strict=True)))
    return worst


@pytest.mark.parametrize("tile", TILES_4)
def test_a_loss_on_one_token_gives_the_gradients_of_dense(ranks, tile):
    """MLM #7452: one valid token, in the first or in the last shard, gave half the gradient."""
    assert max(ranks(4).run(one_token_counts, Case(s=64, tile=tile))) < 1e-10


def gradcheck(case: Case) -> bool:
    """The op of one rank against finite differences; n = 1, so that the others need not join each evaluation."""
    groups = mesh_groups("1x1", members=(dist.get_rank(),)) if dist.get_world_size() == 1 else mesh_groups(case.tile)
    q, k, v, _ = (x.requires_grad_() for x in inputs(case))
    return torch.autograd.gradcheck(lambda q, k, v: mesh_attention(q, k, v, groups), (q, k, v))


def test_gradcheck_and_one_gradient_per_input(ranks):
    """long-context-attention #149: backward returned one gradient too few."""
    assert ranks(1).run(gradcheck, Case(s=6, heads=2, kv_heads=1, d=4, dv=4)) == [True]


def padded(case: Case, valid: int) -> float:
    """TE #3331: 698 tokens padded to 704; the valid rows under a causal mask must equal dense on 698."""
    groups = mesh_groups(case.tile)
    out = run_mesh(case, groups)[0]
    positions = chunk_positions(groups.rank, groups.size, case.s)
    q, k, v, _ = (x[:valid].double() for x in inputs(case))
    live = torch.ones(valid, valid, dtype=torch.bool).tril()
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * case.d**-0.5
    want = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(~live, float("-inf")).softmax(-1), v)
    keep = [i for i, p in enumerate(positions) if p < valid]
    return (out[keep] - want[[positions[i] for i in keep]]).abs().max().item()


@pytest.mark.parametrize("tile", TILES_4)
def test_698_tokens_padded_to_704_equal_dense_on_698(ranks, tile):
    assert max(ranks(4).run(padded, Case(s=704, tile=tile), 698)) < 1e-10


def canary(case: Case) -> bool:
    """MB PR #2665: communication silently off. A change of token 0 must reach the last token."""
    groups = mesh_groups(case.tile)
    before = run_mesh(case, groups)[0]
    positions = chunk_positions(groups.rank, groups.size, case.s)
    q, k, v, _ = (x[positions] for x in inputs(case))
    if 0 in positions:
        v[positions.index(0)] += 1
    after = mesh_attention(q, k, v, groups)
    return bool((after[-1] != before[-1]).any())


@pytest.mark.parametrize("tile", TILES_4)
def test_a_change_of_token_0_reaches_the_last_rows_of_every_rank(ranks, tile):
    assert all(ranks(4).run(canary, Case(s=64, tile=tile)))


def no_grad_equals_grad(case: Case) -> bool:
    groups = mesh_groups(case.tile)
    positions = chunk_positions(groups.rank, groups.size, case.s)
    q, k, v, _ = (x[positions] for x in inputs(case))
    want = run_mesh(case, groups)[0]
    with torch.no_grad():
        return torch.equal(mesh_attention(q, k, v, groups), want)


def test_eval_without_grad_gives_the_same_output(ranks):
    """transformers PR #48167, axolotl #3026."""
    assert all(ranks(4).run(no_grad_equals_grad, Case(s=64, tile="2x2")))


def only_some_inputs_need_gradients(case: Case) -> list[bool]:
    groups = mesh_groups(case.tile)
    positions = chunk_positions(groups.rank, groups.size, case.s)
    q, k, v, dout = (x[positions] for x in inputs(case))
    want = run_mesh(case, groups)
    k = k.requires_grad_()
    mesh_attention(q, k, v, groups).backward(dout)
    return [q.grad is None, v.grad is None, torch.equal(k.grad, want[3])]


def test_inputs_that_need_no_gradient_get_none(ranks):
    assert all(all(r) for r in ranks(4).run(only_some_inputs_need_gradients, Case(s=16, tile="2x2")))


SUBSETS = {"strided": (1, 3, 5, 7), "reversed": (6, 4, 2, 0), "shuffled": (5, 0, 7, 2), "pair": (2, 7)}


def subset(case: Case, members: tuple[int, ...]) -> dict[str, float]:
    groups = mesh_groups(case.tile, members=members)
    return {} if groups is None else errors(case, groups)


@pytest.mark.parametrize("members", SUBSETS.values(), ids=SUBSETS)
def test_a_cp_group_may_be_any_subset_of_the_world(ranks, members):
    for tile in all_tiles(len(members)):
        found = ranks(8).run(subset, Case(s=24, tile=str(tile), kv_heads=2), members)
        assert [rank for rank, e in enumerate(found) if e] == sorted(members)
        assert max(v for e in found for v in e.values()) < 1e-10


def two_groups_at_once(case: Case) -> dict[str, float]:
    """Two CP groups side by side, as data parallel makes them."""
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    made = [mesh_groups(case.tile, members=m) for m in (first, second)]
    return errors(case, next(g for g in made if g is not None))


def test_two_cp_groups_side_by_side_do_not_mix(ranks):
    found = ranks(8).run(two_groups_at_once, Case(s=24, tile="2x2"))
    assert max(v for e in found for v in e.values()) < 1e-10


# Refusals, on every rank, before any communication.


def refused(options: dict, tensors: dict, tile: str) -> tuple[str, int]:
    groups = mesh_groups(tile)
    groups.counters.reset()
    made = {"q": (8, 1, 4, 8), "k": (8, 1, 2, 8), "v": (8, 1, 2, 8)} | {k: v for k, v in tensors.items() if k in "qkv"}
    q, k, v = (torch.randn(made[name]).to(tensors.get(f"{name}_dtype", torch.float32)) for name in "qkv")
    try:
        mesh_attention(q, k, v, groups, **options)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}", groups.counters.messages
    return "accepted", groups.counters.messages


REFUSED = {
    "odd local length": (
        {},
        {"q": (7, 1, 4, 8), "k": (7, 1, 2, 8), "v": (7, 1, 2, 8)},
        "ValueError.*28.*multiple of 2",
    ),
    "heads": ({}, {"q": (8, 1, 3, 8)}, "ValueError: query heads 3 with KV heads 2"),
    "head dims": ({}, {"k": (8, 1, 2, 4)}, "equal head dims"),
    "lengths": ({}, {"k": (4, 1, 2, 8)}, "differ in local sequence length"),
    "batch": ({}, {"v": (8, 2, 2, 8)}, "differ in batch size"),
    "3 dims": ({}, {"q": (8, 4, 8)}, "4 dimensions"),
    "empty": ({}, {"q": (0, 1, 4, 8), "k": (0, 1, 2, 8), "v": (0, 1, 2, 8)}, "empty"),
    "dtypes": ({}, {"k_dtype": torch.float64}, "share one floating dtype"),
    "integers": ({}, {f"{x}_dtype": torch.int32 for x in "qkv"}, "floating dtype"),
    "format": ({"qkv_format": "bhsd"}, {}, "'bhsd': choose from sbhd, bshd"),
    "thd": ({"qkv_format": "thd"}, {}, "packed sequences.*not supported yet"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 7])}, {}, "packed sequences.*not supported yet"),
    "exchange": ({"exchange": "ring"}, {}, "'ring': choose from direct, shift"),
    "kernel": ({"kernel": "cudnn"}, {}, "'cudnn': choose from auto, te, flash, sdpa, reference"),
    "te": ({"kernel": "te"}, {}, "kernel te: it runs on CUDA tensors"),
    "flash": ({"kernel": "flash"}, {}, "kernel flash: it runs on CUDA tensors"),
    "layout": ({"layout": "stripe"}, {}, "'stripe'.*zigzag, plain"),
    "window": ({"window_size": (7, 0)}, {}, "TypeError.*window_size"),
    "sink": ({"softmax_offset": 0.5}, {}, "TypeError.*softmax_offset"),
    "mask": ({"attention_mask": torch.ones(2, 2)}, {}, "TypeError.*attention_mask"),
    "mask as causal": ({"causal": torch.ones(2, 2)}, {}, "causal must be True or False.*mask tensors"),
    "causal None": ({"causal": None}, {}, "causal must be True or False, got None"),
    "learned scale": ({"softmax_scale": torch.ones(1)}, {}, "softmax_scale must be a number"),
    "dropout": ({"dropout_p": 0.1}, {}, "TypeError.*dropout_p"),
}


@pytest.mark.parametrize(("options", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_rejects_what_it_cannot_do_before_any_communication(ranks, options, tensors, message):
    """RFA #37, EasyContext #10, MLM PR #1160, TE #2541, TE #961: never a hang, never a swallowed option."""
    import re

    for text, messages in ranks(4).run(refused, options, tensors, "2x2"):
        assert re.search(message, text, re.DOTALL), text
        assert messages == 0


def build_refusals() -> list[str]:
    out = []
    attempts = [
        lambda: MeshGroups.build(dist.group.WORLD, TileShape(8, 2)),
        lambda: MeshGroups.build(dist.group.WORLD, TileShape(2, 2), TileShape(3, 1)),
        lambda: MeshGroups.build(None, TileShape(2, 2)),
        lambda: mesh_attention(*(torch.zeros(2, 1, 1, 8),) * 3, None),
        lambda: MeshGroups.build(dist.group.WORLD, TileShape(2, 2) if dist.get_rank() else TileShape(4, 1)),
    ]
    for attempt in attempts:
        try:
            attempt()
            out.append("accepted")
        except ValueError as error:
            out.append(str(error))
    return out


def test_groups_that_cannot_work_are_refused_when_they_are_built(ranks):
    """MB #1982 (configured CP 2, data cut for 4), MB PR #2665 (no groups)."""
    wanted = [
        "context_parallel_size 4 with tile 8x2 = 16",
        "backward tile 3x1 = 3",
        "cp_group is None",
        "groups is None",
        "disagree: CP rank 0: tile 4x1",
    ]
    for texts in ranks(4).run(build_refusals):
        for text, want in zip(texts, wanted, strict=True):
            assert want in text


def disagree(what: str) -> str:
    groups = MeshGroups.build(dist.group.WORLD, TileShape(2, 2))
    odd = groups.rank == 3
    q = torch.randn(8, 1, 4, 8, dtype=torch.float16 if odd and what == "dtype" else torch.bfloat16)
    q = q[:4] if odd and what == "length" else q
    if odd and what == "costs":  # as a cluster file that differs on one node would have it
        groups.costs = {Direction.BACKWARD: Costs(2, 0.5, 1, 0.5, 0.1, 1)}
    try:
        mesh_attention(q, q, q, groups, not (odd and what == "causal"))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("what", ["dtype", "length", "causal", "costs"])
def test_ranks_that_disagree_on_the_first_call_are_told_so_on_every_rank(ranks, what):
    """MB #1982: data cut for another size than the groups'."""
    for text in ranks(4).run(disagree, what):
        assert "disagree" in text
        assert "CP rank 3" in text


def fails_in_the_middle() -> list[str]:
    from megatron_mesh_cp.kernels.reference import ReferenceKernel

    groups = MeshGroups.build(dist.group.WORLD, TileShape(2, 2))
    q = torch.randn(8, 1, 4, 8)
    original, out = ReferenceKernel.forward, []
    ReferenceKernel.forward = lambda *args: 1 / 0
    try:
        for _ in range(2):
            try:
                mesh_attention(q, q, q, groups, kernel="reference")
            except (ZeroDivisionError, RuntimeError) as error:
                out.append(repr(error))
            ReferenceKernel.forward = original
    finally:
        ReferenceKernel.forward = original
    return out


def test_after_a_failure_half_way_the_next_call_names_it(ranks):
    pool = ranks(4)
    try:
        for first, second in pool.run(fails_in_the_middle):
            assert "ZeroDivisionError" in first
            assert "CommError" in second
            assert "ZeroDivisionError" in second
            assert "restart the job" in second
    finally:
        pool.kill()  # messages of the failed call are still on their way


def under_autocast(case: Case) -> float:
    groups = mesh_groups(case.tile)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return max(errors(case, groups).values())


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_autocast_does_not_reach_into_the_kernels(ranks, kernel):
    assert max(ranks(4).run(under_autocast, Case(s=64, tile="2x2", dtype=torch.float32, kernel=kernel))) < 1e-5


def copied_groups() -> bool:
    import copy

    groups = mesh_groups("2x2")
    return copy.deepcopy({"groups": groups})["groups"] is groups


def test_a_model_with_groups_can_be_deep_copied(ranks):
    assert all(ranks(4).run(copied_groups))


def misuse() -> list[str]:
    from megatron_mesh_cp.plan import Transfer

    groups = mesh_groups("4x1")
    channel = groups.channel(Direction.FORWARD, Channel.ROW)
    buffer = torch.zeros(4)
    peer = (groups.rank + 1) % 4
    out = []

    def attempt(fn):
        try:
            fn()
            out.append("accepted")
        except (RuntimeError, ValueError) as error:
            out.append(str(error))

    attempt(channel.finish)
    attempt(lambda: channel.start([(Transfer(Payload.Q, 0, groups.rank, True), buffer)], "x", "forward"))
    attempt(lambda: channel.start([(Transfer(Payload.Q, 0, 9, True), buffer)], "x", "forward"))
    attempt(lambda: channel.start([(Transfer(Payload.Q, 0, peer, True), torch.zeros(4, 2).t())], "x", "forward"))
    attempt(lambda: groups.channel(Direction.FORWARD, Channel.COLUMN))
    return out


def test_a_channel_cannot_be_misused(ranks):
    wanted = [
        "no batch to finish",
        "cannot send Q",
        "cannot send Q",
        "not contiguous",
        "one rank has no channel",
    ]
    for texts in ranks(4).run(misuse):
        for text, want in zip(texts, wanted, strict=True):
            assert want in text, texts


def queued_in_order(shared: bool) -> list[str]:
    """Three batches on the row channel and one on the column channel at once; what the recorder saw."""
    from megatron_mesh_cp.plan import Transfer

    groups = mesh_groups("2x2")
    row, column = (groups.channel(Direction.FORWARD, channel) for channel in Channel)
    own = column.queue
    column.queue = row.queue if shared else own
    seen: list[tuple[float, float, str]] = []

    def record(lane: str, label: str, begin: float, end: float) -> None:
        if lane != "wait":
            seen.append((begin, end, lane))

    groups.counters.recorder = record
    try:
        for channel, payload, rounds in ((row, Payload.Q, 2), (column, Payload.KV, 1), (row, Payload.O, 1)):
            members = groups.tile.row_group(groups.rank) if channel is row else groups.tile.column_group(groups.rank)
            peer = next(m for m in members if m != groups.rank)
            for _ in range(rounds):
                there = Transfer(payload, 0, peer, True), torch.full((1 << 18,), groups.rank)
                back = Transfer(payload, 1, peer, False), torch.zeros(1 << 18, dtype=torch.int64)
                channel.start([there, back], "x", "forward")
        for channel in (row, row, row, column):
            channel.finish()
    finally:
        groups.counters.recorder = None
        column.queue = own
    seen.sort()
    overlap = any(later[0] < earlier[1] for earlier, later in pairwise(seen) if shared)
    rows = [entry for entry in seen if entry[2] == "row"]
    overlap |= any(later[0] < earlier[1] for earlier, later in pairwise(rows))
    return ["overlap" if overlap else "one at a time", *(lane for _, _, lane in seen)]


@pytest.mark.parametrize("shared", [True, False], ids=["one link", "two links"])
def test_batches_of_a_queue_run_one_at_a_time_in_the_order_of_their_starts(ranks, shared):
    for seen in ranks(4).run(queued_in_order, shared):
        assert seen[0] == "one at a time"
        assert seen.count("row") == 3
        if shared:
            assert seen[1:] == ["row", "row", "column", "row"]


def after_a_failed_batch() -> list[str]:
    """A batch that torch.distributed refuses: it and the batches behind it fail, and none of them hangs."""
    from megatron_mesh_cp.plan import Transfer

    channel = MeshGroups.build(dist.group.WORLD, TileShape(2, 1)).channel(Direction.FORWARD, Channel.ROW)
    peer = 1 - dist.get_rank()
    sparse = torch.zeros(4).to_sparse()
    sparse.is_contiguous = lambda: True
    texts = []
    for buffer in (sparse, torch.zeros(4)):
        channel.start([(Transfer(Payload.Q, 0, peer, True), buffer)], "x", "forward")
    for _ in range(2):
        try:
            channel.finish()
            texts.append("finished")
        except Exception as error:
            texts.append(type(error).__name__)
    return texts


def test_batches_behind_a_failed_one_fail_too(ranks):
    for texts in ranks(2).run(after_a_failed_batch, timeout=60):
        assert "finished" not in texts
        assert texts[0] == texts[1]


def queues_of_a_plan(links: int) -> tuple[bool, bool]:
    """Whether row and column channel share a queue, before and after the plan is known."""
    costs = {Direction.FORWARD: Costs(1, 2, 1, 0, 1, links)}
    groups = MeshGroups.build(dist.group.WORLD, TileShape(2, 2), costs=costs)
    row, column = (groups.channel(Direction.FORWARD, channel) for channel in Channel)
    before = row.queue is column.queue
    groups.program(Direction.FORWARD, "direct")
    return before, row.queue is column.queue


@pytest.mark.parametrize("links", [1, 2])
def test_channels_share_a_queue_where_the_plan_says_that_they_share_a_link(ranks, links):
    assert ranks(4).run(queues_of_a_plan, links) == [(False, links == 1)] * 4


def threads_after_a_failure() -> tuple[int, int]:
    """Queue threads and message buffers that are left when a transfer failed and the groups were dropped."""
    import gc
    import threading
    import weakref

    groups = MeshGroups.build(dist.group.WORLD, TileShape(1, 2), timeout=2.0)
    channel = groups.channel(Direction.FORWARD, Channel.COLUMN)
    buffers = []

    def watched_start(batch, where, direction, start=channel.start):
        buffers.extend(weakref.ref(buffer) for _, buffer in batch)
        start(batch, where, direction)

    channel.start = watched_start
    if groups.rank == 0:
        channel._post = lambda *_: 1 / 0
    q = torch.randn(8, 1, 4, 8)
    with contextlib.suppress(CommError, ZeroDivisionError):
        mesh_attention(q, q, q, groups)
    del groups, channel, watched_start
    for _ in range(50):
        gc.collect()
        left = sum(t.name == "mesh-cp queue" for t in threading.enumerate()), sum(b() is not None for b in buffers)
        if not any(left):
            break
        time.sleep(0.1)
    return left


def test_after_a_failed_transfer_no_thread_and_no_buffer_is_left():
    pool = RankPool(2)
    try:
        assert pool.run(threads_after_a_failure, timeout=60) == [(0, 0)] * 2
    finally:
        pool.kill()


def planned(case: Case, costs: dict[Direction, Costs]) -> dict[str, float]:
    """Errors of a run whose order was planned for `costs`."""
    groups = MeshGroups.build(
        dist.group.WORLD, TileShape.parse(case.tile), TileShape.parse(case.tile_backward), costs=costs
    )
    return errors(case, groups)


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("block", [0.05, 1.0, 5.0])
def test_plans_for_any_costs_run_and_give_the_same_numbers(ranks, links, block):
    """Other costs are other orders and other depths; forward and backward have other tiles and exchanges."""
    costs = {Direction.FORWARD: Costs(1, 0.5, 1, 0, block, links), Direction.BACKWARD: Costs(2, 2, 1, 2, block, links)}
    for tile, backward in (("4x2", "2x4t"), ("2x4t", "8x1"), ("1x8", "4x2t")):
        for exchange, other in (EXCHANGES, EXCHANGES[::-1]):
            case = Case(s=48, tile=tile, tile_backward=backward, exchange=exchange, exchange_backward=other, kv_heads=2)
            for found in ranks(8).run(planned, case, costs):
                assert max(found.values()) < 1e-10, (tile, exchange)


def warmed_up(tile: str) -> tuple[list[str], int]:
    """MLM PR #5240, PT #130102: one warm-up per group, and no new_group call that other ranks do not make."""
    import megatron_mesh_cp.groups as module

    seen = []
    original = module.warm_up
    module.warm_up = lambda group: (seen.append(str(dist.get_process_group_ranks(group))), original(group))
    before = dist.distributed_c10d._world.group_count
    try:
        MeshGroups.build(dist.group.WORLD, TileShape.parse(tile))
    finally:
        module.warm_up = original
    return seen, dist.distributed_c10d._world.group_count - before


def test_building_warms_the_group_up_once_and_makes_no_groups_behind_the_worlds_back(ranks):
    for seen, made in ranks(6).run(warmed_up, "3x2"):
        assert seen == [str(list(range(6)))]
        assert made == 0


def build_then_new_group(case: Case) -> dict[str, float]:
    """Some ranks build mesh groups, then the whole world makes another group: it must not hang."""
    if dist.get_rank() < 2:
        MeshGroups.build(mesh_groups("1x2", members=(0, 1)).cp_group, TileShape(2, 1))
    else:
        mesh_groups("1x2", members=(0, 1))
    later = dist.new_group([0, 1, 2, 3])
    return errors(case, MeshGroups.build(later, TileShape(2, 2)))


def test_groups_of_the_world_can_still_be_made_after_a_part_of_it_built_mesh_groups(ranks):
    found = ranks(4).run(build_then_new_group, Case(s=24, tile="2x2"), timeout=60)
    assert max(v for e in found for v in e.values()) < 1e-10
