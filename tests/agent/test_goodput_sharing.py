"""The thread that shares an agent's goodput with the job: when it does, and what it never holds up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_ext.agent.companions import JobCompanions
from elastic_ext.agent.metrics import Goodput, share_every_s
from elastic_ext.base.goodput import Shared, Spent, StateSeconds
from elastic_ext.etcd import Unavailable
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.telemetry import families
from elastic_ext.telemetry.goodput import Ledger
from tests.until import LIMIT_S

LONG_S = 600.0  # of the product; nothing here takes a tenth of it, on any machine, unless something waits that must not


class Job:
    """What an agent shares with. fails: raised instead, as long as it is set. open: while it is not set, a share hangs."""

    def __init__(self) -> None:
        self.spent, self.calls = Spent(), 0
        self.fails: Exception | None = None
        self.called, self.open = threading.Event(), threading.Event()
        self.open.set()

    def share(self, spent: Spent) -> Shared:
        self.calls += 1
        self.called.set()
        self.open.wait(LONG_S)
        if self.fails is not None:
            raise self.fails
        self.spent = self.spent.plus(spent)
        return Shared(self.spent, 1)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.open.set()


@pytest.fixture
def mine(job: Job) -> Iterator[Goodput]:
    with pytest.MonkeyPatch.context() as patched:  # of its own: it must last longer than what tests patch
        patched.setattr("elastic_ext.agent.metrics.FIRST_SHARE_S", LONG_S)
        mine = Goodput()
        mine.share_with(job.share)
        yield mine
        mine.close(0)


def ends(action: Callable[[], None]) -> bool:
    """Whether this comes to an end before something else lets it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def share_again(mine: Goodput, job: Job) -> None:
    """As the end of a round does. Return when it has begun."""
    job.called.clear()
    mine.enter("stop")
    assert job.called.wait(LIMIT_S)


def test_sharing_starts_with_the_first_round(mine, job):
    """Before it, the records may be those of an ended job, which the first node of the next one deletes."""
    mine.enter(families.STARTING)
    mine.enter(families.RUNNING)
    assert (job.calls, mine._thread) == (0, None)
    mine.round_begins(None, 0, 1)
    assert job.calls == 1


class AnswersWhenWaitedFor(threading.Event):
    def __init__(self, answer: threading.Event) -> None:
        super().__init__()
        self._answer = answer

    def wait(self, timeout: float | None = None) -> bool:
        self._answer.set()
        return super().wait(timeout)


def test_the_first_round_knows_what_earlier_agents_have_reached(mine, job):
    job.spent = Spent(reached=9)
    job.open.clear()
    mine._first = AnswersWhenWaitedFor(job.open)
    steps: list[int] = []
    mine.round_begins(SimpleNamespace(repeat=steps.append, read_all=list), 5, 1)
    assert steps == [4]


def test_what_the_job_has_spent_does_not_go_back(mine, job):
    """On etcd an agent reads the sum that rank 0 made last, which may lack what this agent has given since."""
    mine._ledger = Ledger(time.monotonic() - 10)  # sums that differ by less than their rounding are the same
    mine.share_with(lambda spent: (job.share(spent), Shared(Spent(), 2))[1])
    mine.round_begins(None, 0, 1)
    before = mine.job()
    share_again(mine, job)
    mine.close(LONG_S)
    assert mine.job().spent.total_s > before.spent.total_s > 0
    assert mine.job().hosts == 2
    job.spent = job.spent.plus(Spent((StateSeconds("productive", 100.0),)))
    mine.share_with(job.share)
    mine._share_once()
    assert mine.job().spent.by_state["productive"] == 100.0


def test_what_could_not_be_shared_is_logged_once_and_shared_later(mine, job, caplog):
    caplog.set_level(logging.INFO)
    job.fails = Unavailable("etcd does not answer")
    mine.round_begins(None, 0, 1)
    for _ in range(3):
        share_again(mine, job)
    before_s = mine.look().spent.total_s
    job.fails = None
    mine.close(LONG_S)
    assert len([each for each in caplog.records if "was not shared" in each.getMessage()]) == 1
    assert 0 < before_s <= job.spent.total_s <= mine.look().spent.total_s


def test_an_error_that_nobody_expects_ends_the_sharing_and_not_the_job(mine, job, caplog):
    job.fails = ZeroDivisionError("a bug")
    assert ends(lambda: mine.round_begins(None, 0, 1))
    mine._thread.join(LIMIT_S)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is job.fails
    mine.enter(families.RUNNING)
    mine.round_begins(None, 0, 1)
    assert ends(lambda: mine.close(LONG_S))
    assert job.calls == 1


def interrupt(limit_s: float) -> None:
    raise KeyboardInterrupt


class EndsBeforeClear(threading.Event):
    """An event during whose `clear` the agent ends: just before it, which is the worst moment."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._ending: threading.Thread | None = threading.Thread(target=end)

    def clear(self) -> None:
        if (ending := self._ending) is not None:
            self._ending = None
            ending.start()
            assert self.wait(LIMIT_S)
        super().clear()


def test_an_end_while_the_thread_begins_to_share_wakes_it(mine, job):
    mine._changed = EndsBeforeClear(lambda: mine.close(0))
    mine.round_begins(None, 0, 1)
    mine._thread.join(LIMIT_S)
    assert not mine._thread.is_alive()
    assert job.calls == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_agent_that_is_told_to_leave_does_not_wait_for_etcd(mine, job, interrupted, monkeypatch):
    """The others wait for it. interrupted: another signal comes meanwhile."""
    job.open.clear()
    monkeypatch.setattr(Goodput.close, "__defaults__", (LONG_S,))  # of an end that nobody waits for
    monkeypatch.setattr("elastic_ext.agent.metrics.FIRST_SHARE_S", 0.01)
    mine.round_begins(None, 0, 1)
    left = threading.Event()
    if interrupted:
        monkeypatch.setattr(mine._thread, "join", interrupt)
    told: list[BaseException] = []
    companions = SimpleNamespace(
        journal=SimpleNamespace(end=told.append), observation=SimpleNamespace(goodput=mine, show_last=lambda left_s: None)
    )
    ending = SystemExit(1)

    def leave() -> None:
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            JobCompanions.leave(cast("JobCompanions", companions), cast("Rendezvous", SimpleNamespace(leave=left.set)), ending)

    assert ends(leave)
    assert left.is_set()
    assert told == [ending]


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 10), (100, 10), (512, 51.2)])
def test_a_job_writes_about_ten_times_a_second_at_most(nodes, seconds):
    assert share_every_s(nodes) == seconds
