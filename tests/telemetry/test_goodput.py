"""The goodput ledger: whatever happens, all time is counted once and no counter falls; and what counts as what."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.base import goodput
from elastic_ext.base.goodput import (
    DETECTION,
    HANG,
    LOST,
    PRODUCTIVE,
    SAVE,
    STARTUP,
    STOPPING,
    CheckpointPosition,
    Spent,
    seconds_of,
)
from elastic_ext.telemetry import families
from elastic_ext.telemetry.goodput import TimeLedger, advised_interval, position_of
from elastic_ext.workers import progress
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import Progress

RUNNING = families.RUNNING


class Training:
    """Workers that settle their time as real ones do, on a clock of the test."""

    def __init__(self, workers: int = 1) -> None:
        self.now, self.ledger = 100.0, TimeLedger(100.0)
        self.workers, self.state = workers, "rendezvous"
        self.rows = [self.new_row() for _ in range(workers)]

    def new_row(self) -> list[int]:
        return [0] * (layout.ROW_BYTES // 8)

    def enter(self, state: str) -> None:
        if state == families.STARTING:
            self.rows = [self.new_row() for _ in range(self.workers)]
        self.ledger.enter(state, self.now, self.times())
        self.state = state

    def resume(self, step: int | None) -> None:
        for row in self.rows:
            row[layout.REPEATED] = self.ledger.resume(step)

    def begin(self, slot: int = 0) -> None:
        row = self.rows[slot]
        row[layout.BEGAN_NS] = row[layout.SETTLED_NS] = int(self.now * 1e9)

    def settle(self, slot: int = 0, phase: str | None = None, step: bool = False) -> None:
        row = self.rows[slot]
        if not row[layout.BEGAN_NS]:
            return
        layout.settle(row, int(self.now * 1e9))  # type: ignore[arg-type]
        if step:
            row[layout.STEPS] += 1
            row[layout.LAST_STEP_NS] = int(self.now * 1e9)
            row[layout.FIRST_STEP_NS] = row[layout.FIRST_STEP_NS] or row[layout.LAST_STEP_NS]
        if phase is not None:
            row[layout.PHASE] = layout.PHASES.index(phase)

    def fail(self, slot: int = 0) -> None:
        self.rows[slot][layout.ENDS_WITH], self.rows[slot][layout.ENDED_AT_NS] = 1, int(self.now * 1e9)
        layout.end(self.rows[slot], int(self.now * 1e9))  # type: ignore[arg-type]

    def save(self, step: int, after: int) -> None:
        for row in self.rows:
            row[layout.SAVED_STEP], row[layout.SAVED_AFTER] = step + 1, after

    def step(self, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.now += seconds
            for slot in range(self.workers):
                self.settle(slot, step=True)

    def run(self, resumed: int | None = 0) -> None:
        """Up to the first step, which takes a second."""
        self.enter(families.STARTING)
        self.resume(resumed)
        self.enter(RUNNING)
        for slot in range(self.workers):
            self.begin(slot)
        self.step(1.0)

    def times(self) -> list[Progress]:
        return [Progress(*[decode(row) for decode in progress._DECODERS]) for row in self.rows]

    def seconds(self) -> dict[str, float]:
        look = self.ledger.at(self.now, self.times())
        assert look.spent.total_s + look.unsettled_s == pytest.approx(self.now - 100.0, abs=1e-5)
        return {state: round(seconds, 6) for state, seconds in look.spent.by_state.items() if seconds > 1e-6}


times = st.floats(0, 1e5)
events = st.one_of(
    st.tuples(st.just("wait"), times),
    st.tuples(st.just("enter"), st.sampled_from(families.STATES)),
    st.tuples(st.just("begin"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("phase"), st.tuples(st.integers(0, 1), st.sampled_from(layout.PHASES))),
    st.tuples(st.just("resume"), st.one_of(st.none(), st.integers(0, 5))),
    st.tuples(st.just("decide"), st.booleans()),
    st.tuples(st.just("fail"), st.integers(0, 1)),
)


@given(st.lists(events, max_size=60))
def test_all_time_counts_once_counters_never_fall(happened):
    job = Training(workers=2)
    before = dict.fromkeys(goodput.STATES, 0.0)
    for what, value in happened:
        match what:
            case "wait":
                job.now += value
            case "enter":
                job.enter(value)
            case "begin":
                if not job.rows[value][layout.BEGAN_NS] and job.state in (families.STARTING, RUNNING):
                    job.begin(value)
            case "step":
                job.settle(value, step=True)
            case "phase":
                job.settle(value[0], phase=value[1])
            case "resume":
                if job.state != RUNNING:
                    job.resume(value)
            case "fail":
                if job.rows[value][layout.BEGAN_NS]:
                    job.fail(value)
            case "decide":
                job.ledger.decide(hung=value)
        look = job.ledger.at(job.now, job.times())
        passed_s = job.now - 100.0
        assert look.spent.total_s + look.unsettled_s == pytest.approx(passed_s, rel=1e-9, abs=1e-5)
        assert look.unsettled_s >= -1e-5
        now = look.spent.by_state
        assert all(now[state] >= before[state] for state in goodput.STATES), (before, now)
        before = now


def test_steps_done_again_are_lost_work():
    job = Training()
    job.run()
    job.step(2.0, count=9)  # the tenth
    job.enter("stop")
    job.enter("rendezvous")
    job.run(resumed=6)
    assert job.seconds() == {PRODUCTIVE: 18, STARTUP: 2}
    job.step(2.0, count=3)  # 8, 9, 10
    assert job.seconds() == {PRODUCTIVE: 18, STARTUP: 2, LOST: 6}
    job.step(2.0)
    assert job.seconds() == {PRODUCTIVE: 20, STARTUP: 2, LOST: 6}


@pytest.mark.parametrize(("resumed", "lost_s"), [(None, 0), (10, 0), (12, 0), (0, 9 * 2)])
def test_without_a_known_step_behind_nothing_is_lost(resumed, lost_s):
    job = Training()
    job.run()
    job.step(2.0, count=9)
    job.enter("stop")
    job.run(resumed)
    job.step(2.0, count=9)
    assert job.seconds().get(LOST, 0) == lost_s


@pytest.mark.parametrize("save_seen", [True, False])
@pytest.mark.parametrize(("first", "per_number"), [(0, 1), (0, 2), (0, 100), (50, 1)])
def test_checkpoints_may_be_numbered_as_one_likes(first, per_number, save_seen):
    """By iterations with two optimizers, by epochs of 100 steps. Of 600 steps the last 300 are done again, and nothing else.

    save_seen: that of the checkpoint that is resumed from; else only an earlier one.
    """
    job = Training()
    job.run(resumed=first)
    job.step(1.0, count=299)
    if not save_seen:
        job.save(first + 200 // per_number if per_number == 1 else 200 // per_number, after=200)
        job.seconds()
    else:
        job.save(first + 300 // per_number, after=300)
    job.step(1.0, count=300)
    job.enter("stop")
    job.run(resumed=first + 300 // per_number)
    job.step(1.0, count=400)
    assert job.seconds()[LOST] == 299  # all but the first, which is part of the start


def test_the_checkpoint_before_the_last_is_known():
    """The last one may be damaged. The numbers say nothing of the steps: each look at the workers counts."""
    job = Training()
    job.run()
    for number, steps in ((1, 9), (7, 40), (8, 30)):
        job.step(1.0, count=steps)
        job.save(number, after=1 + int(job.seconds()[PRODUCTIVE]))
        job.seconds()
    job.enter("stop")
    job.run(resumed=7)
    job.step(1.0, count=50)
    assert job.seconds()[LOST] == 29  # of 30, the first is part of the start
    other = TimeLedger(0)
    other.learn(job.ledger.at(job.now, job.times()).spent)  # an agent that takes over
    assert other.resume(8) == job.rows[0][layout.STEPS] - 30


@pytest.mark.parametrize(
    ("step", "known", "at"),
    [
        (0, [], 0),
        (7, [], 7),
        (0, [CheckpointPosition(0, 99)], 99),
        (3, [CheckpointPosition(2, 200), CheckpointPosition(9, 1000)], 300),
    ],
)
def test_what_a_number_stands_for(step, known, at):
    """An epoch that counts from 0, too."""
    assert position_of(step, known) == at


def test_another_nodes_progress_counts():
    job = Training()
    job.ledger.learn(Spent(reached=3))
    job.run(resumed=0)
    job.step(2.0, count=4)
    assert job.seconds() == {STARTUP: 1, LOST: 4, PRODUCTIVE: 4}


@pytest.mark.parametrize(("hung", "state"), [(False, DETECTION), (True, HANG)])
def test_a_rounds_end_counts_with_its_verdict(hung, state):
    job = Training()
    job.run()
    job.step(2.0, count=2)
    job.now += 10
    job.enter("stop")
    job.now += 3
    job.enter("verdict")
    before = {PRODUCTIVE: 4, STARTUP: 1, STOPPING: 3}
    assert job.seconds() == before
    job.ledger.decide(hung)
    assert job.seconds() == {**before, LOST: 2, state: 8}
    job.enter("rendezvous")
    assert job.seconds() == {**before, LOST: 2, state: 8}


@pytest.mark.parametrize(
    ("steps", "phase", "fails", "hung", "expected"),
    [
        (2, "checkpoint", False, False, {SAVE: 9}),
        (2, "checkpoint", False, True, {HANG: 9}),
        (2, "exit", False, True, {STOPPING: 9}),
        (2, "eval", False, False, {LOST: 2, DETECTION: 7}),
        # a step that an exception ends was no work: the script has waited for a peer until its collective gave up
        (2, None, True, False, {LOST: 2, DETECTION: 7, STOPPING: 1}),
        (2, None, True, True, {LOST: 2, HANG: 7, STOPPING: 1}),
        (0, None, False, False, {LOST: 9}),  # the second step may take any time
        (0, None, False, True, {HANG: 9}),
    ],
)
def test_what_the_script_does_at_the_end(steps, phase, fails, hung, expected):
    """After the first step come others of 2 s, then 9 s without one. fails: the script has failed a second before the end."""
    job = Training()
    job.run()
    job.step(2.0, count=steps)
    job.settle(phase=phase)
    job.now += 9
    if fails:
        job.fail()
        job.now += 1
    job.enter("stop")
    job.ledger.decide(hung)
    assert job.seconds() == {STARTUP: 1, **({PRODUCTIVE: 2 * steps} if steps else {}), **expected}


@pytest.mark.parametrize(("hung", "state"), [(False, STARTUP), (True, HANG)])
def test_workers_that_never_made_a_step(hung, state):
    job = Training()
    job.enter(families.STARTING)
    job.now += 1
    job.enter(RUNNING)
    job.now += 1  # the process starts
    job.begin()
    job.now += 5
    job.enter("stop")
    job.ledger.decide(hung)
    assert job.seconds() == {STARTUP: 1, state: 6} if hung else {STARTUP: 7}


def test_no_counter_falls_by_a_rounding_error():
    """Prometheus would take that for a restart, and count everything again."""
    job = Training(workers=3)
    for seconds in (0.1, 0.7, 1.3):
        job.run()
        job.step(seconds, count=7)
        before = job.ledger.at(job.now, job.times()).spent.by_state
        job.enter("stop")
        after = job.ledger.at(job.now, job.times()).spent.by_state
        assert all(after[state] >= before[state] for state in goodput.STATES)


def test_a_signals_end_has_no_own_state():
    job = Training()
    job.run()
    job.step(2.0, count=2)
    job.now += 9
    job.enter(families.ENDED)
    assert job.seconds() == {STARTUP: 1, PRODUCTIVE: 4, LOST: 2, STOPPING: 7}
    assert job.ledger.at(job.now).spent.interruptions == 1


def test_a_job_that_ends_well():
    job = Training(workers=2)
    job.run()
    job.step(2.0, count=2)
    job.settle(0, phase="exit")
    job.now += 4
    job.settle(1, phase="exit")
    job.now += 1
    job.enter(families.ENDED)
    job.now += 6
    assert job.seconds() == {STARTUP: 1, PRODUCTIVE: 4 + 2, STOPPING: 2 + 1, goodput.IDLE: 6}
    assert job.ledger.at(job.now).spent.interruptions == 0


def test_without_the_bootstrap_workers_are_productive():
    ledger = TimeLedger(0)
    ledger.enter(RUNNING, 1)
    assert ledger.at(5).unsettled_s == 4
    ledger.enter("stop", 11)
    assert ledger.at(11).spent.by_state[PRODUCTIVE] == 10


def test_a_long_rendezvous_waits_for_nodes():
    ledger = TimeLedger(0)
    ledger.enter(families.STARTING, 10)
    ledger.enter(families.BACKOFF, 11)
    found = ledger.at(15).spent.by_state
    assert (found[goodput.RENDEZVOUS], found[goodput.WAITING], found[STARTUP], found[goodput.BACKOFF]) == (2, 8, 1, 4)


def test_what_settles_before_the_first_look_is_startup():
    """A warm standby trains before the last worker has started; the agent has counted that time itself."""
    job = Training()
    job.enter(families.STARTING)
    job.begin()
    job.step(1.0, count=3)
    job.enter(RUNNING)
    assert job.seconds() == {STARTUP: 3}
    job.step(1.0, count=3)
    job.now += 2  # of the next step
    assert job.seconds() == {STARTUP: 3, PRODUCTIVE: 3}


def spent(interruptions: float = 4, saves: float = 10, **seconds: float) -> Spent:
    return Spent(seconds_of(seconds), starts=interruptions + 1, interruptions=interruptions, saves=saves)


@pytest.mark.parametrize("nodes", [1, 64])
def test_the_advised_interval_is_dalys_optimum(nodes):
    """For a stall of 20 s and an interruption every 10 000 s: Daly's own formula, and near the least of his cost model."""
    mine = spent(productive=4 * 10_000 - 200, checkpoint_save=200, startup=250, rendezvous=250, idle=777)
    whole = Spent()
    for _ in range(nodes):
        whole = whole.plus(mine)
    found = advised_interval(whole, nodes)
    assert (found.stall_s, found.between_s, found.restart_s) == pytest.approx((20, 10_000, 100))
    assert found.seconds is not None

    def cost(interval_s: float) -> float:
        return found.between_s * math.expm1((interval_s + found.stall_s) / found.between_s) / interval_s

    best = min(range(1, 5000), key=cost)
    assert found.seconds == pytest.approx(best, rel=0.01)
    assert "20 s" in found.reason


@pytest.mark.parametrize(
    ("too_little", "why"),
    [
        (spent(interruptions=2, productive=100, checkpoint_save=1), "2 interruptions"),
        (spent(saves=2, productive=100, checkpoint_save=1), "2 saves"),
        (spent(productive=100), "do not stall"),
    ],
)
def test_no_advice_without_enough_data(too_little, why):
    found = advised_interval(too_little, 1)
    assert found.seconds is None
    assert why in found.reason


@pytest.mark.parametrize(("times", "advised"), [(1, False), (2, False), (3, True)])
def test_a_jobs_counts_ignore_the_number_of_hosts(times, advised):
    one_host = spent(interruptions=times, saves=times, productive=1000, checkpoint_save=1)
    whole = one_host.plus(one_host).plus(one_host).plus(one_host)
    found = advised_interval(whole, 4)
    assert (found.seconds is not None) == advised
    assert advised or f"{times} interruptions and {times} saves so far" in found.reason


def test_every_worker_state_is_in_the_ledger():
    assert set(layout.ACCOUNTS) <= set(goodput.STATES)
