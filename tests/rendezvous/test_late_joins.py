"""What follows from a host that joins a running job again and again, and restarts everybody each time."""

from __future__ import annotations

import logging

import pytest

from elastic_ext.rendezvous.late_joins import NO_LIMIT, Answer, decide, is_late


@pytest.mark.parametrize(
    ("joins", "limit", "answer"),
    [
        *[(1, 20, Answer.NOTHING), (20, 20, Answer.NOTHING), (21, 20, Answer.REFUSE), (22, 20, Answer.LEAVE)],
        *[(1, 0, Answer.REFUSE), (2, 0, Answer.LEAVE), (1000, NO_LIMIT, Answer.NOTHING)],
    ],
)
def test_what_follows_from_a_join(joins: int, limit: int, answer: Answer) -> None:
    assert decide(joins, limit).answer is answer


@pytest.mark.parametrize(
    ("joins", "limit", "level", "line"),
    [
        (1, 2, logging.INFO, "this host was not in the round before: it has joined the running job once within 60 minutes"),
        (2, 2, logging.WARNING, "this host was not in the round before: it has joined the running job 2 times"),
        (3, 2, logging.WARNING, "once it has left, this host may not come back for 7 s: it has joined the running job 3 times"),
        (1, 0, logging.WARNING, "once it has left, this host may not come back for 7 s: it has joined the running job once"),
        (4, 2, logging.WARNING, "this host may not come back for 7 s: it has joined the running job 4 times within 60 minutes"),
    ],
)
def test_what_is_said_of_a_join(joins: int, limit: int, level: int, line: str) -> None:
    decided = decide(joins, limit)
    assert decided.level == level
    assert decided.line(refused_s=7).startswith(line)


@pytest.mark.parametrize(("round_", "last", "late"), [(1, 0, False), (2, 1, False), (2, 0, True), (5, 3, True), (6, 5, False)])
def test_who_was_not_in_the_round_before_is_late(round_: int, last: int, late: bool) -> None:
    assert is_late(round_, last) is late
