"""Round events through a real TCPStore."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import pytest
from torch.distributed import TCPStore

from elastic_ext.base import records, round_store
from elastic_ext.failures.cuts import Reach, Silent
from elastic_ext.rendezvous.c10d import claim_sender, claims
from elastic_ext.rendezvous.c10d.claims import WORK, Claim, Claims, hang
from elastic_ext.rendezvous.c10d.round_events import MOVED_ON, EventKind, RoundEvent, RoundEvents
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.reader import RecordReader
from tests.etcd.proxy import Proxy
from tests.store_server import StoreServer
from tests.until import until


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def key(number: int) -> str:
    return f"{round_store.PREFIX}/{round_store.event(number)}"


def settle(agent: RoundEvents) -> None:
    """Wait until what the agent claims is in the store, and the round has ended if the job hangs."""
    until(lambda: agent._claims.all_told)


def claimed(server: TCPStore, rank: int) -> Claim:
    """What the store says that this node claims."""
    text = server.compare_set(f"{round_store.PREFIX}/{round_store.claim(rank)}", "-", "-").decode()
    return WORK if text == "-" else records.read(Claim, text, "a claim", claims.SCHEMA)


def alive(agent: RoundEvents) -> list[threading.Thread]:
    return [thread for thread in agent._threads.copy() if thread.is_alive()]


def nothing() -> None:
    pass


def reasons(*agents: RoundEvents) -> list[str | None]:
    return [each.ended_by.reason if each.ended_by is not None else None for each in agents]


@pytest.mark.seam
def test_one_tells_and_all_hear(server):
    heard = [threading.Event() for _ in range(4)]
    agents = [RoundEvents("localhost", server.port, rank, 4, event.set) for rank, event in enumerate(heard)]
    assert reasons(*agents) == [None] * 4
    agents[2].failed("workers failed on b", "b")
    assert all(event.wait(60) for event in heard)
    assert reasons(*agents) == ["workers failed on b"] * 4
    assert {each.ended_by.end.kind for each in agents} == {EndKind.BROKEN}


@pytest.mark.seam
def test_moving_on_to_the_next_round_ends_the_waits_of_this_one(server):
    heard = threading.Event()
    mine, other = RoundEvents("localhost", server.port, 0, 2, nothing), RoundEvents("localhost", server.port, 1, 2, heard.set)
    before = threading.active_count()
    mine.close()
    assert heard.wait(60)
    assert mine.ended_by is None  # no event for the one that moved on
    assert other.ended_by == MOVED_ON
    assert other.ended_without_failure
    assert not other.ended_by_failure
    until(lambda: threading.active_count() <= before)


@pytest.mark.seam
def test_no_thread_is_left_at_the_end(server):
    """One that comes back from C++ while the interpreter ends aborts the process (torch 2.8: exit code -6)."""
    before = set(threading.enumerate())
    events = RoundEvents("localhost", server.port, 0, 2, nothing)
    events.stalled(True)
    settle(events)
    assert len(alive(events)) >= 2  # one listens, one sends
    events.shut_down(60)
    assert not set(threading.enumerate()) - before  # those of another test may have ended


def test_a_store_that_dies_ends_the_wait():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threads = set(threading.enumerate())
    events = RoundEvents("localhost", server.port, 0, 2, nothing)
    (waiting,) = set(threading.enumerate()) - threads
    del server
    waiting.join(60)
    assert not waiting.is_alive()
    assert events.ended_by is None
    assert events.lost


@pytest.mark.full
def test_all_hear_when_the_last_one_has_finished(server):
    agents = [RoundEvents("localhost", server.port, rank, 3, nothing) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(each.await_all_done, 60) for each in agents[:2]]
        assert not any(each.done() for each in first)
        last = pool.submit(agents[2].await_all_done, 60)
        assert {each.result(60) for each in (*first, last)} == {True}
    assert reasons(*agents) == ["all workers have finished"] * 3


@pytest.mark.seam
def test_a_node_that_has_finished_hears_of_a_failure_first(server):
    one, other = (RoundEvents("localhost", server.port, rank, 2, nothing) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one.await_all_done, 60)
        other.failed("workers failed on b", "b")
        assert waits.result(60) is False
    other.close()  # the first event stays
    assert json.loads(server.get(key(1))) == {"schema": 1, "kind": "failed", "reason": "workers failed on b", "node": "b"}
    assert one.ended_by_failure


@pytest.mark.seam
def test_a_node_that_leaves_is_named(server):
    heard = threading.Event()
    one, other = RoundEvents("localhost", server.port, 0, 2, heard.set), RoundEvents("localhost", server.port, 1, 2, nothing)
    other.leaving("b")
    assert heard.wait(60)
    assert (one.left_by, reasons(one)) == ("b", ["b leaves"])
    assert one.ended_without_failure


@pytest.mark.seam
def test_the_last_node_to_claim_a_stall_ends_the_round(server):
    heard = threading.Event()
    one, other = RoundEvents("localhost", server.port, 0, 2, heard.set), RoundEvents("localhost", server.port, 1, 2, nothing)
    one.stalled(True)
    one.stalled(False)
    other.stalled(True)
    one.stalled(True)
    assert heard.wait(60)
    assert one.ended_by.end == RoundEnd(EndKind.STALLED, "no worker of the job is making progress")
    assert one.ended_by_failure


@pytest.mark.full
def test_a_withdrawal_that_got_lost_is_sent_again(server, monkeypatch, caplog):
    with Proxy(server.port) as proxy:
        one = RoundEvents("127.0.0.1", proxy.port, 0, 3, nothing)
        others = [RoundEvents("localhost", server.port, rank, 3, nothing) for rank in (1, 2)]
        monkeypatch.setattr(round_store, "ANSWER", timedelta(seconds=0.5))  # of the attempts, not of the connections above
        one.stalled(True)
        settle(one)
        proxy.refuse()  # the connection for events goes on
        one.stalled(False)
        until(lambda: "could not tell" in caplog.text)
        proxy.start()
        settle(one)
        assert claimed(server, 0) == WORK
        for each in others:
            each.stalled(True)
            settle(each)
        assert not server.check([key(1)])  # the first one works
        one.shut_down()


@pytest.mark.full
@pytest.mark.parametrize("at_once", [True, False])
def test_many_claims_leave_no_threads_and_the_newest_counts(server, at_once):
    one, other = (RoundEvents("localhost", server.port, rank, 2, nothing) for rank in range(2))
    for number in range(100 if at_once else 30):
        one.stalled(number % 2 == 0)
        if not at_once:
            settle(one)
    settle(one)
    if not at_once:
        until(lambda: len(one._threads) <= 4)  # one listens, one sends; attempts that have told may still be ending
    other.stalled(True)
    settle(other)
    assert not server.check([key(1)])


@pytest.mark.full
@pytest.mark.parametrize("claims", [True, False])
def test_a_node_that_has_finished_counts_once(server, monkeypatch, claims):
    """The others are given time to finish, too: they may all have waited for it."""
    one, two, _ = agents = [RoundEvents("localhost", server.port, rank, 3, nothing) for rank in range(3)]
    if claims:
        one.stalled(True)
        one.quiet(GETS_NONE)
    settle(one)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(one.await_all_done, 60)
        until(lambda: server.check([f"{round_store.PREFIX}/{round_store.DONE}"]))
        settle(one)
        two.quiet(B)
        two.stalled(True)
        settle(two)
        assert not server.check([key(1)])  # the third one works
        agents[2].stalled(True)
        settle(agents[2])
        assert not server.check([key(1)])
        monkeypatch.setattr("elastic_ext.rendezvous.c10d.claims.CLAIMS_S", 0.0)  # that time is over
        agents[2].stalled(True)
        assert done.result(60) is False
    assert one.ended_by.end.kind is EndKind.STALLED


A, B, C = (Reach((f"10.0.0.{number}",)) for number in (1, 2, 3))
GETS_NONE = Reach(A.addresses, (Silent(0, "10.0.0.2", 15.0),))


@pytest.mark.seam
def test_the_last_node_to_claim_to_be_quiet_ends_the_round_if_two_cannot_reach_each_other(server):
    heard = threading.Event()
    agents = [RoundEvents("localhost", server.port, 0, 3, heard.set)] + [
        RoundEvents("localhost", server.port, rank, 3, nothing) for rank in (1, 2)
    ]
    one, two, three = agents
    for each, reach in ((one, A), (two, B), (three, C), (three, None), (one, GETS_NONE)):
        each.quiet(reach)
        settle(each)
    assert not server.check([key(1)])  # all were quiet when all could reach each other; now the third one works
    three.quiet(C)
    assert heard.wait(60)
    assert one.ended_by.end == RoundEnd(EndKind.STALLED, GETS_NO_ANSWER)
    assert one.ended_by_failure


GETS_NO_ANSWER = "no worker of the job is making progress: a node gets no answer from another one (10.0.0.2)"
STALLS, DONE = Claim(stalled=True), Claim(finished=True)


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ([STALLS, STALLS], "no worker of the job is making progress"),
        ([STALLS, DONE], "no worker of the job is making progress"),
        ([DONE, DONE], None),
        ([STALLS, Claim()], None),
        ([STALLS, Claim(reach=B)], None),
        ([Claim(reach=A), Claim(reach=B)], None),
        ([Claim(reach=GETS_NONE), Claim(reach=B)], GETS_NO_ANSWER),
        ([Claim(reach=GETS_NONE), Claim(reach=B), STALLS, DONE], GETS_NO_ANSWER),
        ([Claim(reach=GETS_NONE), Claim(reach=B), Claim()], None),
        ([Claim(reach=GETS_NONE), Claim(stalled=True, reach=B)], GETS_NO_ANSWER),
    ],
)
def test_when_the_job_hangs(claims, why):
    assert hang(claims) == why


class Counted:
    """A store that counts the requests to it, and the keys in them."""

    def __init__(self, store: round_store.Store) -> None:
        self._store, self.requests, self.keys = store, 0, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(keys: str | list[str], *args: str) -> object:
            self.requests += 1
            self.keys += 1 if isinstance(keys, str) else len(keys)
            return getattr(self._store, name)(keys, *args)

        return call


@pytest.mark.seam
def test_what_a_claim_costs_does_not_grow_with_the_job_while_a_node_works(server):
    nodes = 50
    store = Counted(round_store.connect("localhost", server.port))
    agents = [Claims(rank, nodes, RecordReader()) for rank in range(nodes)]
    for each in agents[1:]:
        each.change(lambda _: Claim(reach=B))
        assert each.send(store).why is None
    assert store.requests <= 2 * nodes
    for claim in (Claim(reach=GETS_NONE), WORK):
        agents[0].change(lambda _, claim=claim: claim)
        assert agents[0].send(store).why is None  # 10.0.0.2 is that of 49 nodes
    for requests, keys in ((3, 2 * nodes + 1), (2, 2)):  # once all have claimed, one look finds a node that works
        store.requests = store.keys = 0
        for each in agents[1:]:
            each.change(lambda _: Claim(reach=B))
            each.send(store)
        assert store.requests <= requests * nodes
        assert store.keys <= keys * nodes
    why = []
    for each in agents:
        each.change(lambda _: STALLS)
        why.append(each.send(store).why)
    assert why == [None] * (nodes - 1) + ["no worker of the job is making progress"]


class During:
    """A store that calls `then` when this request has been answered."""

    def __init__(self, store: round_store.Store, request: str, then: Callable[[], object]) -> None:
        self._store, self._request, self._then = store, request, then

    def __getattr__(self, name: str) -> object:
        call = getattr(self._store, name)
        return (lambda *args: (call(*args), self._then())[0]) if name == self._request else call


@pytest.mark.seam
@pytest.mark.parametrize("request_", ["compare_set", "check", "multi_get"])
def test_a_hang_is_known_though_claims_are_repeated_faster_than_the_store_answers(server, request_):
    store, repeats = round_store.connect("localhost", server.port), 0
    one, other = (Claims(rank, 2, RecordReader()) for rank in range(2))

    def repeat() -> None:
        nonlocal repeats
        repeats += 1
        assert repeats <= 3, "the hang was seen and thrown away"
        one.change(lambda _: STALLS)

    for each in (other, one):
        each.change(lambda _: STALLS)
        sent = each.send(cast(round_store.Store, During(store, request_, repeat)) if each is one else store)
    assert sent.why == "no worker of the job is making progress"
    assert not one.all_told  # the last repetition is told, too


@pytest.mark.seam
def test_a_hang_is_judged_anew_if_a_claim_was_withdrawn_meanwhile(server):
    store, looks = round_store.connect("localhost", server.port), 0
    one, other = (Claims(rank, 2, RecordReader()) for rank in range(2))

    def work_for_a_moment() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            for each, claims_ in ((other, [WORK]), (one, [WORK, STALLS])):
                for claim in claims_:
                    each.change(lambda _, claim=claim: claim)
            other.send(store)

    other.change(lambda _: STALLS)
    other.send(store)
    one.change(lambda _: STALLS)
    assert one.send(cast(round_store.Store, During(store, "multi_get", work_for_a_moment))).why is None
    assert looks == 2


@pytest.mark.seam
def test_an_address_of_no_node_and_a_claim_that_cannot_be_read_end_no_round(server):
    one, other = (RoundEvents("localhost", server.port, rank, 2, nothing) for rank in range(2))
    other.quiet(B)
    settle(other)
    one.quiet(Reach(A.addresses, (Silent(0, "10.0.0.9", 15.0),)))
    settle(one)
    server.set(f"{round_store.PREFIX}/{round_store.claim(1)}", "{}")
    one.quiet(GETS_NONE)
    settle(one)
    assert reasons(one, other) == [None, None]
    assert not server.check([key(1)])
    server.set(f"{round_store.PREFIX}/{round_store.claim(1)}", '{"schema": 1, "stalled": true, "number": 2000000000}')
    other.quiet(None)
    settle(other)
    assert claimed(server, 1) == WORK


@pytest.mark.full
def test_saves_are_asked_for_and_then_the_round_ends(server):
    heard = threading.Condition()

    def on_event():
        with heard:
            heard.notify_all()

    agents = [RoundEvents("localhost", server.port, rank, 3, on_event) for rank in range(3)]
    for number in (1, 2):
        agents[number].request_save()
        with heard:
            assert heard.wait_for(lambda number=number: all(each.saves == number for each in agents), 60)
        assert reasons(*agents) == [None] * 3
    agents[0].failed("it failed", "a")
    with heard:
        assert heard.wait_for(lambda: reasons(*agents) == ["it failed"] * 3, 60)
    agents[0].request_save()  # nobody saves any more
    agents[0].shut_down()
    assert [each.saves for each in agents] == [2, 2, 2]


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"[" * 50_000, b"{}", b"save", b"left by b", b'{"schema": 2, "kind": "failed"}', b'{"schema": 1, "kind": "?"}'],
)
def test_what_a_stranger_puts_there_is_passed_over(server, text, caplog):
    """It ends nothing and hides no later event, and there is one warning."""
    server.set(key(1), text)
    saved, ended = threading.Event(), threading.Event()
    agents = [
        RoundEvents("localhost", server.port, 0, 2, lambda: (ended if agents[0].ended_by else saved).set()),
        RoundEvents("localhost", server.port, 1, 2, nothing),
    ]
    agents[1].request_save()
    assert saved.wait(60)
    assert reasons(*agents) == [None, None]
    agents[1].failed("workers failed on b", "b")
    assert ended.wait(60)
    assert agents[0].saves == 1
    assert RoundEvent(EventKind.FAILED, "workers failed on b", "b") == agents[0].ended_by
    assert "ignoring it" in caplog.text


@pytest.mark.seam
def test_an_empty_value_hides_no_later_event(server):
    """To a TCPStore's compare-and-set it is as good as none, but the agents have passed it over."""
    server.set(key(1), "")
    server.set(key(2), RoundEvent(EventKind.SAVE).encode())
    saved, ended = threading.Event(), threading.Event()
    one = RoundEvents("localhost", server.port, 0, 2, lambda: (ended if one.ended_by else saved).set())
    other = RoundEvents("localhost", server.port, 1, 2, nothing)
    assert saved.wait(60)  # so it is past the first value
    other.failed("workers failed on b", "b")
    assert ended.wait(60)
    assert RoundEvent(EventKind.FAILED, "workers failed on b", "b") == one.ended_by


# A store, or the way to it, that stands still. The timeout of a TCPStore ends none of these calls.


class BeforeWriting:
    """A store that calls `then` before the first write over it."""

    def __init__(self, store: round_store.Store, then: Callable[[], object]) -> None:
        self._store, self._then = store, [then]

    def __getattr__(self, name: str) -> object:
        call = getattr(self._store, name)
        if name in ("set", "compare_set") and self._then:
            then = self._then.pop()
            return lambda *args: (then(), call(*args))[-1]
        return call


def before_next_write(monkeypatch, port: int, then: Callable[[], object]) -> None:
    """Have the next connection to this port call `then` when its first write is about to leave."""
    connect, left = round_store.connect, [then]

    def connecting(host: str, to: int) -> round_store.Store:
        store = connect(host, to)
        return cast(round_store.Store, BeforeWriting(store, left.pop())) if to == port and left else store

    monkeypatch.setattr(round_store, "connect", connecting)


@pytest.mark.full
@pytest.mark.parametrize("then", ["", "given-up", "claimed-anew"])
def test_claims_on_their_way_do_not_outlive_their_withdrawal(monkeypatch, caplog, then):
    """The first node works again before the store hears that it stalled; the other one's claim arrives before that is heard."""
    if then == "given-up":
        monkeypatch.setattr(round_store, "ANSWER", timedelta(seconds=0.3))
    with StoreServer() as server, Proxy(server.port) as proxy:
        one = RoundEvents("127.0.0.1", proxy.port, 0, 2, nothing)
        other = RoundEvents("localhost", server.port, 1, 2, nothing)
        frozen = threading.Event()
        both = threading.Barrier(2, action=lambda: (server.pause(), frozen.set()))
        before_next_write(monkeypatch, proxy.port, both.wait)
        before_next_write(monkeypatch, server.port, both.wait)
        one.stalled(True)
        other.stalled(True)
        assert frozen.wait(60)
        one.stalled(False)
        time.sleep(claim_sender.PROMPT_S)  # what is less is no longer than a withdrawal may take
        if then == "given-up":
            until(lambda: caplog.text.count("no answer from the store") == 2)
        if then == "claimed-anew":
            there = len(alive(other))
            other.stalled(False)
            until(lambda: len(alive(other)) == there + 1)
            other.stalled(True)
            until(lambda: len(alive(other)) == there + 2)  # an attempt that begins just before the store goes on
        proxy.delay(0.1)
        server.resume()
        settle(one)
        settle(other)
        store = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
        assert [claimed(store, rank) for rank in range(2)] == [WORK, STALLS]
        assert reasons(one, other) == [None, None]
        assert not store.check([key(1)])
        proxy.delay(0.0)
        one.stalled(True)
        until(lambda: reasons(one, other) == ["no worker of the job is making progress"] * 2)
        one.shut_down()
        other.shut_down()


@pytest.mark.full
def test_a_withdrawal_does_not_wait_for_a_claim_on_a_cut_connection(server, monkeypatch):
    monkeypatch.setattr(round_store, "ANSWER", timedelta(seconds=60))  # longer than this test waits for anything
    with Proxy(server.port) as proxy:
        one = RoundEvents("127.0.0.1", proxy.port, 0, 2, nothing)
        other = RoundEvents("localhost", server.port, 1, 2, nothing)
        one.stalled(True)
        settle(one)
        cut = threading.Event()
        before_next_write(monkeypatch, proxy.port, lambda: (proxy.hold(but=1, new=False), cut.set()))
        one.stalled(True)  # again
        assert cut.wait(60)
        for _ in range(5):
            one.stalled(True)
            time.sleep(0.05)  # for an attempt that a repetition must not begin
        one.stalled(False)
        until(lambda: claimed(server, 0) == WORK)
        settle(one)
        assert len(alive(one)) > 2  # it listens, sends, and one attempt is held up
        assert proxy.accepted == 4  # for events, the first claim, the one that is held up, and the withdrawal
        proxy.delay(0.2)  # what the held-up attempt does after its write has arrived, it does later
        proxy.release()
        seen = set()
        until(lambda: seen.add(claimed(server, 0)) or len(alive(one)) == 2)
        assert seen == {WORK}
        other.stalled(True)
        settle(other)
        assert not server.check([key(1)])
        one.shut_down()


@pytest.mark.full
def test_a_hang_is_known_though_the_store_is_always_slow(server, monkeypatch):
    for name in ("PROMPT_S", "RETRY_S"):
        monkeypatch.setattr(claim_sender, name, 0.1)
    with Proxy(server.port) as proxy:
        one = RoundEvents("127.0.0.1", proxy.port, 0, 2, nothing)
        other = RoundEvents("localhost", server.port, 1, 2, nothing)
        other.stalled(True)
        settle(other)
        proxy.delay(0.05)
        one.stalled(True)
        until(lambda: reasons(other) == ["no worker of the job is making progress"])
        one.shut_down()


@pytest.fixture
def no_more_threads() -> Iterator[Callable[[bool], None]]:
    """No thread can be started while it was last called with True: there is not enough memory for a stack."""
    before = threading.stack_size()
    yield lambda none: (threading.stack_size(1 << 46 if none else before), None)[-1]
    threading.stack_size(before)


@pytest.mark.full
def test_claims_are_told_once_there_can_be_threads_again(server, no_more_threads, caplog):
    one = RoundEvents("localhost", server.port, 0, 2, nothing)
    no_more_threads(True)
    one.stalled(True)
    assert "start new thread" in caplog.text
    no_more_threads(False)
    one.stalled(True)
    settle(one)
    assert claimed(server, 0) == STALLS
    caplog.clear()
    no_more_threads(True)
    one.stalled(False)
    until(lambda: "start new thread" in caplog.text)
    no_more_threads(False)
    settle(one)  # without being told again
    assert claimed(server, 0) == WORK
    one.shut_down()
