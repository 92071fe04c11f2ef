"""scripts/apply_patches.sh and patches/: applied, reversed, checked, and never to a file that is not known."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from standin_checkout import INSERTED, ROOT, SCRIPT, apply_patches, make_checkout, make_patches

PATCHES = ROOT / "patches"
TABLE = [line.split() for line in (PATCHES / "releases.txt").read_text().splitlines() if line[:1] not in ("", "#")]


@pytest.fixture
def patches(tmp_path) -> Path:
    return make_patches(tmp_path / "patches")


@pytest.fixture(params=["archive", "git repository", "archive inside another repository"])
def checkout(request, tmp_path) -> Path:
    folder = make_checkout(tmp_path / "outer" / "Megatron-LM")
    where = {"git repository": folder, "archive inside another repository": folder.parent}.get(request.param)
    if where:
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
            subprocess.run(["git", *words], cwd=where, check=True)
    return folder


def text(checkout: Path) -> str:
    return (checkout / "pretrain_gpt.py").read_text()


def test_applied_reversed_and_nothing_is_left(checkout, patches):
    released = text(checkout)
    done = apply_patches(checkout, "--patches", patches)
    assert (done.returncode, done.stderr) == (0, "")
    assert "core_v0.19.9" in done.stdout
    assert "applied core_v0.19.patch to pretrain_gpt.py" in done.stdout
    patched = text(checkout)
    assert [line for line in patched.splitlines() if line not in released.splitlines()] == INSERTED
    assert len(patched.splitlines()) == len(released.splitlines()) + len(INSERTED)
    again = apply_patches(checkout, "--patches", patches)
    assert (again.returncode, text(checkout)) == (0, patched)
    assert "was applied already" in again.stdout
    back = apply_patches("--reverse", checkout, "--patches", patches)
    assert (back.returncode, text(checkout)) == (0, released)
    assert "took core_v0.19.patch out of pretrain_gpt.py" in back.stdout
    assert "is not applied" in apply_patches("--reverse", checkout, "--patches", patches).stdout


def test_check_changes_nothing(checkout, patches):
    released = text(checkout)
    done = apply_patches(checkout, "--check", "--patches", patches)
    assert (done.returncode, text(checkout)) == (0, released)
    assert "would apply" in done.stdout
    apply_patches(checkout, "--patches", patches)
    assert "applied already" in apply_patches(checkout, "--check", "--patches", patches).stdout


@pytest.mark.parametrize("mode", [[], ["--check"], ["--reverse"]])
@pytest.mark.parametrize("patched_before", [False, True])
def test_rejects_a_file_with_local_changes_and_leaves_it_alone(checkout, patches, mode, patched_before):
    """A hunk without context would go in at its line number wherever that is now."""
    if patched_before:
        apply_patches(checkout, "--patches", patches)
    (checkout / "pretrain_gpt.py").write_text("# mine\n" + text(checkout))
    before = text(checkout)
    done = apply_patches(checkout, *mode, "--patches", patches)
    assert (done.returncode, text(checkout)) == (1, before)
    assert "is not that of a known release" in done.stderr
    assert "megatron_mesh_cp.megatron.run" in done.stderr


def test_rejects_a_patch_that_makes_something_else_of_the_file(checkout, patches):
    file, released = patches / "core_v0.19.patch", text(checkout)
    file.write_text(file.read_text().replace("mesh_cp.hook()", "mesh_cp.hock()"))
    done = apply_patches(checkout, "--patches", patches)
    assert (done.returncode, text(checkout)) == (1, released)
    assert "does not make of pretrain_gpt.py what releases.txt says; undone" in done.stderr


def test_rejects_an_unknown_release_naming_the_known_ones_and_the_way_without_a_patch(tmp_path):
    folder = make_checkout(tmp_path / "MLM", "0.21.3")
    done = apply_patches(folder)
    assert (done.returncode, text(folder)) == (1, SCRIPT.read_text())
    assert "Megatron-LM core_v0.21.3; known releases: core_v0.16 core_v0.17 core_v0.18 core_v0.19;" in done.stderr
    assert "-m megatron_mesh_cp.megatron.run PATH/pretrain_gpt.py` needs no patch" in done.stderr


def test_rejects_a_known_release_whose_file_is_missing_or_whose_version_cannot_be_read(tmp_path, patches):
    folder = make_checkout(tmp_path / "MLM")
    (folder / "pretrain_gpt.py").unlink()
    assert "pretrain_gpt.py is missing" in apply_patches(folder, "--patches", patches).stderr
    (folder / "megatron" / "core" / "package_info.py").write_text("VERSION = 3\n")
    assert "cannot read the release" in apply_patches(folder, "--patches", patches).stderr


def test_rejects_two_files_of_which_one_is_patched(tmp_path, patches):
    folder = make_checkout(tmp_path / "MLM")
    table = patches / "releases.txt"
    table.write_text(table.read_text() + table.read_text().replace("pretrain_gpt.py", "other.py"))
    (folder / "other.py").write_text(text(folder))
    apply_patches(folder, "--patches", make_patches(tmp_path / "more"))
    done = apply_patches(folder, "--patches", patches)
    assert done.returncode == 1
    assert "is half patched" in done.stderr
    assert (folder / "other.py").read_text() == SCRIPT.read_text()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "scripts/apply_patches.sh CHECKOUT"),
        (["/", "/"], 2, "one checkout at a time"),
        (["/", "--undo"], 2, "--undo: unknown option"),
        (["/", "--check", "--reverse"], 2, "give one of them"),
        (["/", "--patches"], 2, "the folder is missing"),
        (["/", "--patches", "/nowhere"], 1, "/nowhere: no releases.txt"),
        (["/nowhere"], 1, "/nowhere: not a Megatron-LM checkout"),
    ],
)
def test_rejects_wrong_words_and_folders(words, code, message):
    done = apply_patches(*words)
    assert done.returncode == code
    assert message in done.stderr


def test_it_needs_only_bash_git_and_coreutils(tmp_path, patches):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "git", "dirname", "sha256sum"):
        found = next(p for p in map(Path, ("/usr/bin", "/bin", "/usr/local/bin")) if (p / tool).exists()) / tool
        (tools / tool).symlink_to(found)
    folder = make_checkout(tmp_path / "MLM")
    command = [str(tools / "bash"), str(ROOT / "scripts" / "apply_patches.sh"), str(folder), "--patches", str(patches)]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_patch_is_of_insertions_only_and_has_its_row():
    assert sorted({row[0] for row in TABLE}) == ["0.16", "0.17", "0.18", "0.19"]
    assert {f"core_v{row[0]}.patch" for row in TABLE} == {path.name for path in PATCHES.glob("*.patch")}
    for path in PATCHES.glob("*.patch"):
        hunks = path.read_text().split("\n@@ ")
        heads = re.findall(r"^\+\+\+ b/(.*)$", path.read_text(), re.MULTILINE)
        assert heads == [row[1] for row in TABLE if f"core_v{row[0]}.patch" == path.name]
        assert len(hunks) == 2
        first, *lines = hunks[1].rstrip("\n").split("\n")
        assert re.fullmatch(r"-\d+,0 \+\d+,2 @@", first)  # no line of Megatron's, not even behind the @@
        assert [line[1:] for line in lines] == INSERTED
        assert all(line.startswith("+") for line in lines)
    for row in TABLE:
        assert all(re.fullmatch("[0-9a-f]{64}", s) for s in row[2:4])
        assert row[2] != row[3]
    assert os.access(ROOT / "scripts" / "apply_patches.sh", os.X_OK)
