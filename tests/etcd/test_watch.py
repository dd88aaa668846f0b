"""Watches on a real server that is killed, frozen, compacted and wiped under them: nothing lost, nothing twice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from elastic_ext.etcd import Batch, ClientClosed, Delete, EtcdError, Put, Snapshot, SnapshotWatch, Unavailable
from tests.etcd.conftest import ends, take
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.seam


@pytest.fixture
def own(own_server: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(own_server.endpoint) as made:
        yield made


def test_events_of_a_key_and_of_a_prefix(client: EtcdClient, prefix: str):
    with client.watch(prefix + "a") as key, client.watch(prefix, prefix=True) as all_:
        one = client.put(prefix + "a", "1").revision
        two = client.txn([], [Put(prefix + "a", "2"), Put(prefix + "b", "3"), Put(prefix[:-1], "outside")]).revision
        three = client.delete_prefix(prefix).revision
        seen = [(e.kind, e.kv.key.decode()[-1], e.kv.value, e.kv.mod_revision) for e in take(key, 3)]
        assert seen == [("put", "a", b"1", one), ("put", "a", b"2", two), ("delete", "a", b"", three)]
        events = take(all_, 5)
        assert [event.kv.mod_revision for event in events] == [one, two, two, three, three]
        assert [event.kv.value for event in events] == [b"1", b"2", b"3", b"", b""]
        assert key.get(0) is None
    assert key.closed
    assert key.get() is None
    assert all_.get() is None


def test_from_a_revision_in_the_past(client: EtcdClient, prefix: str):
    first = client.put(prefix, "1").revision
    client.put(prefix, "2")
    with client.watch(prefix, start_revision=first) as watch:
        assert [event.kv.value for event in take(watch, 2)] == [b"1", b"2"]
    with client.watch(prefix, start_revision=first + 1) as watch:
        assert [event.kv.value for event in take(watch, 1)] == [b"2"]


def test_deletes_only(client: EtcdClient, prefix: str):
    with client.watch(prefix, deletes_only=True) as watch:
        client.put(prefix, "1")
        gone = client.delete(prefix).revision
        assert [(event.kind, event.kv.mod_revision) for event in take(watch, 1)] == [("delete", gone)]


def test_one_transaction_is_one_batch(client: EtcdClient, prefix: str):
    with client.watch(prefix, prefix=True) as watch:
        until(lambda: watch.live)
        client.txn([], [Put(f"{prefix}{number:03d}", "") for number in range(128)])
        batch = watch.get(LIMIT_S)
    assert len(batch.events) == 128


def test_a_callback_that_fails_ends_its_watch_alone(client: EtcdClient, prefix: str, caplog: pytest.LogCaptureFixture):
    def fail(item: object) -> None:
        raise RuntimeError("from the callback")

    with client.watch(prefix, callback=fail) as bad, client.watch(prefix) as good:
        client.put(prefix, "1")
        take(good, 1)
        until(lambda: bad.closed)
        client.put(prefix, "2")
        take(good, 1)
    assert [record.exc_text for record in caplog.records if "from the callback" in (record.exc_text or "")]


def test_a_thousand_watches_share_one_stream(client: EtcdClient, server: EtcdServer, prefix: str):
    revision, before = client.put(prefix, "").revision, set(threading.enumerate())
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as shared:
        items: queue.SimpleQueue[Batch | EtcdError] = queue.SimpleQueue()
        watches = [shared.watch(f"{prefix}{n}", start_revision=revision, callback=items.put) for n in range(1000)]
        until(lambda: all(watch.live for watch in watches))
        assert [thread.name for thread in set(threading.enumerate()) - before].count("etcd-watch") == 1
        proxy.stop()
        for start in range(0, 1000, 100):
            client.txn([], [Put(f"{prefix}{n}", str(n)) for n in range(start, start + 100)])
        for watch in watches[::2]:
            watch.close()
        proxy.start()
        batches = [items.get(timeout=LIMIT_S) for _ in watches[1::2]]
        until(lambda: all(watch.live for watch in watches[1::2]))
        assert items.empty()
    got = sorted(int(batch.events[0].kv.value) for batch in batches if isinstance(batch, Batch))
    assert got == list(range(1, 1000, 2))


# What happens to servers and connections


def test_killed_and_restarted(own_server: EtcdServer, own: EtcdClient):
    with own.watch("a/", prefix=True) as watch, EtcdClient(own_server.endpoint) as other:
        for number in range(3):
            other.put(f"a/{number}", "before")
            own_server.kill()
            until(lambda: not watch.live)
            own_server.start()
            other.put(f"a/{number}", "after")
        events = take(watch, 6)
        assert [(event.kv.key, event.kv.value) for event in events] == [
            (f"a/{number}".encode(), value) for number in range(3) for value in (b"before", b"after")
        ]
        own.put("a/last", "")
        assert [event.kv.key for event in take(watch, 1)] == [b"a/last"]  # and nothing twice


@pytest.mark.full
def test_deaf_link_is_noticed_by_pings_alone(client: EtcdClient, proxy: Proxy, prefix: str):
    """Within 13 s; without gRPC's two http2 options it takes a minute or more. No call but the watch is under way."""
    with EtcdClient(proxy.endpoint) as far, far.watch(prefix) as watch:
        until(lambda: watch.live)
        proxy.deaf()
        revision = client.put(prefix, "1").revision
        until(lambda: not watch.live, limit_s=40)
        proxy.stop()
        proxy.start()
        assert [event.kv.mod_revision for event in take(watch, 1)] == [revision]


@pytest.mark.full
@pytest.mark.usefixtures("patient_grpc")
def test_an_unanswered_call_moves_the_watch_at_once(client: EtcdClient, server: EtcdServer, proxy: Proxy, prefix: str):
    """Not when gRPC notices."""
    with EtcdClient([proxy.endpoint, server.endpoint], first=0) as far, far.watch(prefix) as watch:
        until(lambda: watch.live)
        proxy.deaf()
        revision = client.put(prefix, "1").revision
        with suppress(Unavailable):  # half its time is for the deaf endpoint, the rest for the other one
            far.get(prefix, timeout_s=4)
        assert [event.kv.mod_revision for event in take(watch, 1)] == [revision]


# Snapshot, then changes


class Mirror:
    """Applies what a SnapshotWatch gives, and checks that there is no gap: a batch follows what it follows."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}
        self.snapshots = 0
        self.revision = 0

    def apply(self, item: Snapshot | Batch) -> None:
        assert item.revision >= self.revision if isinstance(item, Snapshot) else item.revision > self.revision
        self.revision = item.revision
        if isinstance(item, Snapshot):
            self.snapshots += 1
            self.keys = {kv.key: kv.value for kv in item.kvs}
            return
        for event in item.events:
            if event.kind == "put":
                self.keys[event.kv.key] = event.kv.value
            else:
                del self.keys[event.kv.key]  # a KeyError is a put that was missed or a deletion that came twice

    def follow(self, watch: SnapshotWatch, revision: int) -> None:
        while self.revision < revision:
            item = watch.get(LIMIT_S)
            assert item is not None
            self.apply(item)


def write(client: EtcdClient, start: int, count: int) -> int:
    """Put, change and delete keys; returns the last revision."""
    for number in range(start, start + count):
        client.txn([], [Put(f"a/{number % 7}", str(number)), Put(f"a/x{number}", "")])
        revision = client.txn([], [Delete(f"a/x{number - 3}"), Put("a/last", str(number))]).revision
    return revision


def keys(client: EtcdClient) -> dict[bytes, bytes]:
    return {kv.key: kv.value for kv in client.get_prefix("a/").kvs}


def test_snapshot_again_after_compaction(own: EtcdClient, own_server: EtcdServer):
    mirror, news = Mirror(), threading.Event()
    with (
        Proxy(own_server.client_port) as proxy,
        EtcdClient(proxy.endpoint) as far,
        far.watch_with_snapshot("a/", on_item=news.set) as watch,
    ):
        mirror.follow(watch, write(own, 0, 5))
        until(lambda: watch.live)
        proxy.stop()
        news.clear()
        write(own, 5, 20)
        own.compact(write(own, 25, 5))
        proxy.start()
        assert news.wait(LIMIT_S)
        mirror.follow(watch, write(own, 30, 5))
        assert mirror.keys == keys(own)
        assert mirror.snapshots == 2


def test_snapshot_again_after_the_history_was_lost(own: EtcdClient, own_server: EtcdServer):
    with own.watch_with_snapshot("a/") as watch:
        write(own, 0, 5)
        assert isinstance(watch.get(LIMIT_S), Snapshot)
        until(lambda: watch.live)
        own_server.kill()
        own_server.wipe()
        own_server.start()
        while not isinstance(item := watch.get(LIMIT_S), Snapshot):
            assert item is not None
        assert item.kvs == ()
        own.put("a/new", "1")
        item = watch.get(LIMIT_S)
        assert isinstance(item, Batch)
        assert item.events[0].kv.key == b"a/new"


def test_an_unreadable_snapshot_is_tried_again(server: EtcdServer, prefix: str):
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint, timeout_s=0.3) as far:
        proxy.stop()
        with far.watch_with_snapshot(prefix) as watch:
            with pytest.raises(Unavailable):
                watch.get()
            proxy.start()
            far.timeout_s = LIMIT_S
            assert isinstance(watch.get(LIMIT_S), Snapshot)


# Ends


def test_closing_the_client_wakes_those_who_wait(server: EtcdServer):
    client = EtcdClient(server.endpoint)
    watch, mirror = client.watch("a"), client.watch_with_snapshot("a")
    assert isinstance(mirror.get(), Snapshot)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(item.get) for item in (watch, mirror)]
        client.close()
        assert [type(each.exception(LIMIT_S)) for each in waiting] == [ClientClosed, ClientClosed]
    assert ends(client.watches._thread)


@pytest.mark.parametrize("how", ["stop", "deaf"])
def test_closing_waits_for_no_server_that_left(server: EtcdServer, how: str):
    with Proxy(server.client_port) as proxy:
        client = EtcdClient(proxy.endpoint, timeout_s=300)
        watch = client.watch("a")
        until(lambda: watch.live)
        getattr(proxy, how)()
        closing = threading.Thread(target=client.close)
        closing.start()
        assert ends(closing)
        assert ends(client.watches._thread)


def test_a_stream_thread_that_fails_tells_all_watches(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with EtcdClient(server.endpoint) as client:
        watch = client.watch("a")
        until(lambda: watch.live)

        def fail(*args: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(client.watches, "_handle", fail)
            client.put("a", "1")
            with pytest.raises(EtcdError, match="a bug"):
                watch.get(LIMIT_S)
        assert "Traceback" in caplog.text
        until(lambda: client.watches._thread is None)
        with client.watch("a") as again:  # the next watch gets a new thread
            client.put("a", "2")
            take(again, 1)
