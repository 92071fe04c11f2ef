"""MESH_CP_REQUIRE: what the environment must have, so that a test skipped for lack of it fails instead.

A comma-separated list of the names below; scripts/test.sh and scripts/compat.sh set it. Without it a missing package
skips its tests, which is what someone wants who has installed only a part.
"""

from __future__ import annotations

import os

REASONS = {
    "core": "megatron-core is not installed",
    "slurm": "no SLURM for tests",
    "te": "transformer_engine is not installed",
    "training": "ships no megatron.training",
}


def missing(reason: str, required: str | None = None) -> str:
    """The name of a requirement that `reason` (of a skip) says is not there; empty where it may be skipped.

    Raises ValueError for a name in MESH_CP_REQUIRE that is none.
    """
    text = os.environ.get("MESH_CP_REQUIRE", "") if required is None else required
    for name in filter(None, text.split(",")):
        if name not in REASONS:
            raise ValueError(f"MESH_CP_REQUIRE={text}: unknown {name}; choose from {', '.join(REASONS)}")
        if REASONS[name] in reason:
            return name
    return ""
