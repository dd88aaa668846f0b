"""How agents gather what workers note: nothing is proved where some of that is lost. What the storage refuses is tried again."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import HashStore

from elastic_ext.agent.companion import RoundPlace
from elastic_ext.base import records, round_store
from elastic_ext.checkpoints.record.journal import MAX_PART, JournalPart
from elastic_ext.checkpoints.record.stored import Trust, files_at, trust
from elastic_ext.checkpoints.storage import Entry, LocalStorage
from elastic_ext.features.record.keeping import keeping_of
from elastic_ext.features.record.watch import SCHEMA, PostsOfNodes, RankSteps, SavePost
from tests.features.record.rounds import Node, checkpoints, proved, recorded, store
from tests.until import until

__all__ = ["checkpoints", "store"]  # fixtures


class Deciding(Node):
    """The agent of node 0, whose looks a test makes one by one; the other nodes are posts."""

    def __init__(self, folder: Path, storage: LocalStorage, nodes: int = 2) -> None:
        super().__init__(folder, storage, RoundPlace("a", 0, nodes, nodes, ("", 0)), 0)
        self.posts, self.keeping, self.now = PostsOfNodes(self.place), keeping_of([storage], nodes), 0.0

    def looks(self) -> None:
        self.now += 1.0
        self.watch._record_now(self.keeping, self.posts, self.now)


def post(store: HashStore, made: SavePost | str) -> None:
    number = store.add(round_store.SAVES_POSTED, 1)
    store.set(round_store.saves_post(number), made if isinstance(made, str) else records.encode(made, SCHEMA))


def answer(store: HashStore, steps: int, open: tuple[str, ...] = (), node: int = 1) -> SavePost:
    """The rank of this node has made these steps."""
    return SavePost(node, store.add(round_store.SAVES_ASKED, 0), (RankSteps(node, steps),), open=open)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [each for each in found if text in each]


@pytest.fixture(params=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> Iterator[list[Node]]:
    """Those of ranks 0 and 1, by rank."""
    if request.param == "one node":
        with Node(tmp_path, checkpoints, RoundPlace("a", 0, 1, 2, ("", 0)), 0, 1) as both:
            yield [both, both]
        return
    first, second = (Node(tmp_path, checkpoints, RoundPlace(name, rank, 2, 2, ("", 0)), rank) for rank, name in enumerate("ab"))
    with first, second:
        yield [first, second]


def save_whole(nodes: list[Node], count: int) -> None:
    for rank, node in enumerate(nodes):
        node.saves(rank, count, f"s_{count}/r{rank}")
    for rank, node in enumerate(nodes):
        node.steps(count + 1, rank)


def end(nodes: list[Node]) -> None:
    """The workers have ended, and so do all agents: that of node 0 waits for the others."""
    for node in nodes[::-1]:
        node.watch._over.set()
    for node in nodes:
        assert node.watch._thread is not None
        node.watch._thread.join(60)


@pytest.mark.seam
def test_a_journal_that_fails_ends_all_proofs(
    nodes: list[Node], checkpoints: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines of others that come in the same look are not lost, and what was recorded before stays."""
    for rank, node in enumerate(nodes):
        node.steps(1, rank)
    save_whole(nodes, 3)
    until(lambda: proved(checkpoints) == ["s_3"])
    child = nodes[1].journal(1).with_suffix(".2")
    child.mkdir()  # what cannot be read, as root or not
    nodes[0].saves(0, 6, "early")
    until(lambda: warnings(caplog, "no longer proved"), "a warning")
    child.rmdir()
    save_whole(nodes, 6)
    end(nodes)
    found = recorded(checkpoints)
    assert {name: each.proved for name, each in found.items()} == {"s_3": True, "s_6": False, "early": False}
    assert found["s_6"].why == "the record of rank 1 is incomplete"
    assert found["early"].ranks == (0,)
    assert len(warnings(caplog, "")) == 1
    assert "Is a directory" in warnings(caplog, "")[0]


@pytest.mark.seam
@pytest.mark.parametrize("nodes", ["two nodes"], indirect=True)
def test_a_reporter_that_fails_says_so(
    nodes: list[Node], checkpoints: LocalStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, node in enumerate(nodes):
        node.steps(1, rank)
    save_whole(nodes, 3)
    until(lambda: proved(checkpoints) == ["s_3"])
    monkeypatch.setattr(nodes[1].watch, "_look", lambda asked, over=False: 1 // 0)
    until(lambda: warnings(caplog, "a fault of elastic_ext"))
    save_whole(nodes, 6)
    end(nodes)
    found = recorded(checkpoints)
    assert {name: each.proved for name, each in found.items()} == {"s_3": True, "s_6": False}
    assert found["s_6"].why == "the record of rank 1 is incomplete"


def test_a_node_without_a_word_proves_nothing(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> None:
    """Rank 1 has yet to begin its piece. Its node answers, and then it does so no more."""
    node = Deciding(tmp_path, checkpoints)
    node.steps(1)
    node.saves(0, 5, "s_5/r0")
    node.steps(6)
    node.looks()
    post(store, answer(store, 5))
    node.looks()
    node.looks()
    assert proved(checkpoints) == []
    post(store, answer(store, 6))
    node.looks()  # it is proved now, and listed
    node.looks()
    node.looks()
    assert proved(checkpoints) == []
    post(store, answer(store, 6))
    node.looks()
    assert proved(checkpoints) == ["s_5"]


def listed(node: Deciding, store: HashStore) -> None:
    """A save is proved and listed, and the other node has not answered since."""
    node.steps(1)
    node.saves(0, 5, "s_5/r0")
    node.looks()
    node.steps(6)
    post(store, answer(store, 6))
    node.looks()
    assert node.keeping._listed
    assert proved(node._storage) == []


@pytest.mark.parametrize("lost", ["worker", "post", "node", "large", "nothing"])
def test_what_was_listed_before_a_loss(tmp_path: Path, store: HashStore, checkpoints: LocalStorage, lost: str) -> None:
    """It may have been written again, without a sign of that."""
    node = Deciding(tmp_path, checkpoints)
    listed(node, store)
    if lost == "worker":
        node.breaks(0)
    elif lost != "nothing":
        foreign = SavePost(2, over=True)
        post(store, {"post": "{", "node": records.encode(foreign, SCHEMA), "large": " " * records.MAX_BYTES + "{}"}[lost])
    post(store, answer(store, 6))
    node.looks()
    assert proved(checkpoints) == (["s_5"] if lost == "nothing" else [])
    assert node.posts.missing
    assert not store.check([round_store.saves_post(store.add(round_store.SAVES_POSTED, 0) - 1)])  # it is gone from the store
    node.keeping.write_unproved()
    assert list(recorded(checkpoints)) == ["s_5"]


def test_what_was_recorded_before_a_loss_stays(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> None:
    """It shows that some of the entry was written again since, which was not seen."""
    node = Deciding(tmp_path, checkpoints, nodes=1)
    node.steps(1)
    for name in ("last/a", "last/b"):
        node.saves(0, 5, name)
    node.steps(6)
    node.looks()
    assert proved(checkpoints) == ["last"]
    node.breaks(0)
    checkpoints.put("last/a", b"another")
    node.looks()
    node.keeping.write_unproved()
    assert trust(recorded(checkpoints)["last"], files_at(checkpoints, "last"))[0] is Trust.TORN


def test_what_is_open_holds_until_the_next_answer(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> None:
    """A post that answers nothing new does not say what is open."""
    node = Deciding(tmp_path, checkpoints, nodes=3)
    node.steps(1)
    node.saves(0, 5, "s_5/r0")
    node.looks()
    node.steps(6)
    for number in (1, 2):
        post(store, answer(store, 6, node=number))
    node.looks()
    assert node.keeping._listed
    said = answer(store, 6, open=("s_5",))
    post(store, said)
    post(store, SavePost(1, said.answers, said.counts))
    post(store, answer(store, 6, node=2))
    node.looks()
    assert proved(checkpoints) == []
    assert not node.keeping._listed  # it was put off


def test_any_lines_fit_into_a_post() -> None:
    part = JournalPart("\U0001d49c" * records.MAX_NAME, 2**31 - 1, 2**31 - 1, 2**31 - 1, "\xff" * MAX_PART)
    made = SavePost(2**31 - 1, parts=(part,))
    assert records.read(SavePost, records.encode(made, SCHEMA), "post", SCHEMA) == made


def test_what_does_not_fit_breaks_the_record(
    tmp_path: Path, store: HashStore, checkpoints: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, checkpoints, RoundPlace("b", 1, 2, 4, ("", 0)), 2, 3)
    many = tuple(f"{number:0200}" for number in range(11_000))
    for _ in range(2):
        node.watch._post(store, SavePost(1, 7, (RankSteps(2, 5),), open=many, over=True))
    posts = PostsOfNodes(RoundPlace("a", 0, 2, 4, ("", 0)))
    assert posts.new() == [SavePost(1, 7, (RankSteps(2, 5),), broken=(2, 3), over=True)] * 2
    assert len(warnings(caplog, "bytes cannot be posted")) == 1


class FailingStorage(LocalStorage):
    """refused: an entry that cannot be listed, as on a disk with a bad sector."""

    refused = ""

    def stat(self, name: str) -> Entry | None:
        if name == self.refused:
            raise OSError(errno.EIO, "Input/output error", name)
        return super().stat(name)


@pytest.mark.seam
def test_an_entry_that_cannot_be_listed(tmp_path: Path, store: HashStore, caplog: pytest.LogCaptureFixture) -> None:
    """It holds up no other one, and is recorded once it can be listed."""
    storage = FailingStorage(str(tmp_path / "checkpoints"))
    storage.refused = "s_3"
    with Node(tmp_path, storage, RoundPlace("a", 0, 1, 1, ("", 0)), 0) as node:
        node.steps(1)
        node.saves(0, 3, "s_3")
        node.steps(4)
        until(lambda: warnings(caplog, "the save s_3 cannot be recorded now"))
        node.saves(0, 6, "s_6")
        node.steps(7)
        until(lambda: proved(storage) == ["s_6"])
        storage.refused = ""
        until(lambda: proved(storage) == ["s_3", "s_6"])
    assert len(warnings(caplog, "")) == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.seam
def test_a_full_disk_has_room_again(small: Path, tmp_path: Path, store: HashStore, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(str(small))
    with Node(tmp_path, storage, RoundPlace("a", 0, 1, 1, ("", 0)), 0) as node:
        node.steps(1)
        node.saves(0, 3, "s_3.pt")
        with (small / "fill").open("wb", buffering=0) as fill, suppress(OSError):
            while True:
                fill.write(bytes(4096))
        assert shutil.disk_usage(small).free == 0
        node.steps(4)
        until(lambda: warnings(caplog, "the save s_3.pt cannot be recorded now"))
        assert recorded(storage) == {}
        (small / "fill").unlink()
        until(lambda: proved(storage) == ["s_3.pt"])
    assert len(warnings(caplog, "")) == 1
    assert [each.name for each in storage.listed(".elastic_ext/saves")] == ["000001.00000000.s_3.pt"]  # and no part of one
