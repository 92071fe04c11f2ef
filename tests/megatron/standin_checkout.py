"""Builds a small stand-in for a Megatron-LM checkout, and patches for it, as patches/ has for real ones."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("standin") / "pretrain_gpt.py"
MARK = "# The patch goes between these two comments.\n"
# The same lines that the patches of real releases insert.
_PATCH = (ROOT / "patches" / "core_v0.19.patch").read_text()
INSERTED = [line[1:] for line in _PATCH.splitlines() if line.startswith("+") and not line.startswith("+++")]


def make_checkout(folder: Path, version: str = "0.19.9") -> Path:
    """An unpacked archive of the release: the script, and of Megatron only what tells its release.

    `megatron` has no __init__.py, so an import finds megatron.core and megatron.training in the wheel.
    """
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "training").mkdir()
    major, minor, patch = version.split(".")
    (folder / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
        "__version__ = '.'.join(map(str, (MAJOR, MINOR, PATCH)))\n"
    )
    (folder / "pretrain_gpt.py").write_text(SCRIPT.read_text())
    return folder


def make_patches(folder: Path, release: str = "0.19") -> Path:
    """A folder with releases.txt and one patch, of insertions only, for the stand-in's script."""
    folder.mkdir(parents=True)
    before = SCRIPT.read_text()
    at = before[: before.index(MARK)].count("\n") + 1
    lines = before.splitlines(keepends=True)
    after = "".join(lines[:at] + [f"{line}\n" for line in INSERTED] + lines[at:])
    sums = [hashlib.sha256(text.encode()).hexdigest() for text in (before, after)]
    (folder / "releases.txt").write_text(f"# comment\n\n{release} pretrain_gpt.py {sums[0]} {sums[1]} tags\n")
    (folder / f"core_v{release}.patch").write_text(
        "diff --git a/pretrain_gpt.py b/pretrain_gpt.py\n--- a/pretrain_gpt.py\n+++ b/pretrain_gpt.py\n"
        f"@@ -{at},0 +{at + 1},{len(INSERTED)} @@\n" + "".join(f"+{line}\n" for line in INSERTED)
    )
    return folder


def apply_patches(*words: object) -> subprocess.CompletedProcess[str]:
    """scripts/apply_patches.sh with these words."""
    script = ROOT / "scripts" / "apply_patches.sh"
    return subprocess.run([str(script), *map(str, words)], capture_output=True, text=True, timeout=60)
