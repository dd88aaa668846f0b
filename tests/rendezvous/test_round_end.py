"""How a round has ended, by the newest header that a node of it knows."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest

from elastic_ext.rendezvous.contract import EndKind
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.round_part import EtcdRound, round_end
from elastic_ext.rendezvous.round_records import Assignment, Header, State
from elastic_ext.rendezvous.rounds import STALLED
from tests.participants import place_of


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (Header(3, State.RUNNING, seal="s"), None),
        (Header(3, State.DONE, seal="s"), None),
        (Header(3, State.BROKEN, seal="s"), EndKind.BROKEN),
        (Header(3, State.BROKEN, seal="s", reason=STALLED), EndKind.BROKEN),  # no reason is compared
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
    rendezvous._timed_out, rendezvous._workers, rendezvous.host, rendezvous.node_id = False, 1, "h", "n"
    participant = SimpleNamespace(header=Header(2, State.RUNNING), change_header=lambda *given, **_: ended.append(given))
    rendezvous._place, rendezvous.part = SimpleNamespace(participant=participant), SimpleNamespace(continues=earlier)
    rendezvous.part = rendezvous._part(Header(2, State.RUNNING), Assignment(2, 0, 0, 0, 1))
    rendezvous.part.continues = earlier if last is None else last
    rendezvous.set_closed()
    assert bool(ended) == closes


def test_nodes_await_later_finishers_without_limit(monkeypatch):
    """Whatever torch's exit barrier is told, a node that left before the others would be a lost one."""
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "0")
    header = Header(1, State.RUNNING, 2, 2, seal="s")
    participant = SimpleNamespace(header=header, failure=None, update=lambda change: None)
    limits = []

    class Looked(threading.Condition):
        def wait(self, timeout=None):
            limits.append(timeout)
            participant.header = dataclasses.replace(header, state=State.DONE if len(limits) == 1000 else State.RUNNING)

    place = dataclasses.replace(place_of(participant), changed=Looked())
    assert EtcdRound(place, header, Assignment(1, 0, 0, 0, 2, "s"), 1).await_all_done()
    assert set(limits) == {None}


def test_before_the_first_round():
    assert round_end(Header(), 0, None) is None
    assert round_end(Header(state=State.CLOSED), 0, None).kind is EndKind.CLOSED
    assert round_end(Header(2, State.RUNNING, seal="s"), 0, None).kind is EndKind.BROKEN
