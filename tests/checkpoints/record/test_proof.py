"""Which saves are proved by what workers have noted: the counter-examples of a judged prototype, as tables of events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.checkpoints.record.journal import NOWHERE, JournalLine, SaveJournal, SavePath
from elastic_ext.checkpoints.record.proof import RecordedSave, RoundProof, RoundRecord, kind_of, prove

CHILD = 900  # added to a rank: its forked child, with this pid


def journals(lines: str) -> list[SaveJournal]:
    """From lines of `RANK KIND COUNT [PATH [TO]] [@WHO] [h] [#NUMBER]`; a rank of CHILD and more is a child."""
    events: dict[int, list[JournalLine]] = defaultdict(list)
    for ns, line in enumerate(filter(None, map(str.strip, lines.splitlines()))):
        rank, kind, count, *rest = line.split()
        marks = {each[0]: each[1:] for each in rest if each[0] in "@#" or each == "h"}
        paths = [SavePath(-1, "") if each == "-" else SavePath(0, each) for each in rest if each[0] not in "@#" and each != "h"]
        place, to = [*paths, NOWHERE, NOWHERE][:2]
        who, number = int(marks.get("@", 0)), int(marks.get("#", kind == "s"))
        events[int(rank)].append(JournalLine(kind, int(count), ns, who, "h" in marks, place, to, number))
    return [SaveJournal(rank % CHILD, 10 + rank, 10 if rank >= CHILD else 0, tuple(of)) for rank, of in events.items()]


def record(lines: str, **counts: int) -> RoundRecord:
    return prove(journals(lines), {int(rank[1:]): count for rank, count in counts.items()})


def newest(found: RoundRecord) -> str:
    """The name of the newest proved save that is still there."""
    return next((each.entry.path for each in reversed(found.saves) if each.proved and not each.gone), "")


def of(found: RoundRecord, entry: str) -> RecordedSave:
    return [each for each in found.saves if each.entry.path == entry][-1]


WHOLE = """
0 w 3 step_3/model
0 w 3 step_3/state
0 s 4
"""
# (name, events, counts of the ranks, the newest proved save)
ROWS = [
    ("a step since proves a save", WHOLE, {}, "step_3"),
    ("no step since", WHOLE + "0 w 6 step_6/model", {}, "step_3"),
    ("one rank alone, and the last write is not over", "0 w 3 step_3", {}, ""),
    # 1: other threads
    ("a step proves no thread's file", WHOLE + "0 w 6 step_6/model @2\n0 s 7\n0 s 8", {}, "step_3"),
    ("a thread that has ended", WHOLE + "0 w 6 step_6/model @2\n0 w 7 step_6/state @2\n0 e 7 @2", {"r0": 8}, "step_6"),
    ("one of two threads has ended", WHOLE + "0 w 6 step_6/a @2\n0 w 6 step_6/b @3\n0 e 7 @2", {"r0": 9}, "step_3"),
    ("a work item that failed", WHOLE + "0 w 6 step_6/a @2\n0 f 6 @2", {"r0": 9}, "step_3"),
    ("a thread that lives on is between files", "0 w 3 step_3/a @2\n0 s 4", {"r0": 5}, ""),
    ("a thread that lives on begins the next", "0 w 3 step_3/a @2\n0 s 4\n0 w 6 step_6/a @2\n0 s 7", {}, "step_3"),
    ("its log is no next save", "0 w 3 step_3/a @2\n0 s 4\n0 w 6 log.csv @2\n0 s 7", {}, ""),
    ("main writes after the thread has ended", "0 w 3 s_3/a @2\n0 e 3 @2", {"r0": 3}, ""),
    # 3: ranks that have written nothing yet
    ("a rank that is behind", WHOLE + "0 w 9 step_9/r0\n0 s 10", {"r0": 10, "r1": 2}, ""),
    ("a rank at the save's count", WHOLE, {"r1": 3}, ""),
    ("all ranks are past it", WHOLE, {"r1": 4}, "step_3"),
    ("a rank without a step since its part", "0 w 3 s_3/r0\n1 w 3 s_3/r1\n0 s 4", {}, ""),
    ("both ranks have made a step since", "0 w 3 s_3/r0\n1 w 3 s_3/r1\n0 s 4\n1 s 4", {}, "s_3"),
    ("one rank has left when the other saves", "0 w 3 s_3/r0\n0 x 3\n1 w 3 s_3/r1\n1 x 3", {}, "s_3"),
    ("one rank has left, and the other is cut off", "0 w 3 s_3/r0\n0 x 3\n1 w 3 s_3/r1", {}, ""),
    # 4: save, then rotate
    ("killed after the rotation", WHOLE + "0 w 6 step_6/model\n0 w 6 step_6/state\n0 d 6 step_3/model", {}, "step_6"),
    ("rotated in the middle", WHOLE + "0 w 6 step_6/model\n0 d 6 step_3/model", {}, ""),
    ("removed what its next save proves", "0 w 0 s_0/a\n0 s 1 #1\n0 w 6 s_6/a\n0 d 6 s_0/a", {}, "s_6"),
    ("last is removed, tmp not renamed", "0 w 3 last/a\n0 s 4\n0 w 6 tmp/a\n0 d 6 last/a\n0 d 6 last", {}, "tmp"),
    # 5: save on SIGTERM, then exit
    ("the script ends itself", WHOLE + "0 w 6 step_6/model\n0 w 6 step_6/state\n0 x 6", {}, "step_6"),
    ("an exception ends it", WHOLE + "0 w 6 step_6/model\n0 w 6 step_6/state", {}, "step_3"),
    ("a handler saves and exits", WHOLE + "0 w 6 t/model h\n0 w 6 t/state h\n0 x 6 h", {}, "t"),
    ("a handler exits from a save", WHOLE + "0 w 6 step_6/model\n0 x 6 h", {}, "step_3"),
    ("a handler saves amid a save", WHOLE + "0 w 6 step_6/model\n0 w 6 t/a h\n0 x 6 h", {}, "t"),
    # 6: exit 0 is no proof
    ("a daemon thread is cut off", WHOLE + "0 w 6 step_6/model @2\n0 x 6\n0 x 6", {}, "step_3"),
    # 7: a failed save that the script goes on from
    ("fewer files than the one before", WHOLE + "0 w 6 step_6/model\n0 s 7", {}, "step_3"),
    ("fewer files, written in place", WHOLE.replace("step_3", "last") + "0 w 6 last/model\n0 s 7", {}, ""),
    ("all files, written in place", WHOLE.replace("step_3", "last") + "0 w 6 last/state\n0 w 6 last/model\n0 s 7", {}, "last"),
    ("torn while written in place", WHOLE.replace("step_3", "last") + "0 w 6 last/model", {}, ""),
    # 8: steps that are no training
    ("a probe's own optimizer", WHOLE + "0 w 6 step_6/model\n0 s 7 #7\n0 w 7 step_6/state\n0 s 8 #7", {}, "step_3"),
    ("training after the probe", WHOLE + "0 w 6 a_6/x\n0 s 7 #7\n0 s 8 #1", {}, "a_6"),
    # 9: children
    ("a child that lives", "0 s 2\n900 w 3 s_3/a\n0 s 4\n0 s 5", {}, ""),
    ("a child that has ended itself", "0 s 2\n900 w 3 s_3/a\n900 x 3\n0 s 4", {}, "s_3"),
    ("a process writes for DCP", "0 s 2\n0 p 3 s_3 @4\n0 s 4", {}, ""),
    ("DCP's process has written it", "0 s 2\n0 p 3 s_3 @4\n0 e 4 @4\n0 s 5", {}, "s_3"),
    # 10: the order is that of the record
    ("a script that begins again", "0 w 9 s_9\n0 s 10\n0 w 12 s_1\n0 s 13", {}, "s_1"),
    # 11: events come before what they tell of
    ("a rename that failed", WHOLE + "0 w 6 t/model\n0 w 6 t/state\n0 m 6 t step_6\n0 u 6 step_6", {}, "step_3"),
    ("from elsewhere, and no step since", WHOLE + "0 m 6 - step_6", {}, "step_3"),
    ("an open that failed", WHOLE + "0 w 6 step_3/model\n0 u 6 step_3/model", {}, "step_3"),
    # renames
    ("renamed when closed", "0 w 3 tmp/a\n0 w 3 tmp/b\n0 m 3 tmp step_3", {}, "step_3"),
    ("renamed with a file open", "0 w 3 tmp/a\n0 m 3 tmp step_3 #1", {}, ""),
    ("renamed before others have written", "0 w 3 tmp/a\n1 w 3 tmp/b\n0 m 3 tmp step_3", {}, ""),
    ("a pool has written, main renames", "0 w 3 tmp/a @2\n0 e 3 @2\n0 m 3 tmp step_3", {}, "step_3"),
    ("a pool still writes, main renames", "0 w 3 tmp/a @2\n0 m 3 tmp step_3", {}, ""),
    ("a file is renamed within", "0 w 3 s_3/a.tmp\n0 m 3 s_3/a.tmp s_3/a", {}, ""),
    ("a file within, and a step", "0 w 3 s_3/a.tmp\n0 m 3 s_3/a.tmp s_3/a\n0 s 4", {}, "s_3"),
    ("a torn one is no better renamed", WHOLE.replace("step_3", "last") + "0 w 6 last/model\n0 s 7\n0 m 9 last prev", {}, ""),
    ("what was there before is renamed", "0 m 3 old new\n0 s 4", {}, ""),
    ("renamed onto the last one", "0 w 3 t\n0 m 3 t last\n0 s 4\n0 w 6 t\n0 m 6 t last", {}, "last"),
    # 13, 14: what stays unproved
    ("the last one before an evaluation", WHOLE + "0 w 6 step_6/model\n0 w 6 step_6/state", {}, "step_3"),
    ("a file is added later", WHOLE + "0 w 5 step_3/DONE", {}, ""),
    ("a file was added later", WHOLE + "0 w 5 step_3/DONE\n0 s 6", {}, "step_3"),
    ("a file of it is written again", WHOLE + "0 w 5 step_3/state\n0 s 6", {}, ""),
    ("names with the step, in place", "0 w 3 last/model_3\n0 w 3 last/opt_3\n0 s 4\n0 w 6 last/model_6\n0 s 7", {}, ""),
    ("a thread begins after the step", "0 w 3 s/a @2\n0 e 3 @2\n0 w 3 s/b\n0 s 4\n0 w 6 s_6/b\n0 s 7\n0 w 7 s_6/a @3", {}, "s"),
    ("in place, and the first before a step", "0 w 0 last.pt\n0 s 1\n0 w 100 last.pt\n0 s 101", {}, "last.pt"),
    ("a new optimizer for each epoch", "0 w 3 s_3\n0 s 4 #4\n0 w 6 s_6\n0 s 7 #7", {}, "s_3"),
    ("fewer files from now on", WHOLE + "0 w 6 step_6/model\n0 s 7\n0 w 9 step_9/model\n0 s 10", {}, "step_9"),
    ("another name of a file", "0 w 3 last\n0 s 4\n0 l 4 s_3\n0 s 5", {}, "last"),
    ("a handler rotates amid a save", WHOLE + "0 w 5 s_5/a\n0 w 5 s_6/a h\n0 d 5 step_3/model h", {}, ""),
    ("some of it is removed later", WHOLE + "0 d 6 step_3/state\n0 s 7", {}, ""),
    ("reported as complete", WHOLE + "0 w 6 step_6/model\n0 w 6 step_6/state\n0 k 6", {"r1": 6}, "step_6"),
]


@pytest.mark.parametrize(("events", "counts", "wanted"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_newest_proved_save(events: str, counts: dict[str, int], wanted: str) -> None:
    found = record("0 s 1\n" + events, **counts)
    assert newest(found) == wanted, found
    assert all(each.why for each in found.saves)


def test_an_incomplete_record_proves_nothing() -> None:
    whole = journals("0 s 1" + WHOLE)
    assert newest(prove(whole, {})) == "step_3"
    assert newest(prove(whole, {}, broken=(0,))) == ""
    (damaged,) = [SaveJournal(each.rank, each.pid, 0, each.events, damaged=True) for each in whole]
    assert of(prove([damaged], {}), "step_3").why == "the record of rank 0 is incomplete"


def test_what_is_lost_ends_all_proofs() -> None:
    """A save that was proved may have been written again since, without a sign of it."""
    growing = RoundProof()
    growing.take(journals("0 s 1" + WHOLE + "0 w 6 step_6"), {})
    growing.release()
    assert newest(growing.record()) == "step_3"
    assert growing.waits
    growing.lose("a post is missing")
    growing.lose("another one is")
    assert [(each.proved, each.why) for each in growing.record().saves] == [(False, "a post is missing")] * 2
    assert not growing.waits


def test_a_rank_without_a_word_is_behind() -> None:
    lines = journals("0 s 1\n0 w 3 s_3/r0\n0 s 4")
    found = of(prove(lines, {}, world=2), "s_3")
    assert (found.proved, found.why) == (False, "rank 1 has made 0 steps, not more than the 3 of the save")
    assert newest(prove(lines, {1: 4}, world=2)) == "s_3"


def test_another_directorys_save_is_no_next_one() -> None:
    """A thread may copy each file to another disk as it goes."""
    (whole,) = journals("0 s 1\n0 w 3 s_3/a @2\n0 w 3 s_4/a @2\n0 s 4")
    there = whole.events[2]._replace(place=SavePath(1, "s_4/a"))
    assert of(prove([whole], {}), "s_3").proved
    assert not of(prove([replace(whole, events=(*whole.events[:2], there, whole.events[3]))], {}), "s_3").proved


def test_an_undone_write_restores_the_renamed_save() -> None:
    """Rank 1's open for the old name comes after rank 0's rename, by their hosts, and has failed."""
    first, second = journals("0 s 1\n0 w 3 tmp\n0 m 5 tmp last\n0 s 6\n1 s 1\n1 w 5 tmp\n1 u 5 tmp\n1 s 6")
    found = of(prove([replace(first, host="a"), replace(second, host="b")], {}), "last")
    assert (found.proved, found.gone, found.files) == (True, False, {"last": 0})


def test_files_of_earlier_rounds_count() -> None:
    fewer = journals("0 s 1\n0 w 6 step_6/model\n0 s 7")
    assert newest(prove(fewer, {})) == "step_6"
    assert (
        of(prove(fewer, {}, before={"step_#": 2}), "step_6").why == "it has 1 file, and the last proved save of this name has 2"
    )


def test_a_save_says_what_it_is() -> None:
    found = of(record("0 s 1" + WHOLE + "1 w 3 step_3/rank_1\n1 s 4"), "step_3")
    assert found.files == {"step_3/model": 0, "step_3/rank_1": 1, "step_3/state": 0}
    assert (found.kind, found.count, found.ranks) == ("step_#: model, rank_#, state", 3, (0, 1))
    assert found.why == "rank 0 has made a step since; rank 1 has made a step since"
    assert kind_of(SavePath(0, "step_8.pt"), ["step_8.pt"]) == "step_#.pt"


def test_what_is_read_shows_before_it_is_written() -> None:
    found = record("0 r 0 step_3/model\n0 s 1\n0 w 3 step_6/model\n0 r 3 step_6/model")
    assert [each.place.path for each in found.reads] == ["step_3/model"]


def test_hosts_are_ordered_by_counts_alone() -> None:
    """Rank 1's host has an earlier clock: rank 0 clears the folder, and then both write."""
    first = JournalLine("d", 3, 10**9, place=SavePath(0, "s_3/r1")), JournalLine("w", 3, 10**9 + 1, place=SavePath(0, "s_3/r0"))
    other = JournalLine("w", 3, 5, place=SavePath(0, "s_3/r1"))
    step = JournalLine("s", 4, 2 * 10**9, number=1)
    told = [SaveJournal(0, 1, 0, (*first, step), "b"), SaveJournal(1, 1, 0, (other, step), "a")]
    assert of(prove(told, {}), "s_3").files == {"s_3/r0": 0, "s_3/r1": 1}


_EVENTS = st.tuples(
    st.sampled_from(["0", "1", "900"]),
    st.sampled_from("wpmdrusefxkl"),
    st.integers(0, 4).map(str),
    st.sampled_from(["a", "a/x", "a/y", "b_1/x", "b_2/x"]),
    st.sampled_from(["a", "a/z", "b_2", "b_2/x", "-"]),
    st.sampled_from(["@0", "@1", "@2"]),
)


@given(st.lists(_EVENTS.map(" ".join), max_size=30))
def test_any_journal_is_judged(lines: list[str]) -> None:
    found = record("\n".join(lines))
    assert all(each.why for each in found.saves)
    assert len({each.entry for each in found.saves if not each.gone}) == sum(not each.gone for each in found.saves)


@pytest.mark.parametrize(("events", "counts", "wanted"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_same_is_proved_line_by_line(events: str, counts: dict[str, int], wanted: str) -> None:
    whole = journals("0 s 1\n" + events)
    growing, steps = RoundProof(), {int(rank[1:]): count for rank, count in counts.items()}
    lines = sorted(
        ((event.ns, number, event) for number, each in enumerate(whole) for event in each.events), key=lambda of: of[0]
    )
    for _, number, event in lines:
        growing.take([replace(whole[number], name=f"journal {number}", events=(event,))], steps)
        assert newest(growing.record()) in ("step_3", "last", "s_9", wanted, ""), "torn, and proved for a moment"
    growing.release()
    assert newest(growing.record()) == wanted


def test_events_wait_for_slower_ranks() -> None:
    growing = RoundProof()
    first, second = journals("0 s 1\n0 w 3 s_3\n0 s 4\n1 s 1")
    growing.take([replace(first, name="a"), replace(second, name="b")], {0: 4, 1: 2})
    assert growing.may_change(SavePath(0, "s_3"))
    assert not growing.record().saves
    growing.take([], {0: 5, 1: 5})
    assert newest(growing.record()) == "s_3"
    assert not growing.may_change(SavePath(0, "s_3"))


def test_saves_wait_for_ranks_not_heard_of() -> None:
    """The first look into the journals reads one after the other: no save of the first rank is newer than those of the second."""
    first, second = journals("0 s 1\n1 s 1\n0 w 3 c_3_0\n1 w 3 c_3_1\n0 s 4\n1 s 4\n0 w 6 c_6_0\n1 w 6 c_6_1\n0 s 7\n1 s 7")
    growing = RoundProof(world=2)
    growing.take([replace(first, name="a")], {})
    assert not growing.record().saves
    growing.take([replace(second, name="b")], {0: 8, 1: 8})
    assert [each.entry.path for each in growing.record().saves] == ["c_3_0", "c_3_1", "c_6_0", "c_6_1"]


def test_a_rank_without_steps_holds_up_nothing() -> None:
    growing = RoundProof(world=2)
    growing.take(journals("0 s 1\n0 w 3 s_3\n0 s 4"), {0: 5, 1: 0})
    assert [each.entry.path for each in growing.record().saves] == ["s_3"]
