"""One node's part in a job on etcd: it carries out the decisions of `rounds`. Knows nothing of torch.

A participant consists of parts, each for one subject:

    tasks.TaskRunner            runs all work on the rendezvous thread, and tries again what etcd cannot do now
    own_records.Registration    the node's own record and lease
    own_records.OwnAssignment   the node's assignment to the round
    header_record.HeaderRecord  the header of the rounds, which every node watches and acts on
    election.Election           whether the node leads; if so it has a leader.Leader
    Recovery                    writes again what etcd has lost

`keys` lists all keys. A node costs a fixed number of operations per round; only the leader reads all nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from elastic_ext.etcd import Batch, EtcdClient, EtcdError, Get, LeaseSession, Put, unchanged
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.header_record import HeaderRecord
from elastic_ext.rendezvous.job_records import JobRecords
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.leader import Election, Leader
from elastic_ext.rendezvous.own_records import OwnAssignment, OwnOffer, OwnWatches, Registration
from elastic_ext.rendezvous.round_records import Assignment, EndKind, Header, Node, RecordReader, State, encode
from elastic_ext.rendezvous.tasks import Dispatcher, LostRace, NodeConfig, NodeContext, Outage, TaskRunner

logger = logging.getLogger(__name__)


class Participant:
    """A node in a job. Its methods return at once; `on_change` is called when a property may have changed."""

    def __init__(
        self,
        client: EtcdClient,
        dispatcher: Dispatcher,
        config: NodeConfig,
        on_change: Callable[[], None],
        policy: AgentPolicy,
    ) -> None:
        """
        Args:
            dispatcher: its thread does all of this node's work.
            on_change: called on that thread when a property has changed; it must return at once.
        """
        self.client = client
        self._on_change = on_change
        self.tasks = TaskRunner(
            dispatcher,
            config.node_id,
            in_job=lambda: self.registration.created > 0,
            on_lease_lost=lambda: self.recovery.lease_lost(),
            on_timer=lambda: self.election.on_timer(),
            on_failure=on_change,
        )
        self.context = context = NodeContext(client, config, JobKeys(config.run_id), RecordReader(), self.tasks)
        self.registration = Registration(context, lambda lost: self.recovery.register_again(lost), self._on_key_created)
        outage = Outage(config.lease_ttl_s, lambda: self.registration.session, self.tasks.now)
        self._job_records = JobRecords(context)
        self.header_record = header = HeaderRecord(
            context, outage, self._on_header, self._on_own_assignment, lambda: self.recovery.restore_soon()
        )
        self._own_offer = OwnOffer(context, header, self.registration)
        self._assignment = OwnAssignment(
            context, header, self.registration, self._on_joined, lambda: self.recovery.restore_soon()
        )

        def lead() -> Leader:
            header.read()
            return Leader(context, header, self.registration.created, outage, policy, self.recovery.restore)

        self.election = Election(context, self.registration, lead)
        self.recovery = Recovery(
            context,
            self._job_records,
            header,
            self.registration,
            self._assignment,
            outage,
            leads=lambda: self.election.leader is not None,
        )
        self._watches = OwnWatches(context, self._enter_or_write, header.read)

    # Read by the agent, from any thread.

    @property
    def header(self) -> Header:
        """The newest header of the job's rounds that this node knows."""
        return self.header_record.value

    @property
    def joined(self) -> tuple[Header, Assignment] | None:
        """The round that this node has joined since it was last ready, and its assignment; None while it waits."""
        return self._assignment.joined

    @property
    def failure(self) -> Exception | None:
        """Why this node can no longer take part in the job; None while it can."""
        return self.tasks.failure

    # Called by the agent, from any thread.

    def ready(self, node: Node) -> None:
        """Wait for the next round as `node`."""
        self.tasks.post(lambda: self._ready(node))

    def update(self, change: Callable[[Node], Node]) -> None:
        """Change this node's record."""
        self.tasks.post(lambda: self.registration.update(change))

    def end_round(self, round_: int, state: State, reason: str, end: EndKind | None = None) -> None:
        """End round `round_` for all nodes."""
        self.change_header(round_, lambda header: dataclasses.replace(header, state=state, reason=reason, end=end))

    def change_header(self, round_: int, change: Callable[[Header], Header], in_any_round: bool = False) -> None:
        """Change the header while that round runs. in_any_round: while the job is not over."""
        self.tasks.post(lambda: self.header_record.update(round_, change, in_any_round))

    def offer(self, seal: str, rank: int, text: str) -> None:
        """Report to the node of rank 0 what this node could resume from on its own disk. seal: of the round."""
        self.tasks.post(lambda: self._own_offer.write(seal, rank, text))

    def leave(self, timeout_s: float) -> None:
        """Take this node out by revoking its lease, so that the others know at once. Return after timeout_s at the latest."""
        if self.failure is not None:  # the rendezvous thread does nothing more for this node
            return self._leave(timeout_s)
        left = threading.Event()

        def work() -> None:
            try:
                self._leave(timeout_s)
            finally:
                left.set()

        self.tasks.post(work)
        if not left.wait(timeout_s + 1):
            logger.warning("the job's store did not answer within %g s: the node's lease will expire by itself", timeout_s)
        return None

    # Everything below runs on the rendezvous thread.

    def _ready(self, node: Node) -> None:
        before = self.registration.node  # what its workers have finished they have, until the next round is formed
        self.registration.node = dataclasses.replace(node, done=before.done) if before is not None else node
        self._assignment.joined = None
        self.tasks.run(self._enter_or_write)  # retried on its own; a retry keeps what the node has since changed in its record

    def _enter_or_write(self) -> None:
        if self.registration.node is None:
            return  # it has left meanwhile
        if self.registration.created == 0:
            self._enter()
            return
        self.registration.renew_if_due()
        self.registration.write()
        self._assignment.join_if_assigned()

    def _enter(self) -> None:
        """Get a lease, watch, and only then read and write: what is written after a watch began is delivered."""
        context, registration = self.context, self.registration
        if registration.session is None:
            registration.grant()
        if self._watches.empty:
            self._watches.add(context.keys.header, self._on_header_events)
            self._watches.add(context.own_assignment_key, self._assignment.on_batch)
            self._watches.add(
                context.own_key, self.recovery.on_own_key_deleted, deletes_only=True, on_gap=self.recovery.restore_soon
            )
        if not self._watches.all_began:
            return  # each of them comes back to `_enter_or_write`
        entered = self._job_records.enter_new(context.own_key, registration.create_ops())
        if entered is not None:
            found, written, last = entered
            self.header_record.enter(found)
            registration.registered(written.revision, last)
        else:
            self.header_record.enter(self._job_records.read_or_create())
            registration.write()
        self._on_header()
        if self.joined is not None:  # before it knew that it had registered, so that it restored nothing until now
            self.recovery.restore_soon()

    def _on_header_events(self, batch: Batch) -> None:
        self.header_record.on_event(batch.events[-1])
        if self.election.leader is not None:
            self.election.on_timer()

    def _on_joined(self) -> None:
        self._on_change()
        self.tasks.post(self.election.follow)
        if self._assignment.doubtful:
            self.recovery.restore_soon()

    def _on_key_created(self, last: KeyValue | None) -> None:
        self.election.find_predecessor(last)
        self._own_offer.write_again()

    def _on_header(self) -> None:
        self._assignment.join_if_assigned()
        self._on_change()

    def _on_own_assignment(self, kv: KeyValue) -> None:
        self._assignment.take(kv)
        self._assignment.join_if_assigned()  # its event may never come

    def _leave(self, timeout_s: float) -> None:
        self._watches.close()
        self.election.close()
        session = self.registration.withdraw()
        if session is not None:
            try:
                session.revoke(timeout_s=timeout_s)
            except EtcdError as error:
                logger.warning("%s; the node's lease will expire by itself", error)


class Recovery:
    """One node's share in restoring what etcd has lost while the nodes of the job live. For the rendezvous thread.

    Leases end when etcd is unreachable for longer than they last, and anybody may delete a key. A missing record is a state like
    any other:

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
