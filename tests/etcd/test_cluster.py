"""Three members, of which some are killed or frozen while a client writes, watches and holds a lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic_ext.etcd import LeaseSession, Unavailable
from tests.etcd.conftest import take
from tests.etcd.test_lease import renew_now
from tests.etcd_client import EtcdClient, QueuedWatch
from tests.etcd_server import EtcdCluster, EtcdServer
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

WRITES = 400
TTL_S = 30  # the longest wait for a new leader, and the calls after it, must fit in


@pytest.fixture
def on_leader(cluster: EtcdCluster) -> Iterator[tuple[EtcdServer, EtcdClient]]:
    """The leader, and a client that begins with it: the worst place to be when the leader goes."""
    leader = cluster.leader()
    with EtcdClient(cluster.endpoints, first=cluster.members.index(leader), timeout_s=2) as client:
        yield leader, client


class Writer:
    """Writes numbered keys, each until it is acknowledged, from a thread and a client of its own."""

    def __init__(self, cluster: EtcdCluster, prefix: str) -> None:
        self._endpoints = cluster.endpoints
        self._prefix = prefix
        self._thread = threading.Thread(target=self._run)
        self.written = 0

    def _run(self) -> None:
        with EtcdClient(self._endpoints, timeout_s=1) as client:
            while self.written < WRITES:
                try:
                    client.put(f"{self._prefix}{self.written:04d}", "")
                    self.written += 1
                except Unavailable:
                    pass  # it may have been carried out: then the key has two events, and etcd's own history says so

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join()


def history(watch: QueuedWatch, last: str) -> list[tuple[bytes, int]]:
    """Key and revision of each event, up to the first of the key `last`."""
    seen: list[tuple[bytes, int]] = []
    while not seen or seen[-1][0] != last.encode():
        seen += [(event.kv.key, event.kv.mod_revision) for event in take(watch, 1)]
    return seen


def told_anew(cluster: EtcdCluster, prefix: str, start: int) -> list[tuple[bytes, int]]:
    """The history up to the key `end`, as a watch tells it to which nothing has happened."""
    with EtcdClient(cluster.endpoints) as client, client.watch(prefix, prefix=True, start_revision=start) as watch:
        return history(watch, prefix + "end")


FAULTS: dict[str, Callable[[EtcdServer], None]] = {"killed": EtcdServer.kill, "frozen": EtcdServer.pause}


@pytest.mark.seam
@pytest.mark.full("killed")
@pytest.mark.parametrize("fault", list(FAULTS))
def test_leader_goes_while_watching(cluster: EtcdCluster, on_leader: tuple[EtcdServer, EtcdClient], prefix: str, fault: str):
    """No event is lost or doubled, no lease is lost."""
    leader, client = on_leader
    start = client.revision(prefix, timeout_s=LIMIT_S) + 1
    session = LeaseSession(client, TTL_S, timeout_s=LIMIT_S)
    with client.watch(prefix, prefix=True, start_revision=start) as watch:
        until(lambda: watch.live)
        with Writer(cluster, prefix) as writer:
            until(lambda: writer.written > WRITES // 4)
            before = session.alive_until
            FAULTS[fault](leader)
            renew_now(client, session)
        put_for_sure(client, prefix + "end")
        seen = history(watch, prefix + "end")
    truth = told_anew(cluster, prefix, start)
    assert len(truth) > WRITES
    assert seen == truth
    until(lambda: session.alive_until > before)
    assert not session.lost.is_set()
    session.revoke(timeout_s=LIMIT_S)


def test_quorum_lost(cluster: EtcdCluster, prefix: str):
    """The watch notices, although its own member lives and its connection stands; all goes on when the others are back."""
    stay, *others = cluster.members
    with EtcdClient(stay.endpoint) as client, client.watch(prefix) as watch:
        session = LeaseSession(client, TTL_S)
        until(lambda: watch.live)
        for member in others:
            member.pause()
        until(lambda: not watch.live)
        with pytest.raises(Unavailable):
            client.put(prefix, "lost", timeout_s=1)
        assert client.status().version  # this one member answers
        overdue = session.alive_until
        for member in others:
            member.resume()
        revision = client.put(prefix, "1").revision
        while take(watch, 1)[0].kv.mod_revision < revision:
            pass  # what was said to be unavailable may have been carried out
        renew_now(client, session)
        until(lambda: session.alive_until > overdue)
        assert not session.lost.is_set()
        session.revoke()


def put_for_sure(client: EtcdClient, key: str) -> None:
    """Until it is there."""
    try:
        client.put(key, "")
    except Unavailable:
        if client.get(key, timeout_s=LIMIT_S).kv is None:
            put_for_sure(client, key)


def test_all_members_down(cluster: EtcdCluster, prefix: str):
    """A lease, its key and the watch come through an outage longer than the TTL."""
    with EtcdClient(cluster.endpoints) as client, client.watch(prefix, prefix=True) as watch:
        session = LeaseSession(client, 8)
        client.put(prefix + "key", "1", lease_id=session.lease_id)
        take(watch, 1)
        for member in cluster.members:
            member.kill()
        overdue = session.alive_until
        until(lambda: time.monotonic() > overdue)
        for member in cluster.members:
            cluster.restart(member, wait=False)
        until(lambda: session.alive_until > overdue)
        assert client.get(prefix + "key").kv is not None
        revision = client.put(prefix + "end", "1").revision
        assert [event.kv.mod_revision for event in take(watch, 1)] == [revision]
        assert not session.lost.is_set()
        session.revoke()
