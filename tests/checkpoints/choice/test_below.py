"""A job that begins from nothing says what lies there: further down, of an unknown format, or the directory itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ext.agent.launch import start_line
from elastic_ext.base.exchange import SingleNode
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import below, resolution
from elastic_ext.checkpoints.choice.resolution import Place, Resumption
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import TRAINING, WEIGHTS, saved, tensors, text


def said(directory: Path) -> str:
    return below.seen_in(open_storage(str(directory)))


def resumed(directory: Path) -> Resumption:
    return resolution.agree(Settings(checkpoint_dir=str(directory)), "run", SingleNode(), Place())


def test_where_lightning_puts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lightning_logs"
    for version in (0, 1):
        saved(folder / f"version_{version}" / "checkpoints" / f"epoch={version}-step=100.ckpt", TRAINING, version)
        text(folder / f"version_{version}" / "hparams.yaml", "a: 1")
    where = ", ".join(str(folder / f"version_{v}" / "checkpoints" / f"epoch={v}-step=100.ckpt") for v in (1, 0))
    assert said(tmp_path) == f"checkpoints lie further down: {where}; set checkpoint_dir to the directory that holds them"
    found = resumed(tmp_path)
    assert (found.path, found.at) == ("", None)  # what the script begins with is not known
    line = start_line("ext_c10d", "run", None, Settings(checkpoint_dir=str(tmp_path)), found)
    assert where in line
    assert "a script that trusts resume_from() begins from scratch" in line
    assert main.main(["checkpoints", "ls", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"nothing to resume from: checkpoints lie further down: {where}")
    assert "begins from scratch" in last


@pytest.mark.parametrize(
    "name",
    ["step_100.npz", "model.pkl", "ckpt_5.msgpack", "state_200.tar", "model_latest.h5", "200.weights", "step_7/weights.npz"],
)
def test_what_is_of_an_unknown_format(tmp_path: Path, name: str) -> None:
    text(tmp_path / name, "data")
    text(tmp_path / "train_5.log", "a log")
    shown = tmp_path / name.partition("/")[0]
    assert said(tmp_path) == f"of an unknown format: {shown}; if they are checkpoints, set checkpoint_pattern to their names"
    assert resumed(tmp_path).at is None


def test_a_directory_that_is_a_checkpoint_itself(tmp_path: Path) -> None:
    scenes.accelerate(tmp_path)
    assert (
        said(tmp_path) == f"{tmp_path} looks like a checkpoint of accelerate itself: set checkpoint_dir to the directory above it"
    )


def test_where_there_is_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert said(tmp_path / "none") == ""
    for name in (
        "train_5.log",
        "config.yaml",
        "events.out.tfevents.17",
        "metrics_100.csv",
        ".hidden_5",
        "epoch_3.json",
        "empty_5.x",
    ):
        text(tmp_path / name, "" if name == "empty_5.x" else "text")
    for folder in ("logs", "version_1", ".git"):
        text(tmp_path / folder / "notes.txt", "text")
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "trip").symlink_to(tmp_path)
    tensors(tmp_path / "llama" / "model.safetensors")
    assert said(tmp_path) == ""
    assert resumed(tmp_path) == Resumption(reason=f"no complete checkpoint in {tmp_path}")


def test_torn_ones_are_not_further_down(tmp_path: Path) -> None:
    """Their files are no checkpoints."""
    (scenes.trainer(tmp_path / "checkpoint-5", 5) / "trainer_state.json").unlink()
    scenes.shards(tmp_path / "step_5").joinpath(".metadata").unlink()
    saved(tmp_path / "step_5" / "extra_1.pt")
    assert said(tmp_path) == ""


def test_a_deep_and_wide_directory_costs_a_bounded_time(tmp_path: Path) -> None:
    for number in range(below.MAX_FOLDERS + 50):
        (tmp_path / f"sample{number}").mkdir()
    deep = tmp_path.joinpath(*"abcdefg")
    saved(deep / "step_3.pt")
    assert said(tmp_path) == ""
    assert said(tmp_path.joinpath(*"abc")) != ""


def test_a_question_is_asked_in_the_first_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model_9.pt", "ema_9.pt"):
        saved(tmp_path / name, WEIGHTS)
    found = resumed(tmp_path)
    assert found.path == ""
    line = start_line("ext_c10d", "run", None, Settings(checkpoint_dir=str(tmp_path)), found)
    main.main(["checkpoints", "ls", str(tmp_path)])
    for shown in (line, capsys.readouterr().out.splitlines()[-1]):
        assert "ema_9.pt, model_9.pt belong together" in shown
        assert "set checkpoint_pattern" in shown
        assert "begins from scratch" in shown


@pytest.mark.skipif(os.getuid() == 0, reason="permission bits do not bind root")
def test_what_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0)
    assert said(tmp_path) == ""
