"""A job that begins from nothing says what lies there: further down, of an unknown format, or the directory itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ext.agent.launch import start_line
from elastic_ext.base.contracts import Resumption
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import hints
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import TRAINING, WEIGHTS, half, reasons, resumed, saved, tensors, text

BELOW = "checkpoints lie further down: {}; set checkpoint_dir to the directory that holds them"


def said(directory: Path) -> str:
    return hints.seen_in(open_storage(str(directory)))


def test_where_lightning_puts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lightning_logs"
    for version in (0, 1):
        saved(folder / f"version_{version}" / "checkpoints" / f"epoch={version}-step=100.ckpt", TRAINING, version)
        text(folder / f"version_{version}" / "hparams.yaml", "a: 1")
    where = ", ".join(str(folder / f"version_{v}" / "checkpoints" / f"epoch={v}-step=100.ckpt") for v in (1, 0))
    assert said(tmp_path) == BELOW.format(where)
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


def test_where_there_is_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert said(tmp_path / "none") == ""
    for name in ("train_5.log", "config.yaml", "events.out.tfevents.17", "metrics_100.csv", ".hidden_5", "epoch_3.json"):
        text(tmp_path / name, "text")
    text(tmp_path / "empty_5.x", "")
    for folder in ("logs", "version_1", ".git"):
        text(tmp_path / folder / "notes.txt", "text")
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "trip").symlink_to(tmp_path)
    tensors(tmp_path / "llama" / "model.safetensors")
    assert said(tmp_path) == ""
    assert resumed(tmp_path) == Resumption(reason=f"no complete checkpoint in {tmp_path}")


def test_a_deep_directory_costs_a_bounded_time(tmp_path: Path) -> None:
    for number in range(hints.MAX_FOLDERS + 50):
        (tmp_path / f"sample{number}").mkdir()
    deep = tmp_path.joinpath(*"abcdefg")
    saved(deep / "step_3.pt")
    assert said(tmp_path) == ""
    assert said(tmp_path.joinpath(*"abc")) != ""


def test_a_question_is_asked_in_the_first_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model_9.pt", "ema_9.pt"):
        saved(tmp_path / name, WEIGHTS)
    question = (
        "ema_9.pt, model_9.pt belong together, and none is known to hold both an optimizer and what it trains: set "
        "checkpoint_pattern to the names to resume from, e.g. checkpoint_pattern=model_{step}.pt"
    )
    found = resumed(tmp_path)
    assert found.path == ""
    main.main(["checkpoints", "ls", str(tmp_path)])
    line = start_line("ext_c10d", "run", None, Settings(checkpoint_dir=str(tmp_path)), found)
    for shown in (line, capsys.readouterr().out.splitlines()[-1]):
        assert question in shown
        assert "begins from scratch" in shown
    assert resumed(tmp_path, checkpoint_pattern="model_{step}.pt").step == 9


@pytest.mark.skipif(os.getuid() == 0, reason="permission bits do not bind root")
def test_what_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0)
    assert said(tmp_path) == ""


def run_of(path: Path, make: Callable[[Path, int], Path], name: str) -> Path:
    """Two checkpoints; return the newer."""
    for step in (100, 200):
        newest = make(path / name.format(step), step)
    return newest


def deepspeed_run(path: Path) -> Path:
    text(path / "latest", "global_step200")
    return run_of(path, scenes.deepspeed, "global_step{}")


def trainer_run(path: Path) -> Path:
    return run_of(path, scenes.trainer, "checkpoint-{}")


def files_of_steps(path: Path, name: str) -> Path:
    return run_of(path, lambda file, step: saved(file, TRAINING, step), name)


@pytest.mark.parametrize(
    ("folder", "make"),
    [
        ("ckpt", lambda path: files_of_steps(path, "step_{}.pt")),
        ("ckpt", lambda path: files_of_steps(path, "model_{}.pt")),
        ("checkpoint", lambda path: files_of_steps(path, "epoch_{}.pth")),
        ("checkpoint", trainer_run),
        ("final_run", trainer_run),
        ("ckpts", deepspeed_run),
        ("run_1", deepspeed_run),
        ("ckpt_run1", lambda path: files_of_steps(path, "step_{}.pt")),
        ("llama_epoch3_lr1", lambda path: files_of_steps(path, "step_{}.pt")),
    ],
)
def test_a_directory_of_checkpoints_is_none(tmp_path: Path, folder: str, make: Callable[[Path], Path]) -> None:
    newest = make(tmp_path / folder)
    assert resumed(tmp_path).path == ""
    assert said(tmp_path) == BELOW.format(newest)
    if folder == "run_1":
        assert reasons(tmp_path)[folder].startswith("it holds checkpoints of several steps")
    make(tmp_path / folder.replace("1", "2").replace("3", "5"))
    before = sorted(tmp_path.iterdir())
    assert main.main(["checkpoints", "prune", str(tmp_path), "--keep-last=1", "--yes"]) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_deepspeeds_first_of_a_run_is_its_checkpoint(tmp_path: Path) -> None:
    """Not the directory that holds it."""
    first = scenes.deepspeed(tmp_path / "run_1" / "global_step100", 100)
    text(tmp_path / "run_1" / "latest", "global_step100")
    assert resumed(tmp_path).path == ""
    assert str(first) in said(tmp_path)


@pytest.mark.parametrize("name", ["agent_{}.pt", "stage_{}/a.pt", "{}/a.pt", "model_256x{}.pt", "checkpoint{}.pkl"])
def test_numbered_parts_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    for folder, numbers in (("step_100", (64, 256)), ("latest", (0, 1, 2))):
        for number in numbers:
            saved(tmp_path / folder / folder / name.format(number), TRAINING)
        assert resumed(tmp_path / folder).path == str(tmp_path / folder / folder)


def question(path: Path) -> None:
    for at, name in enumerate(("D_5.pth", "G_5.pth")):
        saved(path / "models" / name, TRAINING, at)


def unknown(path: Path) -> None:
    for name in ("out/step_100.npz", "out/notes_1.npz", "data/frame_1.jpg"):
        text(path / name, "data")


UNKNOWN = "of an unknown format: {}/out/step_100.npz; if they are checkpoints, set checkpoint_pattern to their names"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (scenes.accelerate, "{} looks like a checkpoint of accelerate itself: set checkpoint_dir to the directory above it"),
        (question, BELOW.format("{}/models/G_5.pth")),
        (unknown, UNKNOWN),
        (lambda path: half(files_of_steps(path / "ckpt", "step_{}.pt")), BELOW.format("{}/ckpt/step_100.pt")),
    ],
)
def test_what_is_said(tmp_path: Path, make: Callable[[Path], object], expected: str) -> None:
    make(tmp_path)
    assert said(tmp_path) == expected.format(tmp_path)


def test_what_a_tool_leaves_above_its_checkpoints(tmp_path: Path) -> None:
    """The directory is not a checkpoint itself. Nor are the files of torn ones."""
    (scenes.trainer(tmp_path / "a" / "checkpoint-5", 5) / "optimizer.pt").unlink()
    text(tmp_path / "a" / "trainer_state.json", {"global_step": 5})
    text(tmp_path / "b" / "torchtune_config.yaml", "lr: 1")
    inner = saved(tmp_path / "c" / "mp_rank_00" / "gpt--step=100.ckpt")
    half(scenes.accelerate(tmp_path / "d" / "checkpoint_5") / "optimizer.bin")
    scenes.accelerate(tmp_path / "d", weights="vae/model.safetensors")
    (scenes.trainer(tmp_path / "e" / "checkpoint-5", 5) / "trainer_state.json").unlink()
    scenes.shards(tmp_path / "e" / "step_5").joinpath(".metadata").unlink()
    saved(tmp_path / "e" / "step_5" / "extra_1.pt")
    assert [said(tmp_path / each) for each in "abcde"] == ["", "", BELOW.format(inner), "", ""]
