"""What this node could resume from on its own disk, told to the node of rank 0."""

from __future__ import annotations

from elastic_ext.etcd import Delete, Put
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.etcd.registration import Registration


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
