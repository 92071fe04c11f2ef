"""Which Megatron is here, and whether this plugin knows it."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

SUPPORTED = (Version("0.16"), Version("0.20"))  # from, up to but not including


def megatron_version() -> Version:
    """The installed megatron-core's version. Raises ValueError where there is none."""
    try:
        return Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        pass
    try:  # a Megatron-LM checkout on the path, not installed as a package
        from megatron.core.package_info import __version__
    except ImportError:
        raise ValueError(
            "megatron-core is not installed: pip install 'megatron-core>=0.16,<0.20', or put a Megatron-LM checkout "
            "on PYTHONPATH"
        ) from None
    return Version(__version__)


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
