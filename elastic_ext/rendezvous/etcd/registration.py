"""A node's own record in etcd, under the node's own lease: together they are its membership in the job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from elastic_ext.etcd import Get, LeaseLost, LeaseSession, Put, absent
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.round_records import Node, encode

logger = logging.getLogger(__name__)

FRESH_SHARE = 0.6  # of the lease time: with more than this left, no renewal was missed (one is due every third)


class Registration:
    """This node's record and lease. For the rendezvous thread, except `lease`.

    Attributes:
        node: the record as it should be; None before the node has entered and after it has left.
        session: the lease; None at the same times.
        created: create revision of the node's key; 0 before the node has entered.
        deleted_at: monotonic time when somebody has deleted the key: the others may continue without this node. Any thread may
            read it. It is set before a header is read that was written after the delete.
    """

    def __init__(
        self,
        context: NodeContext,
        on_lost: Callable[[LeaseSession], None],
        on_created: Callable[[KeyValue | None], None],
    ) -> None:
        """
        Args:
            on_lost: called when the lease is lost while this process lives.
            on_created: called when the node's key was created, first or again, with the previous key `last`; None: unknown.
        """
        self.node: Node | None = None
        self.session: LeaseSession | None = None
        self.created = 0
        self.deleted_at = -math.inf
        self._context = context
        self._on_lost = on_lost
        self._on_created = on_created
        self._written: Node | None = None  # the record in etcd

    @property
    def lease(self) -> tuple[int | None, float]:
        """The lease id, and until when (monotonic) the others certainly see this node alive. A consistent pair; any thread."""
        session = self.session
        return (session.lease_id, session.alive_until) if session is not None else (None, float("inf"))

    def grant(self) -> LeaseSession:
        """Get a new lease."""
        tasks = self._context.tasks
        self.session = LeaseSession(
            self._context.client,
            self._context.config.lease_ttl_s,
            patient=True,
            on_lost=lambda lost: tasks.post(lambda: self._on_lost(lost)),
        )
        return self.session

    def renew_if_due(self) -> None:
        """Renew the lease if needed: a round may start after an outage before a renewal is due, and the fence would close."""
        session = self.session
        if session is None or session.alive_until - self._context.tasks.now() > FRESH_SHARE * session.ttl_s:
            return
        kept = self._context.client.lease_keep_alive([session.lease_id])
        ttl_s = kept.ttl_s.get(session.lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {session.lease_id:x} is gone")
        session.renewed(kept.sent_at, ttl_s)

    def create_ops(self) -> list[Op]:
        """Return the operations that create this node's key: read the last node's name, write the key, become the last node."""
        put, last = self._put(), self._context.keys.last_node
        return [Get(last), put, Put(last, self._context.config.node_id, lease_id=put.lease_id)]

    def _put(self) -> Put:
        assert self.node is not None
        assert self.session is not None
        return Put(self._context.own_key, encode(self.node), lease_id=self.session.lease_id)

    def write(self) -> None:
        """Write the record unless etcd already has it."""
        if self._written is self.node:
            return
        if self.node is None or self.session is None:
            return  # it has left meanwhile
        key = self._context.own_key
        written = self._context.client.txn([absent(key)], self.create_ops(), [Get(key), self._put()])
        found = written.readings[0].kv
        if written.succeeded:
            self.registered(written.revision, found)
        elif found is not None and found.create_revision != self.created:
            self.registered(found.create_revision, None)  # an earlier try has created it, and its answer was lost
        else:
            self._written = self.node

    def registered(self, revision: int, last: KeyValue | None) -> None:
        """Note that the node's key was created at this revision. last: see on_created."""
        self.created = revision
        self._written = self.node
        # A separate task: it is retried on its own until done, and runs after everything that a starting job waits for.
        self._context.tasks.post(lambda: self._on_created(last) if revision == self.created else None)

    def write_again(self, node: Node) -> None:
        """Write this record although etcd had it: the key is gone or overwritten."""
        self.node = node
        self._written = None
        self.write()

    def update(self, change: Callable[[Node], Node]) -> None:
        """Change the record once. Only the write is retried, so no failure undoes a later change."""
        if self.node is not None and (node := change(self.node)) != self.node:
            self.node = node
            self._context.tasks.run(self.write)

    def withdraw(self) -> LeaseSession | None:
        """Take no further part. Return the lease for the caller to revoke."""
        session, self.session, self.node = self.session, None, None
        return session
