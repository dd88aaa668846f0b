"""A save of several nodes made complete on each of them, over plain files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from elastic_ext.checkpoints.directory.tiers import Pin
from elastic_ext.checkpoints.sharing import fetching
from elastic_ext.checkpoints.sharing.catalogue import MIRRORED
from elastic_ext.checkpoints.sharing.fetching import FETCHED, chosen_files, fetch, pin_of
from elastic_ext.checkpoints.sharing.merging import SharedFile
from tests.checkpoints.choice.scenes import put
from tests.checkpoints.sharing.several_nodes import PeerOnDisk, SeveralNodes

NAME = "step_10"


@pytest.fixture
def nodes(tmp_path: Path) -> SeveralNodes:
    """The first has the model, the other one the optimizer; each has a file of the name "own.json"."""
    made = SeveralNodes(tmp_path)
    put(made[0] / NAME / "model.pt", b"model of 10")
    put(made[1] / NAME / "deep" / "optimizer.pt", b"optimizer of 10")
    for node in (0, 1):
        put(made[node] / NAME / "own.json", b"of node %d" % node + b"!" * node)
    made.recorded(NAME)
    return made


class Fetched(NamedTuple):
    path: str
    content: dict[str, bytes]


def content(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


def fetched(nodes: SeveralNodes, own: int, name: str = NAME, number: int = 7, **options: object) -> Fetched:
    files = nodes.seen_by().files_of_save(name)  # which node 0 sends
    options = {"peers": {node: each for node, each in nodes.peers().items() if node != own}, **options}
    path = fetch(nodes.storage(own), name, number, files, own, **options)  # type: ignore[arg-type]
    return Fetched(path.removeprefix(f"{nodes[own]}/"), content(Path(path)) if Path(path).is_dir() else {})


def test_each_node_gets_what_it_lacks(nodes: SeveralNodes) -> None:
    for own in (0, 1):
        found = fetched(nodes, own)
        assert found.path == f"{FETCHED}/7/{NAME}"
        assert found.content == {
            "model.pt": b"model of 10",
            "deep/optimizer.pt": b"optimizer of 10",
            "own.json": b"of node %d" % own + b"!" * own,
        }


def test_own_files_are_linked(nodes: SeveralNodes) -> None:
    path = nodes[0] / fetched(nodes, 0).path
    assert (path / "model.pt").samefile(nodes[0] / NAME / "model.pt")
    assert not list(path.rglob(".*"))


def test_without_hard_links_own_files_are_copied(nodes: SeveralNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert fetched(nodes, 0).content["model.pt"] == b"model of 10"


def test_what_is_whole_stays_in_place(nodes: SeveralNodes) -> None:
    put(nodes[0] / "last.ckpt", b"one file")
    put(nodes[0] / "log" / "a", b"1")
    for name in ("last.ckpt", "log"):
        assert fetched(nodes, 0, name, peers={}).path == name
    assert not (nodes[0] / FETCHED).exists()


def test_a_single_file_is_fetched(nodes: SeveralNodes) -> None:
    put(nodes[0] / "last.ckpt", b"one file")
    found = fetched(nodes, 1, "last.ckpt")
    assert found.path == f"{FETCHED}/7/last.ckpt"
    assert (nodes[1] / found.path).read_bytes() == b"one file"


def test_a_rank_gets_its_own_file(nodes: SeveralNodes) -> None:
    for rank in range(4):
        put(nodes[rank // 2] / f"ckpt_5_rank_{rank}.pt", b"of rank %d" % rank)
    wanted = {"ckpt_5_rank_0.pt", "ckpt_5_rank_2.pt"}
    found = fetched(nodes, 1, "ckpt_5_rank_*.pt", only=wanted)
    assert found.path == f"{FETCHED}/7/ckpt_5_rank_*.pt"
    assert content(nodes[1] / FETCHED / "7") == {f"ckpt_5_rank_{rank}.pt": b"of rank %d" % rank for rank in (0, 2)}
    assert fetched(nodes, 1, "ckpt_5_rank_*.pt", only={"ckpt_5_rank_2.pt"}).path == "ckpt_5_rank_*.pt"


def test_a_second_fetch_gets_nothing_again(nodes: SeveralNodes) -> None:
    peers = nodes.peers()
    for _ in range(2):
        fetched(nodes, 1, peers=peers)
    assert isinstance(peers[0], PeerOnDisk)
    assert peers[0].requests == 1
    put(nodes[1] / FETCHED / "7" / NAME / "model.pt", b"cut")
    put(nodes[1] / FETCHED / "7" / NAME / "deep" / ".a.x.part", b"of a fetch that was killed")
    assert fetched(nodes, 1, peers=peers).content.keys() == {"model.pt", "deep/optimizer.pt", "own.json"}
    assert peers[0].requests == 2


def test_earlier_saves_go_first(nodes: SeveralNodes) -> None:
    for number in (5, 6, 7):
        fetched(nodes, 1, number=number)
    assert os.listdir(nodes[1] / FETCHED) == ["7"]


def test_what_is_pinned_stays(nodes: SeveralNodes) -> None:
    fetched(nodes, 1, number=6)
    pin = Pin(nodes.storage(1))
    pin.keep_only(pin_of(6))
    choosing = Pin(nodes.storage(1))  # as this agent does while it fetches
    fetched(nodes, 1, number=7)
    assert sorted(os.listdir(nodes[1] / FETCHED)) == ["6", "7"]
    pin.release()
    fetched(nodes, 1, number=8)
    choosing.release()
    assert os.listdir(nodes[1] / FETCHED) == ["8"]


def test_no_room_is_seen_before(nodes: SeveralNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = len(b"model of 10")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 3))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=f"{needed - 3} are missing"):
        fetched(nodes, 1)
    assert not (nodes[1] / FETCHED).exists()


def test_a_file_of_another_node_has_changed(nodes: SeveralNodes) -> None:
    """Nothing of it appears."""
    files, peers = nodes.seen_by().files_of_save(NAME), nodes.peers()

    class Changed(PeerOnDisk):
        def copy(self, name: str, size: int, file: IO[bytes]) -> None:
            file.write(b"half")
            raise ConnectionError("node 0 has broken off: 7 bytes are missing")

    peers[0] = Changed(nodes[0], 0)
    with pytest.raises(ConnectionError, match="node 0 has broken off"):
        fetch(nodes.storage(1), NAME, 7, files, 1, peers)
    assert content(nodes[1] / FETCHED / "7" / NAME).keys() == {"deep/optimizer.pt", "own.json"}


def test_an_own_file_has_changed(nodes: SeveralNodes) -> None:
    """That of another node takes its place, if there is one."""
    files = nodes.seen_by().files_of_save(NAME)
    put(nodes[1] / NAME / "own.json", b"written again")
    path = fetch(nodes.storage(1), NAME, 7, files, 1, nodes.peers())
    assert (Path(path) / "own.json").read_bytes() == b"of node 0"
    put(nodes[1] / NAME / "deep" / "optimizer.pt", b"written again")
    with pytest.raises(OSError, match="it has changed since it was listed"):
        fetch(nodes.storage(1), NAME, 8, files, 1, nodes.peers())


def test_a_node_without_a_server(nodes: SeveralNodes) -> None:
    with pytest.raises(ConnectionError, match=r"node 0 has step_10/model.pt, and serves no files"):
        fetched(nodes, 1, peers={})


def test_fetches_are_few_at_once(nodes: SeveralNodes) -> None:
    for number in range(40):
        put(nodes[0] / "many" / f"{number}.pt", b"%d" % number)
    busy, most, changed = 0, 0, threading.Condition()

    class Counting(PeerOnDisk):
        def copy(self, name: str, size: int, file: IO[bytes]) -> None:
            nonlocal busy, most
            with changed:
                busy += 1
                most = max(most, busy)
                changed.notify_all()
                changed.wait_for(lambda: most >= fetching.CONNECTIONS, 60)  # they are there together
            super().copy(name, size, file)
            with changed:
                busy -= 1

    found = fetched(nodes, 1, "many", peers={0: Counting(nodes[0], 0)})
    assert len(found.content) == 40
    assert most == fetching.CONNECTIONS


STRANGE = ("other/model.pt", "step_10/../../etc", "/etc/passwd", "step_10x/model.pt", ".elastic_ext/used", "step_10//a")


@pytest.mark.parametrize("strange", STRANGE)
def test_a_list_cannot_lead_elsewhere(nodes: SeveralNodes, strange: str) -> None:
    with pytest.raises(OSError, match="expected files of an entry of local_dir"):
        fetch(nodes.storage(1), NAME, 7, [SharedFile(strange, 1, 0)], 1, nodes.peers())


@pytest.mark.parametrize("name", ["", ".", "..", ".elastic_ext", "a/b"])
def test_a_name_cannot_lead_elsewhere(nodes: SeveralNodes, name: str) -> None:
    with pytest.raises(OSError, match="expected files of an entry of local_dir"):
        fetch(nodes.storage(1), name, 7, [], 1, nodes.peers())


def test_an_own_file_goes_first() -> None:
    mirrored = SharedFile("b", 9, 1, f"{MIRRORED}/key/part/b")
    files = [SharedFile("a", 1, 2), SharedFile("b", 1, 2), SharedFile("a", 3, 0), SharedFile("a", 4, 1), mirrored]
    assert chosen_files(files, 1) == {"a": files[3], "b": files[1]}
    assert chosen_files(files, 3) == {"a": files[0], "b": files[1]}
