"""Which part a node keeps for another one, and what it lets go. Pure."""

from __future__ import annotations

import pytest

from elastic_ext.base import records
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, RecordedFile, StoredSave
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, MirroredPart, NodeEntry, NodeFile
from elastic_ext.checkpoints.sharing.mirror_plan import MirrorPlan, is_unchanged, mirrored_node, next_step

OTHER = "the other directory"


def entry(
    name: str, order: int, proved: bool = True, vouched: bool = True, ranks: tuple[int, ...] = (2,), moment: tuple[int, ...] = ()
) -> NodeEntry:
    """What the other node has, of two ranks. order: of the save in round 3."""
    file = RecordedFile("model.pt", 100 + order, float(order), 2)
    save = StoredSave(proved, "a step since", 5, ranks, 4, 1, 0, (file,), here=2, moment=moment)
    files = (NodeFile(file.name, file.size, file.mtime), NodeFile("a note", 1, 1.0))
    return NodeEntry(name, True, 1.0, files, 3, order, records.encode(save, stored.SCHEMA), vouched)


def kept(*entries: NodeEntry, origin: str = OTHER) -> list[MirroredPart]:
    return [MirroredPart(origin, each.name, each.is_dir, each.attempt, each.order, each.record) for each in entries]


def plan(there: list[NodeEntry], has: list[MirroredPart], *wanted: KnownSave, directory: str = OTHER) -> MirrorPlan:
    return next_step(Catalogue(tuple(there), directory=directory), wanted, has, lambda each: not each.name.startswith("log"))


def names(parts: tuple[MirroredPart, ...]) -> list[str]:
    return [each.name for each in parts]


@pytest.mark.parametrize(("node", "nodes", "expected"), [(0, 1, None), (0, 2, 1), (1, 2, 0), (2, 4, 3), (3, 4, 0)])
def test_each_node_mirrors_the_next(node: int, nodes: int, expected: int | None) -> None:
    assert mirrored_node(node, nodes) == expected


def test_the_newest_save_is_fetched() -> None:
    found = plan([entry("s_1", 1), entry("s_3", 3), entry("s_2", 2)], [])
    assert (names(found.fetch), found.free, found.size) == (["s_3"], (), 103)


def test_only_what_is_vouched_for() -> None:
    there = [entry("s_1", 1), entry("s_2", 2, vouched=False), entry("s_3", 3, proved=False), entry("log", 4)]
    assert names(plan(there, []).fetch) == ["s_1"]
    assert plan(there[1:], []).fetch == ()


def test_what_is_older_goes_last() -> None:
    """Once all of the newest one is kept, and not before."""
    there, old, new = [entry("s_1", 1), entry("s_2", 2)], entry("s_1", 1), entry("s_2", 2)
    assert plan(there, kept(old)) == MirrorPlan("s_2 is newer than what is kept", tuple(kept(new)))
    assert plan(there, kept(old, new)) == MirrorPlan("s_2 is kept", free=tuple(kept(old)))
    assert plan(there, kept(new)) == MirrorPlan("s_2 is kept")


def test_a_third_save_needs_room() -> None:
    """The rest of two saves that are not whole, or of another node."""
    half = entry("s_2_rank_2", 2, moment=(2, 3))
    there = [entry("s_4", 4)]
    assert names(plan(there, kept(entry("s_1", 1), half)).free) == ["s_2_rank_2"]  # the whole one stays
    assert names(plan(there, kept(entry("s_1", 1)) + kept(entry("s_2", 2), origin="a third one")).free) == ["s_1"]


def test_entries_of_one_moment_are_one() -> None:
    """Each rank of the other node has written one."""
    first, second = entry("s_2_rank_2", 2, moment=(2, 3)), entry("s_2_rank_3", 3, ranks=(3,), moment=(2, 3))
    old = entry("s_1", 1)
    assert names(plan([first, second], kept(old)).fetch) == ["s_2_rank_2", "s_2_rank_3"]
    assert plan([first, second], kept(old, first)).free == ()
    assert plan([first], kept(old, first)).free == ()  # the second one has yet to come
    assert names(plan([first, second], kept(old, first, second)).free) == ["s_1"]


def test_a_save_that_is_not_recorded_yet() -> None:
    there = [entry("s_1", 1)]
    assert plan(there, [], KnownSave(3, 2, "s_2")).waits
    assert not plan(there, [], KnownSave(3, 1, "s_1")).waits
    assert not plan([*there, entry("last", 9)], [], KnownSave(3, 2, "last")).waits  # it was saved again


def test_a_directory_without_a_name() -> None:
    found = plan([entry("s_1", 1)], [], directory="")
    assert (found.fetch, found.waits) == ((), False)


def test_what_was_fetched_must_not_have_changed() -> None:
    (part,) = kept(entry("s_1", 1))

    def same(*entries: NodeEntry, directory: str = OTHER) -> bool:
        return is_unchanged(part, Catalogue(entries, directory=directory))

    assert same(entry("s_2", 2), entry("s_1", 1))
    assert not same()
    assert not same(entry("s_1", 1, vouched=False))
    assert not same(entry("s_1", 2))
    assert not same(entry("s_1", 1), directory="another one at that address")
