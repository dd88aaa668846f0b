"""An etcd client with the calls that tests need and the package does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from elastic_ext import etcd
from elastic_ext.etcd import Delete, Put, Watch
from elastic_ext.etcd.values import Deleted, Key, Written
from elastic_ext.etcd.watch import Item
from tests.etcd_server import etcdctl
from tests.until import LIMIT_S


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
    ) -> Watch:
        return Watch(self, key, prefix=prefix, start_revision=start_revision, callback=callback)

    def compact(self, revision: int) -> None:
        """Drop the history before `revision`."""
        etcdctl(self._endpoints.current().name, "compact", str(revision))

    def lease_ttl(self, lease_id: int) -> int:
        """Seconds left; -1 if there is no such lease."""
        endpoint = self._endpoints.current().name
        return json.loads(etcdctl(endpoint, "lease", "timetolive", f"{lease_id:x}", "--write-out=json"))["ttl"]
