"""The checks of `mesh-cp doctor`: each is a function of what it inspects, and returns what it finds; none raises.

`all_checks` inspects this process. A package that breaks when it is asked is a finding like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from packaging.version import InvalidVersion, Version

OLDEST_PYTHON, TRAINING_PYTHON = (3, 11), (3, 12)
OLDEST_TORCH = Version("2.6")
KERNEL_HEAD_DIM = 128
UNDECLARED = {  # packages that Megatron imports and does not ask pip for
    "einops": "hierarchical context-parallel groups fail",
    "psutil": "saving a checkpoint hangs",
    "tqdm": "tokenizers fail",
}


@dataclass(frozen=True)
class Check:
    """One finding. status: ok, warn (works, but look at it), fail (there, and unusable) or absent."""

    name: str
    status: str
    detail: str


def all_checks() -> list[Check]:
    """All checks of this process and machine, in the order in which people need them."""
    from megatron_mesh_cp.cli.doctor_env import interfaces, variables
    from megatron_mesh_cp.cli.doctor_packages import apex, flash_attn, megatron_core, transformer_engine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, error = imported("torch")
        capability = None
        checks = [
            safely("python", lambda: python(sys.version_info[:3])),
            safely("torch", lambda: torch_itself(torch, error)),
        ]
        if torch is not None:
            checks += [
                safely("cuda", lambda: cuda(torch, Path("/dev/nvidiactl").exists())),
                safely("nccl", lambda: nccl(torch)),
                safely("gpus", lambda: gpus(torch)),
            ]
            with contextlib.suppress(Exception):
                capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        checks += [
            safely("megatron-core", megatron_core),
            safely("transformer-engine", transformer_engine),
            safely("flash-attn", flash_attn),
            safely("apex", apex),
            safely("undeclared packages", lambda: undeclared(lambda name: find_spec(name) is not None)),
            safely("kernel", lambda: kernel(torch)),
        ]
        try:
            return checks + variables(os.environ, capability, interfaces(), os.cpu_count() or 1)
        except Exception as problem:
            return [*checks, Check("environment variables", "fail", one_line(problem))]


def safely(name: str, check: Callable[[], Check]) -> Check:
    """The check's finding, or that it broke."""
    try:
        return check()
    except Exception as error:
        return Check(name, "fail", f"the check broke: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """An exception as one line."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


def imported(module: str) -> tuple[ModuleType | None, str]:
    """The module, or None and why it does not import; "" where there is none of that name."""
    try:
        return importlib.import_module(module), ""
    except ModuleNotFoundError as error:
        return None, "" if error.name == module else one_line(error)
    except Exception as error:
        return None, one_line(error)


def version_of(package: str, path: Iterable[str] | None = None) -> Version | None:
    """The version of an installed distribution; None where there is none, or none that can be read."""
    found = metadata.distributions(name=package) if path is None else metadata.distributions(name=package, path=path)
    try:
        return next((Version(d.version) for d in found), None)
    except (InvalidVersion, TypeError):
        return None


def python(version: tuple[int, int, int]) -> Check:
    """3.11 or newer; training needs 3.12, since the megatron-core for 3.11 ships no megatron.training."""
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Check("python", "fail", f"{text}: megatron_mesh_cp needs 3.11 or newer")
    if version[:2] < TRAINING_PYTHON:
        return Check("python", "warn", f"{text}: core attention only; megatron.training needs 3.12 or newer")
    return Check("python", "ok", text)


def torch_itself(torch: ModuleType | None, error: str) -> Check:
    """2.6 or newer, and it imports. error: why it does not, empty where it is not installed."""
    if torch is None:
        how = f"it does not import: {error}" if error else "not installed"
        return Check("torch", "fail", f"{how}; install 'torch>={OLDEST_TORCH}'")
    version = Version(torch.__version__)
    if Version(version.base_version) < OLDEST_TORCH:
        return Check("torch", "fail", f"{version} is too old; install 'torch>={OLDEST_TORCH}'")
    return Check("torch", "ok", f"{version}")


def cuda(torch: ModuleType, driver_is_there: bool) -> Check:
    """The CUDA that torch is built for, the newest that the driver can do, and whether they work together."""
    if torch.version.cuda is None:
        build = "a ROCm build, which nobody has tried" if torch.version.hip else "a CPU build"
        return Check("cuda", "absent", f"torch {torch.__version__} is {build}; CPU ranks with gloo work")
    number = 0
    with contextlib.suppress(Exception):
        number = torch._C._cuda_getDriverVersion()
    driver = f"driver for CUDA {number // 1000}.{number % 1000 // 10}" if number else "no driver"
    detail = f"runtime {torch.version.cuda}, {driver}"
    if torch.cuda.is_available():
        return Check("cuda", "ok", detail)
    if number or driver_is_there:
        return Check("cuda", "fail", f"{detail}: torch cannot use the GPUs (driver too old, or none made visible)")
    return Check("cuda", "absent", f"{detail}; CPU ranks with gloo work")


def nccl(torch: ModuleType) -> Check:
    """The NCCL that torch brings."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return Check("nccl", "absent", "this torch has none; gloo works")
    version = torch.cuda.nccl.version()
    return Check("nccl", "ok", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def gpus(torch: ModuleType) -> Check:
    """How many GPUs are visible on this node, their names and memory; warns where they differ."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Check("gpus", "absent", "none visible on this node")
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    kinds = [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in found]
    listed = "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    if len({p.name for p in found}) > 1:
        return Check("gpus", "warn", f"{listed}: every rank waits for the slowest")
    return Check("gpus", "ok", listed)


def undeclared(has: Callable[[str], bool]) -> Check:
    """einops, psutil and tqdm, which Megatron needs and does not declare. has: whether a module can be found."""
    missing = [name for name in UNDECLARED if not has(name)]
    if missing:
        what = ", ".join(f"{name} (without it {UNDECLARED[name]})" for name in missing)
        return Check("undeclared packages", "warn", f"missing: {what}; pip install {' '.join(missing)}")
    return Check("undeclared packages", "ok", ", ".join(UNDECLARED))


def kernel(torch: ModuleType | None, auto_choice: Callable | None = None) -> Check:
    """Which kernel `--mesh-kernel auto` takes for bf16 and fp32 at head dim 128, and why."""
    if torch is None:
        return Check("kernel", "absent", "no torch")
    if auto_choice is None:
        from megatron_mesh_cp.kernels import auto_choice
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    status, parts = "ok", []
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        try:
            choice = auto_choice(dtype, device_type, KERNEL_HEAD_DIM)
            parts.append(f"{name}: {choice.name} ({choice.why})")
        except ValueError as error:
            status = "warn"
            parts.append(f"{name}: {error}")
    return Check("kernel", status, f"--mesh-kernel auto, head dim {KERNEL_HEAD_DIM}, {device_type}: {'; '.join(parts)}")
