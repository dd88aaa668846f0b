"""Which save all nodes copy now, as tables: no files."""

from __future__ import annotations

import pytest

from elastic_ext.checkpoints.copying.held import LocalSave
from elastic_ext.checkpoints.copying.targets import OneSave, newest_of_each_kind, next_target, released, shared_by_kind
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave


def recorded(attempt: int, name: str, count: int = 1, ranks: tuple[int, ...] = (0,), here: int = 0, parts: int = 1) -> LocalSave:
    save = StoredSave(True, "", count, ranks, 4, 1, 0, (), parts=parts, here=here)
    return LocalSave(KnownSave(attempt, max(ranks), name), save, b"")


def one(attempt: int) -> OneSave:
    return OneSave((recorded(attempt, f"checkpoint-{attempt}", parts=2),))


@pytest.mark.parametrize(
    ("newest", "current", "stalled", "expected"),
    [
        (None, None, False, None),
        (2, None, False, 2),
        (2, 1, False, 1),
        (2, 1, True, 2),
        (None, 1, False, 1),
        (None, 1, True, 1),  # nothing else is there
        (1, 2, True, 2),  # never an older one
        (1, 1, True, 1),
    ],
)
def test_the_next_target(newest: int | None, current: int | None, stalled: bool, expected: int | None) -> None:
    found = next_target(*(one(each) if each is not None else None for each in (newest, current)), stalled)
    assert found == (one(expected) if expected is not None else None)


@pytest.mark.parametrize(
    ("held", "kept", "passed", "expected"),
    [
        ((3, 2, 1), {3}, None, []),
        ((3, 2, 1), {3}, 2, [1]),
        ((5, 4, 3, 2, 1), {5, 1}, None, [2, 3]),  # the target of all is kept, though it is old
        ((5, 4, 3, 2, 1), {5, 3}, 3, [2, 1]),
    ],
)
def test_what_is_let_go(held: tuple[int, ...], kept: set[int], passed: int | None, expected: list[int]) -> None:
    found = released([one(each) for each in held], {one(each).known for each in kept}, one(passed).known if passed else None)
    assert sorted(each.known.attempt for each in found) == sorted(expected)


def of_ranks(*saves: LocalSave) -> list[list[str]]:
    """The names that are of one save on several nodes."""
    _, shared = shared_by_kind(saves)
    return [sorted(each.name for each in one.entries) for ones in shared.values() for one in ones]


def test_which_files_are_of_several_nodes() -> None:
    named = recorded(1, "step_20_rank_2.pt", ranks=(2,), here=2)
    assert of_ranks(named) == [["step_20_rank_2.pt"]]
    assert of_ranks(recorded(1, "step_20_rank_2.pt", ranks=(2,))) == []  # one node
    assert of_ranks(recorded(1, "model_20.pt", here=2)) == []  # rank 0 for all
    unnamed = [recorded(1, f"model_20_{rank}.pt", ranks=(rank,), here=2) for rank in (2, 3)]
    assert of_ranks(*unnamed) == [["model_20_2.pt", "model_20_3.pt"]]
    assert of_ranks(recorded(1, "checkpoint-20", parts=2)) == [["checkpoint-20"]]


def test_steps_that_were_not_counted() -> None:
    """All saves of the round are of one count, but the names differ."""
    saves = [recorded(1, f"step_{step}_rank_2.pt", count=0, ranks=(2,), here=2) for step in (20, 40)]
    assert sorted(of_ranks(*saves)) == [["step_20_rank_2.pt"], ["step_40_rank_2.pt"]]


def test_only_what_may_be_the_newest_is_checked() -> None:
    asked: list[str] = []

    def fits(each: LocalSave) -> bool:
        asked.append(each.name)
        return each.name != "checkpoint-3"

    found = newest_of_each_kind([recorded(attempt, f"checkpoint-{attempt}") for attempt in range(4)], fits)
    assert [each.name for each in found] == ["checkpoint-2"]
    assert asked == ["checkpoint-3", "checkpoint-2"]
