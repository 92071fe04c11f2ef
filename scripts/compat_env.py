"""The rows of scripts/compat.py, and the environment of each.

A row with a torch of its own has a whole environment. All others share the torch of the default environment (5 GB):
theirs holds the packages under test, and a folder of links to the rest of the default environment's packages. Links
to all but the packages under test, since the parts of a namespace package such as `megatron` would be mixed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".compat"
UNDER_TEST = ("megatron", "transformer_engine", "__editable__", "_virtualenv", "pip")  # not shared: how names begin
TOOLS = ("pytest>=8", "pytest-timeout>=2.3")
FITS = "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {!r})"


class NoPython(Exception):
    """There is no interpreter of the version that a row needs on this machine."""


@dataclass(frozen=True)
class Row:
    """One combination of versions.

    packages: distribution -> exact version. python: minor version of an interpreter of its own, None for the default
    environment's with its torch. requires: what must not be skipped for being absent (tests/conftest.py).
    optional: runs only when it is named.
    """

    name: str
    packages: dict[str, str]
    python: str | None = None
    requires: tuple[str, ...] = ("core",)
    optional: bool = False

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def describe(self) -> str:
        """In half a line: versions, and what is special."""
        words = [f"Python {self.python}" if self.python else "the default environment's Python and torch"]
        words += [f"{package} {version}" for package, version in self.packages.items()]
        return ", ".join(words + (["optional: 5 GB"] if self.optional else []))


def _row(name: str, core: str, te: str = "", **more) -> Row:
    packages = {"megatron-core": core} | ({"transformer-engine": te} if te else {})
    requires = ("core", "training", "te") if te else ("core", "training")
    return Row(name, packages, requires=requires, **more)


# megatron-core 0.16.1 is the last for Python 3.11 and ships no megatron.training.
_ROWS = (
    Row("core-0.16.1", {"torch": "2.13.0", "megatron-core": "0.16.1"}, "3.11"),
    Row("core-0.16.1-torch-2.6", {"torch": "2.6.0", "megatron-core": "0.16.1"}, "3.11", optional=True),
    *(_row(f"core-{core}", core) for core in ("0.17.1", "0.18.2", "0.19.2")),
    *(
        _row(f"te-{name}", "0.19.2", te)
        for name, te in {
            "2.12": "2.12.0",
            "2.14.1": "2.14.1",
            "2.16.1": "2.16.1",
            "2.18": "2.18.0",
            "2.19": "2.19.0",
            "2.20.2": "2.20.2",
        }.items()
    ),
)
ROWS = {row.name: row for row in _ROWS}


def make(row: Row) -> Path:
    """The interpreter of the row's environment, which is made where there is none with the right stamp.

    Raises NoPython, or CalledProcessError where the install fails.
    """
    python, stamp = row.folder / "bin" / "python", row.folder / ".mesh-cp-stamp"
    wanted = stamp_of(row)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    interpreter = find_python(row.python) if row.python else sys.executable
    shutil.rmtree(row.folder, ignore_errors=True)
    _run(interpreter, "-m", "venv", "--without-pip", row.folder)
    specs = {package: f"{package}=={version}" for package, version in row.packages.items()}
    te = specs.pop("transformer-engine", None)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    if row.python:
        _run(*pip, *specs.values(), *TOOLS, "-e", ROOT)
    else:
        _run(*pip, "--no-deps", *specs.values())
        link_the_rest(Path(sysconfig.get_path("purelib")), row.folder)
    if te:  # not into site-packages, see env.sh
        _run(*pip, "--no-deps", "--target", row.folder / "te", te)
    stamp.write_text(wanted)
    return python


def stamp_of(row: Row) -> str:
    """A hash of all that the row's environment is made from."""
    parts = [repr(row), str(ROOT), Path(__file__).read_text(), (ROOT / "pyproject.toml").read_text()]
    base = Path(sys.prefix) / ".mesh-cp-stamp"
    if not row.python:
        parts += [sys.prefix, base.read_text() if base.is_file() else ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_python(minor: str) -> str:
    """An interpreter of this version that really runs and can make environments. Raises NoPython.

    A name on PATH may be a pyenv shim that refuses to run, so pyenv's own interpreters are candidates too.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path(os.environ.get("HOME", "/nonexistent")) / ".pyenv")
    inside = sorted(pyenv.glob(f"versions/{minor}.*/bin/python"))
    for candidate in (f"python{minor}", *map(str, inside), "python3"):
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", FITS.format(minor)], capture_output=True).returncode == 0:
            return found
    how = f"apt install python{minor}-venv, or pyenv install {minor}"
    raise NoPython(f"no Python {minor} that runs, with venv; install one ({how})")


def link_the_rest(packages: Path, folder: Path) -> None:
    """Make what lies in `packages` importable in the environment `folder`, but for the packages under test."""
    rest = folder / "rest"
    rest.mkdir()
    for entry in packages.iterdir():
        if not entry.name.startswith(UNDER_TEST) and entry.suffix != ".pth":
            (rest / entry.name).symlink_to(entry)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "rest.pth").write_text(f"{rest}\n")


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
