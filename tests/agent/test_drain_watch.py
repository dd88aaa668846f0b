"""When a node that is to leave has a checkpoint that stays: what its workers tell beside what `checkpoint_dir` holds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from elastic_ext.agent import drain
from elastic_ext.agent.drain import DrainWatch, Published
from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.round_records import Drain


class Node:
    """A node with `local_dir` that is to leave, of which the test tells what its worker and the copier do."""

    def __init__(self, monkeypatch: Any) -> None:
        self.holds = Published("/c/0", 0)
        self.went: list[int | None] = []
        self._look = threading.Event()
        monkeypatch.setattr(drain, "POLL_S", 0.001)
        monkeypatch.setattr(drain, "published", lambda settings: self.holds)
        job = SimpleNamespace(
            drain=Drain("n1-1-aaaaaa", "n1", 1, reason="its fan"),
            on_event=self._look.set,
            save_wanted=0,
            report_ready_to_leave=lambda number, step: self.went.append(step),
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
            assert self._look.wait(30)
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


def test_without_the_newest_checkpoint_the_one_before_is_not_a_new_one(monkeypatch):
    """Somebody has deleted it: what is the newest then is older than the request."""
    directory = drain.Directory(lambda: Published(), lambda: None)
    directory.close()
    for first, newest, newer in [(30, 20, False), (30, 40, True), (30, 30, False), (None, 20, True), (30, None, True)]:
        directory.first, directory.newest = Published("/c/first", first), Published("/c/newest", newest)
        assert directory.newer_than(None) is newer, (first, newest)
