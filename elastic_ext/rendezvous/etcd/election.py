"""The election of the leader: the node whose key was created first. Every other node watches only the node created before it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from elastic_ext.etcd import Batch, Watch
from elastic_ext.etcd.values import KeyValue
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.own_records import Registration

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0  # a node that waits for a round watches its predecessor only after this time; it misses nothing


class Leading(Protocol):
    """The leader's work, for as long as this node leads."""

    def act(self, now: float) -> float:
        """Do all that there is to do; return the monotonic time of the next look."""

    def close(self) -> None: ...


class Election:
    """One node's part in the election. For the rendezvous thread."""

    def __init__(self, context: NodeContext, registration: Registration, lead: Callable[[], Leading]) -> None:
        """lead: called when this node becomes the leader."""
        self._context = context
        self._registration = registration
        self._lead = lead
        self.leader: Leading | None = None
        self._predecessor: Watch | None = None
        self._to_follow: tuple[str, int] | None = None  # key of the predecessor, and a revision at which it existed
        self._doubt_until: float | None = None  # its record was overwritten, and nobody has put it back

    def find_predecessor(self, last: KeyValue | None = None) -> None:
        """Lead if no node came before this one; otherwise watch the last one that did (as in etcd's client/v3/concurrency).

        Asking etcd for it makes etcd sort all nodes. `last` names it for free: a node that existed when this one was created,
        since that key is under the lease of the node that it names.
        """
        if self._registration.node is None:
            return None  # it has left meanwhile
        self.close()
        self._to_follow = self._doubt_until = None
        if last is not None and last.lease_id:  # without a lease, somebody else has written it
            key = self._context.keys.node(last.value.decode(errors="replace"))
            if key != self._context.own_key and self._names_node(key.encode()):
                self._to_follow = (key, self._registration.created)
                # Later, or once this node is in a round: forming the round comes first.
                return self._context.tasks.wake_at(self._context.tasks.now() + FOLLOW_S)
        self._to_follow = self._node_before()
        if self._to_follow is not None:
            return self.follow()
        logger.info("node %s leads the rendezvous", self._context.config.node_id)
        self.leader = self._lead()
        return self.on_timer()

    def on_timer(self) -> None:
        """Take the leader's look; on any other node, begin to watch the predecessor, or look for another one."""
        tasks = self._context.tasks
        if self.leader is not None:
            tasks.wake_at(self.leader.act(tasks.now()))
        elif self._doubt_until is not None and self._doubt_until <= tasks.now():
            self.find_predecessor()
        else:
            self.follow()

    def follow(self) -> None:
        """Begin to watch the predecessor, unless that has been done."""
        if self._to_follow is None or self._registration.node is None:
            return
        (key, revision), self._to_follow = self._to_follow, None
        tasks = self._context.tasks
        self._predecessor = Watch(
            self._context.client,
            key,
            start_revision=revision + 1,
            callback=lambda item: tasks.post(lambda: self._on_predecessor(item)),
        )

    def _on_predecessor(self, item: Item) -> None:
        """Handle the end of the predecessor: it is gone, or has registered again and is no longer the predecessor.

        One whose record was overwritten has the time of a lease: the leader puts the record back, unless it was the leader's own.
        """
        if not isinstance(item, Batch) or any(
            event.kind == "delete" or event.kv.create_revision > self._registration.created for event in item.events
        ):
            self.find_predecessor()
        elif self._is_node(item.events[-1].kv):
            self._doubt_until = None
        else:
            self._doubt_until = self._context.tasks.now() + self._context.config.lease_ttl_s
            self._context.tasks.wake_at(self._doubt_until)

    def _node_before(self) -> tuple[str, int] | None:
        """Return the key of the node created last before this one, and a revision at which it existed.

        A key that holds no node leads nobody: then read all keys to find one that does.
        """
        folder, created = self._context.keys.nodes, self._registration.created
        found = self._context.client.last_created_before(folder, created)
        if found.kv is not None and not self._is_node(found.kv):
            found = self._context.client.get_prefix(folder)
        nodes = [kv for kv in found.kvs if kv.create_revision < created and self._is_node(kv)]
        before = max(nodes, key=lambda kv: kv.create_revision, default=None)
        return (before.key.decode(), found.revision) if before is not None else None

    def _is_node(self, kv: KeyValue) -> bool:
        return self._names_node(kv.key) and self._context.reader.node(kv) is not None

    def _names_node(self, key: bytes) -> bool:
        return self._context.reader.id_of(self._context.keys.nodes, key) is not None

    def close(self) -> None:
        """Stop following and leading."""
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor = None
        if self.leader is not None:
            self.leader.close()
            self.leader = None
