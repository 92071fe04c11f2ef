"""scripts/env.sh: finds an interpreter that runs, says in one line when there is none, installs once."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BASH = "/bin/bash"


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{text}\n")
    path.chmod(0o755)


class Machine:
    """A fake machine: its PATH, its home, and a checkout with nothing but env.sh and pyproject.toml."""

    def __init__(self, root: Path):
        self.home = root / "home"
        self.bin = root / "bin"
        self.checkout = root / "checkout"
        self.venv = root / "venv"
        self.installs = root / "installs"
        self.bin.mkdir()
        for tool in ("dirname", "cat", "cksum", "ls", "mkdir", "grep", "flock", "rm"):
            executable(self.bin / tool, f'PATH=/usr/bin:/bin exec {tool} "$@"')
        (self.checkout / "scripts").mkdir(parents=True)
        (self.checkout / "scripts" / "env.sh").write_text((SCRIPTS / "env.sh").read_text())
        (self.checkout / "pyproject.toml").write_text("[project]\n")

    def add_python(self, path: Path, version: str = "3.12", *, pip_fails: bool = False) -> None:
        """An interpreter that answers what env.sh asks, makes environments and records each install."""
        executable(
            path,
            f"""case "$*" in
              *version_info*) [[ {version} == 3.12 || {version} == 3.13 ]] ;;
              --version) echo "Python {version}" ;;
              "-m pip --version") [[ $0 == {self.venv}/bin/python ]] ;;
              "-m venv "*) mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; /bin/chmod +x "$3/bin/python"
                           echo "home = $0" >"$3/pyvenv.cfg" ;;
              "-m pip install"*) echo "$0 $*" >>{self.installs}; {"exit 1" if pip_fails else "true"} ;;
              *) exit 9 ;;
            esac""",
        )

    def source(self, **env: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.bin), "HOME": str(self.home), "MESH_CP_VENV": str(self.venv), **env}
        command = f"source {self.checkout}/scripts/env.sh && echo PATH=$PATH"
        return subprocess.run([BASH, "-c", command], env=env, cwd="/", capture_output=True, text=True, timeout=60)

    def made_with(self) -> str:
        return (self.venv / "pyvenv.cfg").read_text().removeprefix("home = ").strip()

    def install_count(self) -> int:
        lines = self.installs.read_text().splitlines() if self.installs.exists() else []
        return sum(" -e " in line for line in lines)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def refuse(path: Path) -> None:
    executable(path, "echo 'pyenv: command not found' >&2; exit 127")  # what a pyenv shim does


def test_takes_pyenvs_interpreter_where_the_shim_on_path_refuses(machine):
    refuse(machine.bin / "python3.12")
    machine.add_python(machine.bin / "python3", "3.11")
    inside = machine.home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python"
    machine.add_python(inside)
    done = machine.source()
    assert done.returncode == 0, done.stderr
    assert machine.made_with() == str(inside)
    assert f"PATH={machine.venv}/bin:" in done.stdout


def test_pyenv_root_is_looked_into(machine, tmp_path):
    inside = tmp_path / "elsewhere" / "versions" / "3.13.0" / "bin" / "python"
    machine.add_python(inside, "3.13")
    assert machine.source(PYENV_ROOT=str(tmp_path / "elsewhere")).returncode == 0
    assert machine.made_with() == str(inside)


def test_prefers_312_to_313_and_takes_a_plain_python3_last(machine):
    machine.add_python(machine.bin / "python3", "3.12")
    machine.add_python(machine.bin / "python3.13", "3.13")
    assert machine.source().returncode == 0
    assert machine.made_with() == str(machine.bin / "python3.13")
    machine.add_python(machine.bin / "python3.12")
    other = machine.venv.with_name("venv2")
    machine.venv = other
    machine.add_python(machine.bin / "python3.12")
    assert machine.source().returncode == 0
    assert machine.made_with() == str(machine.bin / "python3.12")


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_says_in_one_line_what_to_install_when_no_interpreter_fits(machine, version):
    refuse(machine.bin / "python3.12")
    machine.add_python(machine.bin / "python3", version)
    done = machine.source()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "no Python 3.12 or 3.13" in done.stderr
    assert "install" in done.stderr
    assert not (machine.venv / "bin").exists()


def test_second_start_installs_nothing_until_pyproject_changes(machine):
    machine.add_python(machine.bin / "python3.12")
    assert machine.source().returncode == 0
    assert machine.install_count() == 1
    second = machine.source()
    assert machine.install_count() == 1
    assert second.stdout.startswith("PATH=")
    (machine.checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert machine.source().returncode == 0
    assert machine.install_count() == 2


def test_transformer_engine_goes_into_a_folder_of_its_own(machine):
    """From site-packages its wheel, without the compiled part, would break every import of megatron.core."""
    machine.add_python(machine.bin / "python3.12")
    old = machine.venv / "te" / "transformer_engine"
    assert machine.source().returncode == 0
    old.mkdir(parents=True)
    (machine.checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert machine.source().returncode == 0
    lines = [line for line in machine.installs.read_text().splitlines() if "transformer-engine" in line]
    assert len(lines) == 2
    assert all(f"--no-deps --target {machine.venv}/te transformer-engine==" in line for line in lines)
    assert not old.exists()


def test_an_install_that_failed_is_not_trusted_and_what_was_cut_off_is_removed(machine):
    machine.add_python(machine.bin / "python3.12", pip_fails=True)
    assert machine.source().returncode != 0
    packages = machine.venv / "lib" / "python3.12" / "site-packages"
    for name, whole in (("torch-2.dist-info", False), ("numpy-2.dist-info", True)):
        (packages / name).mkdir(parents=True)
        if whole:
            (packages / name / "INSTALLER").write_text("pip")
    machine.add_python(machine.venv / "bin" / "python")
    assert machine.source().returncode == 0
    assert machine.install_count() == 2
    assert [path.name for path in packages.iterdir()] == ["numpy-2.dist-info"]


def test_never_touches_a_folder_that_is_no_environment(machine):
    machine.add_python(machine.bin / "python3.12")
    machine.venv.mkdir()
    (machine.venv / "thesis.txt").touch()
    done = machine.source()
    assert done.returncode == 1
    assert "MESH_CP_VENV" in done.stderr
    assert [path.name for path in machine.venv.iterdir()] == ["thesis.txt"]


def test_scripts_are_executable_and_parse():
    for path in (*SCRIPTS.glob("*.sh"), SCRIPTS.parent / ".ci" / "run"):
        subprocess.run([BASH, "-n", path], check=True)
        assert path.name == "env.sh" or os.access(path, os.X_OK), path
