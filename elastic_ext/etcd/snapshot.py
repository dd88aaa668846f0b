"""The keys under a prefix, then their changes: no gap, no duplicates, and a restart from the keys when history is lost."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.etcd.errors import Compacted, EtcdError
from elastic_ext.etcd.values import Key, KeyValue, Reading
from elastic_ext.etcd.watch import FROM_NOW, Batch, Began, Item, Watch, WatchClient

logger = logging.getLogger(__name__)

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

    def __iter__(self) -> Iterator[Snapshot | Batch]:
        while (item := self.get()) is not None:
            yield item

    def close(self) -> None:
        """Close the watch and wake callers of `get`. Any thread may call this."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._items.put(None)
