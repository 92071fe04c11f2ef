"""Environment variables that change what mesh context parallelism does, for `mesh-cp doctor`."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping

from megatron_mesh_cp.cli.doctor_checks import Check

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10  # major compute capability
SWITCHED_OFF = {  # variable -> what is lost where it is 1
    "NCCL_P2P_DISABLE": "no direct copies between GPUs (NVLink, PCIe)",
    "NCCL_SHM_DISABLE": "no shared memory between processes of a node",
    "NCCL_IB_DISABLE": "no InfiniBand or RoCE: all between nodes goes through TCP",
}
TE_KERNELS = {  # 0 takes a kernel out of what Transformer Engine picks from, and so out of --mesh-kernel auto
    "NVTE_FUSED_ATTN": "cuDNN's fused attention",
    "NVTE_FLASH_ATTN": "flash-attn",
    "NVTE_UNFUSED_ATTN": "Transformer Engine's unfused attention",
}
TALKATIVE = ("INFO", "TRACE", "ABORT")


def interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def variables(
    env: Mapping[str, str], capability: tuple[int, int] | None, nics: Iterable[str], cores: int
) -> list[Check]:
    """One check for each variable that is set and matters, and for two that should be.

    capability: compute capability of the GPU, None where there is none. nics: network interfaces. cores: of the node.
    """
    checks = [_connections(env.get(CONNECTIONS), capability), _threads(env.get("OMP_NUM_THREADS"), cores)]
    for name in sorted(env):
        if finding := _finding(name, env[name], env, list(nics)):
            status, detail = finding
            checks.append(Check(name, status, f"{env[name]!r}{': ' if detail else ''}{detail}"))
    return checks


def _connections(value: str | None, capability: tuple[int, int] | None) -> Check:
    """1 lets Megatron's communication start before the kernel it is to overlap with, on GPUs before Blackwell."""
    said = "unset" if value is None else repr(value)
    if capability is None:
        return Check(CONNECTIONS, "absent" if value is None else "ok", f"{said}; it matters on GPUs only")
    if capability[0] >= BLACKWELL:
        return Check(CONNECTIONS, "ok", f"{said}; on this GPU any value will do")
    if value == "1":
        return Check(CONNECTIONS, "ok", said)
    return Check(
        CONNECTIONS,
        "warn",
        f"{said}; Megatron needs 1 on this GPU to overlap tensor- and context-parallel communication with compute: "
        f"export {CONNECTIONS}=1 before the processes start",
    )


def _threads(value: str | None, cores: int) -> Check:
    name = "OMP_NUM_THREADS"
    if value is None:
        return Check(name, "absent", "unset; torchrun sets 1 for each rank, other launchers leave all cores to each")
    if not re.fullmatch(r"[1-9][0-9]*", value):
        return Check(name, "warn", f"{value!r} is no positive whole number")
    if int(value) > cores:
        return Check(name, "warn", f"{value!r}: more threads for each rank than the {cores} cores of this node")
    return Check(name, "ok", repr(value))


def _finding(name: str, value: str, env: Mapping[str, str], nics: list[str]) -> tuple[str, str] | None:
    """Status and words on one variable; None where it does not matter here."""
    if name in SWITCHED_OFF:
        return ("warn", f"{SWITCHED_OFF[name]}; unset it unless it works around a fault") if _on(value) else ("ok", "")
    if name in TE_KERNELS:
        return _te_kernel(name, value, env)
    special: dict[str, Callable[[], tuple[str, str]]] = {
        "NCCL_SOCKET_IFNAME": lambda: _interface(value, nics),
        "NCCL_DEBUG": lambda: ("warn", "prints much") if value.upper() in TALKATIVE else ("ok", ""),
        "TORCH_NCCL_BLOCKING_WAIT": lambda: (
            ("warn", "every wait blocks the CPU, so transfers and compute overlap less") if _on(value) else ("ok", "")
        ),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": lambda: (
            ("warn", "a failed or hanging transfer hangs the run instead of ending it") if value == "0" else ("ok", "")
        ),
    }
    if name in special:
        return special[name]()
    return ("ok", "") if name.startswith(("NCCL_", "TORCH_NCCL_")) else None


def _on(value: str) -> bool:
    return value.strip() not in ("", "0")


def _te_kernel(name: str, value: str, env: Mapping[str, str]) -> tuple[str, str]:
    if all(env.get(other) == "0" for other in TE_KERNELS):
        return "warn", f"{', '.join(TE_KERNELS)} are all 0: Transformer Engine has no attention left"
    if value != "0":
        return "ok", ""
    return "ok" if name == "NVTE_UNFUSED_ATTN" else "warn", f"{TE_KERNELS[name]} is off in Transformer Engine"


def _interface(value: str, nics: list[str]) -> tuple[str, str]:
    """NCCL's own syntax: names that begin like this, comma-separated; = for whole names, ^ for all but these."""
    exclude, names = value.startswith("^"), value.lstrip("^")
    exact, names = names.startswith("="), names.lstrip("=")
    listed = [name for name in names.split(",") if name]
    hit = {nic for nic in nics for name in listed if nic == name or (not exact and nic.startswith(name))}
    usable = [nic for nic in nics if (nic in hit) != exclude]
    if not usable:
        return "warn", f"no interface of this node fits; there are {', '.join(nics) or 'none'}"
    return "ok", f"{', '.join(usable)}"
