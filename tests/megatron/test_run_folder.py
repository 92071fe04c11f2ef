"""`--save` never lands in a folder that holds something, unless the run resumes it."""

import os
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_mesh_cp.megatron.run_folder import check_save_folder


def _args(save: Path | None, load: Path | None = None, **more: object) -> Namespace:
    return Namespace(save=save and str(save), load=load and str(load), **more)


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "iter_0000020").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return folder


def test_allows_no_save_a_new_folder_and_an_empty_one(tmp_path):
    check_save_folder(_args(None))
    check_save_folder(_args(tmp_path / "new"))
    assert not (tmp_path / "new").exists(), "the check must not write"
    check_save_folder(_args(tmp_path))


def test_rejects_a_folder_with_a_checkpoint_and_says_what_it_holds_and_what_to_do(checkpoints):
    with pytest.raises(ValueError) as caught:
        check_save_folder(_args(checkpoints))
    message = str(caught.value)
    for part in (
        f"--save {checkpoints}",
        "iteration 20",
        "no --load",
        f"--load {checkpoints}",
        "empty folder",
    ):
        assert part in message


def test_rejects_a_checkpoint_without_its_tracker_file(checkpoints):
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match="iter_0000020"):
        check_save_folder(_args(checkpoints))


def test_allows_a_resume_however_the_folder_is_spelled(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(checkpoints)
    for load in (checkpoints, Path("run"), tmp_path / "link", Path(f"{checkpoints}{os.sep}")):
        check_save_folder(_args(checkpoints, load))


def test_rejects_a_used_folder_when_load_names_another(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="--load names another folder"):
        check_save_folder(_args(checkpoints, tmp_path))


def test_rejects_a_folder_with_other_things_in_it(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"1 entry \(notes.txt\)"):
        check_save_folder(_args(tmp_path))


def test_rejects_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        check_save_folder(_args(tmp_path / "file"))


@pytest.mark.parametrize(
    ("made", "flags"),
    [
        ("logs/tb/events.out.tfevents.1", {"tensorboard_dir": "logs/tb"}),
        ("events.out.tfevents.1", {"tensorboard_dir": "."}),
        ("w/run/log", {"wandb_save_dir": "w"}),
        ("wandb/run/log", {"wandb_project": "p"}),
    ],
)
def test_what_a_faster_rank_of_the_same_run_logs_there_does_not_count(tmp_path, made, flags):
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    flags = {name: value if name == "wandb_project" else str(tmp_path / value) for name, value in flags.items()}
    check_save_folder(_args(tmp_path, **flags))
    with pytest.raises(ValueError):
        check_save_folder(_args(tmp_path))  # without the flag they are somebody else's
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(ValueError, match="iter_0000001"):
        check_save_folder(_args(tmp_path, **flags))
