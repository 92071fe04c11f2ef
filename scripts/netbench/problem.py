"""What the ranks compute: one attention, whose tensors every rank can make by itself, and a check of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_mesh_cp.cost import AttentionShape
from megatron_mesh_cp.layout import chunk_positions


@dataclass(frozen=True)
class Problem:
    """One attention over all ranks: global sequence length, batch, heads. q, dout [s/n, b, heads, d], k, v likewise."""

    ranks: int
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    @property
    def shape(self) -> AttentionShape:
        """Of one rank."""
        size = self.dtype.itemsize
        sizes = self.seq_len // self.ranks, self.batch, self.heads, self.kv_heads, self.head_dim
        return AttentionShape(*sizes, item_bytes=size, stat_bytes=max(4, size))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def chunk(self, rank: int, kv_group: int | None = None) -> list[torch.Tensor]:
        """q, k, v, dout of a rank; with kv_group only the heads that share one KV head.

        Every KV head has random numbers of its own, so that one group can be made for the whole sequence.
        """
        groups = range(self.kv_heads) if kv_group is None else (kv_group,)
        per_group = self.heads // self.kv_heads
        parts = []
        for group in groups:
            generator = torch.Generator().manual_seed(rank * self.kv_heads + group)
            parts.append(
                [
                    torch.randn(self.seq_len // self.ranks, self.batch, heads, self.head_dim, generator=generator)
                    for heads in (per_group, 1, 1, per_group)
                ]
            )
        return [torch.cat(same, dim=2).to(self.dtype) for same in zip(*parts, strict=True)]

    def error(self, rank: int, got: Sequence[torch.Tensor]) -> float:
        """How far out, dq, dk, dv of this rank are from fp64 attention, over one KV head's group.

        The largest difference, as a part of the largest value of its tensor: a lost block is about 1 / blocks or more.
        """
        group = rank % self.kv_heads
        heads = slice(group * (self.heads // self.kv_heads), (group + 1) * (self.heads // self.kv_heads))
        kv = slice(group, group + 1)
        mine = torch.tensor(chunk_positions(rank, self.ranks, self.seq_len))
        differences = [
            (part[:, :, own].detach().double() - want[mine]).abs().max() / want[mine].abs().max()
            for part, own, want in zip(got, (heads, heads, kv, kv), _dense(self, group), strict=True)
        ]
        return torch.stack(differences).max().item()  # max() of Python would drop a NaN


@lru_cache(maxsize=4)
def _dense(problem: Problem, group: int) -> list[torch.Tensor]:
    """out, dq, dk, dv [s, b, h, d] in fp64 for the heads of one KV head."""
    whole = [torch.empty(0)] * 4
    for rank in range(problem.ranks):
        positions = torch.tensor(chunk_positions(rank, problem.ranks, problem.seq_len))
        for number, part in enumerate(problem.chunk(rank, group)):
            if rank == 0:
                whole[number] = torch.empty(problem.seq_len, *part.shape[1:], dtype=torch.float64)
            whole[number][positions] = part.double()
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in whole)
    aten, mask = torch.ops.aten, (0.0, problem.causal)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *mask, scale=problem.scale)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, *mask, scale=problem.scale
    )
    return [x.permute(2, 0, 1, 3) for x in (out, *grads)]
