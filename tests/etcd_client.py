"""An etcd client with the calls that tests need and the package does not."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from typing import Any

from elastic_ext import etcd
from elastic_ext.etcd import Batch, Delete, EtcdError, Put, Watch
from elastic_ext.etcd.values import Deleted, Key, Written
from elastic_ext.etcd.watch import Item
from tests.etcd_server import etcdctl
from tests.until import LIMIT_S


class QueuedWatch(Watch):
    """A watch to read from. Any thread may read."""

    def __init__(
        self, client: etcd.EtcdClient, key: Key, start_revision: int, callback: Callable[[Item], None] | None, **more: bool
    ) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        super().__init__(client, key, start_revision=start_revision, callback=callback or self._items.put, **more)

    def __enter__(self) -> QueuedWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        self._items.put(None)

    def get(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch; None after timeout_s or if the watch is closed. Every call raises the error that ended it."""
        try:
            item = self._items.get(timeout=timeout_s) if timeout_s != 0 else self._items.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Batch):
            return item
        self._items.put(item)  # every later call, of any reader, gets it again
        if item is None:
            return None
        assert isinstance(item, EtcdError)
        raise item


class EtcdClient(etcd.EtcdClient):
    """Puts, deletes and watches in one line; `etcdctl` for what only an operator does (no TLS, no user).

    A call has a minute, so that a busy machine fails none; a test of calls that end without an answer gives them less.
    """

    def __init__(self, *args: Any, timeout_s: float = LIMIT_S, **more: Any) -> None:
        super().__init__(*args, timeout_s=timeout_s, **more)

    def put(self, key: Key, value: Key, *, lease_id: int = 0, timeout_s: float | None = None) -> Written:
        (written,) = self.txn([], [Put(key, value, lease_id)], timeout_s=timeout_s).responses
        assert isinstance(written, Written)
        return written

    def delete(self, key: Key) -> Deleted:
        return self._delete(Delete(key))

    def delete_prefix(self, prefix: Key) -> Deleted:
        return self._delete(Delete(prefix, prefix=True))

    def _delete(self, op: Delete) -> Deleted:
        (deleted,) = self.txn([], [op]).responses
        assert isinstance(deleted, Deleted)
        return deleted

    def watch(
        self,
        key: Key,
        *,
        prefix: bool = False,
        start_revision: int | None = None,
        callback: Callable[[Item], None] | None = None,
        deletes_only: bool = False,
    ) -> QueuedWatch:
        """Watch everything written after this call, or from a revision on. Without a callback, `get` returns the batches."""
        start = self.revision(key) + 1 if start_revision is None else start_revision
        return QueuedWatch(self, key, start, callback, prefix=prefix, deletes_only=deletes_only)

    def compact(self, revision: int) -> None:
        """Drop the history before `revision`."""
        etcdctl(self._endpoints.current().name, "compact", str(revision))

    def lease_ttl(self, lease_id: int) -> int:
        """Seconds left; -1 if there is no such lease."""
        endpoint = self._endpoints.current().name
        return json.loads(etcdctl(endpoint, "lease", "timetolive", f"{lease_id:x}", "--write-out=json"))["ttl"]
