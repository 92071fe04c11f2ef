"""Which version of an optional kernel package is here, and whether this project knows it."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib import metadata
from types import ModuleType

from packaging.version import InvalidVersion, Version

Range = tuple[Version, Version]  # from, up to but not including


def installed_version(package: str) -> Version | None:
    """The version of an installed distribution, None where there is none (or its version cannot be read)."""
    try:
        return Version(metadata.version(package))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None


def outside(package: str, supported: Range) -> str:
    """Why `package` cannot be used, by its version alone: not installed, or out of range. Empty where it can."""
    version = installed_version(package)
    low, high = supported
    wanted = f"'{package}>={low},<{high}'"
    if version is None:
        return f"{package} is not installed (pip install {wanted})"
    if not low <= Version(version.base_version) < high:
        return f"{package} {version} is not supported; install {wanted}"
    return ""


@lru_cache(maxsize=8)
def load(module: str) -> tuple[ModuleType | None, str]:
    """Import a module of such a package: the module, or None and why it does not import.

    Compiled extensions fail in many ways (another torch, no libcudart, no GPU), all of which mean the same here.
    """
    try:
        return importlib.import_module(module), ""
    except Exception as error:
        return None, f"importing {module} fails: {type(error).__name__}: {error}".split("\n")[0]
