"""Mesh-Attention: communication-efficient context parallelism for Megatron-LM and megatron-core.

Importing this package needs neither a GPU nor Transformer Engine nor Megatron; torch is imported when the first name
that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from .attention import mesh_attention
    from .groups import MeshGroups
    from .megatron.args import add_args
    from .megatron.install import install, uninstall
    from .tile import TileShape

__all__ = ["MeshGroups", "TileShape", "__version__", "add_args", "install", "mesh_attention", "uninstall"]

_HOME = {
    "MeshGroups": ".groups",
    "TileShape": ".tile",
    "add_args": ".megatron.args",
    "install": ".megatron.install",
    "mesh_attention": ".attention",
    "uninstall": ".megatron.install",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
