"""Leases on a real server: kept alive, given up, revoked, lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import pytest

from elastic_ext.etcd import ConfigError, LeaseSession, Unavailable
from elastic_ext.etcd.calls import race
from elastic_ext.etcd.values import KeptAlive
from tests.etcd.conftest import ends
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

KEPT_S = 6  # of leases that are to be kept beyond that
LONG_TTL_S = 300  # of leases that must not end while this machine or etcd is slow


def renew_now(client: EtcdClient, session: LeaseSession) -> None:
    """Not only after a third of its TTL."""
    session.retry_at(time.monotonic())
    client.renewer.add(session)


def with_limits(client: EtcdClient, timeout_s: float) -> None:
    """Give each renewal so much time, and let the next connection take part soon, whatever the TTL."""
    client.renewer._keep_alive = lambda ids, **_: client.lease_keep_alive(ids, timeout_s=timeout_s, beside_s=0.2)


@pytest.mark.seam
def test_a_session_outlives_its_ttl(client: EtcdClient, prefix: str):
    lost: list[LeaseSession] = []
    session = LeaseSession(client, KEPT_S, on_lost=lost.append)
    client.put(prefix, "1", lease_id=session.lease_id)
    first = session.alive_until
    assert first <= time.monotonic() + KEPT_S
    until(lambda: time.monotonic() > first + 1 and session.alive_until > first)
    assert client.get(prefix).kv is not None
    assert not session.lost.is_set()
    assert lost == []
    session.revoke()
    assert client.get(prefix).kv is None
    assert client.lease_ttl(session.lease_id) == -1
    assert not session.lost.is_set()  # given back is not lost
    session.revoke()


def test_the_server_agrees_with_alive_until(client: EtcdClient):
    session = LeaseSession(client, LONG_TTL_S)
    for _ in range(5):
        renew_now(client, session)
        claimed = session.alive_until - time.monotonic()
        assert client.lease_ttl(session.lease_id) >= int(claimed)
    session.revoke()


@pytest.mark.seam
def test_an_orphan_expires_by_itself(client: EtcdClient, prefix: str):
    session = LeaseSession(client, KEPT_S)
    client.put(prefix, "1", lease_id=session.lease_id)
    with client.watch(prefix) as watch:
        session.stop_renewing()
        batch = watch.get(LIMIT_S)
        seen = time.monotonic()
    assert batch.events[0].kind == "delete"
    assert seen >= session.alive_until
    assert not session.lost.is_set()


@pytest.mark.seam
def test_a_lease_that_is_gone_is_an_event(client: EtcdClient, caplog: pytest.LogCaptureFixture):
    lost: queue.SimpleQueue[LeaseSession] = queue.SimpleQueue()
    session = LeaseSession(client, LONG_TTL_S, on_lost=lost.put)
    client.lease_revoke(session.lease_id)
    renew_now(client, session)
    assert session.lost.wait(LIMIT_S)
    assert lost.get(timeout=LIMIT_S) is session
    assert "etcd says that it has expired or was revoked" in caplog.text
    assert client.lease_keep_alive([session.lease_id]).ttl_s == {session.lease_id: 0}


def test_a_connection_that_stands_still_is_no_silence(server: EtcdServer):
    """As TCP does on a link that loses packets: another connection gets through, and the held one may answer later."""
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        with_limits(client, 2 * LIMIT_S)  # more than this test waits
        session = LeaseSession(client, LONG_TTL_S)
        for held in (0, 1):
            before = session.alive_until
            proxy.release()
            proxy.hold(but=held, new=False)
            renew_now(client, session)
            until(lambda before=before: session.alive_until > before or session.lost.is_set())  # type: ignore[misc]
            assert not session.lost.is_set()
        proxy.release()
        session.revoke()


def test_a_session_outlives_a_long_server_outage(own_server: EtcdServer):
    """etcd gives each lease its full time again when it comes back; only its word counts then."""
    with EtcdClient(own_server.endpoint) as client:
        session = LeaseSession(client, KEPT_S)
        own_server.kill()
        overdue = session.alive_until
        until(lambda: time.monotonic() > overdue + 1)
        assert not session.lost.is_set()
        own_server.start()
        until(lambda: session.alive_until > overdue)
        assert client.lease_ttl(session.lease_id) >= 0
        assert not session.lost.is_set()


def test_a_failing_callback_does_not_stop_others(client: EtcdClient, caplog: pytest.LogCaptureFixture):
    def fail(session: LeaseSession) -> None:
        raise RuntimeError("from the callback")

    bad, good = LeaseSession(client, LONG_TTL_S, on_lost=fail), LeaseSession(client, LONG_TTL_S)
    client.lease_revoke(bad.lease_id)
    renew_now(client, bad)
    assert bad.lost.wait(LIMIT_S)
    was = good.alive_until
    renew_now(client, good)
    until(lambda: good.alive_until > was)
    assert "from the callback" in caplog.text
    good.revoke()


def test_a_renewer_that_fails_tells_all_sessions(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with EtcdClient(server.endpoint) as client:
        session = LeaseSession(client, LONG_TTL_S)

        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(client.renewer, "_keep_alive", fail)
        renew_now(client, session)
        assert session.lost.wait(LIMIT_S)
        assert "the thread that keeps it alive failed: RuntimeError('a bug')" in caplog.text
        assert "Traceback" in caplog.text
        monkeypatch.undo()
        later = LeaseSession(client, LONG_TTL_S)
        was = later.alive_until
        renew_now(client, later)
        until(lambda: later.alive_until > was)
        later.revoke()


def test_an_unanswered_attempt_is_followed_at_once(client: EtcdClient, monkeypatch: pytest.MonkeyPatch):
    """A leader of etcd that stops takes the others a second or two to replace; a pause after that could cost the lease."""
    session = LeaseSession(client, LONG_TTL_S)
    keep_alive = client.renewer._keep_alive
    due_again = queue.SimpleQueue[float]()
    began: list[float] = []

    def silent_once(lease_ids: Sequence[int], *, timeout_s: float, beside_s: float) -> KeptAlive:
        began.append(time.monotonic())
        if len(began) == 1:
            until(lambda: time.monotonic() > began[0] + 1)
            raise Unavailable("no answer in time")
        due_again.put(session.state.next_at)
        return keep_alive(lease_ids, timeout_s=timeout_s, beside_s=beside_s)

    monkeypatch.setattr(client.renewer, "_keep_alive", silent_once)
    was = session.alive_until
    renew_now(client, session)
    assert due_again.get(timeout=LIMIT_S) <= began[0] + 0.5
    until(lambda: session.alive_until > was)
    session.revoke()


@pytest.mark.parametrize("limit", [0, 1])
def test_no_more_threads_cost_no_lease(server: EtcdServer, monkeypatch: pytest.MonkeyPatch, limit: int):
    """limit: threads that a renewal may start, of the two that it wants when etcd is slow."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "etcd-race" and sum(each.name == "etcd-race" for each in threading.enumerate()) >= limit:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    refused: list[threading.Thread] = []
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        monkeypatch.setattr(threading.Thread, "start", limited)
        with_limits(client, LIMIT_S)
        session = LeaseSession(client, LONG_TTL_S)
        proxy.delay(0.4)  # in each direction: the second connection is to take part
        was = session.alive_until
        renew_now(client, session)
        until(lambda: session.alive_until > was or session.lost.is_set())
        assert refused
        assert not session.lost.is_set()
        session.stop_renewing()


@pytest.mark.seam
def test_answers_that_arrive_together_move_nobody(client: EtcdClient, monkeypatch: pytest.MonkeyPatch):
    """As after a pause of etcd. To use another connection would break the watches' stream."""
    monkeypatch.setattr("elastic_ext.etcd.calls.GRACE_S", LIMIT_S)  # until the first one comes
    first, *_ = client._endpoints.from_current()
    turn = iter((first_asked := threading.Event(), threading.Event()))
    second_answered = threading.Event()

    def send(etcd: object) -> str:
        if next(turn) is first_asked:
            assert second_answered.wait(LIMIT_S)
            return "first"
        second_answered.set()
        return "second"

    race(client._caller, "ask", send, timeout_s=LIMIT_S, beside_s=0.2)
    assert client._endpoints.current() is first


def test_the_next_race_begins_with_another_connection(server: EtcdServer):
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        lease_id = client.lease_grant(60).lease_id
        first = client._endpoints.current()
        proxy.deaf()
        with pytest.raises(Unavailable):
            client.lease_keep_alive([lease_id], timeout_s=1, beside_s=0.2)
        assert client._endpoints.current() is not first


@pytest.mark.seam
def test_closing_the_client_stops_renewing_without_loss(server: EtcdServer):
    client = EtcdClient(server.endpoint)
    session = LeaseSession(client, 60)
    client.close()
    assert ends(client.renewer._thread)
    assert not session.lost.is_set()


@pytest.mark.seam
def test_a_ttl_below_what_etcd_can_time(client: EtcdClient):
    with pytest.raises(ConfigError, match="lease TTL of 1 s: expected at least 2 s"):
        LeaseSession(client, 1)
