"""How often the state is copied to memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.base.save_cost import LEAST_SHARE, SHARE
from elastic_ext.checkpoints.memory.pace import (
    BUFFERS_HOLD_S,
    FIRST_EVERY,
    HOLD_S,
    LEAST_SEND_S,
    MARGIN,
    Schedule,
    StepTimes,
    Timing,
    choose,
)
from elastic_ext.hangs.detector import IDLE_FLOOR_S


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
        (
            (Timing(1.0, 0.01), Timing(1.0, 0.01, 0.1, 0.04)),
            5,
            "a copy stalls for 0.01 s and waits for 0.04 s, 1% of 5 steps of 1 s at most",
        ),
        # while nothing fails: the square root of 2 * 0.02 s * 10,000 s is 20 s
        ((Timing(1.0, 0.02, age_s=10.0),), 2, "a copy stalls for 0.02 s, 1% of 2 steps of 1 s at most"),
        ((Timing(1.0, 0.02, age_s=1e4),), 20, "a copy stalls for 0.02 s, and nothing has failed for 1e+04 s"),
        ((Timing(1.0, 0.02, age_s=1e9),), 67, "a copy stalls for 0.02 s, and nothing has failed for 1e+09 s"),
        ((Timing(1.0, 0.02, age_s=1e4), Timing(1.0, 0.01)), 2, "a copy stalls for 0.02 s, 1% of 2 steps of 1 s at most"),
        ((Timing(1.0, 0.02, 40.0, age_s=1e4),), 50, "a copy is committed after 40 s, and a step takes 1 s"),
    ],
)
def test_as_often_as_costs_one_percent(timings, every, reason):
    assert choose(None, timings) == (every, reason)


def test_copies_get_rarer_down_to_their_least_cost():
    chosen = [choose(None, [Timing(0.1, 0.02, age_s=age_s)])[0] for age_s in (0, 60, 600, 3600, 10**5, 10**8)]
    assert chosen == [20, 20, 49, 120, 633, 667]
    assert 0.02 / (chosen[-1] * 0.1) == pytest.approx(LEAST_SHARE, rel=0.001)


def test_a_jobs_age_is_its_training_time():
    times = StepTimes()
    for step, now in ((1, 50.0), (2, 51.0), (3, 52.0)):
        times.step_ends(step, now)
        times.goes_on(step, now)
    assert times.timing().age_s == 2.0


def test_a_wish_wins_over_the_cost():
    assert choose(3, (Timing(1.0, 100.0, 100.0),))[0] == 3
    assert choose(3, ())[1] == "memory_every=3"


@pytest.mark.parametrize(
    ("asked", "send_s", "every"),
    [
        (10, 0.0, 10),
        (10, 16.0, 10),  # training waits for it, as was asked for
        (10, 16.1, 21),
        (10, 600.0, 750),
        (1, 1.6, 1),
        (None, 600.0, 750),
    ],
)
def test_a_part_has_the_time_to_be_sent(asked, send_s, every):
    timings = [Timing(1.0, 0.001, send_s=send_s), Timing(1.1, 0.001)]
    assert choose(asked, timings)[0] == (every if send_s or asked else 1)
    schedule = Schedule(asked, False)
    schedule.choose(timings, 0)
    assert schedule.send_limit_s(timings[0]) >= max(LEAST_SEND_S, MARGIN * send_s)


def test_one_warning_says_which_rate_an_interval_needs(caplog):
    schedule = Schedule(10, True, 5.0)
    for _ in range(3):
        schedule.choose([Timing(None, send_s=600.0)], 0)  # no step is measured
        schedule.choose([Timing(1.0, 0.001, send_s=600.0)], 0)
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert line == (
        "copies in memory are made every 750 steps, not every 10 (memory_every): at copy_mb_s=5 a part takes 600 s to send to "
        "another node; for every 10 steps, set copy_mb_s to 188 or more"
    )
    faster = Schedule(10, True, 188.0)
    faster.choose([Timing(1.0, 0.001, send_s=600.0 * 5 / 188)], 0)
    assert faster.every == 10


def begun(due: int = 1) -> Schedule:
    schedule = Schedule(1, False)
    schedule.begins(due)
    return schedule


@pytest.mark.parametrize("first", ["attempt", "training"])
@pytest.mark.parametrize(("apart", "missing", "due"), [(4, False, 5), (None, True, None)])
def test_an_ended_attempt_cancels_an_owed_copy(first, apart, missing, due):
    """Whichever thread is first. Else it would wait at the end for ranks that wait for nothing."""
    schedule = begun()
    schedule.copies(1)
    schedule.copies(3)
    if first == "training":
        assert not schedule.takes(4, free=False)
        assert schedule.owes == 4
    schedule.ended(apart, missing)
    if first == "attempt":
        assert not schedule.takes(4, free=False)
    assert (schedule.due, schedule.owes) == (due, None)


def test_a_rank_owes_an_omitted_copy():
    schedule = begun()
    schedule.copies(1)
    assert not schedule.takes(1, free=True)  # not due yet
    assert not schedule.takes(2, free=False)
    schedule.ended(None, missing=False)
    assert (schedule.due, schedule.owes) == (3, 2)
    assert schedule.takes(3, free=True)
    schedule.copies(3)
    assert schedule.owes is None


def test_an_uncommitted_copy_never_looks_like_a_hang():
    assert BUFFERS_HOLD_S < HOLD_S < IDLE_FLOOR_S / 2


def test_failures_make_attempts_rare():
    assert [choose(2, (), failures)[0] for failures in (0, 1, 2, 6, 7, 1000)] == [2, 4, 8, 128, 128, 128]
    assert choose(None, (), 2)[1] == "nothing is measured yet; 2 attempts in a row failed"


seconds = st.floats(1e-6, 1e4)


@given(st.lists(st.builds(Timing, seconds, seconds, seconds, seconds), min_size=1, max_size=5))
def test_no_rank_stalls_for_more_than_its_share(timings):
    every = choose(None, timings)[0]
    for each in timings:
        assert each.held_s <= SHARE * every * each.step_s * (1 + 1e-9)
        assert each.commit_s <= every * each.step_s


def test_waiting_for_buffers_does_not_lengthen_the_interval():
    """The first copy waits for them; a copy takes no longer for that."""
    times = StepTimes()
    times.step_ends(1, 0.0)
    times.goes_on(1, 0.0)
    times.step_ends(2, 1.0)
    times.waited(3.0)
    times.copied(0.02)
    assert times.timing() == Timing(step_s=1.0, stall_s=0.02)
    assert times.last_stall_s == 3.02
    assert choose(None, [times.timing()])[0] == 2


@pytest.mark.parametrize("slow", [{1}, {0, 3, 5}, set(range(8))], ids=lambda slow: f"{len(slow)} of 8")
def test_an_occasionally_slow_peer_does_not_delay_training(slow):
    """Of 8 copies some are committed after 1.5 s, the others after 10 ms; a step takes 30 ms. Two ranks, not alike in this."""
    ranks, now, waited, copies = (StepTimes(), StepTimes()), 0.0, 0.0, 0
    free, due, every, began = 0.0, 1, choose(None, ())[0], 0.0
    for step in range(1, 40_000):
        now += 0.03
        for times in ranks:
            times.step_ends(step, now)
        if step >= due:
            wait_s = max(0.0, free - now)
            now, waited, copies = now + wait_s, waited + wait_s, copies + 1
            for number, times in enumerate(ranks):
                if copies > 1:
                    times.committed(free - began)
                    times.made_buffers = False
                    times.waited(wait_s * number)
                times.copied(0.0001)
            began, free = now, now + (1.5 if copies % 8 in slow else 0.01)
            every = choose(None, [times.timing() for times in ranks])[0]
            due = step + every
        for times in ranks:
            times.goes_on(step, now)
    assert waited <= 2 * SHARE * now
    assert every <= 1.5 / 0.03 * 1.25 + 1, "and no copy waits any longer"
