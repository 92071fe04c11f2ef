"""Which Megatron is here, and whether this plugin knows it."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

SUPPORTED = (Version("0.16"), Version("0.20"))  # from, up to but not including


def megatron_version() -> Version:
    """The version of the megatron-core that an import finds. Raises ValueError where there is none.

    Not the installed package's metadata: a Megatron-LM checkout on PYTHONPATH comes first.
    """
    spec = find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        info = Path(folder) / "core" / "package_info.py"  # read, since importing megatron.core takes seconds
        if info.is_file():
            return Version(runpy.run_path(str(info))["__version__"])
    raise ValueError(
        "megatron-core is not installed: pip install 'megatron-core>=0.16,<0.20', or put a Megatron-LM checkout on "
        "PYTHONPATH"
    )


def check_megatron(version: Version | None = None) -> Version:
    """The version of megatron-core, if it is supported. Raises ValueError otherwise."""
    version = megatron_version() if version is None else version
    low, high = SUPPORTED
    if not low <= Version(version.base_version) < high:
        raise ValueError(
            f"megatron-core {version} is not supported: mesh context parallelism is tested with {low} up to, not "
            f"including, {high}; install 'megatron-core>={low},<{high}'"
        )
    return version
