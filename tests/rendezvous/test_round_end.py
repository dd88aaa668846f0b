"""How a round has ended, by the newest header that a node of it knows."""

import dataclasses
import functools
import math
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from elastic_ext.base import waits
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.ledger import Report
from elastic_ext.rendezvous import round_part, topics
from elastic_ext.rendezvous.contract import AgentHooks, EndKind, NodeIdentity
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.patience import Patience
from elastic_ext.rendezvous.place import Place
from elastic_ext.rendezvous.round_part import EtcdRound, round_end
from elastic_ext.rendezvous.round_records import Assignment, Header, State
from tests.participants import place_of


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (Header(3, State.RUNNING, seal="s"), None),
        (Header(3, State.DONE, seal="s"), None),
        (Header(3, State.BROKEN, seal="s"), EndKind.BROKEN),
        (Header(3, State.BROKEN, seal="s", reason=topics.NO_PROGRESS), EndKind.BROKEN),  # no reason is compared
        (Header(3, State.BROKEN, seal="s", end=EndKind.STALLED), EndKind.STALLED),
        (Header(3, State.CLOSED, seal="s"), EndKind.CLOSED),
        (Header(3, State.CLOSED, seal="other"), EndKind.CLOSED),
        (Header(3, State.RUNNING, seal="other"), EndKind.BROKEN),
        (Header(4, State.RUNNING, seal="s"), EndKind.BROKEN),
        (Header(4, State.BROKEN, seal="t", end=EndKind.STALLED), EndKind.BROKEN),  # another round stalled
        (Header(), EndKind.BROKEN),
    ],
)
def test_a_round_ends_by_its_header(header, kind):
    ended = round_end(header, 3, "s")
    assert (ended.kind if ended is not None else None) is kind


@pytest.mark.parametrize(("lost", "signal"), [("h0:1", ""), ("", ""), ("", "SIGTERM")])
def test_only_a_lost_node_ends_a_round_so(lost, signal):
    """Not one that a signal has asked to leave."""
    assert round_end(Header(3, State.BROKEN, seal="s", lost=lost, signal=signal), 3, "s").lost is bool(lost)


def test_an_interrupted_leave_is_completed_by_the_next():
    def leave() -> None:
        raise KeyboardInterrupt

    rendezvous, closed = object.__new__(EtcdRendezvous), []
    rendezvous._left, rendezvous.part, rendezvous._place = False, SimpleNamespace(server=None), SimpleNamespace(leave=leave)
    rendezvous._own_store = SimpleNamespace(close=lambda: closed.append("store"))
    with pytest.raises(KeyboardInterrupt):
        rendezvous.leave()
    rendezvous.leave()
    assert closed == ["store"]


@pytest.mark.parametrize(
    ("earlier", "last", "closes"), [(False, None, True), (True, None, False), (True, False, True), (False, True, False)]
)
def test_the_last_verdict_says_whether_the_job_continues(earlier, last, closes):
    """earlier: that of rounds before; last: that of this round, None without one."""
    rendezvous, ended = object.__new__(EtcdRendezvous), []
    rendezvous._timed_out, rendezvous._workers, rendezvous.node = False, 1, NodeIdentity("n", "h", "")
    rendezvous.hooks = AgentHooks()
    participant = SimpleNamespace(header=Header(2, State.RUNNING), change_header=lambda *given, **_: ended.append(given))
    place = SimpleNamespace(participant=participant, take_s=60.0)
    rendezvous._place, rendezvous.part = place, SimpleNamespace(continues=earlier)
    rendezvous.part = rendezvous._part(Header(2, State.RUNNING), Assignment(2, 0, 0, 0, 1))
    rendezvous.part.continues = earlier if last is None else last
    rendezvous.set_closed()
    assert bool(ended) == closes


def heard_node(header: Header, unwritten: bool = False, alive_s: float = 99.0, full: str | None = None) -> SimpleNamespace:
    """A node of round 1. unwritten: the store has not taken its record. alive_s: of its lease."""
    return SimpleNamespace(
        header=header,
        failure=None,
        joined=None,
        update=lambda change: None,
        change_header=lambda *args: None,
        registration=SimpleNamespace(unwritten=unwritten, lease=(7, time.monotonic() + alive_s), deleted_at=-math.inf),
        tasks=SimpleNamespace(refusal=full),
        client=SimpleNamespace(endpoints=("10.0.0.1:2379",)),
        context=SimpleNamespace(config=SimpleNamespace(node_id="n")),
    )


RUNS, BROKE = Header(1, State.RUNNING, 2, 2, seal="s"), Header(1, State.BROKEN, 2, 2, seal="s")


def part_of(monkeypatch: pytest.MonkeyPatch, header: Header, patience_s: float = 0.0, **node) -> EtcdRound:
    """The part of a node to which any time without a word of the store is too long."""
    monkeypatch.setattr(Place, "take_s", 0.0)
    policy = AgentPolicy(Settings(), lambda: None)
    place = dataclasses.replace(place_of(heard_node(header, **node)), patience=Patience(patience_s, 1, 1), policy=policy)
    return EtcdRound(place, header, Assignment(1, 0, 0, 0, 2, "s"), 1)


@pytest.mark.parametrize(
    ("node", "unheard"),
    [
        ({}, False),
        ({"unwritten": True}, True),
        ({"unwritten": True, "alive_s": -1.0}, False),  # the store is down: what comes of it is not for this node to say
        ({"unwritten": True, "full": "NOSPACE"}, False),  # it answers: somebody will make room
    ],
)
def test_a_store_that_takes_no_record(node, unheard):
    assert place_of(heard_node(RUNS, **node)).unheard(time.monotonic()) is unheard


@pytest.mark.parametrize(("ttl_s", "take_s"), [(10, 60.0), (300, 300.0)])
def test_an_outage_ends_the_lease_first(ttl_s, take_s):
    assert dataclasses.replace(place_of(heard_node(RUNS)), settings=Settings(lease_ttl=ttl_s)).take_s == take_s


def test_an_unheard_node_leaves_when_it_waits(monkeypatch):
    """Its report, or that its workers have finished, is too large for the network."""
    failed, finished = (part_of(monkeypatch, header, 99.0, unwritten=True) for header in (BROKE, RUNS))
    with pytest.raises(RendezvousConnectionError, match=r"10\.0\.0\.1:2379 .* from 127\.0\.0\.1 .* check the MTU"):
        failed.conclude(Report("h", classify(Evidence(rank=0, exit_code=1))))
    with pytest.raises(RendezvousConnectionError, match="check the MTU"):
        finished.await_all_done()
    with pytest.raises(RendezvousConnectionError, match="check the MTU"):
        failed._place.await_round(1, lambda verdict: None)


FLAKY, BUG = Evidence(rank=0, exit_code=1), Evidence(rank=0, exit_code=65)


@pytest.mark.parametrize(
    ("evidence", "alive_s", "leaves"),
    [
        (FLAKY, 99.0, True),  # the next round would end the same way, without a history that ends it
        (FLAKY, -1.0, False),  # the store is down: this node waits for a round, but forms none
        (BUG, 99.0, False),  # what is certain ends the job
    ],
)
def test_no_node_restarts_again_and_again_alone(monkeypatch, evidence, alive_s, leaves):
    part = part_of(monkeypatch, BROKE, alive_s=alive_s)
    part._place.policy.max_restarts = 3
    report = Report("h", classify(evidence))
    if leaves:
        with pytest.raises(RendezvousTimeoutError, match=r"no verdict of the job on round 1 in 0 s \(join_timeout\)"):
            part.conclude(report)
    else:
        assert part.conclude(report).ends_job is (evidence is BUG)


@pytest.mark.parametrize(("claims", "kind"), [(False, None), (True, EndKind.CUT_OFF)])
def test_an_unheard_hang_ends_the_round(monkeypatch, claims, kind):
    """Nobody else can end it. Without a claim the workers train, whatever the store does."""
    part = part_of(monkeypatch, RUNS, unwritten=True)
    part.post(topics.STALLED, topics.Stalled() if claims else None)
    ended = part.over()
    assert (ended.kind if ended is not None else None) is kind


def test_no_choice_of_a_checkpoint_has_an_end(monkeypatch):
    """For the node of rank 0, whose choice the store does not take, and for the others."""
    exchange = part_of(monkeypatch, RUNS).exchange
    with pytest.raises(RendezvousTimeoutError, match="waited for the choice of a checkpoint by the node of rank 0"):
        exchange.choice(0.0)
    with pytest.raises(RendezvousTimeoutError, match="waited for the job's store to take the choice of a checkpoint"):
        exchange.publish("it")


def test_nodes_await_later_finishers_without_limit(monkeypatch):
    """Whatever torch's exit barrier is told, a node that left before the others would be a lost one."""
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "0")
    header = Header(1, State.RUNNING, 2, 2, seal="s")
    registration, tasks = SimpleNamespace(unwritten=False, lease=(7, math.inf)), SimpleNamespace(refusal=None)
    participant = SimpleNamespace(header=header, failure=None, update=lambda change: None, registration=registration, tasks=tasks)
    limits = []

    class Looked(threading.Condition):
        def wait(self, timeout=None):
            limits.append(timeout)
            participant.header = dataclasses.replace(header, state=State.DONE if len(limits) == 1000 else State.RUNNING)

    place = dataclasses.replace(place_of(participant), changed=Looked())
    assert EtcdRound(place, header, Assignment(1, 0, 0, 0, 2, "s"), 1).await_all_done()
    assert set(limits) == {None}


@pytest.mark.parametrize(("full", "why"), [(None, "another node has not reported"), ("NOSPACE; defragment etcd", "NOSPACE; def")])
def test_a_missing_verdict_names_a_full_store(monkeypatch, full, why):
    """And what has failed here: no verdict does."""
    part = part_of(monkeypatch, BROKE, full=full)
    part._place.policy.max_restarts = 3
    with pytest.raises(RendezvousTimeoutError, match=rf"though its store answers: {why}.*; here: rank 0 ended with exit code 1"):
        part.conclude(Report("h", classify(FLAKY)))


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({}, "their workers still run"),
        ({"alive_s": -1.0}, "the job's store does not answer"),
        ({"unwritten": True, "full": "NOSPACE"}, "NOSPACE"),
    ],
)
def test_why_a_finished_node_waits_is_said(monkeypatch, caplog, node, why):
    """All workers may have finished: without the store nobody learns of it."""
    part = part_of(monkeypatch, RUNS, **node)
    monkeypatch.setattr(waits, "Waiting", functools.partial(waits.Waiting, first_s=0.0))

    class Looked(threading.Condition):
        def wait(self, timeout=None):
            part._participant.header = dataclasses.replace(RUNS, state=State.DONE)

    object.__setattr__(part._place, "changed", Looked())
    assert part.await_all_done()
    assert [each.message.rpartition(": ")[2] for each in caplog.records] == [why]


@pytest.mark.parametrize(("node", "why"), [({"alive_s": -1.0}, "does not answer"), ({"full": "NOSPACE"}, "NOSPACE")])
def test_no_node_awaits_news_for_ever(monkeypatch, node, why):
    """With a store that is full, or gone for good."""
    part = part_of(monkeypatch, RUNS, **node)
    monkeypatch.setattr(round_part, "NO_NEWS_S", 0.0)
    with pytest.raises(RendezvousConnectionError, match=rf"no news of the other nodes in 0 s: .*{why}.*; the workers here"):
        part.await_all_done()


def test_before_the_first_round():
    assert round_end(Header(), 0, None) is None
    assert round_end(Header(state=State.CLOSED), 0, None).kind is EndKind.CLOSED
    assert round_end(Header(2, State.RUNNING, seal="s"), 0, None).kind is EndKind.BROKEN
