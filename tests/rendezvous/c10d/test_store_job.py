"""Verdicts and the ledger through a real TCPStore."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from elastic_ext.failures import judgement
from elastic_ext.failures import ledger as job
from elastic_ext.rendezvous.c10d import store_calls, store_job
from elastic_ext.rendezvous.c10d.store_calls import NOTHING, StoreCalls, StoreLost
from elastic_ext.rendezvous.c10d.store_job import Membership, StoreJob
from tests.etcd.proxy import Proxy
from tests.failures.test_ledger import PEER, RULES, report
from tests.ports import free_port
from tests.store_server import StoreServer
from tests.until import until

pytestmark = pytest.mark.seam

LONG_S = 60.0


class Node:
    def __init__(self, store: TCPStore, rank: int, nodes: int, name: str, ledger: job.Ledger | None = None) -> None:
        self.job = StoreJob(store, "job", f"{name}-id", hosts=rank == 0, ledger=ledger or job.Ledger())
        self.job.enter_job()
        self.membership = Membership(1, rank, nodes)
        self.judged: list[set[str]] = []

    def conclude(
        self, told: job.Report, settle_s: float = LONG_S, patience_s: float = LONG_S
    ) -> tuple[job.Ledger, job.JobVerdict]:
        return self.job.conclude(self.membership, told, self.judge, settle_s, patience_s)

    def judge(self, reports, ledger, store_host):
        self.judged.append(set(reports))
        assert store_host == "a-id"
        return judgement.judge(reports, ledger, RULES, self.membership.round)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def make(store: TCPStore, names: str) -> list[Node]:
    return [Node(store, rank, len(names), name) for rank, name in enumerate(names)]


def test_all_get_one_verdict_and_it_is_charged_once(store):
    """Two fail at the same moment, one is well. The bug is not outvoted, whoever judges; rounds follow each other."""
    nodes = make(store, "abc")
    a, b, c = nodes
    with ThreadPoolExecutor(3) as pool:
        for number, told in ((1, report("b", signal="SIGKILL")), (2, report("b", "NameError", "x"))):
            for node in nodes:
                node.membership = Membership(number, node.membership.rank, 3)
            answers = [
                pool.submit(a.conclude, report("a", **PEER)),
                pool.submit(b.conclude, told),
                pool.submit(c.job.await_verdict, c.membership, LONG_S),
            ]
            found = [answer.result(LONG_S) for answer in answers]
            assert found[0] == found[1] == found[2]
            ledger, verdict = found[0]
            assert (verdict.round, verdict.host, ledger.charged) == (number, "b", 1)
            assert sum(len(node.judged) for node in nodes) == number
            assert a.job.stopped() == (verdict if number == 2 else None)


def test_a_node_that_is_silent_is_waited_for_until_the_settle_window_is_over_and_gets_the_same(store):
    a, b = make(store, "ab")
    ledger, verdict = a.conclude(report("a", signal="SIGKILL"), settle_s=0.1)
    assert b.conclude(report("b", **PEER)) == (ledger, verdict)
    assert (a.judged, b.judged) == ([{"a-id"}], [])


def test_what_only_follows_is_not_judged_before_the_silent_have_told(store, caplog):
    """The cause is with the node that is slow to tell; that one is heard, though the settle window is over."""
    a, b, c = make(store, "abc")
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(node.conclude, report(name, **PEER), settle_s=0.1) for name, node in (("a", a), ("c", c))]
        until(lambda: "waiting for the nodes that have not reported yet" in caplog.text)
        assert not any(answer.done() for answer in answers)
        answers.append(pool.submit(b.conclude, report("b", "NameError", "x"), settle_s=0.1))
        (_, verdict), *others = [answer.result(LONG_S / 2) for answer in answers]
    assert (verdict.host, verdict.decision.kind) == ("b", "code")
    assert all(other[1] == verdict for other in others)


@pytest.mark.full
@pytest.mark.parametrize(("told", "patience_s"), [(PEER, 1.0), (PEER, 0.1), ({"signal": "SIGKILL"}, LONG_S)])
def test_a_host_that_has_died_holds_up_nobody_for_long(store, told, patience_s):
    """Where there is a cause not for longer than the settle window."""
    a, _ = make(store, "ab")
    begin = time.monotonic()
    _, verdict = a.conclude(report("a", **told), settle_s=0.1, patience_s=patience_s)
    took_s = time.monotonic() - begin
    assert verdict.host == "a"
    assert took_s < LONG_S / 2
    assert told != PEER or took_s >= patience_s


@pytest.mark.full
def test_a_judge_that_dies_is_replaced(store, monkeypatch):
    monkeypatch.setattr(store_job, "JUDGING_S", 0.1)
    a, b = make(store, "ab")
    a.job.calls.swap("1/judge", "", "a-id")  # and no more of it
    _, verdict = b.conclude(report("b", signal="SIGKILL"), settle_s=0.1, patience_s=0.1)
    assert verdict.node == "b-id"
    assert b.judged == [{"b-id"}]


def test_of_two_judges_one_is_heard(store):
    a, b = make(store, "ab")
    told = a.conclude(report("a", signal="SIGKILL"), settle_s=0.1)
    again = b.job._judge(b.membership, report("b", "NameError", "x"), b.judge, 0.1, LONG_S)
    assert again == told
    assert b.judged == []


def test_the_ledger_of_an_earlier_agent_counts_and_its_rounds_are_not_ours(store):
    before, _ = judgement.judge({"x": report("c", signal="SIGKILL")}, job.Ledger(), RULES, 1)
    _, b = Node(store, 0, 2, "a"), Node(store, 1, 2, "b", before)
    ledger, verdict = b.conclude(report("b", signal="SIGSEGV"), settle_s=0.1)
    assert (ledger.charged, verdict.restarts, len(ledger.failures)) == (2, 2, 2)


def test_a_node_that_was_told_to_leave_is_refused_until_it_is_forgiven(store):
    a, b = make(store, "ab")
    nodes = [a, b, Node(store, 2, 3, "c")]
    for number in (1, 2):
        for node in nodes:
            node.membership = Membership(number, node.membership.rank, 3)
        _, verdict = b.conclude(report("b", signal="SIGSEGV", step=None), settle_s=0.1)
    assert (verdict.decision.exit_code, verdict.host) == (69, "b")
    why = a.job.refused("b")
    assert why == verdict.decision.reason
    a.job.end_refusal("b", "another one")
    assert a.job.refused("b") == why
    a.job.end_refusal("b", why)
    assert a.job.refused("b") == ""


def test_a_wait_ends_in_time_and_keeps_nothing_waiting(store):
    calls = StoreCalls(store, "x/")
    calls.connect()
    calls.put("here", "1")
    threads = threading.active_count()
    calls.wait_all(["here", "never"], 0.1)
    assert [calls.read(key) for key in ("here", "never", "other")] == ["1", NOTHING, ""]
    calls.end(LONG_S)
    until(lambda: threading.active_count() <= threads)


def test_a_host_that_waits_for_the_others_goes_when_they_have_gone(store):
    a, b = make(store, "ab")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(a.job.await_others, LONG_S)
        b.job.leave()
        waits.result(LONG_S / 2)


def test_a_store_that_dies_ends_the_waits_and_is_not_asked_again():
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
    calls = StoreCalls(client, "x/")
    calls.connect()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(calls.wait_all, ["never"], LONG_S)
        del store
        with pytest.raises(StoreLost):
            waits.result(LONG_S / 2)
    with pytest.raises(StoreLost):
        calls.read("x")


def test_a_store_behind_a_cut_link_holds_up_nobody(store, monkeypatch):
    """Torch's own calls would wait for as long as TCP does."""
    with Proxy(store.port) as proxy:
        host, port = proxy.endpoint.split(":")
        calls = StoreCalls(TCPStore(host, int(port), is_master=False, wait_for_workers=False), "x/")
        calls.connect()
        calls.put("a", "1")
        monkeypatch.setattr(store_calls, "CALL_S", 0.2)
        proxy.deaf()
        begin = time.monotonic()
        with pytest.raises(StoreLost, match="no answer"):
            calls.put("a", "2")
        with pytest.raises(StoreLost):
            calls.wait_all(["b"], LONG_S)
        assert time.monotonic() - begin < LONG_S / 2
        proxy.stop()
        calls.end(LONG_S)


def client_of(port: int) -> TCPStore:
    return TCPStore("localhost", port, is_master=False, wait_for_workers=False)


@pytest.mark.full
def test_a_store_that_was_slow_is_asked_again_and_knows_all(monkeypatch):
    """The call that was given up holds its connection, and is carried out in the end: nothing is told twice."""
    with StoreServer() as server:
        nodes = make(client_of(server.port), "ab")
        a, b = nodes
        told = report("a", signal="SIGKILL")
        server.pause()
        with monkeypatch.context() as context:
            context.setattr(store_calls, "CALL_S", 1.0)
            context.setattr(store_calls, "CONNECT_S", 1.0)
            with pytest.raises(StoreLost, match="no answer"):
                a.conclude(told, settle_s=0.1)
            with pytest.raises(StoreLost, match="no answer"):
                a.job.reconnect()  # not yet there
        server.resume()
        a.job.reconnect()
        ledger, verdict = a.conclude(told, settle_s=0.1)
        assert (ledger.charged, len(ledger.failures), verdict.host) == (1, 1, "a")
        assert b.conclude(report("b", **PEER)) == (ledger, verdict)
        for node in nodes:
            node.job.calls.end(LONG_S)


def test_of_a_host_that_is_gone_that_is_known_at_once():
    """Torch alone would try to connect for five minutes."""
    with StoreServer() as server:
        (node,) = make(client_of(server.port), "a")
        server.kill()
        begin = time.monotonic()
        for _ in range(2):
            with pytest.raises(StoreLost):
                node.job.reconnect()
        node.job.calls.end(LONG_S)
        assert time.monotonic() - begin < LONG_S


def test_a_store_in_the_place_of_the_lost_one_is_told_nothing():
    """A pod that was started again serves there: a new job, in which what we know of rounds and verdicts is wrong."""
    port = free_port()
    with StoreServer(port):
        (node,) = make(client_of(port), "a")
    with StoreServer(port):
        (other,) = make(client_of(port), "b")
        with pytest.raises(StoreLost, match="another store"):
            node.job.reconnect()
        with pytest.raises(StoreLost, match="another store"):
            node.job.stop(judgement.judge({"a": report("a")}, job.Ledger(), RULES, 1)[1])
        assert other.job.stopped() is None


def test_a_store_that_cannot_be_reached_at_the_start_is_lost():
    server = StoreServer()
    client = client_of(server.port)
    server.kill()
    shared = StoreJob(client, "job", "a-id", hosts=False, ledger=job.Ledger())
    with pytest.raises(StoreLost):
        shared.enter_job()
