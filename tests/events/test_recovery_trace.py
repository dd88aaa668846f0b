"""The recovery of a recovery, and the outbox that sends it."""

from __future__ import annotations

import threading
from pathlib import Path

from elastic_ext.events.event_table import (
    MOST_FAILURES,
    Cause,
    PastRecovery,
    RecoveryPhase,
    RecoveryTrace,
    SeenFailure,
)
from elastic_ext.events.output import Outbox

CRASH, AGAIN = Cause("crash", "restart", "it crashed"), Cause("hang", "restart", "it hung")


def crashed() -> RecoveryTrace:
    """A job that trained in round 1 and crashed at 10."""
    trace = RecoveryTrace()
    for phase in ("rendezvous", "start"):
        trace.entered(phase, 0, 1.0)
    trace.ran(2.0)
    assert trace.first_steps(3.0) is None, "the first start is no recovery"
    trace.entered("stop", 1, 10.0)
    trace.stopped_for(CRASH)
    return trace


def test_phases_follow_without_gaps():
    trace = crashed()
    trace.entered("rendezvous", 1, 11.0)
    trace.entered("start", 2, 13.0)
    trace.ran(14.0)
    phases = (
        RecoveryPhase("stop", 10, 11),
        RecoveryPhase("rendezvous", 11, 13),
        RecoveryPhase("start", 13, 14),
        RecoveryPhase("first_step", 14, 16),
    )
    assert trace.first_steps(16.0) == PastRecovery(CRASH, 1, phases, True)
    assert trace.first_steps(17.0) is None


def test_a_failure_before_the_first_step_prolongs_it():
    trace = crashed()
    trace.entered("start", 2, 11.0)
    trace.ran(12.0)
    trace.entered("stop", 2, 20.0)
    trace.stopped_for(AGAIN)
    trace.entered("start", 3, 21.0)
    trace.ran(22.0)
    recovery = trace.first_steps(23.0)
    assert recovery is not None
    assert (recovery.cause, recovery.round, recovery.begin, recovery.end) == (CRASH, 1, 10, 23)
    assert recovery.seconds() == {"stop": 2, "start": 2, "first_step": 9}


def test_a_verdict_says_more_than_a_rounds_end():
    trace = RecoveryTrace()
    trace.ran(1.0)
    trace.stopped_for(Cause(reason="the job hangs"))
    trace.entered("stop", 1, 2.0)
    trace.stopped_for(AGAIN)
    trace.ran(3.0)
    recovery = trace.first_steps(4.0)
    assert recovery is not None
    assert recovery.cause == AGAIN


def test_a_recovery_has_its_own_failures():
    trace = crashed()
    first, more = (SeenFailure(at, "crash", "exit-code", "it crashed", 0, 7) for at in (9.0, 19.0))
    trace.failed(first)
    trace.ran(12.0)
    for _ in range(MOST_FAILURES):
        trace.failed(more)
    recovery = trace.first_steps(23.0)
    assert recovery is not None
    assert recovery.failures == (first, *[more] * (MOST_FAILURES - 1))
    trace.entered("stop", 3, 30.0)
    trace.ran(31.0)
    again = trace.first_steps(32.0)
    assert again is not None
    assert not again.failures


def test_an_agent_that_ends():
    assert RecoveryTrace().given_up(1.0) is None
    stopped = crashed().given_up(12.0)
    assert stopped == PastRecovery(CRASH, 1, (RecoveryPhase("stop", 10, 12),), False)
    trace = crashed()
    trace.ran(12.0)
    assert trace.given_up(100.0) == PastRecovery(CRASH, 1, (RecoveryPhase("stop", 10, 12),), None)
    done = RecoveryTrace()
    done.ran(1.0)
    done.entered("stop", 1, 2.0)
    assert done.given_up(3.0) is None, "the end of a job is no recovery"


def test_a_failing_item_does_not_end_the_thread(tmp_path, caplog):
    sent: list[int] = []

    def send(item: int) -> None:
        Path(tmp_path / str(item)).touch(exist_ok=False)
        sent.append(item)

    outbox = Outbox(send, "test")
    for item in (1, 1, 2):
        outbox.put(item)
    assert outbox.close(60)
    outbox.put(3)
    assert sent == [1, 2]
    assert "an item was lost" in caplog.text


def test_an_outbox_that_hangs_is_left_alone():
    hangs = threading.Event()
    outbox: Outbox[int] = Outbox(lambda item: hangs.wait() and None, "test", most=2)
    for item in range(10):
        outbox.put(item)
    assert outbox.dropped >= 7
    assert not outbox.close(0.01)
    hangs.set()
    assert outbox.close(60)
