"""Run the tests marked `compat` in one environment per row of versions, and print a table; called by compat.sh.

Environments lie in .compat/ and are used again until what they were made from changes. Exit codes: 0 all rows passed,
1 a row failed, 2 wrong usage, 3 none failed but one could not run because its Python is not on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import compat_env
from compat_env import ROOT, ROWS, NoPython, Row
from compat_table import COLUMNS, Result, as_text, write_markdown

LIMIT = 1200  # seconds a row's tests may take; 2 minutes on two idle cores
# What the environment of a row sees of the caller's: nothing that changes which versions are imported, or which tests
# run with what.
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS", "MESH_CP_REQUIRE")
VERSIONS = """
import importlib.metadata as metadata, importlib.util as util, platform, sys, torch, megatron.core
print("python", platform.python_version())
print("torch", torch.__version__)
version = megatron.core.__version__.split("+")[0]  # it adds the commit of a checkout around it, ours
print("megatron-core", version, megatron.core.__file__)
sys.path.insert(0, sys.prefix + "/te")
if te := util.find_spec("transformer_engine"):  # not imported: without its compiled part that fails
    print("transformer-engine", metadata.version("transformer-engine"), te.origin)
"""


@dataclass(frozen=True)
class Outcome:
    """What a pytest run came to: counts, and how many of the tests under tests/te passed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    te_passed: int = 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        for row in ROWS.values():
            print(f"{row.name:24}{row.describe()}")
        return 0
    results = []
    for row in [ROWS[name] for name in args.rows] or [row for row in ROWS.values() if not row.optional]:
        begin = time.monotonic()
        try:
            result = run(row)
        except NoPython as error:
            result = Result(row.name, note=f"not run: {error}")
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            result = Result(row.name, ok=False, note=str(error))
        if row.optional and not args.keep:
            shutil.rmtree(row.folder, ignore_errors=True)
        if result.note:
            print(f"mesh-cp: row {row.name}: {result.note}", file=sys.stderr, flush=True)
        results.append(result.timed(time.monotonic() - begin))
        if args.markdown:  # after each row: an interrupted run keeps what it has
            write_markdown(args.markdown, results, list(ROWS))
    print(as_text(results))
    return 1 if any(r.ok is False for r in results) else 3 if any(r.ok is None for r in results) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 and the rows there are for a name that is none."""
    parser = argparse.ArgumentParser(prog="scripts/compat.sh", description="Run the compat tests with other versions.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run; default: all that are not optional")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the environments of optional rows too (5 GB each)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help=f"write the table ({', '.join(COLUMNS)}) into FILE"
    )
    args = parser.parse_args(argv)
    for name in args.rows:
        if name not in ROWS:
            parser.error(f"unknown row {name}: choose from {', '.join(ROWS)}")
    if args.markdown and not args.markdown.is_file():
        parser.error(f"--markdown {args.markdown}: no such file; it must exist and hold the two marks of the table")
    return args


def run(row: Row) -> Result:
    """Make the row's environment, check what it imports, run the tests. Raises NoPython where there is none for it."""
    say(f"row {row.name}: {row.describe()}")
    python = compat_env.make(row)
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    env |= {"PYTHONPATH": str(ROOT), "MESH_CP_REQUIRE": ",".join(row.requires)}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    versions = imported_versions(row, python, env)
    report = row.folder / "tests.xml"
    report.unlink(missing_ok=True)
    with (row.folder / "tests.log").open("w") as log:
        options = ["-m", "compat", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [str(python), "-m", "pytest", *options]
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=LIMIT).returncode
    outcome = read_report(report) if report.is_file() else Outcome()
    problem = verdict(row, code, outcome)
    if problem:
        tail = (row.folder / "tests.log").read_text(errors="replace").splitlines()[-40:]
        print("\n".join(tail), file=sys.stderr, flush=True)
    counts = {"passed": outcome.passed, "failed": outcome.failed, "skipped": outcome.skipped}
    return Result(row.name, not problem, problem, versions, counts)


def imported_versions(row: Row, python: Path, env: dict[str, str]) -> dict[str, str]:
    """Package -> version, as the row's interpreter imports it.

    Raises ValueError where it is not the row's version, or comes from another environment than the row's.
    """
    done = subprocess.run(
        [python, "-W", "ignore", "-c", VERSIONS], cwd=row.folder, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"its packages do not import: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    found = {line[0]: line[1] for line in lines}
    for package, wanted in row.packages.items():
        if found.get(package, "none").split("+")[0] != wanted:
            raise ValueError(f"{package} {found.get(package, 'none')} is imported where the row has {wanted}")
    for package, _, *file in lines:
        if file and not Path(file[0]).is_relative_to(row.folder):
            raise ValueError(f"{package} is imported from {file[0]}, not from the row's environment")
    if "transformer-engine" in found and "transformer-engine" not in row.packages:
        raise ValueError(f"transformer-engine {found['transformer-engine']} is imported where the row has none")
    return found


def read_report(report: Path) -> Outcome:
    """Counts of a JUnit file; an error of a fixture or of a collection is a failure."""
    passed = failed = skipped = te = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
            te += case.get("classname", "").startswith("tests.te.")
    return Outcome(passed, failed, skipped, te)


def verdict(row: Row, code: int, outcome: Outcome) -> str:
    """Why the row fails; empty where it passes. code: pytest's exit code."""
    if outcome.failed or code:
        return f"{outcome.failed} failed, pytest's exit code is {code}; see {row.folder / 'tests.log'}"
    if not outcome.passed:
        return "no test ran"
    if "te" in row.requires and not outcome.te_passed:
        return "no test of tests/te passed, and this row is for them"
    return ""


def say(text: str) -> None:
    print(f"mesh-cp: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
