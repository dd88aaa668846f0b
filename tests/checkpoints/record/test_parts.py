"""Which parts of several nodes are one save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.record import parts
from elastic_ext.checkpoints.record.journal import JournalLine, SaveJournal, SavePath
from elastic_ext.checkpoints.record.parts import (
    LOCAL,
    KindFiles,
    LeftParts,
    Parts,
    RemovedPart,
    RemovedSaves,
    UsualFiles,
    WholeSave,
    current_parts,
    proved_saves,
)
from elastic_ext.checkpoints.record.proof import RecordedSave, RoundProof
from elastic_ext.checkpoints.record.stored import NodePart, RecordedFile


def part(node: int, order: int, name: str = "last", count: int = 5, **changed: object) -> RecordedSave:
    files = {f"{name}/r{node}": node}
    save = RecordedSave(order, SavePath(LOCAL + node, name), files, frozenset(files), count, (node,), True, "a step since")
    return replace(save, **changed)  # type: ignore[arg-type]


def wholes(
    current: Mapping[str, Mapping[int, RecordedSave]], last: Mapping[str, Parts], left: Mapping[str, Mapping[int, int]] = {}
) -> list[str]:
    return [each.name for each in proved_saves(current, last, left) if not each.doubt]


@pytest.mark.parametrize(
    ("saves", "last", "whole"),
    [
        ([part(0, 1), part(1, 2)], {}, True),
        ([part(1, 2)], {}, True),
        ([part(0, 1), part(1, 2, proved=False)], {}, False),
        ([part(0, 1, since=2), part(1, 2, count=6, since=5)], {}, False),
        ([part(0, 1, "s_5"), part(1, 2, "s_5", count=6)], {}, True),
        ([part(0, 3), part(1, 2)], {0: (1, 0), 1: (2, 0)}, False),
        ([part(0, 3, "s_5"), part(1, 2, "s_5", count=6)], {0: (1, 0), 1: (2, 0)}, False),
        ([part(0, 1), part(1, 2)], {0: (1, 0), 1: (2, 0)}, False),
        ([part(0, 1, changes=1), part(1, 2)], {0: (1, 0), 1: (2, 0)}, True),
        ([part(0, 1), part(1, 2)], {0: (1, 0)}, True),
        ([part(0, 3), part(1, 4)], {0: (1, 0), 1: (2, 0)}, True),
        ([part(1, 2)], {0: (1, 0), 1: (2, 0)}, False),
    ],
    ids=[
        "both", "one of two nodes", "one not proved", "counts of a name without a number", "counts of a name with one",
        "an old part", "an old part, with a number", "the same", "more of the same", "a part that came late", "all again",
        "one was removed",
    ],
)  # fmt: skip
def test_which_parts_are_one_save(saves: list[RecordedSave], last: dict[int, tuple[int, int]], whole: bool) -> None:
    name = saves[0].entry.path
    assert wholes(current_parts(saves), {name: last}) == [name] * whole


def test_what_is_left_of_a_save_is_none() -> None:
    """Rank 0 has removed its part before it was recorded. What is written again counts, whatever was removed before."""
    left, removed = LeftParts(), [SavePath(0, "s_5"), SavePath(LOCAL, "s_5")]
    both, rest, again = [part(0, 1, "s_5"), part(1, 2, "s_5")], [part(1, 2, "s_5")], [part(1, 3, "s_5")]
    found = []
    for saves, gone in ((both, []), (rest, removed), (rest, removed), (again, removed), ([*again, part(0, 4, "s_5")], [])):
        current = current_parts(saves)
        left.look(gone, current)
        found.append(len(wholes(current, {}, left.orders)))
    assert found == [1, 0, 0, 1, 1]
    left.look(removed, {})
    left.look(removed, current_parts(rest))
    assert left.orders == {}, "it was removed before this part was written"


def test_what_is_no_part_of_a_script() -> None:
    """What is in `checkpoint_dir`, has gone, is hidden, or is our own."""
    others = [part(0, 1, gone=True), part(0, 2, ".tmp"), part(0, 3, directory_name(7, 2)), part(0, 4)]
    others[3] = replace(others[3], entry=SavePath(0, "last"))
    assert wholes(current_parts([part(1, 9, "s_5"), *others]), {}) == ["s_5"]


@pytest.mark.parametrize(
    ("node_1", "whole"),
    [
        (part(1, 2, count=6, number=1, since=3), True),
        (part(1, 2, count=6, number=2, since=5), False),
        (part(1, 2, count=6, number=1, since=5), False),
        (part(1, 2, count=5, number=2, since=4), True),
    ],
    ids=["the same one", "one more", "the one before came when this one began", "at the same step"],
)
def test_late_parts_of_a_name_that_comes_again(node_1: RecordedSave, whole: bool) -> None:
    saves = [part(0, 1, number=1, since=2), node_1]
    assert wholes(current_parts(saves), {}) == ["last"] * whole


@pytest.mark.parametrize(
    ("node_1", "whole"),
    [
        (part(1, 2, "tmp_5"), False),
        (part(1, 2, "tmp_5", count=6), False),
        (part(1, 2, "tmp_5", count=4), True),
        (part(1, 2, "s_5", was="tmp_5"), True),
        (part(0, 2, "tmp_5"), True),
    ],
    ids=["not renamed", "not renamed, and late", "of an earlier save", "renamed", "of the same node"],
)
def test_a_rank_that_renames_for_all(node_1: RecordedSave, whole: bool) -> None:
    """The parts of other nodes still have the old name."""
    saves = [part(0, 1, "s_5", was="tmp_5"), node_1]
    assert wholes(current_parts(saves), {}) == ["s_5"] * whole


def files(rank: int = 0, **sizes: int) -> dict[str, RecordedFile]:
    return {name: RecordedFile(name, size, 0.0, rank) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ({0: files(r0=1), 1: files(r1=1), 2: {}}, ""),
        ({0: files(r0=1), 1: files(r1=1)}, "node 2 has not listed"),
        ({0: files(r0=1), 1: {}, 2: {}}, "node 1 does not have all"),
        ({0: files(r0=1), 1: files(r1=1), 2: files(r2=1)}, "node 2 has files of that name"),
    ],
)
def test_what_the_lists_of_all_nodes_must_have(listed: parts.Listed, why: str) -> None:
    found = parts.refused(WholeSave("last", {0: part(0, 1), 1: part(1, 2)}), listed, 3)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_the_files_of_a_part() -> None:
    listed = {0: files(config=1, r0=2), 1: {}, 2: files(config=3, r2=4)}
    first, last = parts.part_of(listed, 0), parts.part_of(listed, 2)
    assert [(each.name, each.size) for each in first.elsewhere] == [("r2", 4)]
    assert [(each.name, each.size) for each in last.elsewhere] == [("config", 1), ("r0", 2)]
    assert [(each.part, each.parts) for each in (first, last)] == [(0, 2), (1, 2)]
    assert parts.part_of({1: {"": RecordedFile("", 7, 0.0)}, 0: {}}, 1) == NodePart()


def test_a_file_that_was_written_counts() -> None:
    """And not one that an older save has left on another node, whose rank had that file before."""
    listed = {0: files(r0=2) | files(rank=-1, r2=9), 2: files(r2=4)}
    assert [(each.name, each.size) for each in parts.part_of(listed, 0).elsewhere] == [("r2", 4)]
    assert [(each.name, each.size) for each in parts.part_of(listed, 2).elsewhere] == [("r0", 2)]


def test_fewer_files_need_another_save_like_it() -> None:
    """Ranks may move between nodes meanwhile."""
    usual = UsualFiles()
    usual.know([KindFiles("s_#", 3, 0), KindFiles("s_#", 2, 0)])
    few, again = (
        WholeSave(name, {1: part(1, order, name), 0: part(0, order + 1, name)}) for name, order in (("s_5", 2), ("s_6", 4))
    )
    more = {"s_7/a": 0, "s_7/b": 0, "s_7/r1": 0}
    many = WholeSave("s_7", {0: part(0, 6, "s_7"), 1: part(1, 7, "s_7", files=more)})
    assert "have 2 files" in usual.lacks(few)
    assert "the last one of this name had 3" in usual.lacks(few)
    assert usual.lacks(many) == ""
    assert usual.lacks(again) == ""
    usual.recorded(again, 2)
    assert usual.lacks(few) == ""


def test_half_the_bytes_need_another_save() -> None:
    usual = UsualFiles()
    usual.know([KindFiles("s_#", 0, 100), KindFiles("s_#", 2, 90)])
    first, second, third = (WholeSave(f"s_{order}", {0: part(0, order, f"s_{order}")}) for order in (5, 6, 7))
    assert usual.cut_short(first, 50) == ""
    assert "have 49 bytes of it, and the last one of this name had 100" in usual.cut_short(first, 49)
    assert usual.cut_short(first, 49), "it is the same save"
    assert usual.cut_short(second, 24)
    assert usual.cut_short(third, 24) == ""
    usual.recorded(third, 24)
    assert usual.cut_short(first, 12) == ""


def test_a_file_of_two_nodes_counts_once() -> None:
    assert parts.size_of({0: files(config=3, r0=4), 2: files(config=3, r2=5), 1: {}}) == 12


def test_other_parts_go_two_saves_later() -> None:
    gone, removed = RemovedPart(1, 7, "s_5"), RemovedSaves()
    removed.saved()
    removed.removed([gone])
    for due in ((), (gone,), ()):
        removed.removed([])
        assert removed.take_due() == ()
        removed.saved()
        assert removed.take_due() == due


def journal(rank: int, *events: JournalLine) -> SaveJournal:
    return SaveJournal(rank, 10 + rank, events=events, host=str(rank), name=f"j{rank}")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("commit", ["rename", "report"])
def test_a_rename_says_nothing_of_other_nodes(apart: bool, commit: str) -> None:
    """Rank 1 has yet to write its part, into a directory of its own."""
    name = "tmp" if commit == "rename" else "s_5"
    events = [JournalLine("s", 4, 1, number=1), JournalLine("w", 5, 2, place=SavePath(LOCAL, f"{name}/r0"))]
    if commit == "rename":
        events.append(JournalLine("m", 5, 3, place=SavePath(LOCAL, "tmp"), to=SavePath(LOCAL, "s_5")))
    else:
        events.append(JournalLine("k", 5, 3, number=5))
    proof = RoundProof(world=2, apart=apart)
    proof.take([journal(0, *events), journal(1, JournalLine("s", 4, 1, number=1))], {0: 6, 1: 5})
    proof.release()
    (save,) = [each for each in proof.record().saves if each.entry.path == "s_5"]
    assert save.proved == (not apart), save.why
    proof.take([], {1: 6})
    (save,) = [each for each in proof.record().saves if each.entry.path == "s_5"]
    assert save.proved, save.why


def test_events_get_the_number_of_their_node() -> None:
    event = JournalLine("m", 5, 3, place=SavePath(LOCAL, "a"), to=SavePath(0, "b"))
    assert parts.of_node(event, 2) == event._replace(place=SavePath(LOCAL + 2, "a"))
    assert parts.of_node(event, 0) == event
    assert parts.of_node(JournalLine("s", 5, 3), 2) == JournalLine("s", 5, 3)
