"""The text data set: right bytes, built once, whole or not at all, and never over somebody else's files."""

import json
import os

import numpy as np
import pytest

from megatron_mesh_cp.megatron import text_data
from megatron_mesh_cp.megatron.text_data import build_text_dataset

SUFFIXES = (".bin", ".idx", ".json")
SOME = 100_000  # bytes


def _build(prefix, max_bytes=SOME, progress=False):
    return build_text_dataset(prefix, max_bytes=max_bytes, progress=progress)


def _files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_megatron_reads_back_the_bytes_of_the_sources_with_an_end_after_each(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    info = _build(tmp_path / "text")
    dataset = IndexedDataset(str(info.prefix))
    sources = [text for path in text_data.source_files() if (text := path.read_bytes())][: len(dataset)]
    assert len(dataset) == len(dataset.document_indices) - 1 == info.documents > 5
    assert dataset[0].dtype == np.uint16
    for document, source in zip(dataset, sources, strict=True):
        assert document[-1] == text_data.END_OF_DOCUMENT
        assert source.startswith(document[:-1].astype(np.uint8).tobytes())
        assert len(document) - 1 == len(source) or source is sources[-1], "only the last one may be cut"
    assert sum(map(len, dataset)) == info.tokens == SOME + info.documents


def test_null_tokenizer_ends_documents_with_the_same_token():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    assert NullTokenizer(text_data.VOCAB_SIZE).eod == text_data.END_OF_DOCUMENT


def test_sources_are_the_library_without_tests_and_installed_packages():
    names = [path.as_posix() for path in text_data.source_files()]
    assert names == sorted(names)
    assert len(names) > 300
    assert not [name for name in names if "/site-packages/" in name or "/test/" in name]


def test_the_second_call_reuses_the_files_and_says_so(tmp_path, capsys):
    first = _build(tmp_path / "text", progress=True)
    before = {name: os.stat(tmp_path / name).st_mtime_ns for name in _files(tmp_path)}
    assert "wrote" in capsys.readouterr().err
    assert _build(tmp_path / "text", progress=True) == first
    assert "reusing" in capsys.readouterr().err
    assert before == {name: os.stat(tmp_path / name).st_mtime_ns for name in _files(tmp_path)}
    assert set(before) == {"text.bin", "text.idx", "text.json"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rejects_files_it_did_not_make_and_leaves_them_alone(tmp_path, suffix):
    theirs = tmp_path / f"text{suffix}"
    theirs.write_text('{"made_by": "somebody"}')
    with pytest.raises(FileExistsError, match="not made by"):
        _build(tmp_path / "text")
    assert _files(tmp_path) == [theirs.name]
    assert theirs.read_text() == '{"made_by": "somebody"}'


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_rejects_a_data_set_that_was_changed_since(tmp_path, suffix):
    _build(tmp_path / "text")
    path = tmp_path / f"text{suffix}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if suffix == ".idx" else content[:-2])
    with pytest.raises(ValueError, match=f"text{suffix} was changed"):
        _build(tmp_path / "text")


@pytest.mark.parametrize(("key", "value"), [("max_bytes", 5), ("python", "3.0.0")])
def test_rejects_a_data_set_of_another_size_or_python(tmp_path, key, value):
    _build(tmp_path / "text")
    marker = json.loads((tmp_path / "text.json").read_text())
    (tmp_path / "text.json").write_text(json.dumps(marker | {key: value}))
    with pytest.raises(ValueError, match=f"made with {key} {value}"):
        _build(tmp_path / "text")


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def two_then_failure(max_bytes, progress):
        yield b"one"
        yield b"two"
        raise KeyboardInterrupt

    monkeypatch.setattr(text_data, "_documents", two_then_failure)
    with pytest.raises(KeyboardInterrupt):
        _build(tmp_path / "text")
    assert _files(tmp_path) == []


@pytest.mark.parametrize("moved", [1, 2])
def test_a_build_stopped_while_its_files_get_their_names_is_incomplete_and_the_next_completes_it(
    tmp_path, monkeypatch, moved
):
    link, calls = os.link, []

    def stop_after(source, target):
        if len(calls) == moved:
            raise KeyboardInterrupt
        calls.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", stop_after)
    with pytest.raises(KeyboardInterrupt):
        _build(tmp_path / "text")
    monkeypatch.undo()
    assert "text.idx" not in _files(tmp_path), "an index makes it look complete"
    info = _build(tmp_path / "text")
    assert _files(tmp_path) == ["text.bin", "text.idx", "text.json"]
    assert _build(tmp_path / "text") == info


def test_rejects_no_bytes_at_all(tmp_path):
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        _build(tmp_path / "text", max_bytes=0)


def test_a_prefix_may_hold_a_dot(tmp_path):
    _build(tmp_path / "text.v1")
    assert _files(tmp_path) == ["text.v1.bin", "text.v1.idx", "text.v1.json"]


def test_the_command_builds_and_ends_with_one_line_on_a_mistake(tmp_path, capsys):
    text_data.main([str(tmp_path / "text"), "--max-bytes", "1000"])
    with pytest.raises(SystemExit) as stop:
        text_data.main([str(tmp_path / "text"), "--max-bytes", "1001"])
    assert stop.value.code == 1
    assert "asked for is 1001" in capsys.readouterr().err.splitlines()[-1]
