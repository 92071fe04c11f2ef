"""Is the attention of a built model really mesh? A script with layer specs of its own may bypass what install swaps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def check_built_models(models: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Raise ValueError, on all ranks, where mesh was asked for and an attention layer is without it.

    A layer for which --cp-comm-type names another type has what it should have.

    Called by all ranks of the world with the parts of the model that they built. A part may be without attention (a
    pipeline stage, a vision encoder that runs without context parallelism); the whole model may not.
    """
    parts = [models] if isinstance(models, torch.nn.Module) else list(models)
    here = [_attention_of(part) for part in parts]
    found = (sum(mesh for mesh, _ in here), [text for _, bypassed in here for text in bypassed])
    every: list[tuple[int, list[str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    bypassed = list(dict.fromkeys(text for entry in every for text in entry[1]))
    if bypassed:
        raise ValueError(
            f"--context-parallel-algo mesh: {len(bypassed)} attention layers of the model were built without it, by "
            f"layer specs that do not ask Megatron's spec providers: {'; '.join(bypassed[:3])}; use the script's "
            "default layer specs, or --context-parallel-algo megatron"
        )
    if not any(entry[0] for entry in every):
        raise ValueError(
            "--context-parallel-algo mesh: the model was built without any mesh attention layer; use a model with "
            "Megatron's self-attention and its default layer specs, or --context-parallel-algo megatron"
        )


def _attention_of(model: torch.nn.Module) -> tuple[int, list[str]]:
    """The number of attention layers with mesh, and a name for each that has context parallelism without it."""
    from megatron.core.transformer.attention import Attention

    from .core_attention import MeshDotProductAttention

    mesh, bypassed = 0, []
    for name, module in model.named_modules():
        if not isinstance(module, Attention):
            continue
        core, types = module.core_attention, module.config.cp_comm_type
        # Transformer Engine's attention keeps the type of communication that it was built with.
        kind = getattr(core, "cp_comm_type", None)
        as_asked = kind in types if isinstance(types, list) else kind == types
        if isinstance(core, MeshDotProductAttention) or kind == "mesh":
            mesh += 1
        elif module.config.context_parallel_size > 1 and not as_asked:
            bypassed.append(f"{name} ({type(core).__name__})")
    return mesh, bypassed
