"""Sizes as people type and read them."""

from __future__ import annotations

import re

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Bytes of a size such as 20GB (10^9) or 20GiB (2^30). Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = match and _BYTES.get(match[2].lower())
    if not unit or round(float(match[1]) * unit) < 1:
        raise ValueError(f"{text!r} must be a positive size with its unit, such as 20GB, 512MB or 20GiB")
    return round(float(match[1]) * unit)


def human(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return ""
