#!/usr/bin/env python
"""Mesh-Attention in real Megatron-LM releases, on CPU ranks: `python scripts/stock_check.py CLONE [TAG ...]`.

For each tag of the Megatron-LM clone (bare ones too; it is only read) in a temporary checkout: train a few iterations
through `-m megatron_mesh_cp.megatron.run` on the unpatched script, check and apply the patch, train the same through
the patched script, take the patch out again and see that nothing is left. Losses and gradient norms must be the same.
Needs this project's environment with the megatron-core wheel of this platform (for its compiled data helper), git and
tar; about two minutes a tag on 2 cores. Exit code 1 on any difference or failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAGS = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")
# What a release imports at start and this project's environment does not have.
NEEDS = {"core_v0.16": ("six", "regex", "pydantic")}
TIMEOUT = 600  # seconds for one training run
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --lr-decay-iters 5 --train-iters 5 --log-interval 1
    --eval-interval 5 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 257 --split 80,10,10
    --num-workers 0 --clip-grad 0.5 --seed 7 --no-create-attention-mask-in-dataloader
    --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --context-parallel-algo mesh
"""


class CheckFailedError(Exception):
    """What went wrong with one tag, in a line or the end of a log."""


def export(clone: Path, tag: str, folder: Path) -> Path:
    """A checkout of the tag: a git repository of its own with one commit."""
    checkout = folder / "Megatron-LM"
    checkout.mkdir()
    archive = subprocess.Popen(["git", "-C", str(clone), "archive", tag], stdout=subprocess.PIPE)
    unpacked = subprocess.run(["tar", "-x", "-C", str(checkout)], stdin=archive.stdout, capture_output=True)
    if archive.wait() or unpacked.returncode:
        raise CheckFailedError(f"cannot export {tag} of {clone}")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A", "-f")
    git(checkout, "-c", "user.name=check", "-c", "user.email=check@localhost", "commit", "-q", "-m", tag)
    return checkout


def git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
    if done.returncode:
        raise CheckFailedError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def give_compiled_helper(checkout: Path, folder: Path) -> None:
    """Put the wheel's compiled data helper into the checkout, where `make` then finds nothing to do.

    The source of the helper is the same in all these releases. In `folder/bin`, for PATH, comes a `python3-config`
    that speaks of this interpreter (a virtual environment has none, and the system's may be of another Python).
    """
    wheel = Path(next(iter(find_spec("megatron").submodule_search_locations)), "core", "datasets")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    # copy(), not copy2(): the helper must be newer than its source
    shutil.copy(wheel / f"helpers_cpp{suffix}", checkout / "megatron" / "core" / "datasets")
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    config = bin_folder / "python3-config"
    config.write_text(f"#!/bin/sh\necho {suffix}\n")
    config.chmod(0o755)


def install_needs(tag: str, folder: Path) -> None:
    """Put the packages that only this release needs into `folder/needs`, for PYTHONPATH."""
    target = folder / "needs"
    target.mkdir()
    for package in NEEDS.get(tag.rpartition(".")[0], ()):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), package]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise CheckFailedError(f"pip install {package}: {done.stderr.strip()[-500:]}")


def train(start: list[str], ranks: int, folder: Path) -> list[tuple[str, str]]:
    """Loss and gradient norm of each iteration, as printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(port), *start, *shlex.split(FLAGS), "--context-parallel-size", str(ranks)]
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    env = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "needs"), env.get("PYTHONPATH"))))
    with open(folder / "log", "w+") as log:
        try:
            done = subprocess.run(
                command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise CheckFailedError(f"{shlex.join(start)}: no end in {TIMEOUT} s") from None
        log.seek(0)
        text = log.read()
    if done.returncode:
        raise CheckFailedError(f"{shlex.join(start)}: exit code {done.returncode}\n{text[-3000:]}")
    if text.count("[mesh-cp] Mesh-Attention is on") != 1:
        raise CheckFailedError(f"{shlex.join(start)}: no start-up receipt")
    return re.findall(r"iteration +\d+/.*?lm loss: (\S+) .*?grad norm: (\S+) ", text)


def patch(checkout: Path, *options: str) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "apply_patches.sh"), str(checkout), *options], capture_output=True, text=True
    )
    print(f"    {(done.stdout + done.stderr).strip()}".replace(str(checkout), "the checkout"), flush=True)
    if done.returncode:
        raise CheckFailedError(f"apply_patches.sh: exit code {done.returncode}")


def check(clone: Path, tag: str, ranks: int) -> list[tuple[str, str]]:
    """The losses and gradient norms of the tag, which are the same with and without the patch."""
    with tempfile.TemporaryDirectory(prefix="stock-check-") as name:
        folder = Path(name)
        checkout = export(clone, tag, folder)
        give_compiled_helper(checkout, folder)
        install_needs(tag, folder)
        script = str(checkout / "pretrain_gpt.py")
        unpatched = train(["-m", "megatron_mesh_cp.megatron.run", script], ranks, folder)
        if git(checkout, "status", "--porcelain", "--untracked-files=no"):
            raise CheckFailedError("the run changed tracked files of the checkout")
        patch(checkout, "--check")
        patch(checkout)
        removed = [line.split()[1] for line in git(checkout, "diff", "--numstat").splitlines()]
        if not removed or set(removed) != {"0"}:
            raise CheckFailedError(f"the patch is not one of pure insertions: {removed}")
        patched = train([script], ranks, folder)
        patch(checkout, "--reverse")
        if git(checkout, "status", "--porcelain", "--untracked-files=no"):
            raise CheckFailedError("the patch left something behind")
    if len(unpatched) != 5 or unpatched != patched:
        raise CheckFailedError(f"unpatched {unpatched}, patched {patched}")
    return unpatched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of github.com/NVIDIA/Megatron-LM with its tags")
    parser.add_argument("tags", nargs="*", default=list(TAGS), help=f"default: {' '.join(TAGS)}")
    parser.add_argument("--ranks", type=int, default=4, help="ranks = context-parallel size (default 4)")
    options = parser.parse_args()
    rows = []
    for tag in options.tags:
        print(f"{tag} ...", flush=True)
        try:
            figures = check(options.clone, tag, options.ranks)
        except CheckFailedError as error:
            print(f"    FAILED: {error}", flush=True)
            rows.append((tag, "FAILED", ""))
        else:
            rows.append((tag, "equal", " ".join(loss for loss, _ in figures)))
    width = max(len(tag) for tag, _, _ in rows)
    print(f"\n{'tag':{width}}  patched vs run   losses of 5 iterations, {options.ranks} ranks")
    for tag, verdict, losses in rows:
        print(f"{tag:{width}}  {verdict:15}  {losses}")
    return int(any(verdict != "equal" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
