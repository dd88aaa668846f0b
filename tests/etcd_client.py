"""An etcd client with the calls that tests need and the package does not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

from elastic_ext import etcd
from elastic_ext.etcd import Delete, Put, Watch
from elastic_ext.etcd.values import Deleted, Key, Written
from elastic_ext.etcd.watch import Item
from tests.etcd_server import distro_binary


class EtcdClient(etcd.EtcdClient):
    """Puts, deletes and watches in one line; `etcdctl` for what only an operator does (no TLS, no user)."""

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
        self._etcdctl("compact", str(revision))

    def lease_ttl(self, lease_id: int) -> int:
        """Seconds left; -1 if there is no such lease."""
        return json.loads(self._etcdctl("lease", "timetolive", f"{lease_id:x}", "--write-out=json"))["ttl"]

    def _etcdctl(self, *args: str) -> str:
        command = [str(distro_binary("etcdctl")), "--endpoints", self._endpoints.current().name, *args]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=30, env={**os.environ, "ETCDCTL_API": "3"}
        ).stdout
