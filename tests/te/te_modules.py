"""Cases of single modules with Transformer Engine: what is refused, what stays untouched, groups of one's own."""

from __future__ import annotations

import te_cases
import te_emulation
import torch
import torch.distributed as dist
from te_cases import BATCH, DIM, HEADS, SEQUENCE, Case, dense, mine, problem, start_megatron, te_attention

from megatron_mesh_cp import MeshGroups, TileShape, install, mesh_attention, uninstall
from megatron_mesh_cp.kernels import select_kernel


def plain_attention(comm_type: str, group: dist.ProcessGroup | None = None, **more: object) -> torch.nn.Module:
    """Transformer Engine's own DotProductAttention, as a user without Megatron makes it."""
    import transformer_engine.pytorch as te

    group = group or dist.group.WORLD
    settings = {"num_gqa_groups": 2, "attention_dropout": 0.0, "attn_mask_type": "causal", "cp_comm_type": comm_type}
    members = {"cp_group": group, "cp_global_ranks": dist.get_process_group_ranks(group)}
    return te.DotProductAttention(HEADS, DIM, **{**settings, **members, "cp_stream": torch.cuda.Stream(), **more})


def refusal(where: str, more: dict[str, object]) -> str:
    """The error of a Megatron layer ("megatron"), of a module of Transformer Engine ("te"), or of its call ("call")."""
    case = Case()
    start_megatron(case)
    dist.barrier()
    te_emulation.calls.clear()
    try:
        if where == "megatron":
            te_attention(case, **more)
        elif where == "te":
            plain_attention("mesh", **more)
        else:
            attention = te_attention(case)
            q, k, v, _ = (mine(x) for x in problem(case))
            # Straight into the seam, as Transformer Engine's backends call it with features that they allow.
            backend = __import__(
                "transformer_engine.pytorch.attention.dot_product_attention.backends", fromlist=["backends"]
            )
            wanted = {"softmax_scale": DIM**-0.5, "qkv_format": "sbhd", "use_fused_attention": True, **more}
            if wanted.pop("fp32", False):
                q, k, v = q.float(), k.float(), v.float()
            dropout = wanted.pop("dropout_p", 0.0)
            group = attention.cp_group
            cu = torch.zeros(BATCH + 1, dtype=torch.int32)
            backend.attn_forward_func_with_cp(
                True, q, k, v, cu, cu, SEQUENCE, SEQUENCE, None, None, dropout, group,
                dist.get_process_group_ranks(group), None, "mesh", **wanted,
            )  # fmt: skip
    except ValueError as error:
        assert not te_emulation.calls
        return str(error)
    return "no error"


def untouched(comm_type: str) -> bool:
    """Are outputs and gradients of another comm type, and the calls of the kernel, the same bits with the seam?"""
    uninstall()
    results = []
    for mesh in (None, Case("mesh", "2x2").mesh):
        if mesh is not None:
            install(mesh)
        attention = plain_attention(comm_type)
        q, k, v, dout = (mine(x) for x in problem(Case()))
        for x in (q, k, v):
            x.requires_grad_()
        te_emulation.calls.clear()
        out = attention(q, k, v)
        out.backward(dout.flatten(2))
        results.append(((out, q.grad, k.grad, v.grad), list(te_emulation.calls)))
    (before, calls), (after, calls_with_seam) = results
    return calls == calls_with_seam and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def install_and_uninstall() -> list[bool]:
    """Is Transformer Engine changed, changed no further by a second install, and put back?"""
    import transformer_engine.pytorch.attention.dot_product_attention.backends as backends
    from transformer_engine.pytorch import DotProductAttention

    uninstall()

    def now() -> tuple[object, ...]:
        module = DotProductAttention
        return backends.attn_forward_func_with_cp, module.__init__, module.set_context_parallel_group

    before = now()
    install(Case().mesh)
    first = now()
    install(Case().mesh)
    second = now()
    uninstall()
    return [all(a is not b for a, b in zip(before, first, strict=True)), first == second, now() == before]


def without_megatrons_groups(later: bool) -> list[float]:
    """Transformer Engine alone, on a group of two of the four ranks; `later`: set by set_context_parallel_group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    uninstall()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    case = Case("mesh", "2x1")
    install(case.mesh)
    if later:
        attention = plain_attention("p2p", cp_group=None, cp_global_ranks=None)
        attention.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), "mesh")
    else:
        attention = plain_attention("mesh", group)
    half = SEQUENCE // 4
    rank = dist.get_rank(group)
    own = torch.cat([torch.arange(half) + half * rank, torch.arange(half) + half * (3 - rank)])
    q, k, v, dout = (x[own].contiguous() for x in problem(case))
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v)
    out.backward(dout.flatten(2))
    found = out.unflatten(2, (HEADS, DIM)), q.grad, k.grad, v.grad
    return [
        ((got.detach().double() - want[own]).norm() / want[own].norm()).item()
        for got, want in zip(found, dense(case), strict=True)
    ]


def fp32_is_refused_before_any_communication() -> tuple[str, int]:
    """The error of the op with kernel te, and the bytes that were sent."""
    groups = MeshGroups.build(dist.group.WORLD, TileShape(2, 2))
    q = torch.randn(16, 1, 2, 64)
    try:
        mesh_attention(q, q, q, groups, kernel="te")
    except ValueError as error:
        return str(error), sum(groups.counters.sent.values())
    return "no error", 0


def block_errors() -> dict[str, float]:
    """Largest relative error of the te kernel against the reference in fp64, by block, dtype and memory order."""
    reference = select_kernel("reference", dtype=torch.float64, device_type="cpu", head_dim=DIM)
    found = {}
    blocks = ((64, 64, True), (64, 64, False), (32, 64, False), (64, 32, False), (32, 64, True))
    for dtype in (torch.bfloat16, torch.float16):
        kernel = select_kernel("te", dtype=dtype, device_type="cpu", head_dim=DIM)
        for memory in ("sbhd", "bshd", "bhsd"):
            for rows, columns, causal in blocks:
                g = torch.Generator().manual_seed(rows + columns)
                q, k, v, dout = (
                    torch.randn([{"b": 2, "h": h, "s": s, "d": DIM}[axis] for axis in memory], generator=g)
                    .permute([memory.index(axis) for axis in "bhsd"])
                    .to(dtype)
                    for h, s in ((HEADS, rows), (2, columns), (2, columns), (HEADS, rows))
                )
                out, lse = kernel.forward(q, k, v, causal, DIM**-0.5)
                wide = [x.double() for x in (q, k, v, dout)]
                want_out, want_lse = reference.forward(*wide[:3], causal, DIM**-0.5)
                delta = (wide[3] * want_out).sum(-1)
                grads = kernel.backward(dout, q, k, v, out, lse, delta, causal, DIM**-0.5)
                want = reference.backward(wide[3], *wide[:3], None, want_lse, delta, causal, DIM**-0.5)
                pairs = zip((out, lse, *grads), (want_out, want_lse, *want), strict=True)
                name = f"{rows} x {columns} {'causal' if causal else 'full'} {dtype} {memory}"
                found[name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    return found


def check_refusals() -> dict[str, str]:
    """What the te kernel refuses when it is selected."""
    asked = {
        "fp32": {"dtype": torch.float32, "head_dim": 64},
        "head dim 12": {"dtype": torch.bfloat16, "head_dim": 12},
        "head dim 264": {"dtype": torch.bfloat16, "head_dim": 264},
        "V of 260": {"dtype": torch.bfloat16, "head_dim": 64, "v_head_dim": 260},
    }
    found = {}
    for name, what in asked.items():
        try:
            select_kernel("te", device_type="cuda", flag="--mesh-kernel", **what)
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    return found


def another_version() -> str:
    """The error of install where Transformer Engine is out of range."""
    from packaging.version import Version

    from megatron_mesh_cp.kernels import te
    from megatron_mesh_cp.megatron.te_seam import open_seam

    supported, te.SUPPORTED = te.SUPPORTED, (Version("1.0"), Version("1.1"))
    try:
        open_seam(te_cases.Case().mesh)
    except ValueError as error:
        return str(error)
    finally:
        te.SUPPORTED = supported
    return "no error"
