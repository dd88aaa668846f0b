"""The header of a job's rounds: read, cached, and written by one compare-and-swap.

Invariant: a node never goes from a header to an older one of the same job, so a round that is over stays over.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from elastic_ext.etcd import Compare, EtcdClient, Event, Get, Put, TxnResult, unchanged, values
from elastic_ext.failures.ledger import JobVerdict, encode_verdict
from elastic_ext.rendezvous import job_records, rounds, tasks
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, State, encode

logger = logging.getLogger(__name__)


def swap(
    client: EtcdClient,
    keys: JobKeys,
    header: Header,
    *,
    over: tuple[int, int],
    compares: Sequence[Compare] = (),
    puts: Sequence[values.Op] = (),
    timeout_s: float | None = None,
) -> TxnResult:
    """Write the header if the one in etcd is still its predecessor. Nothing else writes that key.

    Args:
        over: revision of the header to replace (0: none), and the lease of the job's records.
        compares, puts: further conditions, and further writes in the same transaction.
        timeout_s: of the call; None: the client's.
    """
    revision, lease_id = over
    put = Put(keys.header, encode(header), lease_id=lease_id)
    return client.txn([unchanged(keys.header, revision), *compares], [put, *puts], timeout_s=timeout_s)


def closed(header: Header, by: str, verdict: JobVerdict | None) -> Header:
    """Return the header of a job that a node closes. by: its host. verdict: what the others do; None: nothing is known."""
    text = encode_verdict(dataclasses.replace(verdict, round=header.round)) if verdict is not None else header.verdict
    why = f": {verdict.decision.reason}" if verdict is not None else ""
    return dataclasses.replace(header, state=State.CLOSED, reason=f"{by} closed the job{why}", end=None, verdict=text)


class HeaderRecord:
    """One node's knowledge of the header. For the rendezvous thread, except `value`."""

    def __init__(
        self,
        context: tasks.NodeContext,
        outage: tasks.Outage,
        on_header: Callable[[], None],
        on_own_assignment: Callable[[values.KeyValue], None],
        on_lost_record: Callable[[], None],
    ) -> None:
        """
        Args:
            on_header: called with a newer header in `value`.
            on_own_assignment: called with a reading of this node's assignment.
            on_lost_record: called when records of the job are missing, unreadable, or older than what this node knows.
        """
        # The newest header that this node knows; replaced, never changed in place; readable from any thread.
        self.value = Header()
        self.revision = 0  # of the header in etcd; 0 if there is none
        self.lease_id = 0  # lease of the records that belong to no node
        self.job = ""  # name of the job that this node has entered. Another may begin under its run id while this node is cut off
        self._context = context
        self._outage = outage
        self._on_header, self._on_own_assignment, self._on_lost_record = on_header, on_own_assignment, on_lost_record
        self._heard = 0  # revision of the last event of the header, including its deletion

    def enter(self, found: job_records.JobSnapshot) -> None:
        """Start with the job as this node found it."""
        self.lease_id, self.value, self.revision = found.lease_id, found.header, found.revision
        self._heard = max(self._heard, found.revision)
        self.job = found.header.job

    # Reading.

    def read(self) -> None:
        """Read the header, and this node's assignment as of the same revision."""
        context = self._context
        found = context.client.txn([], [Get(context.keys.header), Get(context.own_assignment_key)])
        header, assignment = (reading.kv for reading in found.readings)
        if assignment is not None:
            self._on_own_assignment(assignment)
        self.observe(header, found.revision)
        if rounds.needs_restoring(self.readable(header) if header is not None else None, self.value):
            self._on_lost_record()

    def observe(self, header: values.KeyValue | None, revision: int) -> None:
        """Take in a reading at this revision; None: no header. If it is older than what is known, it changes nothing."""
        at = header.mod_revision if header is not None else revision
        found = self.readable(header) if header is not None else self.value
        if at < self._heard or (at == self._heard and found != self.value and not rounds.precedes(found, self.value)):
            # Readings are linearizable: this is another store, new or from a backup, no matter what was written there since.
            self._heard = 0
        if header is not None:
            self._take(found, header.mod_revision)
        elif revision > self._heard:
            self._heard, self.revision = revision, 0
            if rounds.needs_restoring(None, self.value):
                self._outage.expect_members()

    def on_event(self, event: Event) -> None:
        """Take in an event of the watch on the header."""
        if event.kind == "put":
            self._saw(self.readable(event.kv), event.kv.mod_revision)
        elif event.kv.mod_revision > self._heard:
            self.observe(None, event.kv.mod_revision)
            if rounds.needs_restoring(None, self.value):
                self._on_lost_record()

    def readable(self, kv: values.KeyValue) -> Header:
        """Decode a header. An unreadable one changes nothing: the known header holds, until the next one is written over it."""
        header = self._context.reader.header(kv)
        return header if header is not None else self.value

    def _saw(self, header: Header, revision: int) -> None:
        if self._take(header, revision) and rounds.precedes(header, self.value):
            self._on_lost_record()

    def _take(self, header: Header, revision: int) -> bool:
        """Take in a header. Return whether etcd wrote it after everything known here."""
        if revision <= self._heard:
            return False
        self._heard = self.revision = revision
        if not rounds.precedes(header, self.value):
            self.value = header
            self.job = self.job or header.job
            self._on_header()
        return True

    # Writing.

    @property
    def unchanged(self) -> Compare:
        """Comparison that holds while the header in etcd is the one known here."""
        return unchanged(self._context.keys.header, self.revision)

    def write(self, header: Header, compares: Sequence[Compare] = (), puts: Sequence[values.Op] = ()) -> bool:
        """Replace the known header with this one. Return False if etcd holds another one. See `swap`."""
        written = self._swap(header, compares, puts)
        if written.succeeded:
            self._saw(header, written.revision)
        return written.succeeded

    def write_again(self) -> None:
        """Write the known header over what etcd holds: nothing, or an older header.

        Raises LostRace: another node has written at the same time.
        """
        written = self._swap(self.value)
        if not written.succeeded:
            raise tasks.LostRace("another node wrote the header at the same time")
        self._heard = self.revision = written.revision
        self._outage.expect_members()
        logger.warning("the store had lost the records of the job; wrote round %s again", self.value.round)

    def update(self, round_: int, change: Callable[[Header], Header], in_any_round: bool = False) -> None:
        """Write the result of `change` while that round runs. in_any_round: while the job is not over.

        Raises LostRace: the header in etcd has changed in a way that this node cannot see; the caller must try again.
        """
        while not self.value.ended and (in_any_round or self._runs(round_)):
            before = self.revision
            if self.write(change(self.value)):
                return
            self.read()
            if self.revision == before:
                raise tasks.LostRace("another node wrote the header at the same time")

    def _runs(self, round_: int) -> bool:
        return self.value.state is State.RUNNING and self.value.round == round_

    def _swap(self, header: Header, compares: Sequence[Compare] = (), puts: Sequence[values.Op] = ()) -> TxnResult:
        over = (self.revision, self.lease_id)
        return swap(self._context.client, self._context.keys, header, over=over, compares=compares, puts=puts)
