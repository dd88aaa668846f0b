"""What agents of several nodes record where each saves in a directory of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from elastic_ext.agent.companion import RoundPlace
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.record.stored import StoredSave, Trust, files_at, known_saves, trust
from elastic_ext.checkpoints.storage import LocalStorage
from tests.features.record.rounds import Node, checkpoints, recorded, store
from tests.until import until

__all__ = ["checkpoints", "store"]  # fixtures
NODES = 3
pytestmark = pytest.mark.seam


class Apart:
    """Three agents, a rank each."""

    def __init__(self, folder: Path, shared: LocalStorage, stack: ExitStack, rounds: int = 0) -> None:
        self.locals = [LocalStorage(str(folder / f"local_{node}")) for node in range(NODES)]
        for each in self.locals:
            Path(each.address).mkdir(exist_ok=True)
            each.put(notes.USED, b"")  # the script has called `save_dir()`
            notes.note_round(each, saves_here=True)
        self.nodes: list[Node] = []
        for node, local in enumerate(self.locals):
            place = RoundPlace(f"host{node}", node, NODES, NODES, ("", 0))
            self.nodes.append(stack.enter_context(Node(folder, shared, place, node, local=local, rounds=rounds)))

    def steps(self, count: int, *nodes: int) -> None:
        for node in nodes or range(NODES):
            self.nodes[node].steps(count, node)

    def save(self, count: int, name: str, *nodes: int, data: bytes = b"x") -> None:
        for node in nodes or range(NODES):
            self.nodes[node].saves_apart(node, count, f"{name}/r{node}", data)

    def parts(self, name: str) -> list[tuple[int, int] | None]:
        """By node, which part of a save it has recorded."""
        found = [recorded(each).get(name) for each in self.locals]
        return [(each.part, each.parts) if each is not None else None for each in found]

    def record(self, node: int, name: str) -> StoredSave:
        return recorded(self.locals[node])[name]

    def end(self) -> None:
        for each in self.nodes[::-1]:
            each.watch.patience_s = 20
            each.watch._over.set()
        for each in self.nodes:
            assert each.watch._thread is not None
            each.watch._thread.join(20)
            assert not each.watch._thread.is_alive()


WHOLE = [(0, 3), (1, 3), (2, 3)]


@pytest.fixture
def apart(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> Iterator[Apart]:
    with ExitStack() as stack:
        made = Apart(tmp_path, checkpoints, stack)
        yield made
        made.end()


def test_each_node_records_its_own_part(apart: Apart, checkpoints: LocalStorage) -> None:
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    saves = [apart.record(node, "s_5") for node in range(NODES)]
    assert [[each.name for each in save.files] for save in saves] == [["r0"], ["r1"], ["r2"]]
    assert [[each.name for each in save.elsewhere] for save in saves] == [["r1", "r2"], ["r0", "r2"], ["r0", "r1"]]
    assert len({known_saves(each)["s_5"] for each in apart.locals}) == 1
    assert {trust(save.as_whole, files_at(local, "s_5"))[0] for save, local in zip(saves, apart.locals, strict=True)} == {
        Trust.PROVED
    }
    assert {trust(save, files_at(local, "s_5"))[0] for save, local in zip(saves, apart.locals, strict=True)} == {Trust.TORN}
    assert known_saves(checkpoints) == {}


@pytest.mark.parametrize("late", ["write", "step"])
def test_a_node_that_is_late_holds_all_up(apart: Apart, late: str) -> None:
    """Its part has yet to come, or it may still write to it."""
    apart.steps(1)
    apart.save(5, "s_5", *((0, 1) if late == "write" else ()))
    apart.steps(6, 0, 1)
    apart.nodes[0].saves_apart(0, 6, "log")  # what comes later has been seen
    asked = apart.nodes[0].watch
    until(lambda: asked._thread is not None and asked._thread.is_alive())
    assert apart.parts("s_5") == [None] * NODES
    if late == "write":
        apart.save(5, "s_5", 2)
    apart.steps(6, 2)
    until(lambda: apart.parts("s_5") == WHOLE)


def test_the_end_proves_the_last_save(apart: Apart) -> None:
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    apart.end()
    assert apart.parts("s_5") == WHOLE


def test_a_node_that_ends_after_the_first_one(apart: Apart) -> None:
    """It has been told that nothing more will be asked, and does not wait for more."""
    apart.steps(1)
    first = apart.nodes[0]
    first.watch._over.set()
    assert first.watch._thread is not None
    first.watch._thread.join(60)
    apart.steps(2)
    apart.save(3, "s_3", 1)  # those that are left look once more
    until(lambda: apart.nodes[1].watch.answered > 0 and apart.nodes[2].watch.answered > 0)
    apart.end()


def test_what_was_not_proved_is_not_recorded(apart: Apart) -> None:
    """Rank 2 was killed before it had made another step."""
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6, 0, 1)
    apart.end()
    assert apart.parts("s_5") == [None] * NODES


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0,)], ids=["all nodes", "one node"])
def test_the_last_save_of_a_killed_round(apart: Apart, nodes: tuple[int, ...]) -> None:
    """What other nodes have of it is unknown at the end. So it counts only where one node saves for all."""
    apart.steps(1)
    apart.save(5, "s_5", *nodes)
    apart.steps(6)
    until(lambda: apart.parts("s_5") == (WHOLE if len(nodes) > 1 else [(0, 1), None, None]))
    apart.save(8, "s_8", 0)
    apart.end()
    assert apart.parts("s_8") == [None if len(nodes) > 1 else (0, 1), None, None]


def test_one_node_saves_for_all(apart: Apart) -> None:
    apart.steps(1)
    apart.save(5, "s_5", 1)
    apart.steps(6)
    until(lambda: apart.parts("s_5") == [None, (0, 1), None])


def test_old_files_of_a_name_are_no_part(apart: Apart) -> None:
    """Nothing says what they are; once they have gone, it is recorded."""
    apart.locals[2].put("s_5/old", b"?")
    apart.steps(1)
    apart.save(5, "s_5", 0, 1)
    apart.save(5, "t_5")
    apart.steps(6)
    until(lambda: apart.parts("t_5") == WHOLE)
    assert apart.parts("s_5") == [None] * NODES
    apart.locals[2].remove_tree("s_5")
    until(lambda: apart.parts("s_5") == [(0, 2), (1, 2), None])


def test_a_name_that_is_written_again(apart: Apart) -> None:
    """An old part and a new one are never put together."""
    apart.steps(1)
    apart.save(5, "last")
    apart.steps(6)
    until(lambda: apart.parts("last") == WHOLE)
    first = known_saves(apart.locals[0])["last"]
    apart.save(8, "last", 0, 1, data=b"new")
    apart.steps(9)
    apart.save(9, "mark")
    apart.steps(10)
    until(lambda: apart.parts("mark") == WHOLE)
    assert known_saves(apart.locals[2])["last"] == first
    apart.save(10, "last", data=b"newer")
    apart.steps(11)
    apart.end()
    assert apart.parts("last") == WHOLE
    assert len({known_saves(each)["last"] for each in apart.locals} - {first}) == 1
    assert {each.size for node in range(NODES) for each in apart.record(node, "last").files} == {5}


def test_files_with_one_name_count_once(apart: Apart) -> None:
    apart.steps(1)
    for node in range(NODES):
        apart.nodes[node].saves_apart(node, 5, "s_5/config", b"c" * (node + 1))
    apart.save(5, "s_5", 1)
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    assert [[each.name for each in apart.record(node, "s_5").counting] for node in range(NODES)] == [["config"], ["r1"], []]


def test_a_file_of_a_rank_that_has_moved(apart: Apart) -> None:
    """Node 2 had rank 1 when the job saved under this name before."""
    apart.locals[2].put("s_5/r1", b"of the round before")
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    saves = [apart.record(node, "s_5") for node in range(NODES)]
    assert [each.proved for each in saves] == [True] * NODES
    assert [[each.name for each in save.files] for save in saves] == [["r0"], ["r1"], ["r2"]]


def test_rank_0_removes_for_all(apart: Apart) -> None:
    """The other parts go, too, but not while their own workers might be about to remove them."""
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    apart.nodes[0].removes_apart(0, 6, "s_5")
    until(lambda: notes.removed_names(apart.locals[0]) == ["s_5"])
    for count in (8, 10):
        assert apart.locals[1].stat("s_5") is not None
        apart.save(count, f"s_{count}")
        apart.steps(count + 1)
        until(lambda count=count: apart.parts(f"s_{count}") == WHOLE)  # type: ignore[misc]
    until(lambda: [each.stat("s_5") for each in apart.locals] == [None] * NODES)
    until(lambda: apart.parts("s_5") == [None] * NODES)
    assert apart.parts("s_10") == WHOLE


def test_a_part_that_is_left_is_no_save(apart: Apart) -> None:
    """Rank 0 has removed its own before all of it was recorded."""
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6, 0, 1)
    apart.nodes[0].removes_apart(0, 6, "s_5")
    apart.steps(6, 2)
    apart.save(8, "s_8")
    apart.steps(9)
    until(lambda: apart.parts("s_8") == WHOLE)
    apart.end()
    assert apart.parts("s_5") == [None] * NODES


def test_a_later_round_goes_on_counting(
    apart: Apart, tmp_path: Path, checkpoints: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes have one number for it, also one whose disk is empty, and one with a part of an older save of that name."""
    apart.steps(1)
    apart.nodes[0].saves_apart(0, 5, "s_5/more")
    apart.save(5, "s_5")
    apart.save(5, "last", 2)
    apart.steps(6)
    apart.end()
    assert known_saves(apart.locals[0])["s_5"].attempt == 1
    apart.locals[1].remove_tree("")
    made = HashStore()
    monkeypatch.setattr("elastic_ext.base.round_store.connect", lambda host, port: made)
    with ExitStack() as stack:
        later = Apart(tmp_path, checkpoints, stack, rounds=1)
        later.steps(1)
        later.nodes[2].saves_apart(2, 7, "s_7/more")  # nodes have other ranks now, and this one had more files before
        later.save(7, "s_7")
        later.save(7, "last", 0)  # rank 0 is on another node now
        later.steps(8)
        until(lambda: later.parts("s_7") == WHOLE)
        until(lambda: later.parts("last") == [(0, 1), None, (0, 1)])
        assert {known_saves(each)["s_7"].attempt for each in later.locals} == {2}
        assert [known_saves(later.locals[node])["last"].attempt for node in (0, 2)] == [2, 1]
        later.end()


def test_ranks_of_other_sizes_move(
    apart: Apart, tmp_path: Path, checkpoints: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with little to save comes to a node that had one with much: only all parts together say what is cut short."""
    apart.steps(1)
    apart.save(5, "s_5", 0, data=b"x" * 100)
    apart.save(5, "s_5", 1, 2)
    apart.steps(6)
    apart.end()
    made = HashStore()
    monkeypatch.setattr("elastic_ext.base.round_store.connect", lambda host, port: made)
    with ExitStack() as stack:
        later = Apart(tmp_path, checkpoints, stack, rounds=1)
        later.steps(1)
        later.save(7, "s_7", 0, 1)
        later.save(7, "s_7", 2, data=b"x" * 100)
        later.steps(8)
        until(lambda: later.parts("s_7") == WHOLE)
        assert [later.record(node, "s_7").proved for node in range(NODES)] == [True] * NODES
        later.end()


def test_what_is_cut_short_is_not_recorded(apart: Apart) -> None:
    """Until another save is as short."""
    apart.steps(1)
    apart.save(5, "s_5", data=b"x" * 100)
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    apart.save(7, "s_7", data=b"x" * 40)
    apart.steps(8)
    apart.save(9, "s_9", data=b"x" * 40)
    apart.steps(10)
    until(lambda: apart.parts("s_9") == WHOLE)
    assert apart.parts("s_7") == [None] * NODES


def test_a_file_that_none_has_written(apart: Apart) -> None:
    """A part is recorded as proved on all nodes, or on none: a format cannot say of a part whether it is whole."""
    apart.steps(1)
    apart.locals[1].put("s_5/foreign", b"x")
    os.utime(apart.locals[1].path("s_5/foreign"), (0, 0))  # before this round
    apart.save(5, "s_5")
    apart.steps(6)
    apart.save(7, "s_7")
    apart.steps(8)
    until(lambda: apart.parts("s_7") == WHOLE)
    apart.end()
    assert apart.parts("s_5") == [None] * NODES
