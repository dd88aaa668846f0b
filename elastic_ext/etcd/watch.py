"""Watches that survive what happens to connections and servers: nothing lost, nothing twice.

All watches of a client share one stream and one daemon thread (`stream.py`). Each watch knows the revision it wants next;
whatever breaks the stream, it is opened again, on the next endpoint if need be, and each watch goes on from that revision.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from elastic_ext.etcd.errors import EtcdError
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import Event, Key, range_of_prefix, to_bytes

if TYPE_CHECKING:
    from elastic_ext.etcd.client import EtcdClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Events in their order, of whole revisions: all changes that one transaction made to the watched keys come together."""

    revision: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Began:
    """First of a watch from FROM_NOW: all that is written after `revision` is delivered.

    What was before is for the caller to read; a reading of that revision or a later one misses nothing.
    """

    revision: int


Item: TypeAlias = Batch | Began | EtcdError

# For start_revision: from when the server has it. Unlike a watch of the past it is one that the server need not catch up with
# (it looks after those ten times a second only).
FROM_NOW = 0


class Watch:
    """The changes of a key, or of all keys with a prefix, from a revision on.

    Delivers `Batch`es (after a `Began`, if it is FROM_NOW) and at last, if it ends by itself, one error: `Compacted` (read
    again, then watch from there),
    `AuthError` (no permission), `UnsupportedVersion`, `ClientClosed`, or `EtcdError` where its thread or callback failed.
    Trouble with connections and servers is not delivered: it is waited out; `live` tells of it.

    Use it as an iterator, with `get`, or give a callback: it gets each item on the stream's thread, which serves all watches of
    the client, and must return at once.

    Attributes:
        next_revision: all before it has been delivered.
        live: a server with a leader holds it at the moment; False while the stream is being opened again.
    """

    def __init__(
        self,
        client: EtcdClient,
        key: Key,
        *,
        prefix: bool = False,
        start_revision: int | None = None,
        prev_kv: bool = False,
        callback: Callable[[Item], None] | None = None,
        deletes_only: bool = False,
    ) -> None:
        """Returns at once, but for a missing start_revision: then all that is written after this call counts.

        Args:
            start_revision: the first revision to deliver; that of a reading or transaction + 1. FROM_NOW: a
                `Began` tells the callback.
            prev_kv: events hold the value before.
            deletes_only: the server does not send what is put.
        """
        self.key, self.range_end = range_of_prefix(key) if prefix else (to_bytes(key), b"")
        self.prev_kv = prev_kv
        self.deletes_only = deletes_only
        self.next_revision = client.revision(self.key) + 1 if start_revision is None else start_revision
        self.watch_id = 0
        self.live = False
        self._items: queue.SimpleQueue[Batch | EtcdError | None] = queue.SimpleQueue()
        self._callback = callback
        self._stream = client.watches
        self._ended = threading.Event()
        self._stream.add(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """It will deliver no more than what waits in `get`."""
        return self._ended.is_set()

    def close(self) -> None:
        """From any thread, any number of times. Whoever waits in `get` or in the iterator is woken."""
        self._stream.remove(self)
        self.end(None)

    def get(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch; None when the time is over or the watch is closed. Raises the error that ended it, each time."""
        try:
            item = self._items.get(timeout=timeout_s) if timeout_s != 0 else self._items.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Batch):
            return item
        self._items.put(item)  # the end stays the end, for every reader
        if item is None:
            return None
        raise item

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self.get()) is not None:
            yield batch

    # For the stream

    def began(self, revision: int) -> None:
        """The server has it, at this revision."""
        if self.next_revision == FROM_NOW:
            self.next_revision = revision + 1
            self._call(Began(revision))

    def request(self) -> Any:
        rpc = etcdrpc()
        create = rpc.WatchCreateRequest(
            key=self.key,
            range_end=self.range_end,
            start_revision=self.next_revision,
            prev_kv=self.prev_kv,
            filters=[rpc.WatchCreateRequest.NOPUT] if self.deletes_only else [],
            # After 10 minutes without events the server tells its revision: a quiet watch does not fall behind compaction.
            progress_notify=True,
            watch_id=self.watch_id,
        )
        return rpc.WatchRequest(create_request=create)

    def take(self, response: Any) -> None:
        """Events, or a progress notice without any."""
        events = tuple(Event.parse(event) for event in response.events if event.kv.mod_revision >= self.next_revision)
        if events:
            self.next_revision = events[-1].kv.mod_revision + 1
            self._deliver(Batch(events[-1].kv.mod_revision, events))
        elif not response.events:
            self.next_revision = max(self.next_revision, response.header.revision + 1)

    def end(self, error: EtcdError | None) -> None:
        if self._ended.is_set():
            return
        self.live = False
        self._ended.set()
        if error is None or not self._call(error):
            self._items.put(error)

    def _deliver(self, batch: Batch) -> None:
        if not self._call(batch):
            self._items.put(batch)

    def _call(self, item: Item) -> bool:
        """Give it to the callback, if there is one."""
        if self._callback is None:
            return False
        try:
            self._callback(item)
        except Exception:  # foreign code on the thread of all watches
            logger.exception("the callback of the etcd watch on %r failed: this watch ends", self.key)
            self._stream.remove(self)
            self._ended.set()
            self._items.put(EtcdError(f"the callback of the etcd watch on {self.key!r} failed"))
        return True
