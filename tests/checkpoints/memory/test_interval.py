"""How often the state is copied to memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.checkpoints.memory.interval import FIRST_EVERY, SHARE, Timing, choose
from elastic_ext.checkpoints.memory.saver import StepTimes


@pytest.mark.parametrize(
    ("timings", "every", "reason"),
    [
        ((), FIRST_EVERY, "nothing is measured yet"),
        ((Timing(step_s=1.0),), FIRST_EVERY, "nothing is measured yet"),
        ((Timing(stall_s=0.1),), FIRST_EVERY, "nothing is measured yet"),
        ((Timing(1.0, 0.01, 0.1),), 1, "a copy stalls for 0.01 s, 1% of 1 steps of 1 s at most"),
        ((Timing(1.0, 0.011),), 2, "a copy stalls for 0.011 s, 1% of 2 steps of 1 s at most"),
        ((Timing(1.0, 0.01), Timing(0.5, 0.02)), 4, "a copy stalls for 0.02 s, 1% of 4 steps of 0.5 s at most"),
        ((Timing(0.1, 0.001, 0.4), Timing(0.1, 0.001, 0.1)), 5, "a copy is committed after 0.4 s, and a step takes 0.1 s"),
    ],
)
def test_as_often_as_costs_one_percent(timings, every, reason):
    found = choose(None, timings)
    assert (found.every, found.reason) == (every, reason)


def test_what_was_asked_for_wins_over_what_it_costs():
    assert choose(3, (Timing(1.0, 100.0, 100.0),)).every == 3
    assert choose(3, ()).reason == "memory_every=3"


def test_failures_make_attempts_rare():
    assert [choose(2, (), failures).every for failures in (0, 1, 2, 6, 7, 1000)] == [2, 4, 8, 128, 128, 128]
    assert choose(None, (), 2).reason == "nothing is measured yet; 2 attempts in a row failed"


seconds = st.floats(1e-6, 1e4)


@given(st.lists(st.builds(Timing, seconds, seconds, seconds), min_size=1, max_size=5))
def test_no_rank_stalls_for_more_than_its_share(timings):
    every = choose(None, timings).every
    for each in timings:
        assert each.stall_s <= SHARE * every * each.step_s * (1 + 1e-9)
        assert each.commit_s <= every * each.step_s


def test_a_wait_for_buffers_does_not_lengthen_the_interval():
    """The first copy waits for them; a copy takes no longer for that."""
    times = StepTimes()
    times.step_ends(1, 0.0)
    times.goes_on(1, 0.0)
    times.step_ends(2, 1.0)
    times.copied(0.02, 3.0)
    assert times.timing() == Timing(step_s=1.0, stall_s=0.02)
    assert times.last_stall_s == 3.02
    assert choose(None, [times.timing()]).every == 2
