"""Real text for a first training run, from what every machine has: the Python standard library's sources.

    python -m megatron_mesh_cp.megatron.text_data PREFIX [--max-bytes N]

writes PREFIX.bin and PREFIX.idx, a Megatron IndexedDataset, and PREFIX.json, a marker saying who made them. A
token is a byte (0 to 255); token 256 ends each document, which is one source file. Train on it with
`--data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257`: NullTokenizer takes the last id, 256, as
end of document, and Megatron pads the 257 rows to a multiple of 128 times the tensor-parallel size.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_MADE_BY = "megatron_mesh_cp.megatron.text_data"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class DatasetInfo:
    """A data set on disk: `PREFIX.bin` and `PREFIX.idx`, its number of documents, its tokens (with ends)."""

    prefix: Path
    documents: int
    tokens: int


def build_text_dataset(prefix: Path, *, max_bytes: int | None = None, progress: bool = True) -> DatasetInfo:
    """Build the byte-level data set at `prefix`, or reuse the one an earlier call made there.

    The files are written to a temporary folder beside `prefix` and renamed, PREFIX.idx last: whatever stops a
    build, there is never an index without its data. The next call completes what was interrupted.

    Args:
        prefix: path of the files without their suffixes; missing folders are made.
        max_bytes: stop after this many bytes of text (the last document is cut); None takes all, about 12 MB.
        progress: show a progress bar and what was done, on stderr.

    Returns:
        What lies at `prefix`.

    Raises:
        ValueError: `max_bytes` is below 1; or a data set made by this function is there but was changed
            since, or was made with another `max_bytes` or Python version.
        FileExistsError: files are there that this function did not make. Nothing is ever overwritten.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    prefix = Path(prefix)
    source = {"made_by": _MADE_BY, "python": platform.python_version(), "max_bytes": max_bytes}
    marker = _read_marker(prefix)
    if marker is not None:
        _check_same_source(prefix, marker, source)
        if _all_files_match(prefix, marker):
            if progress:
                print(f"reusing {_describe(prefix, marker)}", file=sys.stderr)
            return DatasetInfo(prefix, marker["documents"], marker["tokens"])

    prefix.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.building-", dir=prefix.parent))
    try:
        marker = source | _write(building, max_bytes, progress)
        _publish(building, prefix, marker)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if progress:
        print(f"wrote {_describe(prefix, marker)}", file=sys.stderr)
    return DatasetInfo(prefix, marker["documents"], marker["tokens"])


def source_files() -> list[Path]:
    """The standard library's `*.py` files, without tests and installed packages, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in files if not _LEFT_OUT.intersection(path.parts))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _documents(max_bytes: int | None, progress: bool) -> Iterator[bytes]:
    from rich.console import Console
    from rich.progress import track

    left = max_bytes
    console = Console(stderr=True)
    for path in track(source_files(), "standard library", console=console, disable=not progress):
        text = path.read_bytes()[:left]
        if text:
            yield text
        if left is not None:
            left -= len(text)
            if left == 0:
                return


def _write(folder: Path, max_bytes: int | None, progress: bool) -> dict[str, int | str]:
    """Write data.bin and data.idx into `folder`; return what the marker says about them."""
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Apex and Transformer Engine are absent matters to no data set
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # takes seconds

    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=np.uint16)
    documents = tokens = 0
    for text in _documents(max_bytes, progress):
        ids = np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(ids, [len(ids)])
        documents, tokens = documents + 1, tokens + len(ids)
    builder.finalize(str(folder / "data.idx"))
    return {
        "documents": documents,
        "tokens": tokens,
        "bin_bytes": (folder / "data.bin").stat().st_size,
        "idx_bytes": (folder / "data.idx").stat().st_size,
        "idx_sha256": _sha256(folder / "data.idx"),
    }


def _publish(building: Path, prefix: Path, marker: dict) -> None:
    """Move the files to their names: the marker first, so that an interrupted move is known to be ours."""
    (building / "data.json").write_text(json.dumps(marker, indent=2) + "\n")
    for suffix in (".json", ".bin", ".idx"):
        made, final = building / f"data{suffix}", _with(prefix, suffix)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        if not (final.exists() and _matches(final, suffix, marker)):
            os.link(made, final)  # unlike a rename it fails, and overwrites nothing, if the name is taken


def _read_marker(prefix: Path) -> dict | None:
    """The marker at `prefix`; None if nothing is there at all."""
    path = _with(prefix, ".json")
    try:
        marker = json.loads(path.read_text())
        if marker["made_by"] == _MADE_BY and marker.keys() >= {"documents", "tokens", "idx_sha256"}:
            return marker
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError):  # some other file of that name
        pass
    taken = [str(name) for suffix in (".json", ".bin", ".idx") if (name := _with(prefix, suffix)).exists()]
    if taken:
        raise FileExistsError(
            f"{', '.join(taken)}: already there and not made by {_MADE_BY} ({path.name} does not say so); "
            "choose another prefix or move the files away"
        )
    return None


def _check_same_source(prefix: Path, marker: dict, source: dict) -> None:
    for key, wanted in source.items():
        if marker.get(key) != wanted:
            raise ValueError(
                f"{prefix}: the data set there was made with {key} {marker.get(key)}, asked for is {wanted}; "
                f"choose another prefix or remove {prefix}.bin, .idx and .json"
            )


def _all_files_match(prefix: Path, marker: dict) -> bool:
    """True if both files are there and as the marker says; False if one is missing (an interrupted build)."""
    there = [suffix for suffix in (".bin", ".idx") if _with(prefix, suffix).exists()]
    for suffix in there:
        if not _matches(_with(prefix, suffix), suffix, marker):
            raise ValueError(
                f"{_with(prefix, suffix)} was changed since it was made ({prefix}.json says otherwise); "
                f"choose another prefix or remove {prefix}.bin, .idx and .json"
            )
    return len(there) == 2


def _matches(path: Path, suffix: str, marker: dict) -> bool:
    if suffix == ".json":
        return json.loads(path.read_text()) == marker
    if path.stat().st_size != marker[f"{suffix[1:]}_bytes"]:
        return False
    return suffix == ".bin" or _sha256(path) == marker["idx_sha256"]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)  # not with_suffix(): a prefix may hold a dot


def _describe(prefix: Path, marker: dict) -> str:
    return f"{prefix}.bin and .idx: {marker['documents']:,} documents, {marker['tokens']:,} tokens"


def main(argv: list[str] | None = None) -> None:
    """The command `python -m megatron_mesh_cp.megatron.text_data`."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_mesh_cp.megatron.text_data",
        description="Build a byte-level Megatron data set from the Python standard library's sources.",
    )
    parser.add_argument("prefix", type=Path, help="path of the files, without .bin and .idx")
    parser.add_argument("--max-bytes", type=int, help="stop after this many bytes of text (default: all)")
    args = parser.parse_args(argv)
    try:
        build_text_dataset(args.prefix, max_bytes=args.max_bytes)
    except (ValueError, FileExistsError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
