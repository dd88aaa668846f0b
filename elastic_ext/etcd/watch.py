"""Watches that survive failures of connections and servers: nothing is lost or delivered twice.

All watches of a client share one stream and one daemon thread (`stream.py`). Each watch knows the revision it wants next;
whatever breaks the stream, it is reopened, on the next endpoint if need be, and each watch goes on from that revision.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from elastic_ext.etcd.errors import Compacted, EtcdError
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import Event, Key, KeyValue, Reading, range_of_prefix, to_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Events in order, of whole revisions: all changes that one transaction made to the watched keys come together."""

    revision: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Began:
    """The first item of a watch from FROM_NOW: everything written after `revision` is delivered.

    The caller reads what existed before. A reading at that revision or later misses nothing.
    """

    revision: int


Item: TypeAlias = Batch | Began | EtcdError

# start_revision of a watch that starts when the server has it. The server need not let such a watch catch up with the past, as
# it does for others only ten times a second.
FROM_NOW = 0


class Stream(Protocol):
    """Carries watches to the server and back: `stream.WatchStream`."""

    def add(self, watch: Watch) -> None: ...

    def remove(self, watch: Watch) -> None: ...


class WatchClient(Protocol):
    """The part of a client that a watch needs."""

    @property
    def watches(self) -> Stream: ...


class Watch:
    """The changes of a key, or of all keys with a prefix, from a revision on.

    Delivers `Batch`es, after a `Began` if it is FROM_NOW. If the watch ends by itself, the last item is an error: `Compacted`
    (read again, then watch from there), `AuthError` (no permission), `UnsupportedVersion`, `ClientClosed`, or `EtcdError` if the
    thread failed. Trouble with connections and servers is not delivered; the watch waits it out, and `live` shows it.
    """

    def __init__(
        self,
        client: WatchClient,
        key: Key,
        *,
        start_revision: int,
        callback: Callable[[Item], None],
        prefix: bool = False,
        deletes_only: bool = False,
    ) -> None:
        """Start the watch, and return at once.

        Args:
            start_revision: the first revision to deliver: that of a reading or transaction + 1. FROM_NOW: from a `Began` on.
            callback: gets each item on the stream's thread, which serves all watches of the client, and must return at once.
            deletes_only: the server does not send puts.
        """
        self.key, self.range_end = range_of_prefix(key) if prefix else (to_bytes(key), b"")
        self.deletes_only = deletes_only
        self.next_revision = start_revision  # everything before it has been delivered
        self.watch_id = 0
        self.live = False  # a server with a leader now holds the watch; False while the stream is being reopened
        self._callback = callback
        self._stream = client.watches
        self._ended = threading.Event()
        self._stream.add(self)

    @property
    def closed(self) -> bool:
        """Whether it delivers nothing more."""
        return self._ended.is_set()

    def close(self) -> None:
        """Close the watch. Any thread may call this, any number of times."""
        self._stream.remove(self)
        self.end(None)

    # For the stream

    def began(self, revision: int) -> None:
        """Note that the server has the watch, from this revision on."""
        if self.next_revision == FROM_NOW:
            self.next_revision = revision + 1
            self._call(Began(revision))

    def request(self) -> Any:
        """Return the WatchRequest that creates this watch."""
        rpc = etcdrpc()
        create = rpc.WatchCreateRequest(
            key=self.key,
            range_end=self.range_end,
            start_revision=self.next_revision,
            filters=[rpc.WatchCreateRequest.NOPUT] if self.deletes_only else [],
            # After 10 minutes without events the server sends its revision: a quiet watch does not fall behind compaction.
            progress_notify=True,
            watch_id=self.watch_id,
        )
        return rpc.WatchRequest(create_request=create)

    def take(self, response: Any) -> None:
        """Take in events, or a progress notice without any."""
        events = tuple(Event.parse(event) for event in response.events if event.kv.mod_revision >= self.next_revision)
        if events:
            self.next_revision = events[-1].kv.mod_revision + 1
            self._call(Batch(events[-1].kv.mod_revision, events))
        elif not response.events:
            self.next_revision = max(self.next_revision, response.header.revision + 1)

    def end(self, error: EtcdError | None) -> None:
        """Deliver nothing more than this error. None: the caller has closed the watch."""
        if self._ended.is_set():
            return
        self.live = False
        self._ended.set()
        if error is not None:
            self._call(error)

    def _call(self, item: Item) -> None:
        try:
            self._callback(item)
        except Exception:  # foreign code on the thread of all watches
            logger.exception("the callback of the etcd watch on %r failed: this watch ends", self.key)
            self._stream.remove(self)
            self._ended.set()


BEGAN_S = 0.1  # a watch usually begins within a millisecond


@dataclass(frozen=True)
class Snapshot:
    """All keys with the prefix as of `revision`. It replaces everything known before: a missing key is gone."""

    revision: int
    kvs: tuple[KeyValue, ...]


class SnapshotClient(WatchClient, Protocol):
    """The part of a client that a snapshot watch needs."""

    def get_prefix(self, prefix: Key, *, timeout_s: float | None = None) -> Reading: ...


class SnapshotWatch:
    """A watch that gives a `Snapshot`, then `Batch`es of later changes; after a compaction a `Snapshot` again.

    Reading happens on the caller's thread, in `get`.
    """

    def __init__(
        self, client: SnapshotClient, prefix: Key, on_item: Callable[[], None] | None = None, began_s: float = BEGAN_S
    ) -> None:
        """
        Args:
            on_item: called on another thread when `get` has something to return; it must return at once.
            began_s: a reading waits this long for the watch to begin.
        """
        self._client = client
        self._prefix = prefix
        self._on_item = on_item
        self._began_s = began_s
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._watch: Watch | None = None
        self._due = False  # the keys must be read
        self._revision = 0  # of the last reading
        self._closed = False

    def __enter__(self) -> SnapshotWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def live(self) -> bool:
        """See `Watch.live`."""
        return self._watch is not None and self._watch.live

    def get(self, timeout_s: float | None = None) -> Snapshot | Batch | None:
        """Return the next item; None after timeout_s or if the watch is closed.

        timeout_s also limits the reading of a snapshot, where 0 stands for the client's default.

        Raises:
            EtcdError: the snapshot could not be read, and the next `get` tries again; or the watch ended for a reason other than
                compaction.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            if self._watch is None:
                self._watch = self._begin()
            if self._due:
                return self._read(timeout_s or None)
            try:
                item = self._items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(item, Batch):
                if (batch := self._since_reading(item)) is not None:
                    return batch
            elif isinstance(item, Began):
                self._due = item.revision > self._revision  # writes in between were neither read nor watched
            else:
                self._watch.close()
                if isinstance(item, Compacted):
                    self._watch = None
                elif isinstance(item, EtcdError):
                    self._items.put(item)  # every later `get` raises it again
                    raise item
        return None

    def _begin(self) -> Watch:
        """Watch from now on; the reading follows.

        etcd serves a watch from an older revision only ten times a second until it has caught up (syncWatchersLoop of
        mvcc/watchable_store.go). When many nodes came at once, that was most of the wait.
        """
        # Each watch has its own queue: items left from the previous one are older than the following reading.
        items = self._items = queue.SimpleQueue()

        def take(item: Item) -> None:
            items.put(item)
            if self._on_item is not None:
                try:
                    self._on_item()
                except Exception:  # foreign code; the item is queued in any case
                    logger.exception("on_item of the etcd watch on %r failed", self._prefix)

        self._due = True
        watch = Watch(self._client, self._prefix, prefix=True, start_revision=FROM_NOW, callback=take)
        if self._closed:
            watch.close()
        with contextlib.suppress(queue.Empty):  # it may begin later; if somebody writes before, the keys are read again
            if not isinstance(first := items.get(timeout=self._began_s), Began):
                items.put(first)  # the end of the watch; nothing follows it
        return watch

    def _read(self, timeout_s: float | None) -> Snapshot:
        reading = self._client.get_prefix(self._prefix, timeout_s=timeout_s)
        self._due, self._revision = False, reading.revision
        return Snapshot(reading.revision, reading.kvs)

    def _since_reading(self, batch: Batch) -> Batch | None:
        """Return the batch without the events that the last reading contains; None if none are left."""
        events = tuple(event for event in batch.events if event.kv.mod_revision > self._revision)
        return Batch(batch.revision, events) if events else None

    def close(self) -> None:
        """Close the watch and wake callers of `get`. Any thread may call this."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._items.put(None)
