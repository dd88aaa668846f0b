"""Is a node whose link ended dead? The decision, and the two calls to etcd that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.reader import RecordReader

CALL_TIMEOUT_S = 2.0  # of a call to etcd; the lease tells, too, so nothing depends on an answer


@dataclass(frozen=True)
class Peer:
    """Another node, as its record in etcd describes it.

    Attributes:
        address, port: of its listening socket for links; port 0: it has none.
        signs: how often the node has written that it lives; see `links`.
        created: create revision of the record.
        lease_id: revoking it takes the node out of the job.
    """

    node_id: str
    address: str
    port: int
    signs: int
    created: int
    lease_id: int


@dataclass(frozen=True)
class Finding:
    """Whether a suspected node is dead. reason: one line, for people."""

    dead: bool
    reason: str


def judge(known: Peer, found: Peer | None) -> Finding:
    """Decide about a node whose link has ended, and at whose port nothing listens.

    Args:
        known: as it was before the link ended.
        found: its record `watcher.CONFIRM_S` later; None: etcd has none.
    """
    if found is None:
        return Finding(False, f"node {known.node_id} has left the job meanwhile")
    if (found.signs, found.created) != (known.signs, known.created):
        return Finding(False, f"node {known.node_id} refuses connections but has written to etcd since, so it lives")
    return Finding(
        True, f"node {known.node_id} is dead: its link has ended, and {known.address}:{known.port} refuses connections"
    )


class Peers:
    """The records of the other nodes. Its methods block; any thread may call them. They raise EtcdError."""

    def __init__(self, client: EtcdClient, keys: JobKeys, reader: RecordReader) -> None:
        self._client, self._keys, self._reader = client, keys, reader

    def find(self, node_id: str) -> Peer | None:
        """Return this node; None if etcd has no readable record of it."""
        kv = self._client.get(self._keys.node(node_id), timeout_s=CALL_TIMEOUT_S).kv
        node = self._reader.node(kv) if kv is not None else None
        if kv is None or node is None:
            return None
        return Peer(node_id, node.address, node.link_port, node.signs, kv.create_revision, kv.lease_id)

    def remove(self, peer: Peer) -> None:
        """Take a dead node out of the job, as its reaper would have done."""
        self._client.lease_revoke(peer.lease_id, timeout_s=CALL_TIMEOUT_S)
