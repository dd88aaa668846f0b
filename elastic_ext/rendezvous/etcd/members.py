"""The members of the current round, as its leader knows them: from sealing the round, or from the assignments in etcd."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.etcd.outage import Outage
from elastic_ext.rendezvous.round_records import Assignment, Header


class Members:
    """Ranks of the current round. For the rendezvous thread.

    Attributes:
        ranks: rank of each node in the round, by id; includes lost nodes.
    """

    def __init__(self, context: NodeContext, header: HeaderRecord, outage: Outage) -> None:
        self.ranks: dict[str, int] = {}
        self._context = context
        self._header = header
        self._outage = outage
        self._round: tuple[int, str] = (0, "")  # number and seal of their round
        self._load_at = 0.0

    def refresh(self, now: float) -> None:
        """Load the ranks of a round that this leader has not sealed, and load them again while assignments are missing."""
        header = self._header.value
        missing = len(self.ranks) < header.nodes
        if self._round != (header.round, header.seal) or (missing and now >= self._load_at):
            self.load()
            self._load_at = now + rounds.ASSIGNMENTS_POLL_S

    def load(self) -> None:
        """Read the assignments."""
        folder, header, reader = self._context.keys.assignments, self._header.value, self._context.reader
        before, self.ranks, known = self._round, {}, 0
        for kv in self._context.client.get_prefix(folder).kvs:
            id_, assignment = reader.id_of(folder, kv.key), reader.assignment(kv)
            if id_ is not None and assignment is not None and assignment.of(header):
                known += 1
                # A node that was lost with its assignment, as the store was, is known by its neighbors'.
                near = rounds.neighbors(assignment.rank, range(header.nodes))
                self.ranks |= {id_: assignment.rank, **dict(zip(assignment.neighbors, near, strict=False))}
        self._round = (header.round, header.seal)
        if before != self._round and known < header.nodes:
            self._outage.expect_members()  # some assignments are lost; each node writes its own again

    def sealed(self, header: Header, assignments: Mapping[str, Assignment]) -> None:
        """Take the ranks from the assignments that this leader has written."""
        self.ranks = {id_: assignment.rank for id_, assignment in assignments.items()}
        self._round = (header.round, header.seal)
