"""mesh-cp doctor: each status of each check on faked machines, one JSON object, exit codes, nothing ever raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from megatron_mesh_cp.cli import doctor_checks, doctor_packages
from megatron_mesh_cp.cli.doctor_checks import Check
from megatron_mesh_cp.cli.doctor_env import variables
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.kernels import Choice

HOPPER, BLACKWELL = (9, 0), (10, 0)
RANGE = (Version("2.12"), Version("2.21"))


def machine(gpus: tuple[str, ...] = (), cuda: str | None = "13.0", driver: int = 0, hip: str | None = None, **more):
    """A torch as far as the checks ask it."""
    properties = [SimpleNamespace(name=name, total_memory=80 * 2**30) for name in gpus]
    return SimpleNamespace(
        **{
            "__version__": "2.14.1",
            "version": SimpleNamespace(cuda=cuda, hip=hip),
            "cuda": SimpleNamespace(
                is_available=lambda: bool(gpus),
                device_count=lambda: len(gpus),
                get_device_properties=lambda i: properties[i],
                nccl=SimpleNamespace(version=lambda: (2, 30, 7)),
            ),
            "_C": SimpleNamespace(_cuda_getDriverVersion=lambda: driver),
            "distributed": SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: cuda is not None),
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            **more,
        }
    )


def assert_finding(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    for word in words:
        assert word in check.detail, (word, check)


def test_python_is_ok_from_312_on_and_core_attention_only_on_311():
    assert_finding(doctor_checks.python((3, 12, 1)), "ok", "3.12.1")
    assert_finding(doctor_checks.python((3, 11, 7)), "warn", "core attention only")
    assert_finding(doctor_checks.python((3, 10, 4)), "fail", "needs 3.11 or newer")


def test_torch_missing_broken_too_old_or_fine():
    check = doctor_checks.torch_itself
    assert_finding(check(None, ""), "fail", "not installed", "torch>=2.6")
    assert_finding(check(None, "OSError: libcudart.so.12"), "fail", "does not import: OSError: libcudart.so.12")
    assert_finding(check(SimpleNamespace(__version__="2.5.1+cu124"), ""), "fail", "2.5.1", "too old")
    assert_finding(check(SimpleNamespace(__version__="2.6.0a0+git1"), ""), "ok")
    assert_finding(check(machine(), ""), "ok", "2.14.1")


def test_cuda_is_told_apart_by_build_driver_and_gpus():
    check = doctor_checks.cuda
    assert_finding(check(machine(cuda=None), False), "absent", "a CPU build", "gloo")
    assert_finding(check(machine(cuda=None, hip="6.2"), False), "absent", "ROCm")
    assert_finding(check(machine(), False), "absent", "runtime 13.0, no driver")
    assert_finding(check(machine(driver=12080), False), "fail", "driver for CUDA 12.8", "cannot use the GPUs")
    assert_finding(check(machine(), True), "fail", "cannot use the GPUs")
    assert_finding(check(machine(gpus=("H100",), driver=13000), True), "ok", "runtime 13.0, driver for CUDA 13.0")
    assert_finding(check(machine(_C=None), False), "absent", "no driver")  # a torch without the private function


def test_nccl_is_there_or_not():
    assert_finding(doctor_checks.nccl(machine()), "ok", "2.30.7")
    assert_finding(doctor_checks.nccl(machine(cuda=None)), "absent", "gloo works")


def test_gpus_are_counted_and_different_ones_warned_of():
    assert_finding(doctor_checks.gpus(machine()), "absent", "none visible")
    assert_finding(doctor_checks.gpus(machine(gpus=("H100", "H100"))), "ok", "2 x H100, 80 GiB")
    mixed = doctor_checks.gpus(machine(gpus=("H100", "A100")))
    assert_finding(mixed, "warn", "1 x H100, 80 GiB; 1 x A100, 80 GiB", "slowest")


def test_packages_that_megatron_does_not_declare():
    assert_finding(doctor_checks.undeclared(lambda name: True), "ok")
    missing = doctor_checks.undeclared(lambda name: name != "psutil")
    assert_finding(missing, "warn", "psutil (without it saving a checkpoint hangs)", "pip install psutil")


def test_kernel_says_what_auto_takes_and_why_or_what_is_in_the_way():
    def choose(dtype: torch.dtype, device_type: str, head_dim: int) -> Choice:
        assert (device_type, head_dim) == ("cuda", 128)
        if dtype == torch.float32:
            raise ValueError("no kernel for float32")
        return Choice("te", "what Transformer Engine picks")

    gpu = machine(gpus=("H100",))
    found = doctor_checks.kernel(gpu, choose)
    assert_finding(found, "warn", "bf16: te (what Transformer Engine picks)", "fp32: no kernel for float32")
    fine = doctor_checks.kernel(gpu, lambda *args: Choice("flash", "because"))
    assert_finding(fine, "ok", "bf16: flash (because); fp32: flash (because)")
    assert_finding(doctor_checks.kernel(machine()), "ok", "cpu: bf16: sdpa", "fp32: sdpa")
    assert_finding(doctor_checks.kernel(None), "absent", "no torch")


@pytest.fixture
def core(tmp_path):
    """A folder with megatron/core in it, and megatron/training and pip's metadata where they are asked for."""

    def make(training: bool = True, wheel: bool = True) -> Path:
        folder = tmp_path / "site" / "megatron" / "core"
        folder.mkdir(parents=True)
        if training:
            (folder.parent / "training").mkdir()
        if wheel:
            (tmp_path / "site" / "megatron_core-0.19.2.dist-info").mkdir()
        return folder

    return make


def test_megatron_core_from_pip_with_training(core):
    found = doctor_packages.megatron_core(core(), Version("0.19.2+abc"), Version("0.19.2"), "")
    assert_finding(found, "ok", "0.19.2, with megatron.training")
    assert "checkout" not in found.detail


def test_megatron_core_without_training_and_from_a_checkout(core):
    folder = core(training=False, wheel=False)
    found = doctor_packages.megatron_core(folder, Version("0.18.0rc3"), Version("0.19.2"), "")
    assert_finding(
        found, "ok", "without megatron.training", f"a checkout in {folder.parents[1]}", "before the installed"
    )
    assert_finding(doctor_packages.megatron_core(folder, Version("0.18.0"), None, ""), "ok", "a checkout")


def test_megatron_core_that_is_out_of_range_broken_or_absent(core, monkeypatch):
    folder = core()
    old = doctor_packages.megatron_core(folder, Version("0.15.3"), None, "")
    assert_finding(old, "fail", "megatron-core 0.15.3 is not supported", ">=0.16,<0.20")
    broken = doctor_packages.megatron_core(folder, Version("0.19.2"), Version("0.19.2"), "RuntimeError: no")
    assert_finding(broken, "fail", "importing it fails: RuntimeError: no")
    monkeypatch.setattr(doctor_packages, "folder_of", lambda module: None)
    assert_finding(doctor_packages.megatron_core(), "absent", "mesh_attention works without")


def test_transformer_engine_without_its_compiled_part_is_told_apart_from_a_working_one(tmp_path, monkeypatch):
    """The wheel transformer-engine alone is 1 MB of Python, beside which megatron-core cannot be imported."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    version = Version("2.20.2")
    check = doctor_packages.transformer_engine
    bare = check(folder, version, RANGE)  # error=None: it must not even try to import
    assert_finding(bare, "fail", "the Python alone", "megatron-core cannot be imported", "[pytorch]==2.20.2")
    (tmp_path / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert_finding(check(folder, version, RANGE, ""), "ok", "2.20.2")
    assert_finding(check(folder, Version("2.4"), RANGE, ""), "warn", "2.4 is not supported", ">=2.12,<2.21")
    assert_finding(check(folder, Version("2.21.0"), RANGE, ""), "warn", "2.21.0 is not supported")
    assert_finding(check(folder, version, RANGE, "OSError: libcudart"), "fail", "importing", "OSError: libcudart")
    assert_finding(check(folder, None, RANGE, ""), "fail", "no metadata")
    assert_finding(check(None, version, RANGE, ""), "fail", "its files are gone")
    monkeypatch.setattr(doctor_packages, "folder_of", lambda module: None)
    monkeypatch.setattr(doctor_packages, "version_of", lambda package: None)
    assert_finding(check(), "absent", "not installed")


def test_flash_attn_in_range_out_of_it_broken_or_absent(tmp_path, monkeypatch):
    check, supported = doctor_packages.flash_attn, (Version("2.7"), Version("2.9"))
    assert_finding(check(tmp_path, Version("2.8.3"), supported, ""), "ok", "2.8.3")
    assert_finding(check(tmp_path, Version("2.6.3"), supported, ""), "warn", "not supported", ">=2.7,<2.9")
    assert_finding(check(tmp_path, Version("2.8.3"), supported, "ImportError: undefined symbol"), "fail", "undefined")
    assert_finding(check(None, Version("2.8.3"), supported), "fail", "its files are gone")
    monkeypatch.setattr(doctor_packages, "folder_of", lambda module: None)
    monkeypatch.setattr(doctor_packages, "version_of", lambda package: None)
    assert_finding(check(), "absent", "not installed")


def fake_apex(site: Path, folders: tuple[str, ...], version: str, requires: tuple[str, ...] = ()) -> list[str]:
    """An installed package apex that cannot be imported without a trace."""
    for name in ("", *folders):
        (site / "apex" / name).mkdir(parents=True, exist_ok=True)
    (site / "apex" / "__init__.py").write_text("raise SystemExit('apex was imported')\n")
    info = site / f"apex-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: apex", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return [str(site)]


def test_pypis_apex_is_recognised_and_explained_and_never_imported(tmp_path):
    path = fake_apex(tmp_path, ("lib", "templates"), "0.9.10.dev0", ("cryptacular", "pyramid>1.1.2", "velruse>=1.0.3"))
    found = doctor_packages.apex(path)
    assert_finding(found, "warn", "0.9.10.dev0 is not NVIDIA's", "web toolkit (for Pyramid)", "pip uninstall apex")
    assert "apex" not in sys.modules


def test_nvidias_apex_with_and_without_its_extensions(tmp_path):
    path = fake_apex(tmp_path, ("amp", "optimizers", "contrib"), "0.1")
    assert_finding(doctor_packages.apex(path), "warn", "NVIDIA's (0.1) without its CUDA extensions")
    (tmp_path / "amp_C.cpython-312-x86_64-linux-gnu.so").touch()
    assert_finding(doctor_packages.apex(path), "ok", "NVIDIA's (0.1)")
    assert "apex" not in sys.modules


def test_no_apex_and_half_an_apex(tmp_path):
    assert_finding(doctor_packages.apex([str(tmp_path)]), "absent", "optional")
    path = fake_apex(tmp_path, (), "0.1")
    (tmp_path / "apex" / "__init__.py").unlink()
    assert_finding(doctor_packages.apex(path), "warn", "its files are not")


def test_the_process_itself_is_inspected_where_nothing_is_passed(tmp_path, monkeypatch):
    """PyPI's apex on sys.path: found, and still not imported."""
    monkeypatch.setattr(sys, "path", [*fake_apex(tmp_path, ("lib",), "0.9.10", ("pyramid",)), *sys.path])
    assert_finding(doctor_packages.apex(), "warn", "not NVIDIA's")
    assert "apex" not in sys.modules


ENVIRONMENT = {
    "unset before Blackwell": (
        {},
        HOPPER,
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "warn",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    "8 before Blackwell": ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, HOPPER, "CUDA_DEVICE_MAX_CONNECTIONS", "warn", "'8'"),
    "1 before Blackwell": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, HOPPER, "CUDA_DEVICE_MAX_CONNECTIONS", "ok", "'1'"),
    "unset on Blackwell": ({}, BLACKWELL, "CUDA_DEVICE_MAX_CONNECTIONS", "ok", "any value"),
    "unset without GPU": ({}, None, "CUDA_DEVICE_MAX_CONNECTIONS", "absent", "GPUs only"),
    "set without GPU": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None, "CUDA_DEVICE_MAX_CONNECTIONS", "ok", "'1'"),
    "threads unset": ({}, None, "OMP_NUM_THREADS", "absent", "torchrun sets 1"),
    "threads": ({"OMP_NUM_THREADS": "2"}, None, "OMP_NUM_THREADS", "ok", "'2'"),
    "too many threads": ({"OMP_NUM_THREADS": "9"}, None, "OMP_NUM_THREADS", "warn", "8 cores"),
    "no number of threads": ({"OMP_NUM_THREADS": "all"}, None, "OMP_NUM_THREADS", "warn", "no positive whole number"),
    "P2P off": ({"NCCL_P2P_DISABLE": "1"}, None, "NCCL_P2P_DISABLE", "warn", "NVLink"),
    "P2P on": ({"NCCL_P2P_DISABLE": "0"}, None, "NCCL_P2P_DISABLE", "ok", "'0'"),
    "SHM off": ({"NCCL_SHM_DISABLE": "1"}, None, "NCCL_SHM_DISABLE", "warn", "shared memory"),
    "IB off": ({"NCCL_IB_DISABLE": "1"}, None, "NCCL_IB_DISABLE", "warn", "TCP"),
    "interface": ({"NCCL_SOCKET_IFNAME": "eth"}, None, "NCCL_SOCKET_IFNAME", "ok", "eth0, eth1"),
    "exact interface": ({"NCCL_SOCKET_IFNAME": "=eth"}, None, "NCCL_SOCKET_IFNAME", "warn", "there are lo, eth0, eth1"),
    "all but": ({"NCCL_SOCKET_IFNAME": "^lo,eth0"}, None, "NCCL_SOCKET_IFNAME", "ok", "eth1"),
    "wrong interface": ({"NCCL_SOCKET_IFNAME": "ib0"}, None, "NCCL_SOCKET_IFNAME", "warn", "no interface"),
    "debug": ({"NCCL_DEBUG": "info"}, None, "NCCL_DEBUG", "warn", "prints much"),
    "warnings": ({"NCCL_DEBUG": "WARN"}, None, "NCCL_DEBUG", "ok", "'WARN'"),
    "cuDNN off": ({"NVTE_FUSED_ATTN": "0"}, None, "NVTE_FUSED_ATTN", "warn", "cuDNN's fused attention is off"),
    "cuDNN on": ({"NVTE_FUSED_ATTN": "1"}, None, "NVTE_FUSED_ATTN", "ok", "'1'"),
    "flash off": ({"NVTE_FLASH_ATTN": "0"}, None, "NVTE_FLASH_ATTN", "warn", "flash-attn is off"),
    "unfused off": ({"NVTE_UNFUSED_ATTN": "0"}, None, "NVTE_UNFUSED_ATTN", "ok", "is off"),
    "all off": (
        {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
        *(None, "NVTE_UNFUSED_ATTN", "warn", "no attention left"),
    ),
    "blocking wait": ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, None, "TORCH_NCCL_BLOCKING_WAIT", "warn", "overlap less"),
    "no error handling": (
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        *(None, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "warn", "hangs the run"),
    ),
    "another one of NCCL's": ({"NCCL_ALGO": "Ring"}, None, "NCCL_ALGO", "ok", "'Ring'"),
    "another one of torch's": ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, None, "TORCH_NCCL_DUMP_ON_TIMEOUT", "ok", "'1'"),
}


@pytest.mark.parametrize(("env", "capability", "name", "status", "words"), ENVIRONMENT.values(), ids=ENVIRONMENT)
def test_environment_variables_that_matter(env, capability, name, status, words):
    found = {check.name: check for check in variables({"HOME": "/", **env}, capability, ["lo", "eth0", "eth1"], 8)}
    assert_finding(found[name], status, words)
    assert found.keys() == {"CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", *env}


def run(capsys, *flags: str) -> tuple[int, str]:
    code = main(["doctor", *flags])
    return code, capsys.readouterr().out


NAMES = {
    *("python", "torch", "cuda", "nccl", "gpus", "megatron-core", "transformer-engine", "flash-attn", "apex", "kernel"),
    *("undeclared packages", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS"),
}


def test_json_is_one_object_of_all_checks_and_nothing_else_is_on_stdout(capsys, monkeypatch):
    real = doctor_checks.imported
    monkeypatch.setattr(doctor_checks, "imported", lambda module: [print("a package that prints"), real(module)][1])
    code, out = run(capsys, "--json")
    assert code == 0
    checks = json.loads(out)["checks"]
    assert {check["name"] for check in checks} >= NAMES
    assert all(check.keys() == {"name", "status", "detail"} for check in checks)
    assert {check["status"] for check in checks} <= {"ok", "warn", "fail", "absent"}
    assert next(c for c in checks if c["name"] == "megatron-core")["status"] == "ok", checks


def test_the_table_says_the_same_to_people(capsys):
    code, out = run(capsys)
    assert code == 0
    for word in (*NAMES, torch.__version__, "--mesh-kernel auto"):
        assert word in out


def test_exit_code_1_only_where_nothing_works(capsys, monkeypatch):
    monkeypatch.setattr(doctor_packages, "check_megatron", lambda version: 1 / 0)
    code, out = run(capsys, "--json")
    broken = next(c for c in json.loads(out)["checks"] if c["name"] == "megatron-core")
    assert (code, broken["status"]) == (0, "fail")  # mesh_attention works without Megatron
    assert "ZeroDivisionError" in broken["detail"]

    real = doctor_checks.imported
    monkeypatch.setattr(doctor_checks, "imported", lambda m: (None, "OSError: no") if m == "torch" else real(m))
    code, out = run(capsys, "--json")
    checks = {c["name"]: c for c in json.loads(out)["checks"]}
    assert (code, checks["torch"]["status"], checks["kernel"]["status"]) == (1, "fail", "absent")


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("two\nlines")

    for module, name in ((doctor_checks, "nccl"), (doctor_packages, "apex"), (doctor_checks, "gpus")):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr("megatron_mesh_cp.cli.doctor_env.interfaces", broken)
    code, out = run(capsys, "--json")
    checks = {c["name"]: c for c in json.loads(out)["checks"]}
    assert code == 0
    for name in ("nccl", "apex", "gpus"):
        assert checks[name]["status"] == "fail"
        assert checks[name]["detail"].endswith("RuntimeError: two")
    assert checks["environment variables"]["status"] == "fail"
    assert checks["kernel"]["status"] == "ok"


def test_a_module_that_breaks_while_imported_is_told_apart_from_one_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "breaks_here.py").write_text("raise OSError('libcudart.so.12: no such file\\nmore')\n")
    (tmp_path / "lacks_another.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor_checks.imported("surely_not_there") == (None, "")
    assert doctor_checks.imported("breaks_here") == (None, "OSError: libcudart.so.12: no such file")
    assert doctor_checks.imported("lacks_another")[1].startswith("ModuleNotFoundError")
