"""When a node that is to leave has a checkpoint that stays: what its workers tell beside what `checkpoint_dir` holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic_ext.agent import leaving
from elastic_ext.agent.leaving import DrainWatch, Published, is_new
from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.round_records import Drain
from tests.until import LIMIT_S


class Node:
    """A node with `local_dir` that is to leave, of which the test tells what its worker and the copier do."""

    def __init__(self, monkeypatch: Any) -> None:
        self.holds = Published("/c/0", 0, lies_there=frozenset({("/c/0", None)}))
        self.went: list[int | None] = []
        self._look = threading.Event()
        monkeypatch.setattr(leaving, "POLL_S", 0.001)
        monkeypatch.setattr(leaving, "published", lambda settings: self.holds)
        job = SimpleNamespace(
            drain=Drain("n1-1-aaaaaa", "n1", 1, reason="its fan"),
            on_event=self._look.set,
            part=SimpleNamespace(save_wanted=0, report_ready_to_leave=lambda number, step: self.went.append(step)),
        )
        self._watch = DrainWatch(cast("Any", job), None, Settings(checkpoint_dir="/c", local_dir="/local"))

    def check(self, saves: int, saved_step: int | None) -> bool:
        """The worker has told of so many saves, the last one of this step. Return whether the node can leave."""
        row = SimpleNamespace(saves=saves, saved_step=saved_step, asks_for_saves=False)
        self._watch.check(cast("Any", SimpleNamespace(read_progress=lambda: [row])))
        return bool(self.went)

    def copied(self, step: int) -> None:
        """A copy of this step is complete, and has been seen."""
        self._seen()
        self.holds = Published(f"/c/{step}", step)
        self._seen()

    def _seen(self) -> None:
        assert self._watch._under_way is not None
        directory = self._watch._under_way.directory
        assert directory is not None
        while directory.newest != self.holds:
            assert self._look.wait(LIMIT_S)
            self._look.clear()

    def close(self) -> None:
        self._watch.workers_ended(cast("Any", None))


def test_saves_that_come_faster_than_their_copies_do_not_move_the_goal(monkeypatch):
    node = Node(monkeypatch)
    assert not node.check(1, 10)
    node.copied(10)
    assert not node.check(1, 10)  # from before the request: steps since would be lost
    assert not node.check(2, 20)
    assert not node.check(3, 30)
    node.copied(20)
    assert node.check(4, 40)
    node.close()


def test_a_script_that_tells_of_no_save_leaves_with_the_next_copy(monkeypatch):
    node = Node(monkeypatch)
    assert not node.check(0, None)
    node.copied(10)
    assert node.check(0, None)
    node.close()


class Files:
    """A checkpoint_dir whose files the test writes and deletes; each is younger than those before it."""

    def __init__(self, folder: Path, pattern: str = "") -> None:
        self.folder, self.settings = folder, Settings(checkpoint_dir=str(folder), checkpoint_pattern=pattern)
        self._written = 0

    def look(self) -> Published:
        return leaving.published(self.settings)

    def write(self, name: str) -> None:
        torch.save({"weight": torch.zeros(1)}, self.folder / f".{name}")
        self._written += 1
        os.utime(self.folder / f".{name}", (self._written, self._written))
        (self.folder / f".{name}").rename(self.folder / name)


def test_a_checkpoint_that_lay_there_is_not_new_when_a_later_one_is_deleted(tmp_path):
    files = Files(tmp_path)
    files.write("model_20.pt")
    files.write("model_30.pt")
    first = files.look()
    assert not is_new(first, files.look(), None)
    (tmp_path / "model_30.pt").unlink()
    assert not is_new(first, files.look(), None)
    files.write("model_40.pt")
    assert is_new(first, files.look(), None)


@pytest.mark.parametrize(
    ("before", "later"),
    [("epoch_1_step_900.pt", "epoch_2_step_5.pt"), ("model_latest.pt", "model_latest.pt"), ("", "model_1.pt")],
)
def test_a_checkpoint_is_new_whatever_its_step(tmp_path, before, later):
    files = Files(tmp_path)
    if before:
        files.write(before)
    first = files.look()
    assert not is_new(first, files.look(), None)
    files.write(later)
    assert is_new(first, files.look(), None)


def test_a_checkpoint_that_is_complete_only_now_is_new(tmp_path):
    files = Files(tmp_path)
    files.write("model_20.pt")
    (tmp_path / "model_30.pt").write_bytes(b"PK\x03\x04 half")
    first = files.look()
    assert not is_new(first, files.look(), None)
    files.write("model_30.pt")
    assert is_new(first, files.look(), None)


@pytest.mark.parametrize(
    ("first", "goal", "copied", "new"),
    [
        *[(0, 20, 10, False), (0, 20, 20, True), (0, 20, 30, True), (0, None, 10, True), (0, 20, None, True)],
        *[(800, 900, 850, False), (800, 900, 5, True)],  # 5 is of the next epoch
        *[(800, 5, 900, False), (800, 5, 4, False), (800, 5, 5, True), (None, 5, 5, True)],
    ],
)
def test_which_copy_is_late_enough(first, goal, copied, new):
    assert is_new(Published("/c/first", first), Published("/c/copied", copied), goal) is new
