"""A node's assignment to the current round, which the leader wrote, and whether the node has joined that round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ext.etcd import Batch
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.etcd.registration import Registration
from elastic_ext.rendezvous.round_records import Assignment, Header, State


class OwnAssignment:
    """This node's assignment. For the rendezvous thread, except `joined`.

    Attributes:
        value: the last readable assignment of this node.
        joined: the round that this node has joined since it was last ready, and its assignment; None while it waits.
            Replaced, never changed in place; readable from any thread.
    """

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
        self.value: Assignment | None = None
        self.joined: tuple[Header, Assignment] | None = None
        self._context = context
        self._header = header
        self._registration = registration
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._unreadable = False  # what etcd holds in its place is unreadable

    @property
    def current(self) -> Assignment | None:
        """The assignment, if it is for the round of the header."""
        return self.value if self.value is not None and self.value.of(self._header.value) else None

    def take(self, kv: KeyValue) -> None:
        """Take in a reading of the assignment."""
        assignment = self._context.reader.assignment(kv)
        self._unreadable = assignment is None
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
        if assignment is None:
            if self._unreadable and header.state is State.RUNNING:  # it may be in this round, and can never learn its rank
                self._wait_for_next_round(header)
        elif header.state is State.RUNNING:
            self.joined = (header, assignment)
            self._on_joined()
        elif header.state is State.BROKEN:
            self._wait_for_next_round(header)

    def _wait_for_next_round(self, header: Header) -> None:
        self._registration.update(lambda node: dataclasses.replace(node, after=header.round))
