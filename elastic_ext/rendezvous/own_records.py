"""A node's own records in etcd: its membership in the job, its assignment to a round, its offer; and the watches on them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from elastic_ext.etcd import FROM_NOW, Batch, Began, Compare, Delete, Get, LeaseLost, LeaseSession, Put, Watch, absent, values
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.header_record import HeaderRecord
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State, encode
from elastic_ext.rendezvous.tasks import NodeContext

logger = logging.getLogger(__name__)

LOST_S = 5.0  # longer than most rounds take to follow one another
FRESH_SHARE = 0.6  # of the lease time: with more than this left, no renewal was missed (one is due every third)


class Registration:
    """This node's record and lease. For the rendezvous thread, except `lease` and `unwritten`."""

    def __init__(
        self,
        context: NodeContext,
        on_lost: Callable[[LeaseSession], None],
        on_created: Callable[[values.KeyValue | None], None],
    ) -> None:
        """
        Args:
            on_lost: called when the lease is lost while this process lives.
            on_created: called when the node's key was created, first or again, with the previous key `last`; None: unknown.
        """
        self.node: Node | None = None  # the record as it should be; None before the node has entered and after it has left
        self.session: LeaseSession | None = None  # the lease; None at the same times
        self.created = 0  # create revision of the node's key; 0 before the node has entered
        self.configuration = ""  # what this node runs with, encoded; "": unknown
        self.compared = ""  # `Header.job` of the job with which this node was compared, by a leader or on its own
        # Monotonic time when somebody has deleted the key: the others may continue without this node. Any thread may read it. It
        # is set before a header is read that was written after the delete.
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

    @property
    def unwritten(self) -> bool:
        """Whether etcd has not taken the record as it should be. Any thread."""
        return self._written is not self.node

    def grant(self) -> LeaseSession:
        """Get a new lease."""
        tasks = self._context.tasks
        self.session = LeaseSession(
            self._context.client,
            self._context.config.lease_ttl_s,
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

    def create_ops(self) -> list[values.Op]:
        """Return the operations that create this node's key: read the last node's name, write the key, become the last node."""
        put, keys, node_id = self._put(), self._context.keys, self._context.config.node_id
        ops: list[values.Op] = [Get(keys.last_node), put, Put(keys.last_node, node_id, lease_id=put.lease_id)]
        if not self.configuration:
            return ops
        return [*ops, Put(keys.configuration_of(node_id), self.configuration, lease_id=put.lease_id)]

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
        if self.created and self._context.client.txn([Compare(key, "create", "=", self.created)], [self._put()]).succeeded:
            self._written = self.node  # a claim is sent once: small messages pass where large ones are lost
            return
        written = self._context.client.txn([absent(key)], self.create_ops(), [Get(key), self._put()])
        found = written.readings[0].kv
        if written.succeeded:
            self.registered(written.revision, found)
        elif found is not None and found.create_revision != self.created:
            self.registered(found.create_revision, None)  # an earlier try has created it, and its answer was lost
        else:
            self._written = self.node

    def registered(self, revision: int, last: values.KeyValue | None) -> None:
        """Note that the node's key was created at this revision. last: see on_created."""
        self.created = revision
        self._written = self.node
        # A separate task: it is retried on its own until done, and runs after everything that a starting job waits for.
        self._context.tasks.post(lambda: self._on_created(last) if revision == self.created else None)

    def write_again(self, node: Node) -> None:
        """Write this record although etcd had it: the key is gone."""
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


class OwnAssignment:
    """This node's assignment. For the rendezvous thread, except `joined`."""

    def __init__(
        self,
        context: NodeContext,
        header: HeaderRecord,
        registration: Registration,
        on_joined: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        """
        Args:
            on_joined: called when this node has joined a running round.
            on_lost: called when the assignment for the current round is missing from etcd, or unreadable there.
        """
        self.value: Assignment | None = None  # the last readable assignment of this node
        # The round that this node has joined since it was last ready, and its assignment; None while it waits. Replaced, never
        # changed in place; readable from any thread.
        self.joined: tuple[Header, Assignment] | None = None
        self._context = context
        self._header = header
        self._registration = registration
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._unreadable = False  # what etcd holds in its place is unreadable
        # What etcd holds may be lost: it was deleted or unreadable since it was read, or lost records were written again while
        # this node could not know that the assignment is one of them.
        self.doubtful = False

    @property
    def current(self) -> Assignment | None:
        """The assignment, if it is for the round of the header."""
        return self.value if self.value is not None and self.value.of(self._header.value) else None

    def take(self, kv: values.KeyValue) -> None:
        """Take in a reading of the assignment."""
        assignment = self._context.reader.assignment(kv)
        self._unreadable = assignment is None
        self.doubtful = False
        self.value = assignment if assignment is not None else self.value
        if assignment is None:
            self._lost()

    def on_batch(self, batch: Batch) -> None:
        """Take in events of the watch."""
        event = batch.events[-1]
        if event.kind == "put":
            self.take(event.kv)
            self.join_if_assigned()
        else:
            self._lost()

    def _lost(self) -> None:
        self.doubtful = True
        if self.current is not None and self._registration.node is not None:
            self._on_lost()

    def join_if_assigned(self) -> None:
        """If this node waits and has an assignment to the running round, join it. If that round is already over, say so.

        Both happen on this thread: a node that has joined never claims to wait.
        """
        node, header = self._registration.node, self._header.value
        if node is None or self.joined is not None or node.after >= header.round:
            return
        assignment = self.current
        if header.state is State.RUNNING and assignment is not None:
            self.joined = (header, assignment)
            self._on_joined()
        elif self._is_lost:
            self._context.tasks.retry(self._give_up_lost_round, LOST_S)
        elif header.state is State.BROKEN:
            self._wait_for_next_round()

    @property
    def _is_lost(self) -> bool:
        """Whether this node cannot know if it is in the round: nothing is there once that is over, or nothing readable."""
        state = self._header.value.state
        return self.current is None and (state is State.BROKEN or (state is State.RUNNING and self._unreadable))

    def _give_up_lost_round(self) -> None:
        """Wait for the next round if no assignment to this one, and no later one, has come.

        A member whose assignment was lost never learns that it is one, and the others wait until it has left that round. Usually
        a node without an assignment is a spare, and the next round comes before each of them has written that.
        """
        node, header = self._registration.node, self._header.value
        if node is not None and self.joined is None and node.after < header.round and self._is_lost:
            self._wait_for_next_round()

    def _wait_for_next_round(self) -> None:
        number = self._header.value.round
        self._registration.update(lambda node: dataclasses.replace(node, after=number))


class OwnOffer:
    """This node's last offer. For the rendezvous thread.

    Invariant: at most one key of this node is there, and it has the lease of the node's own key.
    """

    def __init__(self, context: NodeContext, header: HeaderRecord, registration: Registration) -> None:
        self._context, self._header, self._registration = context, header, registration
        self._last: tuple[str, int, str] | None = None  # the seal of its round, rank, and text

    def write(self, seal: str, rank: int, text: str) -> None:
        """Put an offer in place of the last one. seal: of the round; rank: this node's in it."""
        session = self._registration.session
        if session is None or seal != self._header.value.seal:  # a retry that comes too late
            return
        key = self._context.keys.offer(seal, rank)
        last = self._context.keys.offer(*self._last[:2]) if self._last is not None else key
        before = [Delete(last)] if last != key else []
        self._context.client.txn([], [Put(key, text, lease_id=session.lease_id), *before])
        self._last = seal, rank, text

    def write_again(self) -> None:
        """Call this when the node's key is there again: the offer had the same lease, and is gone like that."""
        if self._last is not None:
            self.write(*self._last)


class OwnWatches:
    """The watches of one node. For the rendezvous thread, which receives all events."""

    def __init__(self, context: NodeContext, on_began: Callable[[], None], read: Callable[[], None]) -> None:
        """
        Args:
            on_began: work to run each time the news of one more key are delivered.
            read: reads the keys; called when events may have been missed.
        """
        self._context = context
        self._on_began = on_began
        self._read = read
        self._watches: list[Watch] = []
        self._awaited: set[str] = set()  # keys whose news are not delivered yet
        self._closed = False

    @property
    def empty(self) -> bool:
        """Whether no watch has been added yet."""
        return not self._watches

    @property
    def all_began(self) -> bool:
        """Whether everything written from now on is delivered."""
        return not self._awaited

    def add(
        self,
        key: str,
        on_batch: Callable[[Batch], None],
        *,
        deletes_only: bool = False,
        on_gap: Callable[[], None] | None = None,
    ) -> None:
        """Call `on_batch` with all later events of the key. on_gap: called when events may have been missed."""

        def take(item: Item) -> None:
            if self._closed:
                return
            if isinstance(item, Batch):
                on_batch(item)
                return
            # It has ended, perhaps because its history was compacted: read, then watch from there.
            if not isinstance(item, Began):
                revision = self._context.client.revision(key)
                self._read()
                self._open(key, take, revision + 1, deletes_only)
                if on_gap is not None:
                    on_gap()
            if key in self._awaited:
                self._awaited.remove(key)
                self._context.tasks.run(self._on_began)

        self._awaited.add(key)
        self._open(key, take, FROM_NOW, deletes_only)

    def _open(self, key: str, take: Callable[[Item], None], start_revision: int, deletes_only: bool) -> None:
        tasks = self._context.tasks
        watch = Watch(
            self._context.client,
            key,
            start_revision=start_revision,
            callback=lambda item: tasks.post(lambda: take(item)),
            deletes_only=deletes_only,
        )
        self._watches.append(watch)

    def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch.close()
