"""scripts/compat.sh and what goes with it: rows, interpreters, verdicts, tables, and skips that must not be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import required

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import compat
import compat_env
import compat_table
from compat_env import NoPython, Row
from compat_table import MARKS, Result

ROOT = Path(__file__).resolve().parents[1]
ROW = Row("te-1", {"megatron-core": "0.19.2", "transformer-engine": "1.0"}, requires=("core", "te"))


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_takes_the_interpreter_that_runs_not_the_shim_that_refuses(tmp_path, monkeypatch):
    executable(tmp_path / "bin" / "python3.11", "exit 127")
    inside = executable(tmp_path / "pyenv" / "versions" / "3.11.7" / "bin" / "python", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert compat_env.find_python("3.11") == str(inside)


def test_a_missing_interpreter_is_one_line_and_exit_code_3(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(NoPython, match="no Python 3.11 that runs.*apt install python3.11-venv, or pyenv install 3.11"):
        compat_env.find_python("3.11")
    monkeypatch.setattr(compat_env, "FOLDER", tmp_path / "envs")
    assert compat.main(["core-0.16.1"]) == 3
    out, err = capsys.readouterr()
    assert "core-0.16.1 (not run)" in out
    assert len([line for line in err.splitlines() if "no Python 3.11" in line]) == 1


@pytest.mark.parametrize(
    ("oks", "code"), [((True, True), 0), ((True, False), 1), ((True, None), 3), ((None, False), 1)], ids=str
)
def test_exit_code_is_1_where_a_row_failed_and_3_where_one_could_not_run(monkeypatch, oks, code):
    results = iter([Result(name, ok) for name, ok in zip("ab", oks, strict=True)])
    monkeypatch.setattr(compat, "run", lambda row: next(results))
    assert compat.main(["core-0.17.1", "core-0.18.2"]) == code


def test_an_install_that_fails_is_a_failed_row_and_the_next_one_runs(monkeypatch, capsys):
    def run(row: Row) -> Result:
        if row.name == "core-0.17.1":
            raise subprocess.CalledProcessError(1, ["pip"])
        return Result(row.name, True)

    monkeypatch.setattr(compat, "run", run)
    assert compat.main(["core-0.17.1", "core-0.18.2"]) == 1
    out = capsys.readouterr().out
    assert "core-0.17.1 (FAILED)" in out
    assert "core-0.18.2  " in out


def test_optional_rows_run_only_when_named_and_leave_no_environment_behind(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(compat_env, "FOLDER", tmp_path)
    monkeypatch.setattr(compat, "run", lambda row: [ran.append(row.name), Result(row.name, True)][1])
    folder = tmp_path / "core-0.16.1-torch-2.6"
    folder.mkdir()
    assert compat.main([]) == 0
    assert set(ran) == {row.name for row in compat_env.ROWS.values() if not row.optional}
    assert compat.main(["--keep", folder.name]) == 0
    assert folder.is_dir()
    assert compat.main([folder.name]) == 0
    assert not folder.exists()


def test_rejects_an_unknown_row_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        compat.main(["core-0.20"])
    assert "unknown row core-0.20: choose from core-0.16.1, " in capsys.readouterr().err


CASE = '<testcase classname="{}" name="x">{}</testcase>'


def report(path: Path, *cases: tuple[str, str]) -> compat.Outcome:
    path.write_text(f"<testsuites><testsuite>{''.join(CASE.format(*case) for case in cases)}</testsuite></testsuites>")
    return compat.read_report(path)


def test_a_row_fails_for_a_failure_an_error_an_exit_code_and_for_nothing_run(tmp_path):
    file = tmp_path / "tests.xml"
    te, other, skip = ("tests.te.test_a", ""), ("tests.core.test_b", ""), ("tests.te.test_a", "<skipped/>")
    fine = report(file, te, other, ("tests.core.test_c", "<skipped/>"))
    assert (fine.passed, fine.failed, fine.skipped, fine.te_passed) == (2, 0, 1, 1)
    assert compat.verdict(ROW, 0, fine) == ""
    assert "1 failed" in compat.verdict(ROW, 1, report(file, te, ("tests.core.test_b", "<failure/>")))
    assert "1 failed" in compat.verdict(ROW, 1, report(file, te, ("tests.core.test_b", "<error/>")))
    assert "exit code is 2" in compat.verdict(ROW, 2, fine)
    assert compat.verdict(ROW, 0, report(file)) == "no test ran"
    assert "no test of tests/te passed" in compat.verdict(ROW, 0, report(file, other, skip))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "torch 2\nmegatron-core 0.18.0 {row}/core\ntransformer-engine 1.0 {row}/te",
            "megatron-core 0.18.0 is imported",
        ),
        ("torch 2\nmegatron-core 0.19.2 /usr/core\ntransformer-engine 1.0 {row}/te", "not from the row's environment"),
        ("torch 2\nmegatron-core 0.19.2 {row}/core", "transformer-engine none is imported where the row has 1.0"),
    ],
    ids=["another version", "another place", "absent"],
)
def test_a_row_that_imports_something_else_fails_before_its_tests(tmp_path, monkeypatch, lines, message):
    monkeypatch.setattr(compat_env, "FOLDER", tmp_path)
    ROW.folder.mkdir()
    python = executable(ROW.folder / "python", f"cat <<E\n{lines.format(row=ROW.folder)}\nE")
    with pytest.raises(ValueError, match=message):
        compat.imported_versions(ROW, python, dict(os.environ))


def test_what_a_row_shares_leaves_out_the_packages_under_test(tmp_path):
    packages, folder = tmp_path / "packages", tmp_path / "row"
    for name in ("torch", "numpy", "megatron", "megatron_core-1.dist-info", "transformer_engine", "__editable__x.py"):
        (packages / name).mkdir(parents=True)
    (packages / "x.pth").touch()
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    compat_env.link_the_rest(packages, folder)
    assert {path.name for path in (folder / "rest").iterdir()} == {"torch", "numpy"}
    assert (site / "rest.pth").read_text() == f"{folder}/rest\n"


def test_the_table_in_a_file_keeps_the_rows_that_did_not_run_now(tmp_path):
    file = tmp_path / "doc.md"
    file.write_text(f"above\n{MARKS[0]}\n{MARKS[1]}\nbelow\n")
    counts = {"passed": 3, "failed": 0, "skipped": 1}
    versions = {"python": "3.12.1", "torch": "2.14.1", "megatron-core": "0.19.2"}
    order = ["a", "b", "c"]
    compat_table.write_markdown(file, [Result("c", True, "", versions, counts, 61.4), Result("a", False)], order)
    compat_table.write_markdown(file, [Result("a", True, "", versions, counts, 9), Result("c", None)], order)
    above, head, _, one, two, below = [line for line in file.read_text().splitlines() if "compat:" not in line]
    assert (above, below) == ("above", "below")
    assert head.startswith("| row | Python |")
    assert one.startswith("| a | 3.12.1 | 2.14.1 | 0.19.2 | - | 3 | 0 | 1 | 9 | 20")
    assert two.startswith("| c | 3.12.1 | 2.14.1 | 0.19.2 | - | 3 | 0 | 1 | 61 | 20")
    file.write_text("no marks\n")
    with pytest.raises(ValueError, match="must hold the lines"):
        compat_table.write_markdown(file, [], order)


def test_a_skip_for_lack_of_what_is_required_is_a_failure():
    absent = "Skipped: transformer_engine is not installed"
    assert required.missing(absent, "core,te") == "te"
    assert required.missing(absent, "core") == ""
    assert required.missing("this megatron-core ships no megatron.training", "training") == "training"
    assert required.missing("no GPU", "core,te,training") == ""
    with pytest.raises(ValueError, match="unknown tea; choose from core, netns, slurm, te, training"):
        required.missing("no GPU", "tea")


SKIPS = """
import pytest
def test_one():
    pytest.skip("transformer_engine is not installed")
@pytest.mark.skipif(True, reason="transformer_engine is not installed")
def test_two(): pass
def test_three():
    pytest.skip("no GPU")
"""
MODULE = 'import pytest\npytest.skip("transformer_engine is not installed", allow_module_level=True)\n'


@pytest.mark.parametrize(
    ("needs", "code", "counts"), [("", 0, "4 skipped"), ("te", 1, "1 failed, 1 skipped, 2 errors")]
)
def test_pytest_fails_where_a_required_package_is_skipped(tmp_path, needs, code, counts):
    for name in ("conftest.py", "required.py", "te_path.py", "rank_pool.py"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    env = {**os.environ, "MESH_CP_REQUIRE": needs, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-q"]
    done = subprocess.run([*command, tmp_path], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert counts in done.stdout, done.stdout
    assert done.returncode == code


FAKE = 'case "$0 $*" in *"$FAILS"*) exit {code} ;; esac; echo "$(basename "$0") $*" >>"$LOG"'


@pytest.mark.parametrize(
    ("fails", "code", "ci", "expected"),
    [
        ("nothing at all", 0, "", 0),
        ("-m pytest", 4, "", 4),
        ("compat.sh", 1, "", 1),
        ("compat.sh", 3, "", 0),
        ("compat.sh", 3, "1", 3),
        ("ruff check", 1, "", 1),
        ("ruff format", 1, "", 1),
    ],
)
def test_the_exit_code_of_test_sh(tmp_path, fails, code, ci, expected):
    """A failing part fails the whole; a missing Python 3.11 only in CI."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "test.sh").write_text((ROOT / "scripts" / "test.sh").read_text())
    (scripts / "env.sh").write_text(f"mesh_cp_root={tmp_path}\n")
    for path in (tmp_path / "bin" / "ruff", tmp_path / "bin" / "python", scripts / "compat.sh"):
        executable(path, FAKE.format(code=code))
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FAILS": fails, "LOG": str(log), "MESH_CP_CI": ci}
    assert subprocess.run(["bash", scripts / "test.sh"], env=env).returncode == expected
    if fails == "-m pytest":
        assert "compat.sh core-0.16.1" in log.read_text()  # the row says what it has to say all the same
    log.unlink(missing_ok=True)
    if fails == "nothing at all":
        assert subprocess.run(["bash", scripts / "test.sh", "tests/core"], env=env).returncode == 0
        assert "compat" not in log.read_text()
        assert "python -m pytest tests/core" in log.read_text()
