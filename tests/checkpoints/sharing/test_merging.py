"""Which entries of several nodes are one. Pure: the catalogues are made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_ext.base import records
from elastic_ext.checkpoints.directory.own_files import Mark
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import RecordedFile, StoredSave, Trust, trust
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, NodeEntry, NodeFile
from elastic_ext.checkpoints.sharing.merging import NOT_PROVED, NOT_VOUCHED, SharedEntry, SharedFile, merged
from elastic_ext.checkpoints.storage import Entry

A, B, C = "a.pt", "b.pt", "c.pt"
SIZES = {A: 10, B: 20, C: 30, "both.json": 5}
TIMES = {0: 100.5, 1: 9000.5, 2: 50.5}  # of the clocks of the nodes

Rows = dict[int, NodeEntry]


def part(
    node: int,
    names: str,
    number: int = 0,
    others: str = "",
    parts: int = 2,
    order: int = 7,
    proved: bool = True,
    vouched: bool = True,
) -> NodeEntry:
    """What a node has of "last": files by the first letters of their names; none are recorded for order 0."""
    own = [next(each for each in SIZES if each.startswith(letter)) for letter in names.split()]
    away = [next(each for each in SIZES if each.startswith(letter)) for letter in others.split()]
    files = tuple(NodeFile(each, SIZES[each], TIMES[node] + at) for at, each in enumerate(own))
    save = StoredSave(
        proved=proved,
        why="a step since" if proved else "no step since",
        count=5,
        ranks=(node,),
        world=2,
        written=len(own),
        kept=0,
        files=tuple(RecordedFile(each.name, each.size, each.mtime, node) for each in files),
        part=number,
        parts=parts,
        elsewhere=tuple(RecordedFile(each, SIZES[each], 0.0, 9) for each in away),
    )
    record = records.encode(save, stored.SCHEMA) if order else ""
    return NodeEntry("last", True, TIMES[node], files, 3 if order else 0, order, record, vouched and proved and order > 0)


def whole() -> Rows:
    return {0: part(0, "a both", 0, "b."), 1: part(1, "b. both", 1, "a both")}


def joined(rows: Rows) -> SharedEntry:
    return merged({node: Catalogue((entry,)) for node, entry in rows.items()})["last"]


def of(entry: SharedEntry) -> StoredSave:
    found = stored.save_of(entry.record.encode(), "a test")
    assert found is not None
    return found


def listed(entry: SharedEntry) -> dict[str, Entry]:
    return {path: Entry(path, path, False, file.size, file.mtime) for path, (_, file) in entry.files.items()}


def test_parts_of_a_save_are_one_entry() -> None:
    found = joined(whole())
    assert not found.torn
    assert {path: node for path, (node, _) in found.files.items()} == {A: 0, "both.json": 0, B: 1}
    assert trust(of(found), listed(found)) == (Trust.PROVED, "a step since")
    assert (of(found).parts, of(found).elsewhere, of(found).ranks) == (1, (), (0, 1))


def test_clocks_of_nodes_are_not_compared() -> None:
    found = joined(whole())
    newest = TIMES[0] + 1
    assert found.mtime == newest
    assert {file.mtime for _, file in found.files.values()} == {newest} == {file.mtime for file in of(found).files}


def test_nodes_keep_their_own_of_one_name() -> None:
    found = [each for each in joined(whole()).shared_files if each.name == "last/both.json"]
    assert found == [SharedFile("last/both.json", 5, 0), SharedFile("last/both.json", 5, 1)]


CASES: dict[str, tuple[Callable[[], Rows], str]] = {
    "a part is missing": (lambda: {0: whole()[0]}, "part 2 of 2 is on no node"),
    "the first part is missing": (lambda: {1: whole()[1]}, "part 1 of 2 is on no node"),
    "a part is torn": (
        lambda: whole() | {1: replace(whole()[1], files=(NodeFile(B, 21, 9999.0),), vouched=False)},
        "node 1 has written its part again since it was recorded",
    ),
    "a file of a part has gone": (
        lambda: whole() | {1: replace(whole()[1], files=whole()[1].files[:1], vouched=False)},
        "part 2 of 2 is on no node",
    ),
    "the other node has only its record": (
        lambda: whole() | {1: replace(whole()[1], files=(), is_dir=False, vouched=False)},
        "part 2 of 2 is on no node",
    ),
    "a third node has other files": (lambda: whole() | {2: part(2, "c", order=0)}, "node 2 has other files of that name"),
    "a third node has changed the save before": (
        lambda: whole() | {2: replace(part(2, "a both b.", parts=1, order=6), vouched=False)},
        "node 2 has other files of that name",
    ),
    "not proved": (lambda: {0: part(0, "a", 0, "b.", proved=False), 1: part(1, "b.", 1, "a", proved=False)}, NOT_PROVED),
    "proved on one node": (lambda: whole() | {1: part(1, "b. both", 1, "a both", proved=False)}, NOT_PROVED),
    "not recorded": (lambda: {0: part(0, "a", order=0), 1: part(1, "b.", order=0)}, NOT_PROVED),
    "recorded on one node": (
        lambda: {0: part(0, "a", parts=1), 1: part(1, "b.", order=0)},
        "node 1 has other files of that name",
    ),
    "other sizes elsewhere": (
        lambda: whole() | {1: part(1, "b. c", 1, "a both")},
        "the record of node 0 does not fit those of the other parts",
    ),
    "two numbers of parts": (
        lambda: whole() | {1: part(1, "b. both", 1, "a both", parts=3)},
        "the record of node 1 does not fit those of the other parts",
    ),
    "two records of one part": (
        lambda: whole() | {2: part(2, "a c", 0, "b.")},
        "the record of node 2 does not fit those of the other parts",
    ),
    "a file and a directory": (
        lambda: whole() | {1: replace(whole()[1], is_dir=False)},
        "the record of node 1 does not fit those of the other parts",
    ),
    "more files than listed": (lambda: whole() | {1: replace(whole()[1], more=True)}, "node 1 has more files than it can list"),
    "more than listed on one node": (
        lambda: {1: replace(part(1, "a", parts=1), more=True)},
        "node 1 has more files than it can list",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_anything_else_is_torn(case: str) -> None:
    rows, why = CASES[case]
    found = joined(rows())
    assert found.torn == why
    if found.known is not None:
        assert trust(of(found), listed(found)) == (Trust.TORN, why)


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        (lambda: whole() | {2: part(2, "a both b.", parts=1, order=6)}, 7),
        (lambda: whole() | {1: part(1, "a b.", parts=1, order=8)}, 8),
    ],
    ids=["a third node has the save before", "a newer save on one node"],
)
def test_older_saves_elsewhere_are_left_out(rows: Callable[[], Rows], order: int) -> None:
    found = joined(rows())
    assert not found.torn
    assert found.known is not None
    assert found.known.order == order


FINE: dict[str, Callable[[], Rows]] = {
    "a mirror of a part": lambda: whole() | {2: part(2, "b. both", 1, "a both")},
    "a mirror that has lost a file": lambda: whole() | {2: replace(part(2, "b. both", 1, "a both"), files=(), vouched=False)},
    "a rest of a mirror": lambda: (
        whole() | {2: replace(part(2, "b. both", 1, "a both"), files=part(2, "b. both").files[:1], vouched=False)}
    ),
    "an empty directory": lambda: whole() | {2: NodeEntry("last", True, 1.0)},
    "an old record without files": lambda: whole() | {2: replace(part(2, "a", order=3), files=(), is_dir=False, vouched=False)},
    "one node's notes": lambda: whole() | {0: replace(whole()[0], files=(*whole()[0].files, NodeFile("note", 1, 1.0)))},
}


@pytest.mark.parametrize("case", FINE)
def test_what_does_no_harm(case: str) -> None:
    found = joined(FINE[case]())
    assert not found.torn
    assert {path: node for path, (node, _) in found.files.items()} == {A: 0, "both.json": 0, B: 1}


@pytest.mark.parametrize(("older_than", "torn"), [(0, True), ((3 << 32) + 7, False), ((3 << 32) + 8, True)])
def test_what_a_node_notes_as_older(older_than: int, torn: bool) -> None:
    """It is left from a killed round. What is older than a later save may be part of this one."""
    rows = {0: part(0, "a", parts=1), 1: replace(part(1, "b.", order=0), older_than=older_than)}
    assert bool(joined(rows).torn) == torn


def test_the_lowest_of_equal_parts_counts() -> None:
    rows = {0: part(0, "b. both", 1, "a both"), 1: part(1, "a both", 0, "b."), 2: part(2, "b. both", 1, "a both")}
    found = joined(rows)
    assert {path: node for path, (node, _) in found.files.items()} == {A: 1, "both.json": 1, B: 0}
    assert found.mtime == TIMES[1] + 1  # of part 0, wherever it is


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize(("order", "nodes"), [(0, 1), (7, 1), (7, 2)])
def test_what_one_node_has_stays(order: int, nodes: int, vouched: bool) -> None:
    row = part(1, "a b.", parts=1, order=order, vouched=vouched)
    found = joined({0: NodeEntry("last"), 1: row} if nodes > 1 else {1: row})
    assert not found.torn
    assert (found.mtime, found.record, found.known) == (row.mtime, row.record, row.known)
    assert found.files == {file.name: (1, file) for file in row.files}


def test_a_record_outlives_its_entry() -> None:
    gone = replace(part(1, "a", parts=1), files=(), is_dir=False, vouched=False)
    found = joined({1: gone})
    assert (found.is_there, found.record, found.known) == (False, gone.record, gone.known)


MARK = Mark("diverged", "a test", 5.0, 1234.0)


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_name_barred_anywhere_is_barred(node: int) -> None:
    rows = whole() | {2: NodeEntry("last")}
    found = joined(rows | {node: replace(rows[node], mark=MARK)})
    assert found.mark == replace(MARK, written_at=0.0)
    assert joined(rows).mark is None


def single(node: int, size: int = 10, other: int = 0, number: int = 0) -> NodeEntry:
    """A file on two nodes, the first of which counts."""
    file = RecordedFile("", size, TIMES[node], node)
    away = (RecordedFile("", other, 0.0, 0),) if number else ()
    save = StoredSave(True, "a step since", 5, (node,), 2, 1, 0, (file,), part=number, parts=2, elsewhere=away)
    files = (NodeFile("", size, TIMES[node]),)
    return NodeEntry("last", False, TIMES[node], files, 3, 7, records.encode(save, stored.SCHEMA), True)


def test_single_files_of_one_save() -> None:
    found = joined({0: single(0), 1: single(1, 12, other=10, number=1)})
    assert (found.torn, found.is_dir) == ("", False)
    assert found.files == {"": (0, NodeFile("", 10, TIMES[0]))}
    assert list(found.shared_files) == [SharedFile("last", 10, 0), SharedFile("last", 12, 1)]
    assert joined({0: single(0), 1: replace(single(1, 12), record="", vouched=False)}).torn


def stale(entry: NodeEntry, *names: str) -> NodeEntry:
    """As if no rank had been seen to write these files: an earlier round has left them."""
    save = stored.save_of(entry.record.encode(), "a test")
    assert save is not None
    files = tuple(replace(each, rank=-1) if each.name in names else each for each in save.files)
    return replace(entry, record=records.encode(replace(save, files=files), stored.SCHEMA))


def test_a_file_of_an_earlier_round_counts_least() -> None:
    """The nodes had other ranks then."""
    rows = whole() | {0: stale(whole()[0], "both.json")}
    found = joined(rows)
    assert {path: node for path, (node, _) in found.files.items()} == {A: 0, "both.json": 1, B: 1}
    assert [each for each in found.shared_files if each.name == "last/both.json"] == [SharedFile("last/both.json", 5, 1)]
    assert not found.torn
    found = joined(whole() | {0: stale(whole()[0], A)})
    assert found.files[A][0] == 0  # no other node has it


KIND_OF_SEVERAL = {node: replace(row, name="last9") for node, row in whole().items()}


@pytest.mark.parametrize(
    "row", [part(1, "a", order=0), part(1, "a", parts=1, proved=False), part(1, "a", parts=1, vouched=False)]
)
def test_one_node_may_lack_what_others_had(row: NodeEntry) -> None:
    """Saves of its kind are of several nodes, so others may have been lost."""
    catalogues = {node: Catalogue((each,)) for node, each in KIND_OF_SEVERAL.items()}
    row = replace(row, name="last8")
    found = merged(catalogues | {2: Catalogue((row,))})["last8"]
    assert found.torn == NOT_VOUCHED
    assert not found.record or trust(of(found), listed(found)) == (Trust.TORN, NOT_VOUCHED)
    assert not merged({2: Catalogue((row,))})["last8"].torn


def test_a_vouched_save_of_one_node_counts() -> None:
    catalogues = {node: Catalogue((each,)) for node, each in KIND_OF_SEVERAL.items()}
    row = replace(part(1, "a", parts=1), name="last8")
    assert not merged(catalogues | {2: Catalogue((row,))})["last8"].torn


def test_a_lost_part_says_who_wrote() -> None:
    """Else it would look like the file of one rank."""
    assert of(joined({1: whole()[1]})).ranks == (1, 9)
    gone = replace(whole()[1], files=(), is_dir=False, vouched=False)
    assert of(joined({1: gone})).ranks == (1, 9)
    assert not joined({1: gone}).is_there


# Files of which each rank has written its own.


def rank_file(rank: int, name: str = "ckpt_10_rank_{}.pt", world: int = 4, count: int = 10) -> NodeEntry:
    save = StoredSave(True, "a step since", count, (rank,), world, 1, 0, (RecordedFile("", 10, 5.5, rank),))
    record = records.encode(save, stored.SCHEMA)
    return NodeEntry(name.format(rank), False, 5.5, (NodeFile("", 10, 5.5),), 3, 7 + rank, record, True)


def of_ranks(*ranks: int, **options: object) -> dict[str, str]:
    entries = [rank_file(each, **options) for each in ranks]  # type: ignore[arg-type]
    return {name: each.torn for name, each in merged({0: Catalogue(tuple(entries))}).items()}


def test_files_of_all_ranks_are_whole() -> None:
    assert set(of_ranks(0, 1, 2, 3).values()) == {""}


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (2, 3), (0, 2, 3)])
def test_a_lost_node_has_taken_ranks_along(ranks: tuple[int, ...]) -> None:
    lacking = min({0, 1, 2, 3} - {*ranks})
    assert set(of_ranks(*ranks).values()) == {f"the file of rank {lacking} is on no node"}


def test_a_number_alone_may_be_a_rank() -> None:
    assert set(of_ranks(0, 1, name="ckpt-10-{}.pt").values()) == {"the file of rank 2 is on no node"}
    assert set(of_ranks(0, name="ckpt-10-{}.pt").values()) == {""}  # rank 0 has saved for all
    assert set(of_ranks(0, 1, name="ckpt_10_tp_{}.pt").values()) == {""}  # there may be more ranks than that


def test_unrecorded_files_of_ranks_are_counted() -> None:
    """By the number of ranks that the last save of the kind had."""
    recorded = [rank_file(each) for each in range(4)]
    for ranks, wanted in (((0, 1, 2, 3), ""), ((0, 1), "the file of rank 2 is on no node")):
        later = [replace(rank_file(each, "ckpt_20_rank_{}.pt"), record="", vouched=False) for each in ranks]
        found = merged({0: Catalogue((*recorded, *later))})
        assert {each.torn for name, each in found.items() if "20" in name} == {wanted}
        assert {each.torn for name, each in found.items() if "10" in name} == {""}


def test_ranks_of_two_moments_are_apart() -> None:
    entries = (*(rank_file(each) for each in range(4)), *(rank_file(each, "ckpt_20_rank_{}.pt", count=20) for each in (0, 1)))
    found = merged({0: Catalogue(entries)})
    assert {name for name, each in found.items() if each.torn} == {"ckpt_20_rank_0.pt", "ckpt_20_rank_1.pt"}


def test_one_torn_file_of_a_rank_tears_all() -> None:
    rows = {rank: rank_file(rank) for rank in range(4)}
    other = replace(rows[1], record="", vouched=False)
    found = merged({0: Catalogue((rows[0], rows[1])), 1: Catalogue((other, rows[2], rows[3]))})
    assert {each.torn for each in found.values()} == {"node 1 has other files of that name"}


def test_what_no_node_has_recorded_is_torn() -> None:
    """What a lost node had of it would not be missed."""
    assert joined({0: NodeEntry("last"), 1: part(1, "a b.", parts=1, order=0)}).torn == NOT_VOUCHED
