"""A node's own record in etcd, under the node's own lease: both together are its membership of the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elastic_ext.etcd import Get, LeaseLost, LeaseSession, Put, absent
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.round_records import Node, encode

logger = logging.getLogger(__name__)

FRESH_SHARE = 0.6  # of the lease time left: the last renewal was not missed (one is due every third)


class Registration:
    """For the rendezvous thread, but for `lease`.

    Attributes:
        node: the record as it should be; None before the node has entered and after it has left.
        session: the lease; None likewise.
        created: create revision of the node's key; 0 before it has entered.
    """

    def __init__(
        self,
        context: NodeContext,
        on_lost: Callable[[LeaseSession], None],
        on_created: Callable[[KeyValue | None], None],
    ) -> None:
        """
        Args:
            on_lost: the lease is lost, this process is not.
            on_created: the node's key was created, first or again. Gets the key `last` as it was before; None: not known.
        """
        self.node: Node | None = None
        self.session: LeaseSession | None = None
        self.created = 0
        self._context = context
        self._on_lost = on_lost
        self._on_created = on_created
        self._written: Node | None = None  # the record as etcd has it

    @property
    def lease(self) -> tuple[int | None, float]:
        """Its id, and the monotonic time until which the others certainly see this node alive. Both of one moment; any thread."""
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
        """After an outage a round may be there before the next renewal is due: the fence would see this node as cut off."""
        session = self.session
        if session is None or session.alive_until - time.monotonic() > FRESH_SHARE * session.ttl_s:
            return
        kept = self._context.client.lease_keep_alive([session.lease_id])
        ttl_s = kept.ttl_s.get(session.lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {session.lease_id:x} is gone")
        session.renewed(kept.sent_at, ttl_s)

    def operations(self) -> list[Op]:
        """What creates this node's key: read who did so last, write the key, name this node as the last."""
        put, last = self._put(), self._context.keys.last_node
        return [Get(last), put, Put(last, self._context.config.node_id, lease_id=put.lease_id)]

    def _put(self) -> Put:
        assert self.node is not None
        assert self.session is not None
        return Put(self._context.own_key, encode(self.node), lease_id=self.session.lease_id)

    def write(self) -> None:
        """Write the record, if etcd does not have it so."""
        if self._written is self.node:
            return
        if self.node is None or self.session is None:
            return  # it has left meanwhile
        key = self._context.own_key
        written = self._context.client.txn([absent(key)], self.operations(), [Get(key), self._put()])
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
        # As a task of its own: tried again by itself until it is done. And after all that a starting job waits for.
        self._context.tasks.post(lambda: self._on_created(last) if revision == self.created else None)

    def write_again(self, node: Node) -> None:
        """Write this record although etcd had it: the key is gone or written over."""
        self.node = node
        self._written = None
        self.write()

    def update(self, change: Callable[[Node], Node]) -> None:
        """Change the record, once. Only the writing is tried again: no later change is taken back, whatever fails."""
        if self.node is not None and (node := change(self.node)) != self.node:
            self.node = node
            self._context.tasks.run(self.write)

    def withdraw(self) -> LeaseSession | None:
        """Take no further part. Returns the lease, for the caller to revoke."""
        session, self.session, self.node = self.session, None, None
        return session
