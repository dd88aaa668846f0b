"""Restores what etcd has lost while the nodes of the job live.

Leases end when etcd is unreachable for longer than they last, and anybody may delete a key. A missing record is a state like any
other:

    nodes/ID        its node writes it again, under a new lease if the old one is gone; the election goes by the new key
    job             the leader writes it again, under the old lease or a new one; another node that misses it, somewhat later
    round           the same: the node writes the header that it remembers. A header that `precedes` it was brought back by a
                    node that had missed events, and is replaced. So the newest header that any node knows comes back.
    assign/ID       its node writes it again, while the header is still of that round
    last, ledger, charges, refused: lost records are forgotten

Invariant: each of these writes is conditional on the record still being missing.

A running round goes on meanwhile: a node acts on the header that it remembers, and a leader that was in the outage gives the
members time to come back (`Outage.returning_until`) before it breaks the round.
"""

import dataclasses
from collections.abc import Callable

from elastic_ext.etcd import Batch, Get, LeaseSession, Put, unchanged
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.header_record import HeaderRecord
from elastic_ext.rendezvous.job_records import JobRecords
from elastic_ext.rendezvous.own_records import OwnAssignment, Registration
from elastic_ext.rendezvous.round_records import encode
from elastic_ext.rendezvous.tasks import LostRace, NodeContext, Outage


class Recovery:
    """One node's share of the recovery. For the rendezvous thread."""

    def __init__(
        self,
        context: NodeContext,
        job_records: JobRecords,
        header: HeaderRecord,
        registration: Registration,
        assignment: OwnAssignment,
        outage: Outage,
        leads: Callable[[], bool],
    ) -> None:
        """leads: returns whether this node is the leader."""
        self._context = context
        self._job_records = job_records
        self._header = header
        self._registration = registration
        self._assignment = assignment
        self._outage = outage
        self._leads = leads

    def restore_soon(self) -> None:
        """Restore now on the leader, later on another node: if the leader lives, that node has only its own keys to restore."""
        if self._leads():
            self._context.tasks.post(self.restore)
        else:
            self._context.tasks.retry(self.restore)

    def restore(self) -> None:
        """Write again the job's records and this node's that are missing but known here. If none is missing, do nothing.

        Raises LostRace: another node has written at the same time; the caller must try again.
        """
        context, header = self._context, self._header
        if self._registration.node is None:
            return
        if self._assignment.joined is None:
            self._assignment.doubtful = True
        if self._registration.created == 0:
            return
        header.lease_id = self._job_records.bring_back(header.lease_id, header.job)
        read = context.client.txn([], [Get(context.keys.header), Get(context.own_assignment_key), Get(context.own_key)])
        found, assignment, own = (reading.kv for reading in read.readings)
        header.observe(found, read.revision)
        header.job = header.value.job  # the job has the same settings
        if rounds.needs_restoring(header.readable(found) if found is not None else None, header.value):
            header.write_again()
        self._restore_assignment(assignment)
        if own is None or own.create_revision != self._registration.created:  # written by a try whose answer was lost
            self.write_own_key()

    def _restore_assignment(self, found: KeyValue | None) -> None:
        context, header = self._context, self._header
        assignment = self._assignment.current
        if assignment is None or (found is not None and context.reader.assignment(found) is not None):
            return
        key = context.own_assignment_key
        same = unchanged(key, found.mod_revision if found is not None else 0)
        put = Put(key, encode(assignment), lease_id=header.lease_id)
        if not context.client.txn([same, header.unchanged], [put]).succeeded:
            raise LostRace("the header changed while this node's assignment was being written again")

    def write_own_key(self) -> None:
        """Write the node's own key, which is gone or overwritten. The record names the round of its workers: nothing else may
        know of that round.
        """
        node, joined = self._registration.node, self._assignment.joined
        if node is not None and self._registration.session is not None:
            self._registration.write_again(dataclasses.replace(node, round=joined[0].round if joined is not None else 0))

    def on_own_key_deleted(self, batch: Batch) -> None:
        """Take in events of the watch for deletes of the node's own key."""
        if batch.revision > self._registration.created and self._registration.node is not None:
            self._registration.deleted_at = self._context.tasks.now()
            self.restore_soon()

    def lease_lost(self) -> None:
        """Recover from a write that failed because its lease is gone: this node's own, or that of the job's records."""
        session = self._registration.session
        if session is None or self._registration.node is None:
            return
        if self._context.client.lease_keep_alive([session.lease_id]).ttl_s.get(session.lease_id, 0) <= 0:
            self.register_again(session)
        elif self._registration.created:
            self.restore()

    def register_again(self, lost: LeaseSession) -> None:
        """Register the same node under a new lease: the old lease is lost, but this process lives."""
        registration, tasks = self._registration, self._context.tasks
        if registration.session is not lost or registration.node is None:
            return
        lost.stop_renewing()
        registration.grant()
        if registration.created == 0:  # it was about to enter; that is retried
            return
        self._outage.expect_members()
        tasks.run(self.write_own_key)  # each is retried on its own, so that this lease is not lost again
        tasks.run(self.restore)
