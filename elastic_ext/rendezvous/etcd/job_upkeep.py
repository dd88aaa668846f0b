"""The leader's upkeep of the records that belong to no node."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ext.etcd import FROM_NOW, Batch, Began, LeaseLost, Watch
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord


class JobUpkeep:
    """Watches the job's record and renews the lease of the records that belong to no node. For the rendezvous thread.

    That lease outlives the last node for a while, and lasts between two leaders.

    Attributes:
        renew_at: monotonic time of the next renewal.
    """

    def __init__(self, context: NodeContext, header: HeaderRecord, restore: Callable[[], None]) -> None:
        """restore: writes lost records again."""
        self.renew_at = 0.0
        self._context = context
        self._header = header
        self._restore = restore
        self._closed = False
        self._watch = self._open()

    def _open(self) -> Watch:
        tasks = self._context.tasks
        return Watch(
            self._context.client,
            self._context.keys.job,
            start_revision=FROM_NOW,
            callback=lambda item: tasks.post(lambda: self._on_job(item)),
        )

    def _on_job(self, item: Item) -> None:
        """Restore the record if needed: the watch begins or ends, or somebody has written or deleted the record."""
        if self._closed:
            return
        self._restore()
        if not isinstance(item, Batch | Began):
            self._watch = self._open()

    def renew(self, now: float) -> None:
        """Renew the lease if it is due. Raises LeaseLost."""
        if now < self.renew_at:
            return
        lease_id = self._header.lease_id
        ttl_s = self._context.client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {lease_id:x} of the job's records is gone")
        self.renew_at = now + ttl_s / 3

    def close(self) -> None:
        self._closed = True
        self._watch.close()
