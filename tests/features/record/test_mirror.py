"""The thread that keeps another node's part, over real servers."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_ext.agent.companion import LocalWorkers, RoundPlace
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement.shared_dir import SharedDir
from elastic_ext.checkpoints.record.stored import KnownSave
from elastic_ext.checkpoints.sharing.mirrored import kept_in, mirrored_parts
from elastic_ext.features.record import mirror
from elastic_ext.features.record.mirror import PartMirror
from elastic_ext.features.record.orders import Orders, PartList, SizedFile, WriteOrder
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes
from tests.until import until

pytestmark = pytest.mark.seam
WORKERS = LocalWorkers(SimpleNamespace(), None, {}, {}, {})  # type: ignore[arg-type]


class Two:
    """Node 1 keeps the part of node 0, which is there without an agent's thread."""

    def __init__(self, folder: Path, rate: float = 0.0) -> None:
        self.nodes = SeveralNodes(folder)
        self.nodes.mirrors = True
        self.shared = [SharedDir(self.nodes.storage(node), "127.0.0.1", "a secret", kept_in) for node in (0, 1)]
        self.shared[1].servers = [each.place for each in self.shared]
        self.mirror = PartMirror(self.nodes.storage(1), rate=rate)
        self.begin()

    def begin(self) -> None:
        self.mirror.begin(RoundPlace("host", 1, 2, 2, ("", 0)), self.shared[1])

    def write(self, name: str, count: int) -> None:
        saved(self.nodes[0] / name / "model.pt", TRAINING, count)
        saved(self.nodes[1] / name / "optim.pt", OPTIMIZER, count)

    def save(self, name: str, count: int) -> KnownSave:
        """All nodes record it."""
        self.write(name, count)
        known = self.nodes.recorded(name, count)
        self.tell(known)
        return known

    def tell(self, known: KnownSave) -> None:
        lists = tuple(PartList(node, known.order, (SizedFile("model.pt", 1),)) for node in (0, 1))
        self.mirror.recorded(Orders(known.attempt, writes=(WriteOrder(known.order, known.name, lists),)))

    @property
    def kept(self) -> list[str]:
        return sorted(each.name for each in mirrored_parts(self.nodes.storage(1)))

    def close(self) -> None:
        self.mirror.close()
        for each in self.shared:
            each.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def test_the_newest_save_is_kept(two: Two) -> None:
    for step in (10, 20, 30):
        name = f"step_{step}"
        two.save(name, step)
        until(lambda name=name: two.kept == [name])  # type: ignore[misc]
    shutil.rmtree(two.nodes[0])
    two.nodes[0].mkdir()
    assert two.nodes.chosen(1) == "step_30"


def test_it_waits_for_the_other_record(two: Two) -> None:
    """That node is told at the same time, and may be later."""
    two.write("step_10", 10)
    two.tell(KnownSave(1, 1, "step_10"))
    assert two.kept == []
    two.nodes.recorded("step_10", 10)
    until(lambda: two.kept == ["step_10"])


def test_nothing_goes_between_two_rounds(two: Two) -> None:
    """Another node may be about to fetch it."""
    two.save("step_10", 10)
    until(lambda: two.kept == ["step_10"])
    two.write("step_20", 20)
    two.tell(KnownSave(1, 2, "step_20"))
    two.mirror.workers_ended(WORKERS)
    two.nodes.recorded("step_20", 20)
    until(lambda: two.kept == ["step_10", "step_20"])
    two.begin()
    two.save("step_30", 30)
    until(lambda: two.kept == ["step_30"])


def test_a_dead_node_is_logged_once(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.save("step_10", 10)
    until(lambda: two.kept == ["step_10"])
    two.shared[0].close()
    for step in (20, 30, 40):  # it has tried the one before when it takes the next
        two.save(f"step_{step}", step)
        until(lambda: two.mirror._wish is None)
    two.mirror.close()
    assert two.mirror._thread is not None
    assert not two.mirror._thread.is_alive()
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
    assert two.kept == ["step_10"]


def test_a_full_disk_is_logged(two: Two, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for it, and then not for two saves of this node."""
    free = 1000
    monkeypatch.setattr("elastic_ext.checkpoints.directory.save_place.LEAST_FREE", 1000)
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))  # type: ignore[attr-defined]
    two.save("step_10", 10)
    until(lambda: any("your saves need the rest" in each.getMessage() for each in caplog.records))
    assert two.kept == []
    free = 100_000
    two.save("step_20", 20)
    until(lambda: two.kept == ["step_20"])


def test_a_slow_copy_ends_with_the_agent(tmp_path: Path) -> None:
    two = Two(tmp_path, rate=1.0)  # a byte in a second
    try:
        saved(two.nodes[0] / "step_10" / "other.pt", TRAINING, 10)  # the first file goes at once
        two.save("step_10", 10)
        until(lambda: two.mirror._bucket.paid_until > 0)
        two.mirror.close()
        assert two.mirror._thread is not None
        assert not two.mirror._thread.is_alive()
        assert two.kept == []
    finally:
        two.close()


def test_what_was_cut_off_goes(tmp_path: Path) -> None:
    """By the end of an agent."""
    left = tmp_path / "node_1" / ".elastic_ext" / "mirrored" / "key" / "part"
    two = Two(tmp_path)
    try:
        saved(left / "step_5" / "model.pt", TRAINING, 5)
        two.save("step_10", 10)
        until(lambda: two.kept == ["step_10"] and not os.path.exists(left))
    finally:
        two.close()


def test_it_is_off_without_a_local_directory() -> None:
    assert mirror.of_settings(Settings(local_dir="memory://x")) is None
