"""The records of other nodes in etcd, and the doubt whether one of them lives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elastic_ext.etcd import (
    FROM_NOW,
    Compare,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    LeaseLost,
    Put,
    Watch,
    unchanged,
)
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.round_records import RecordReader

DOUBT, DEAD = "doubt", "dead"  # values of the key; "dead" is followed by the create revision of the record that was deleted
CALL_TIMEOUT_S = 2.0  # of a call to etcd; the lease tells, too, so nothing depends on an answer


@dataclass(frozen=True)
class Peer:
    """Another node, as its record in etcd describes it.

    Attributes:
        address, port: of its listening socket for links; port 0: nobody may link to it.
        created: create revision of its record.
        lease_id: of its record.
    """

    node_id: str
    address: str
    port: int
    created: int
    lease_id: int


@dataclass(frozen=True)
class Standing:
    """What etcd says of this node. dead: it was declared dead. in_job: those of the other nodes asked for that are in the job."""

    dead: bool
    in_job: frozenset[str]


class Peers:
    """The calls to etcd that links need. They block; any thread may make them. They raise EtcdError.

    Attributes:
        since: create revision of this node's record when it entered the current round; what was said of earlier ones is over.
    """

    def __init__(
        self, client: EtcdClient, keys: JobKeys, reader: RecordReader, node_id: str, lease_id: Callable[[], int | None]
    ) -> None:
        """node_id: this node. lease_id: returns that of this node; None: it has left."""
        self._client, self._keys, self._reader = client, keys, reader
        self._node_id, self._lease_id = node_id, lease_id
        self.since = 0

    def find(self, node_id: str) -> Peer | None:
        """Return this node; None if etcd has no readable record of it."""
        kv = self._client.get(self._keys.node(node_id), timeout_s=CALL_TIMEOUT_S).kv
        node = self._reader.node(kv) if kv is not None else None
        if kv is None or node is None:
            return None
        return Peer(node_id, node.address, node.link_port, kv.create_revision, kv.lease_id)

    def watch_doubts(self, on_item: Callable[[Item], None]) -> Watch:
        """Watch the doubts about this node. on_item: called on the thread of the client's watches; it must return at once."""
        return Watch(self._client, self._keys.doubt(self._node_id), start_revision=FROM_NOW, callback=on_item)

    def answer(self, others: Collection[str] = ()) -> Standing:
        """Remove the doubt about this node, if any. others: nodes to look for at the same time."""
        key, asked = self._keys.doubt(self._node_id), tuple(others)
        gets = [Get(key), *(Get(self._keys.node(each)) for each in asked)]
        while True:
            doubt, *nodes = (each.kv for each in self._client.txn([], gets, timeout_s=CALL_TIMEOUT_S).readings)
            in_job = frozenset(node_id for node_id, kv in zip(asked, nodes, strict=True) if kv is not None)
            if doubt is None:
                return Standing(False, in_job)
            as_read = [unchanged(key, doubt.mod_revision)]
            if self._is_dead(doubt.value):
                with contextlib.suppress(EtcdError):  # what matters is known
                    self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S)
                return Standing(True, in_job)
            if self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S).succeeded:
                return Standing(False, in_job)

    def doubt(self, peer: Peer, timeout_s: float) -> int | None:
        """Write the doubt whether a node lives, unless another node has; return its revision. None: the node is gone.

        A second doubt never replaces the first: two nodes that watch the same one would each undo the other's.

        Raises LeaseLost: this node itself has left.
        """
        key, put = self._keys.doubt(peer.node_id), self._put_doubt(peer, DOUBT)
        both = self._both_in_job(peer)
        written = self._client.txn([unchanged(key, 0), *both], [put], [Get(key)], timeout_s=timeout_s)
        if written.succeeded:
            return written.revision
        found = written.readings[0].kv
        if found is None or found.value == DOUBT.encode():
            return None if found is None else found.mod_revision
        # "dead" is from an earlier time: the node has registered again.
        written = self._client.txn([unchanged(key, found.mod_revision), *both], [put], timeout_s=timeout_s)
        return written.revision if written.succeeded else None

    def remove(self, peer: Peer, doubted: int, timeout_s: float) -> bool:
        """Take a node out of the job if it has not answered the doubt. Return whether that was done."""
        node, doubt = self._keys.node(peer.node_id), self._keys.doubt(peer.node_id)
        silent = [unchanged(doubt, doubted), *self._both_in_job(peer)]
        put = self._put_doubt(peer, f"{DEAD} {peer.created}")
        if not self._client.txn(silent, [Delete(node), put], timeout_s=timeout_s).succeeded:
            return False
        with contextlib.suppress(EtcdError):  # what else it has written goes when the lease ends
            self._client.lease_revoke(peer.lease_id, timeout_s=CALL_TIMEOUT_S)
        return True

    def _both_in_job(self, peer: Peer) -> list[Compare]:
        """The condition that the other node has not registered again, and that nobody has taken this one out of the job."""
        return [
            Compare(self._keys.node(peer.node_id), "create", "=", peer.created),
            Compare(self._keys.node(self._node_id), "create", ">", 0),
        ]

    def _put_doubt(self, peer: Peer, value: str) -> Put:
        lease_id = self._lease_id()
        if lease_id is None:
            raise LeaseLost("this node has left the job")
        return Put(self._keys.doubt(peer.node_id), value, lease_id=lease_id)

    def _is_dead(self, value: bytes) -> bool:
        """Return whether a key of doubts says that this node was declared dead in the current round."""
        word, _, created = value.decode(errors="replace").partition(" ")
        return word == DEAD and (not created.isdecimal() or int(created) >= self.since)
