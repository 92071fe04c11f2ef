"""The lse merge and the stand-in for out."""

from __future__ import annotations

import pytest
import torch

from megatron_mesh_cp.merge import merge_, row_delta, stand_in_out

INF = float("inf")


def test_merge_of_two_halves_is_the_softmax_over_both():
    torch.manual_seed(0)
    scores, v = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 8, 4, dtype=torch.float64)
    parts = [(s.softmax(-1) @ w, s.logsumexp(-1)) for s, w in zip(scores.split(4, -1), v.split(4, -2), strict=True)]
    (out, lse), (out2, lse2) = parts
    merge_(out, lse, out2, lse2)
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-14)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-14)


@pytest.mark.parametrize("masked", [-INF, INF], ids=["-inf", "+inf"])
def test_a_fully_masked_row_changes_nothing(masked):
    """FlashAttention softmax.h: lse = +inf on fully masked rows wipes valid rows in a merge."""
    x = torch.randn(1, 1, 2, 4)
    out, lse = x.clone(), torch.zeros(1, 1, 2)
    merge_(out, lse, torch.zeros_like(x), torch.full((1, 1, 2), masked))
    assert torch.equal(out, x)
    assert torch.equal(lse, torch.zeros(1, 1, 2))


def test_two_fully_masked_rows_give_zero_and_no_nan():
    out, lse = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -INF)
    merge_(out, lse, torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -INF))
    assert torch.equal(out, torch.zeros(1, 1, 2, 4))
    assert torch.equal(lse, torch.full((1, 1, 2), -INF))


def test_large_scores_do_not_overflow():
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 1e4)
    merge_(out, lse, torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 1e4))
    assert torch.allclose(out, torch.full_like(out, 0.5), rtol=1e-3)  # fp32 has steps of 1e-3 at 1e4


def stress(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    out = torch.randn(1, 2, 64, 32, generator=g)
    dout = torch.randn(1, 2, 64, 32, generator=g)
    half_zero = dout.clone()
    half_zero[:, :, ::2] = 0
    one_hot = torch.nn.functional.one_hot(torch.randint(0, 32, (1, 2, 64), generator=g), 32).float()
    cases = {
        "gaussian": (out, dout),
        "shifted": (out + 50, dout),
        "ones": (out, torch.ones_like(dout)),
        "one hot": (out, one_hot),
        "tiny": (out, dout * (1e-24 if dtype == torch.bfloat16 else 1e-6)),
        "zero rows": (out, half_zero),
        "orthogonal": (
            out,
            dout - out * (dout * out).sum(-1, keepdim=True) / (out * out).sum(-1, keepdim=True),
        ),
    }
    return {name: (o.to(dtype), d.to(dtype)) for name, (o, d) in cases.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_stand_in_keeps_delta_better_than_rounding_of_out_does(dtype):
    for name, (out, dout) in stress(dtype).items():
        exact = (dout.double() * (out.double() * 1.001)).sum(-1)  # delta of an out that is not representable
        made = stand_in_out(dout, exact.to(torch.float64 if dtype == torch.float64 else torch.float32))
        assert made.dtype == dtype
        assert torch.isfinite(made).all(), name
        error = ((dout.double() * made.double()).sum(-1) - exact).norm()
        rounded = (dout.double() * (out.double() * 1.001).to(dtype).double()).sum(-1)
        floor = 1e-6 if dtype != torch.float64 else 1e-14  # fp32 statistics
        scale = (dout.double().abs() * out.double().abs()).sum(-1).norm()
        assert error <= (rounded - exact).norm() + floor * scale, f"{name}: {error} of {scale}"


def test_stand_in_of_zero_rows_is_zero():
    assert torch.equal(stand_in_out(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3)), torch.zeros(1, 1, 3, 4))


def test_delta_is_summed_in_fp32():
    out, dout = (
        torch.full((1, 1, 1, 4096), 1.0, dtype=torch.bfloat16),
        torch.full((1, 1, 1, 4096), 1.0).bfloat16(),
    )
    assert row_delta(dout, out).item() == 4096
