"""Megatron, Transformer Engine, flash-attn and Apex, for `mesh-cp doctor`: which, from where, and does it work.

Each check takes what it inspects; left out, it inspects this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from megatron_mesh_cp.cli.doctor_checks import Check, imported, version_of
from megatron_mesh_cp.megatron.versions import check_megatron, megatron_version

NVIDIA_APEX = ("amp", "optimizers", "contrib", "multi_tensor_apply", "normalization")  # folders the other one lacks


def folder_of(module: str) -> Path | None:
    """The folder of a package that an import would find, without importing it; None where there is none."""
    parent, _, _ = module.partition(".")
    spec = find_spec(parent) and find_spec(module)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else Path(spec.origin).parent if spec.origin else None


def megatron_core(
    folder: Path | None = None, version: Version | None = None, pip: Version | None = None, error: str | None = None
) -> Check:
    """In the supported range, importable; with megatron.training or not; from a checkout or from pip.

    folder: of megatron/core. version: of what is in it. pip: of the installed distribution. error: why importing it
    fails, "" where it does not.
    """
    name = "megatron-core"
    if folder is None and version is None:
        folder, pip = folder_of("megatron.core"), version_of(name)
    if folder is None:
        return Check(
            name, "absent", "not installed; mesh_attention works without, --context-parallel-algo mesh does not"
        )
    try:
        version = check_megatron(megatron_version() if version is None else version)
    except ValueError as problem:
        return Check(name, "fail", str(problem))
    if error is None:
        error = imported("megatron.core")[1]  # a bare transformer-engine wheel beside it is enough to break it
    version = Version(version.public)  # Megatron adds the commit of whatever checkout it lies in
    training = (folder.parent / "training").is_dir()
    parts = [str(version), "with megatron.training" if training else "without megatron.training (core attention only)"]
    # A wheel lies beside its metadata, a checkout does not.
    if pip is None or pip != version or not list(folder.parents[1].glob("megatron_core-*.dist-info")):
        parts.append(f"a checkout in {folder.parents[1]}" + (f", before the installed {pip}" if pip else ""))
    if error:
        return Check(name, "fail", f"{', '.join(parts)}: importing it fails: {error}")
    return Check(name, "ok", ", ".join(parts))


def transformer_engine(
    folder: Path | None = None,
    version: Version | None = None,
    supported: tuple[Version, Version] | None = None,
    error: str | None = None,
) -> Check:
    """Version, compiled part, and import. error: why importing it fails, "" where it does not."""
    name = "transformer-engine"
    if folder is None and version is None:
        folder, version = folder_of("transformer_engine"), version_of(name)
    if supported is None:
        from megatron_mesh_cp.kernels.te import SUPPORTED as supported
    if folder is None or version is None:
        if folder is not None or version is not None:
            half = f"its metadata says {version}, its files are gone" if version else f"files in {folder}, no metadata"
            return Check(name, "fail", f"{half}; install it again")
        return Check(name, "absent", "not installed; kernels flash and sdpa, if they can run, serve instead")
    places = (folder, folder / "wheel_lib", folder.parent)
    if not any(found for place in places for found in place.glob("transformer_engine_torch*.so")):
        return Check(
            name,
            "fail",
            f"{version} is the Python alone, without its compiled part for torch, and megatron-core cannot be imported "
            f"beside it; pip install --no-build-isolation 'transformer-engine[pytorch]=={version}', or uninstall it",
        )
    if error is None:
        error = imported("transformer_engine.pytorch")[1]
    if error:
        return Check(name, "fail", f"{version}: importing transformer_engine.pytorch fails: {error}")
    return in_range(name, version, supported)


def flash_attn(
    folder: Path | None = None,
    version: Version | None = None,
    supported: tuple[Version, Version] | None = None,
    error: str | None = None,
) -> Check:
    """Version and import of flash-attn 2; see `transformer_engine`."""
    name = "flash-attn"
    if folder is None and version is None:
        folder, version = folder_of("flash_attn"), version_of(name)
    if supported is None:
        from megatron_mesh_cp.kernels.flash import SUPPORTED as supported
    if version is None:
        return Check(name, "absent", "not installed; kernels te and sdpa, if they can run, serve instead")
    if error is None:
        error = imported("flash_attn.flash_attn_interface")[1] if folder else "its files are gone"
    if error:
        return Check(name, "fail", f"{version}: importing it fails: {error}")
    return in_range(name, version, supported)


def in_range(name: str, version: Version, supported: tuple[Version, Version]) -> Check:
    """ok within the versions that this project knows, otherwise warn: `--mesh-kernel auto` leaves it out."""
    low, high = supported
    if low <= Version(version.base_version) < high:
        return Check(name, "ok", str(version))
    return Check(name, "warn", f"{version} is not supported and not used by mesh; install '{name}>={low},<{high}'")


def apex(path: Sequence[str] | None = None) -> Check:
    """NVIDIA's Apex, none, or the package called apex on PyPI, which is another one; never imports it.

    path: where to look, sys.path by default.
    """
    if path is None:
        folder = folder_of("apex")
    else:
        folder = next((Path(p) / "apex" for p in path if (Path(p) / "apex" / "__init__.py").is_file()), None)
    found = (
        metadata.distributions(name="apex") if path is None else metadata.distributions(name="apex", path=list(path))
    )
    dist = next(iter(found), None)
    version = dist.version if dist else "no version"
    if folder is None and dist is None:
        return Check(
            "apex", "absent", "not installed; it is optional (NVIDIA's is built from source, it is not on PyPI)"
        )
    if folder is None:
        return Check("apex", "warn", f"{version}: its metadata is there, its files are not; pip uninstall apex")
    if any((folder / name).is_dir() for name in NVIDIA_APEX):
        compiled = [p for place in (folder.parent, folder) for p in place.glob("amp_C*.so")]
        if not compiled:
            detail = f"NVIDIA's ({version}) without its CUDA extensions (amp_C): Megatron's fused optimizers need them"
            return Check("apex", "warn", detail)
        return Check("apex", "ok", f"NVIDIA's ({version})")
    requires = " ".join(dist.requires or []) if dist else ""
    known = " (for Pyramid)" if "pyramid" in requires.lower() or "velruse" in requires.lower() else ""
    return Check(
        "apex",
        "warn",
        f"{version} is not NVIDIA's: PyPI's package of that name is an unrelated web toolkit{known}, without "
        "apex.optimizers and apex.amp; pip uninstall apex, and build NVIDIA's from its repository if you want it",
    )
