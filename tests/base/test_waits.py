"""What the agent says while it waits, and when."""

from __future__ import annotations

import math

import pytest

from elastic_ext.base.waits import EVERY_S, SELDOM_S, Lasting, Waiting

LEAVES = "this node leaves"


@pytest.mark.parametrize(
    ("first_s", "until", "said"),
    [
        (EVERY_S, 700.0, [160.0, 220.0, 280.0]),
        (10.0, 700.0, [110.0, 170.0, 230.0, 290.0]),
        (EVERY_S, math.inf, [160.0]),
    ],
)
def test_it_is_said_once_a_minute(first_s: float, until: float, said: list[float]) -> None:
    waiting = Waiting("an answer", 100.0, first_s)
    assert [now for now in map(float, range(100, 300)) if waiting.text(now, until, LEAVES)] == said


def test_a_wait_without_a_limit_speaks_seldom() -> None:
    waiting = Waiting("an answer", 0.0)
    assert waiting.text(EVERY_S, math.inf, "it trains") == "still waiting for an answer, 60 s so far: it trains"
    assert waiting.text(SELDOM_S, math.inf, "it trains") == ""
    assert waiting.text(SELDOM_S + EVERY_S, math.inf, "it trains") == "still waiting for an answer, 3660 s so far: it trains"


def test_a_limit_that_comes_later_is_said() -> None:
    """As by a spare, once the job no longer trains; but not while that only forms its next round."""
    waiting, said = Waiting("a round", 0.0), []
    for now in map(float, range(400)):
        limited = 100 <= now < 103 or now >= 200
        if text := waiting.text(now, 800.0 if limited else math.inf, LEAVES):
            said.append((now, text))
    assert [now for now, _ in said] == [60.0, 259.0, 319.0, 379.0]
    assert said[1][1] == "still waiting for a round, 259 s so far; in 541 s this node leaves"


def test_it_says_what_ends_the_wait() -> None:
    text = Waiting("an answer", 100.0).text(220.0, 700.0, LEAVES)
    assert text == "still waiting for an answer, 120 s so far; in 480 s this node leaves"


@pytest.mark.parametrize(
    ("now", "until", "pause_s"), [(0.0, 700.0, 60.0), (55.0, 700.0, 5.0), (55.0, 57.0, 2.0), (61.0, 700.0, 0.0)]
)
def test_it_pauses_until_something_is_due(now: float, until: float, pause_s: float) -> None:
    assert Waiting("an answer", 0.0).pause_s(now, until) == pause_s


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([(True, 0.0), (True, 59.0)], False),
        ([(True, 0.0), (True, 60.0)], True),
        ([(True, 0.0), (False, 30.0), (True, 40.0), (True, 99.0)], False),
        ([(False, 0.0), (True, 99.0)], False),
    ],
)
def test_what_was_seen_without_a_break_lasts(looks: list[tuple[bool, float]], over: bool) -> None:
    lasting = Lasting(60.0)
    assert [lasting.is_over(holds, now) for holds, now in looks][-1] is over
