"""The records of other nodes in etcd, and the doubt whether one of them lives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.etcd import (
    FROM_NOW,
    Compare,
    Delete,
    EtcdClient,
    EtcdError,
    LeaseLost,
    Put,
    Watch,
    unchanged,
)
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.reader import RecordReader

DOUBT, DEAD = "doubt", "dead"  # values of the key
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


class Peers:
    """The calls to etcd that links need. They block; any thread may make them. They raise EtcdError."""

    def __init__(
        self, client: EtcdClient, keys: JobKeys, reader: RecordReader, node_id: str, lease_id: Callable[[], int | None]
    ) -> None:
        """node_id: this node. lease_id: returns that of this node; None: it has left."""
        self._client, self._keys, self._reader = client, keys, reader
        self._node_id, self._lease_id = node_id, lease_id

    def find(self, node_id: str) -> Peer | None:
        """Return this node; None if etcd has no readable record of it."""
        kv = self._client.get(self._keys.node(node_id), timeout_s=CALL_TIMEOUT_S).kv
        node = self._reader.node(kv) if kv is not None else None
        if kv is None or node is None:
            return None
        return Peer(node_id, node.address, node.link_port, kv.create_revision, kv.lease_id)

    def reach(self) -> None:
        """Return when etcd has answered."""
        self._client.get(self._keys.node(self._node_id), timeout_s=CALL_TIMEOUT_S)

    def watch_doubts(self, on_item: Callable[[Item], None]) -> Watch:
        """Watch the doubts about this node. on_item: called on the thread of the client's watches; it must return at once."""
        return Watch(self._client, self._keys.doubt(self._node_id), start_revision=FROM_NOW, callback=on_item)

    def doubt(self, peer: Peer) -> int:
        """Write the doubt whether a node lives, unless another node has; return its revision.

        A second doubt never replaces the first: two nodes that watch the same one would each undo the other's.

        Raises LeaseLost: this node itself has left.
        """
        key, put = self._keys.doubt(peer.node_id), self._put_doubt(peer, DOUBT)
        while True:
            kv = self._client.get(key, timeout_s=CALL_TIMEOUT_S).kv
            if kv is not None and kv.value == DOUBT.encode():
                return kv.mod_revision
            before = 0 if kv is None else kv.mod_revision  # "dead" is from an earlier time: the node has registered again
            written = self._client.txn([unchanged(key, before)], [put], timeout_s=CALL_TIMEOUT_S)
            if written.succeeded:
                return written.revision

    def answer(self) -> bool:
        """Remove the doubt about this node, if any. Return False if this node was declared dead, once."""
        key = self._keys.doubt(self._node_id)
        while (kv := self._client.get(key, timeout_s=CALL_TIMEOUT_S).kv) is not None:
            as_read = [unchanged(key, kv.mod_revision)]
            if kv.value == DEAD.encode():
                with contextlib.suppress(EtcdError):  # what matters is known
                    self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S)
                return False
            if self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S).succeeded:
                break
        return True

    def remove(self, peer: Peer, doubted: int) -> bool:
        """Take a node out of the job if it has not answered the doubt. Return whether that was done."""
        node, doubt = self._keys.node(peer.node_id), self._keys.doubt(peer.node_id)
        silent = [unchanged(doubt, doubted), Compare(node, "create", "=", peer.created)]
        put = self._put_doubt(peer, DEAD)
        if not self._client.txn(silent, [Delete(node), put], timeout_s=CALL_TIMEOUT_S).succeeded:
            return False
        with contextlib.suppress(EtcdError):  # what else it has written goes when the lease ends
            self._client.lease_revoke(peer.lease_id, timeout_s=CALL_TIMEOUT_S)
        return True

    def _put_doubt(self, peer: Peer, value: str) -> Put:
        lease_id = self._lease_id()
        if lease_id is None:
            raise LeaseLost("this node has left the job")
        return Put(self._keys.doubt(peer.node_id), value, lease_id=lease_id)
