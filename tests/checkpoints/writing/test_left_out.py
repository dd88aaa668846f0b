"""What a rank leaves out costs what it has left out, and nothing after it: no rank waits for it, and no state is mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups

pytestmark = pytest.mark.seam

ALL = [0, 1]
LOAD, WAIT, REDUCE = ["load", ALL], ["wait", ALL], ["reduce", ALL]


def save(step: int, ranks: list[int], accumulation: int = 0) -> list[Any]:
    return ["save", ranks, step, accumulation]


def snapshot(step: int, ranks: list[int], accumulation: int = 0) -> list[Any]:
    return ["snapshot", ranks, step, accumulation]


COPIED = [LOAD, save(1, ALL), *(each for step in (2, 3, 4) for each in (snapshot(step, ALL), WAIT))]


def late(seconds: float) -> list[Any]:
    return ["late", ALL, seconds]


def of(results: list[dict], name: str) -> list[Any]:
    return [result[name] for result in results]


def on_disk(tmp_path: Path, groups: RankGroups, *calls: list[Any]) -> list[dict]:
    found: list[dict] = groups.run("calls", 2, {"directory": str(tmp_path / "checkpoints"), "calls": calls})
    return found


@pytest.mark.parametrize("faulty", ALL)
def test_a_save_within_a_step(tmp_path: Path, groups: RankGroups, faulty: int) -> None:
    """Micro-steps tell saves of one step apart."""
    other = 1 - faulty
    results = on_disk(tmp_path, groups, LOAD, save(5, [other], 1), save(5, ALL, 2), WAIT, LOAD)
    assert of(results, "loaded") == [[[0, 0, -1], [5, 2, 52]]] * 2
    assert (results[other]["failed"], results[faulty]["failed"]) == ([5], [])


@pytest.mark.parametrize("first", [[LOAD, save(1, ALL), WAIT], [LOAD], []], ids=["saved", "loaded", "new"])
@pytest.mark.parametrize("faulty", ALL)
def test_the_last_save_before_a_load(tmp_path: Path, groups: RankGroups, first: list[Any], faulty: int) -> None:
    other = 1 - faulty
    results = on_disk(tmp_path, groups, *first, save(2, [other]), LOAD, save(3, ALL), WAIT)
    saved = [1] if len(first) > 1 else []
    assert of(results, "saved") == [[*saved, 3]] * 2
    assert (results[other]["failed"], results[faulty]["failed"]) == ([2], [])
    assert [loaded[-1][0] for loaded in of(results, "loaded")] == [1 if saved else 0] * 2


@pytest.mark.full
@pytest.mark.parametrize("faulty", ALL)
def test_two_saves_in_a_row_while_training_together(tmp_path: Path, groups: RankGroups, faulty: int) -> None:
    """The rank that waits for the first of them would hold up the collective that the other waits in."""
    other = 1 - faulty
    calls = [LOAD, late(0)]
    for step in range(2, 12, 2):
        calls += [REDUCE, save(step, [other])] if step < 6 else [REDUCE, late(600), save(step, ALL)]
    results = on_disk(tmp_path, groups, *calls)
    assert of(results, "saved")[0] == of(results, "saved")[1]
    assert of(results, "saved")[0][-2:] == [8, 10]
    assert set(results[other]["failed"]) >= {2, 4}


@pytest.mark.full
@pytest.mark.parametrize("last", ALL)
def test_nobody_has_left_out_what_is_saved_twice(tmp_path: Path, groups: RankGroups, last: int) -> None:
    """The last save may be one that is due and one that ends the training, and a rank may come late to both."""
    results = on_disk(tmp_path, groups, LOAD, late(0), ["after", [last]], save(4, ALL), save(4, ALL))
    assert (of(results, "failed"), of(results, "saved")) == ([[], []], [[4], [4]])


@pytest.mark.parametrize("faulty", ALL)
def test_a_copy_within_a_step(hosts: Hosts, faulty: int) -> None:
    left_out = [snapshot(5, [1 - faulty], 1), snapshot(5, ALL, 2), WAIT]
    hosts.task("calls", {"calls": [*COPIED, *left_out]})
    results = hosts.task("calls", {"calls": [LOAD]}, hosts.newest())
    assert of(results, "loaded") in ([[[4, 0, 40]]] * 2, [[[5, 2, 52]]] * 2)


@pytest.mark.parametrize("faulty", ALL)
def test_the_last_copy_before_a_load(hosts: Hosts, groups: RankGroups, faulty: int) -> None:
    after = [each for step in range(2, 9) for each in (snapshot(step, ALL), WAIT)]
    results = hosts.task("calls", {"calls": [*COPIED, snapshot(5, [1 - faulty]), LOAD, *after]})
    assert of(results, "loaded") == [[[0, 0, -1], [1, 0, 10]]] * 2
    assert hosts.newest().startswith("step_00000008")
    told = "rank 1 cannot copy its state to memory: it is at a load and has not made this copy" in groups.stderr.read_text()
    assert told == (faulty == 1)  # rank 0 tells, and it knows of no copy that it has left out itself


@pytest.mark.parametrize("faulty", ALL)
def test_the_first_save_after_loading_nothing(hosts: Hosts, faulty: int) -> None:
    """Only with a save they get what copies in memory need. They begin to make them while they train."""
    calls = []
    for step in range(1, 30):
        calls += [REDUCE, snapshot(step, ALL)]
        if step in (2, 4, 6):
            calls += [save(step, [1 - faulty] if step == 2 else ALL)]
        if step == 6:
            calls += [WAIT]
    results = hosts.task("calls", {"calls": calls})
    assert of(results, "saved")[0] == of(results, "saved")[1]
    assert 6 in of(results, "saved")[0]
    assert hosts.newest() > "step_00000010"


@pytest.mark.full
def test_ranks_without_copies_load_and_save(hosts: Hosts, groups: RankGroups) -> None:
    """Rank 1 comes so late to a copy that it may be lost."""
    lost = [["memory limit", ALL, 1], snapshot(5, [0]), WAIT]
    results = hosts.task("calls", {"calls": [*COPIED, *lost, save(6, ALL), WAIT, LOAD, save(7, ALL), WAIT]})
    assert of(results, "saved") == [[1, 6, 7]] * 2
    assert "no more copies in memory" in groups.stderr.read_text()
