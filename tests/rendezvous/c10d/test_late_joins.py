"""A host that joins a running job again and again is refused, through the job's store; the nodes in the job keep the time."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elastic_ext.base.settings import Settings
from elastic_ext.failures import ledger
from elastic_ext.rendezvous.c10d import admission, job_keys
from elastic_ext.rendezvous.c10d.admission import Admission, Rounds
from elastic_ext.rendezvous.c10d.job_keys import LateJoin, LateJoins, LateRefusal
from elastic_ext.rendezvous.c10d.late_joins import joined, passed, why_refused
from elastic_ext.rendezvous.c10d.store_job import RetryingJob, StoreJob
from elastic_ext.rendezvous.late_joins import WINDOW_S, Answer
from tests.rendezvous.c10d.test_c10d_failures import CONF, ELASTIC, Nodes, seen

RETURNS_AFTER_S = 60  # `refuse_node` here


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


# The record


def test_a_join_is_counted_once_however_often_it_is_told():
    record, _ = joined(LateJoins(), "h", 2, 1)
    record, _ = joined(record, "other", 2, 1)
    again, decided = joined(record, "h", 2, 1)
    assert again == record == LateJoins((LateJoin("h", 2), LateJoin("other", 2)))
    assert (decided.answer, decided.joins) == (Answer.NOTHING, 1)


def test_a_host_is_refused_from_its_newest_join_on():
    record, decided = joined(LateJoins((LateJoin("h", 2),)), "h", 4, 1)
    assert decided.answer is Answer.REFUSE
    assert record.refused == (LateRefusal("h", 4, decided.reason),)
    assert joined(record, "h", 4, 1) == (record, decided)
    record, decided = joined(record, "h", 6, 1)
    assert decided.answer is Answer.LEAVE
    assert record.refused == (LateRefusal("h", 6, decided.reason),)
    assert (why_refused(record, "h"), why_refused(record, "other")) == (decided.reason, "")


def test_what_is_over_goes_and_the_rest_stays():
    record = LateJoins(
        tuple(LateJoin("h", number) for number in (2, 3, 5)), (LateRefusal("g", 3, "often"), LateRefusal("h", 5, "often"))
    )
    assert passed(record, 0, 0) == record
    assert passed(record, 3, 0) == LateJoins((LateJoin("h", 5),), record.refused)
    assert passed(record, 4, 4) == LateJoins((LateJoin("h", 5),), record.refused[1:])
    assert passed(record, 5, 5) == LateJoins()


def test_rounds_are_told_when_they_have_the_age_and_once():
    rounds = Rounds(60)
    assert rounds.passed(1000) == 0
    for number, now in ((1, 0.0), (2, 10.0), (5, 30.0)):
        rounds.add(number, now)
    assert [rounds.passed(now) for now in (59, 60, 65, 90, 1000)] == [0, 1, 0, 5, 0]


# The store


class Node:
    """One agent's admission; its clock stands still until a test moves it."""

    def __init__(self, store: TCPStore, host: str, limit: int = 1, hosts: bool = False) -> None:
        self.job = StoreJob(store, "job", f"{host}-id", hosts=hosts, ledger=ledger.Ledger())
        self.job.enter_job()
        self.admission = Admission(RetryingJob(self.job), host, Settings(max_rejoins=limit, refuse_node=RETURNS_AFTER_S))

    @property
    def record(self) -> LateJoins:
        return self.job._late_joins()[1]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.seam
def test_the_nodes_in_the_job_keep_the_time_of_one_that_comes_and_goes(store, clock, caplog):
    caplog.set_level(logging.INFO)
    steady = Node(store, "a", hosts=True)
    assert not steady.admission.entered(1)
    for number, said in ((2, "was not in the round before: it has joined the running job once"), (4, "once it has left")):
        guest = Node(store, "b")
        assert guest.admission.refused() == ""
        clock[0] += 10
        assert not any([steady.admission.entered(number), guest.admission.entered(number)])
        assert said in caplog.messages[-1]
        assert guest.admission.refused() == ""  # it stays
        assert not any([steady.admission.entered(number + 1)])
    assert "it has joined the running job 2 times within 60 minutes (max_rejoins=1)" in Node(store, "b").admission.refused()
    assert Node(store, "c").admission.refused() == ""

    clock[0] += RETURNS_AFTER_S - 0.1  # of round 4
    steady.admission.keep_time()
    assert Node(store, "b").admission.refused() != ""
    clock[0] += 0.2
    steady.admission.keep_time()
    assert caplog.messages[-1] == "host b may come back"
    late = Node(store, "b")
    assert late.admission.refused() == ""
    assert late.admission.entered(6)  # the third time within the hour
    assert "this host may not come back for 60 s: it has joined the running job 3 times" in late.admission.refused()
    assert not steady.admission.entered(6)

    clock[0] = 10 + WINDOW_S  # the age of round 2, and all refusals are over
    steady.admission.keep_time()
    assert steady.record == LateJoins((LateJoin("b", 4), LateJoin("b", 6)))
    clock[0] += WINDOW_S
    steady.admission.keep_time()
    assert steady.record == LateJoins()


@pytest.mark.full
def test_a_node_that_was_in_every_round_or_hosts_the_store_is_not_counted(store):
    first, other = Node(store, "a", limit=0, hosts=True), Node(store, "b", limit=0)
    for number in (1, 2, 3):
        assert not any([first.admission.entered(number), other.admission.entered(number)])
    assert not first.admission.entered(7)
    assert first.record == LateJoins()


@pytest.mark.seam
def test_in_a_store_that_no_agent_hosts_nobody_is_counted(store):
    """All agents may have died since, and nobody would have kept the time."""
    for number in (2, 4, 6):
        assert not Node(store, "b", limit=0).admission.entered(number)
    assert Node(store, "b").record == LateJoins()


@pytest.mark.full
def test_what_a_stranger_has_written_counts_as_nothing(store, caplog):
    node = Node(store, "a", hosts=True)
    node.job.calls.put(job_keys.LATE_JOINS, '{"schema": 1, "joins": "many"}')
    assert Node(store, "b").admission.refused() == ""
    node.job.calls.put(job_keys.LATE_JOINS, '{"schema": 1, "refused": [{"host": "b", "round": 1, "reason": "\\u001b[2J"}]}')
    assert "\x1b" not in Node(store, "b").admission.refused()
    node.job.calls.put(job_keys.LATE_JOINS, "\x00")
    assert not Node(store, "b").admission.entered(2)
    assert node.record == LateJoins((LateJoin("b", 2),))


@pytest.mark.full
def test_hosts_that_join_at_the_same_time_are_all_counted_while_the_time_of_others_ends(store):
    """Each on its own connection, as from another process; what is over goes at the same moment."""
    keepers = [Node(store, name, hosts=name == "a") for name in "ak"]
    guests = [Node(store, f"n{number}", limit=0) for number in range(8)]
    for number in range(2, 6):
        Node(store, "old").admission.entered(number)
    with ThreadPoolExecutor(len(guests) + len(keepers)) as pool:
        calls = [pool.submit(keeper.job.end_late_joins, 5, 5) for keeper in keepers]
        calls += [pool.submit(guest.admission.entered, 9) for guest in guests]
        assert [call.result(60) for call in calls] == [None] * 2 + [False] * 8
    record = keepers[0].record
    assert set(record.joins) == {LateJoin(f"n{number}", 9) for number in range(8)}
    assert {each.host for each in record.refused} == {f"n{number}" for number in range(8)}


# Real jobs


@pytest.mark.full
@pytest.mark.parametrize("back", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_host_that_comes_and_goes_is_refused_and_the_job_goes_on(nodes, back):
    """back: it comes once more when its time is over, is in a round, and leaves it by itself."""
    conf = CONF + ",max_rejoins=0" + (",refuse_node=2" if back else "")
    (steady,) = nodes.start_all("a", "1:2", ELASTIC, conf=conf, LOGLEVEL="INFO")
    steady.wait_for(seen(1, 0))
    flapping = nodes.start("b", "1:2", ELASTIC, conf=conf)
    flapping.wait_for(seen(2, 1))
    assert "once it has left, this host may not come back" in flapping.err
    flapping.process.send_signal(signal.SIGTERM)
    assert flapping.finish().returncode == 75
    steady.wait_for(seen(1, 2))
    if back:
        steady.wait_for("host b may come back")
    refused = nodes.start("b", "1:2", ELASTIC, conf=conf).finish()
    assert refused.returncode == 69, refused.err
    times = "2 times" if back else "once"
    assert f"it has joined the running job {times} within 60 minutes (max_rejoins=0)" in refused.err
    if back:
        assert "this host may not come back for 2 s" in refused.err
        steady.wait_for(seen(1, 4))
    nodes.gate.open()
    done = steady.finish()
    assert done.returncode == 0, done.err
    assert "restart 1 of" not in done.err  # nobody has failed
