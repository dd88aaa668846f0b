"""The records of all nodes of a job, as its leader reads them. No other node reads them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_ext.etcd import Batch, Delete, LeaseLost, Put, Snapshot, unchanged
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.round_records import Node, encode


class NodeRecords:
    """The records, kept up to date by a watch. For the rendezvous thread.

    Attributes:
        nodes: by id.
        joined: create revision of each node's key, by id.
        written: revision of each node's record, by id.
        last_arrival: when the last new node came, in monotonic seconds.
    """

    def __init__(self, context: NodeContext, on_event: Callable[[], None], on_member_of_lost_round: Callable[[], None]) -> None:
        """
        Args:
            on_event: called from any thread when `read` has something to read.
            on_member_of_lost_round: called when a node comes whose record says that it is in a round.
        """
        self.nodes: dict[str, Node] = {}
        self.joined: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.last_arrival = context.tasks.now()
        self._context = context
        self._on_member_of_lost_round = on_member_of_lost_round
        self._overwritten: dict[str, KeyValue] = {}  # unreadable records, of nodes that this leader has not known
        self._known: dict[str, tuple[Node, int]] = {}  # the last readable record of each node, and its lease
        self._watch = context.client.watch_with_snapshot(context.keys.nodes, on_item=on_event)

    def close(self) -> None:
        self._watch.close()

    def read(self, now: float) -> None:
        """Take in what has happened since the last call."""
        reader, folder = self._context.reader, self._context.keys.nodes
        while (item := self._watch.get(timeout_s=0)) is not None:
            if isinstance(item, Snapshot):
                self.nodes, self.joined = {}, {}
                for kv in item.kvs:
                    self._put(kv, now)
            elif isinstance(item, Batch):
                for event in item.events:
                    if event.kind == "put":
                        self._put(event.kv, now)
                    elif (id_ := reader.id_of(folder, event.kv.key)) is not None:
                        self.nodes.pop(id_, None)
                        self._known.pop(id_, None)

    def _put(self, kv: KeyValue, now: float) -> None:
        """Take in a node's record, or what somebody else has put there: that is no node."""
        id_ = self._context.reader.id_of(self._context.keys.nodes, kv.key)
        if id_ is None:
            return None
        node = self._context.reader.node(kv)
        if node is None:
            return self._put_back(id_, kv)
        if id_ not in self.nodes:
            self.last_arrival = now
        self._known[id_] = node, kv.lease_id
        self.nodes[id_] = node
        self.joined[id_] = kv.create_revision
        self.written[id_] = kv.mod_revision
        if node.round:
            self._on_member_of_lost_round()
        return None

    def _put_back(self, id_: str, kv: KeyValue) -> None:
        """Put back the last readable record of a node whose record was overwritten, under its lease, so that its end will be
        seen. Until then the node counts as before. A key that never held a node is not one.
        """
        client = self._context.client
        if id_ not in self._known:
            self._overwritten[id_] = kv
            return
        node, lease_id = self._known[id_]
        same = unchanged(kv.key, kv.mod_revision)
        try:
            client.txn([same], [Put(kv.key, encode(node), lease_id=lease_id)])
            self.nodes[id_] = node
            self.joined.setdefault(id_, kv.create_revision)
        except LeaseLost:  # the lease has ended since, so nothing would delete the intruding record
            client.txn([same], [Delete(kv.key)])

    def clear_overwritten(self, members: Mapping[str, object]) -> None:
        """Delete members' records that were overwritten before this leader had read them: then their nodes write them again."""
        for id_ in self._overwritten.keys() & members.keys():
            kv = self._overwritten.pop(id_)
            self._context.client.txn([unchanged(kv.key, kv.mod_revision)], [Delete(kv.key)])
