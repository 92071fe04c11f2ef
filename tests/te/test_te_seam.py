"""cp_comm_type="mesh" in Transformer Engine's attention, over its real Python, on four gloo ranks."""

from __future__ import annotations

import pytest
import te_cases
from te_cases import Case, planned_calls

pytestmark = pytest.mark.compat

NAMES = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_megatrons_te_attention_with_mesh_is_no_worse_than_its_own_ring(te_ranks, causal, kv_heads):
    """Both against fp64, forward and backward; the kernel is given the plan's blocks, in its order, nothing else."""
    pool = te_ranks()
    ring = pool.run(te_cases.run, Case("p2p", "1x4", causal=causal, kv_heads=kv_heads))[0][0]
    assert max(ring) < 1e-2  # bf16 noise
    for tile in ("1x4", "2x2", "4x1"):
        case = Case("mesh", tile, causal=causal, kv_heads=kv_heads)
        answers = pool.run(te_cases.run, case)
        for name, ours, theirs in zip(NAMES, answers[0][0], ring, strict=True):
            assert ours <= theirs * 1.02, f"{tile} {name}: error {ours:.2e}, Transformer Engine's ring {theirs:.2e}"
        for rank, (_, calls) in enumerate(answers):
            assert calls == planned_calls(case, rank, 4), f"{tile}, rank {rank}"
