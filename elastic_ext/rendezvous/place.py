"""A node's place in a job, from the agent's start until it leaves: what outlives a round, and the waits of the main thread.

`Participant` carries out the decisions of `rounds` on etcd, and `Place` is what the main thread of the agent sees of it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.elastic import rendezvous

from elastic_ext.base import diagnosis, errors, name_lookup, printable, waits
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings, torch_number
from elastic_ext.etcd import Batch, EtcdClient, EtcdError, Get, LeaseSession, Put, unchanged, values
from elastic_ext.failures import ledger
from elastic_ext.rendezvous import drains, header_record, judging, leader, round_store, rounds, running_job
from elastic_ext.rendezvous.address import check_own, checked_address, host_of, is_loopback, network, own_address, own_name
from elastic_ext.rendezvous.configuration import TO_DO
from elastic_ext.rendezvous.contract import ETCD, JOIN_TIMEOUT_S, JobDone
from elastic_ext.rendezvous.fence import Fence
from elastic_ext.rendezvous.job_records import JobRecords, JobSnapshot, LateJoins
from elastic_ext.rendezvous.keys import JobKeys, checked, checked_given
from elastic_ext.rendezvous.links import Links, Peers
from elastic_ext.rendezvous.own_records import OwnAssignment, OwnOffer, OwnWatches, Registration
from elastic_ext.rendezvous.patience import Patience, limits_of, silent_s
from elastic_ext.rendezvous.round_records import Assignment, EndKind, Header, Node, RecordReader, State, encode
from elastic_ext.rendezvous.tasks import Dispatcher, HostRefused, LostRace, NodeConfig, NodeContext, Outage, TaskRunner

logger = logging.getLogger(__name__)


COMPARE_AGAIN_S = 5.0  # a lost record of what the job runs with is written again by then


class NodesDiffer(errors.UsageError):
    """The nodes of a job run with different settings, so that no first round was formed."""


class Participant:
    """A node in a job. Its methods return at once; `on_change` is called when a property may have changed.

    It consists of parts, each for one subject:

        tasks.TaskRunner            runs all work on the rendezvous thread, and tries again what etcd cannot do now
        own_records.Registration    the node's own record and lease
        own_records.OwnAssignment   the node's assignment to the round
        header_record.HeaderRecord  the header of the rounds, which every node watches and acts on
        leader.Election             whether the node leads; if so it has a leader.Leader
        RecordRepair                writes again what etcd has lost

    `keys` lists all keys. A node costs a fixed number of operations per round; only the leader reads all nodes.
    """

    def __init__(
        self,
        client: EtcdClient,
        dispatcher: Dispatcher,
        config: NodeConfig,
        on_change: Callable[[], None],
        policy: judging.AgentPolicy,
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
            on_lease_lost=lambda: self.repair.lease_lost(),
            on_timer=lambda: self.election.on_timer(),
            on_failure=on_change,
        )
        self.context = context = NodeContext(client, config, JobKeys(config.run_id), RecordReader(), self.tasks)
        self.registration = Registration(context, lambda lost: self.repair.register_again(lost), self._on_key_created)
        outage = Outage(config.lease_ttl_s, lambda: self.registration.session, self.tasks.now)
        self._job_records = JobRecords(context)
        self.header_record = header = header_record.HeaderRecord(
            context, outage, self._on_header, self._on_own_assignment, lambda: self.repair.restore_soon()
        )
        self._own_offer = OwnOffer(context, header, self.registration)
        self._assignment = OwnAssignment(context, header, self.registration, self._on_joined, lambda: self.repair.restore_soon())

        def lead() -> leader.Leader:
            header.read()
            limits = self._job_records.limits
            return leader.Leader(context, header, self.registration.created, limits, outage, policy, self.repair.restore)

        self.election = leader.Election(context, self.registration, lead)
        self.repair = RecordRepair(
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

    def end_round(self, round_: int, state: State, reason: str, end: EndKind | None = None, signal: str = "") -> None:
        """End round `round_` for all nodes."""
        self.change_header(round_, lambda header: dataclasses.replace(header, state=state, reason=reason, end=end, signal=signal))

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
            logger.warning("the job's store did not answer within %g s: the node's lease expires when its time is up", timeout_s)
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
            self._watches.add(context.own_key, self.repair.on_own_key_deleted, deletes_only=True, on_gap=self.repair.restore_soon)
        if not self._watches.all_began:
            return  # each of them comes back to `_enter_or_write`
        entered = self._job_records.enter_new(context.own_key, registration.create_ops())
        if entered is not None:
            found, written, last = entered
            self.header_record.enter(found)
            registration.registered(written.revision, last)
        else:
            found = self._job_records.read_or_create()
            if found.header.round and found.header.state is not State.CLOSED:  # else another job is to begin
                self._compare(found)
            self.header_record.enter(found)
            registration.write()
        self._on_header()
        if self.joined is not None:  # before it knew that it had registered, so that it restored nothing until now
            self.repair.restore_soon()

    def _on_header_events(self, batch: Batch) -> None:
        self.header_record.on_event(batch.events[-1])
        if self.election.leader is not None:
            self.election.on_timer()

    def _compare(self, found: JobSnapshot | None = None) -> None:
        """found: see `JobRecords.compare`. Raises LostRace; UsageError: this node cannot take part in the job."""
        job = found.header.job if found is not None else self.header.job
        if self.registration.compared == job:
            return
        if self._job_records.compare(self.registration.configuration, found):
            self.registration.compared = job
        elif found is None:
            self.tasks.retry(self._compare, COMPARE_AGAIN_S)

    def _on_joined(self) -> None:
        self.registration.compared = self.header.job
        self._on_change()
        self.tasks.post(self.election.follow)
        if self._assignment.doubtful:
            self.repair.restore_soon()

    def _on_key_created(self, last: values.KeyValue | None) -> None:
        self.election.find_predecessor(last)
        self._own_offer.write_again()

    def _on_header(self) -> None:
        self._assignment.join_if_assigned()
        if self.header.round and self.registration.compared != self.header.job and self.registration.created:
            # It came as a round was sealed. A member of that has joined when the retry comes; at the end no one joins any more.
            (self.tasks.run if self.header.ended else self.tasks.retry)(self._compare)
        self._on_change()

    def _on_own_assignment(self, kv: values.KeyValue) -> None:
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
                logger.warning("%s; the node's lease expires when its time is up", error)


class RecordRepair:
    """One node's share in restoring what etcd has lost while the nodes of the job live. For the rendezvous thread.

    Leases end when etcd is unreachable for longer than they last, and anybody may delete a key. A missing record is a state like
    any other:

        nodes/ID        its node writes it again, under a new lease if the old one is gone; the election goes by the new key
        job             the leader writes it again, under the old lease or a new one; another node that misses it, somewhat later
        round           the same: the node writes the header that it remembers. A header that `precedes` it was brought back by a
                        node that had missed events, and is replaced. So the newest header that any node knows comes back.
        assign/ID       its node writes it again, while the header is still of that round
        config          the leader writes it with each round, and once it is deleted; if all is lost, each node that was compared
                        with this job. Meanwhile the leader compares who comes with the members: no round grows by a stranger
        last, ledger, charges, refused: lost records are forgotten

    Invariant: each of these writes is conditional on the record still being missing. What somebody else has written over a record
    is logged and passed over, and costs a restart at most: the next write of its owner replaces it.

    A running round goes on meanwhile: a node acts on the header that it remembers, and a leader that was in the outage gives the
    members time to come back (`Outage.returning_until`) before it breaks the round.
    """

    def __init__(
        self,
        context: NodeContext,
        job_records: JobRecords,
        header: header_record.HeaderRecord,
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
        header.lease_id = self._job_records.restore(header.lease_id, header.value, header.job)
        read = context.client.txn([], [Get(context.keys.header), Get(context.own_assignment_key), Get(context.own_key)])
        found, assignment, own = (reading.kv for reading in read.readings)
        header.observe(found, read.revision)
        header.job = header.value.job  # the job has the same settings
        if rounds.needs_restoring(header.readable(found) if found is not None else None, header.value):
            header.write_again()
        self._restore_assignment(assignment)
        self._restore_configuration()
        if own is None or own.create_revision != self._registration.created:  # written by a try whose answer was lost
            self.write_own_key()

    def _restore_assignment(self, found: values.KeyValue | None) -> None:
        context, header = self._context, self._header
        assignment = self._assignment.current
        if assignment is None or found is not None:
            return
        key = context.own_assignment_key
        put = Put(key, encode(assignment), lease_id=header.lease_id)
        if not context.client.txn([unchanged(key, 0), header.unchanged], [put]).succeeded:
            raise LostRace("the header changed while this node's assignment was being written again")

    def _restore_configuration(self) -> None:
        """Write what this node runs with as what the job does, if that is lost: the two do not differ."""
        context, header, mine = self._context, self._header, self._registration.configuration
        if mine and header.value.round and self._registration.compared == header.value.job:
            key = context.keys.configuration
            context.client.txn([unchanged(key, 0), header.unchanged], [Put(key, mine, lease_id=header.lease_id)])

    def write_own_key(self) -> None:
        """Write the node's own key, which is gone. The record names the round of its workers: nothing else may
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


# For etcd to answer at all: longer than a member takes to start; a wrong address should not cost join_timeout. Torch's default
# for `read_timeout`, which may say otherwise.
START_S = 60.0
LEAVE_TIMEOUT_S = 3.0
POLL_S = 1.0  # how often a waiting main thread looks for a signal that was lost
TAKE_S = 60.0  # for the store to take this node's record: a dozen tries


class InterruptibleCondition(threading.Condition):
    """A condition whose waits end within POLL_S, so that `on_wait` is called again and again; it may raise.

    A signal ends a wait by the exception that its handler raises, unless other code (such as logging) catches it. Then `on_wait`
    raises it.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification, for at most the lesser of `timeout` and POLL_S (seconds); the caller must check again."""
        self._on_wait()
        return super().wait(POLL_S if timeout is None else min(timeout, POLL_S))


@dataclass(frozen=True)
class Place:
    """What a node has in a job for as long as it takes part."""

    params: rendezvous.RendezvousParameters
    settings: Settings
    policy: judging.AgentPolicy
    address: str  # the address by which the other nodes reach this one
    patience: Patience
    participant: Participant
    dispatcher: Dispatcher
    fence: Fence
    links: Links
    late_joins: LateJoins
    stores: round_store.StoreConnector
    changed: InterruptibleCondition  # notified when anything in the participant or the fence has changed

    @property
    def node_id(self) -> str:
        return self.participant.context.config.node_id

    def alive_until(self) -> float | None:
        """Return until when, monotonic, etcd certainly keeps this node; None without a lease."""
        lease_id, until = self.participant.registration.lease
        return until if lease_id is not None else None

    def silent(self, now: float) -> bool:
        """Return whether the lease has expired. The time before counts for nothing: this node may have been paused."""
        alive_until = self.alive_until()
        return alive_until is not None and alive_until <= now

    def unheard(self, now: float) -> bool:
        """Return whether the store renews the lease, but has not taken this node's record as it should be."""
        alive_until, refusal = self.alive_until(), self.participant.tasks.refusal
        return self.participant.registration.unwritten and refusal is None and alive_until is not None and alive_until > now

    def held_up_by(self, now: float) -> str:
        """Return what is wrong with the store, for which this node may wait; "" if nothing is known."""
        if (refusal := self.participant.tasks.refusal) is not None:
            return str(refusal)
        return "the job's store does not answer" if self.silent(now) else ""

    @property
    def take_s(self) -> float:
        """After how long that is no outage: in one, the lease would have expired."""
        return max(TAKE_S, self.settings.lease_ttl)

    @property
    def why_unheard(self) -> str:
        """What the node says when it leaves because that has lasted."""
        store = ", ".join(map(str, self.participant.client.endpoints))
        return (
            f"the job's store at {store} renews this node's lease, but has taken no record from {self.address} for "
            f"{self.take_s:g} s: small messages pass and large ones do not, or the store cannot write to its disk; check the MTU "
            "between the two hosts, and the store; this node leaves"
        )

    def await_round(self, after: int, on_verdict: Callable[[ledger.JobVerdict], None]) -> tuple[Header, Assignment]:
        """Return the next round after round `after`, and this node's assignment to it.

        on_verdict: called with the verdict on round `after`. A node on which nothing failed learns of it only here.

        Raises:
            JobStopped: a verdict has ended the job, or has this node leave.
            NodeDrained: an operator has this node leave.
            JobDone: without this node.
            NodesDiffer: they still do when this node has waited for as long as it may.
            NodeRefused, RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError, UsageError
        """
        participant, now = self.participant, time.monotonic()
        deadline, notified, said = now + self.patience.timeout_s, "", ""
        wait = waits.Waiting(f"a round after round {after}", now)
        silence, unheard = waits.Lasting(self.patience.silent_s), waits.Lasting(self.take_s)
        with self.changed:
            while True:
                header = participant.header
                if header.verdict:  # of a later round, too: it may have been over before this node could take its part in it
                    news = header.round == after and header.verdict != notified
                    notified = header.verdict if news else notified
                    self._heed(header, on_verdict if news else None)
                joined = participant.joined
                if joined is not None and joined[0].round > after:
                    return joined
                if (drain := drains.of_node(header, self.node_id)) is not None and drain.released:
                    raise errors.NodeDrained(drain.reason, drain.refused_s, drain.step if drain.step >= 0 else None)
                self.raise_failure()
                if header.ended:
                    over = JobDone if header.state is State.DONE else rendezvous.RendezvousClosedError
                    raise over(f"the job {participant.context.config.run_id} is over: {printable.shown(header.reason)}")
                now = time.monotonic()
                if spare := self._is_spare(header, after):
                    deadline = now + self.patience.timeout_s
                self._check_time(header, deadline - now)
                if header.differs != said:
                    said = header.differs
                    _show_difference(said, deadline - now)
                if silence.is_over(self.silent(now), now):
                    raise rendezvous.RendezvousTimeoutError(self.patience.store_lost)
                if unheard.is_over(self.unheard(now), now):
                    raise rendezvous.RendezvousConnectionError(self.why_unheard)
                if spare:
                    wait.say(now, math.inf, "the job trains without this node")
                else:
                    wait.say(now, deadline, "this node leaves (join_timeout)")
                self.changed.wait(deadline - now)

    def _check_time(self, header: Header, left_s: float) -> None:
        """Raises NodesDiffer, RendezvousTimeoutError: this node has waited for as long as it may."""
        if left_s > 0:
            return
        if header.differs:
            raise NodesDiffer(f"no round was formed: {header.differs}; {TO_DO}")
        why = self.participant.tasks.refusal
        raise rendezvous.RendezvousTimeoutError(self.patience.over + (f": {why}" if why is not None else ""))

    def _heed(self, header: Header, on_news: Callable[[ledger.JobVerdict], None] | None) -> None:
        """Pass a new verdict on. on_news: None if it is not new. Raises JobStopped if it ends the job, or has this node leave.

        It may though nothing failed here: others got no answer from it. A job can also be closed between a verdict that lets it
        go on and the next round.
        """
        verdict = _decoded(header.verdict)
        if verdict is None:
            return
        leaves = verdict.decision.response is diagnosis.Response.REPLACE_NODE and verdict.node == self.node_id
        if on_news is not None and not leaves:
            on_news(verdict)
        if leaves or (header.state is State.CLOSED and verdict.ends_job):
            raise ledger.JobStopped(verdict)

    def _is_spare(self, header: Header, after: int) -> bool:
        """Return whether the job trains without this node, which waits for as long as it does. Without etcd nothing is known."""
        alive_until = self.alive_until()
        return header.state is State.RUNNING and header.round > after and (alive_until or 0.0) > time.monotonic()

    def raise_failure(self) -> None:
        """Raise the reason why this node can no longer take part in the job, if any."""
        failure = self.participant.failure
        if failure is None:
            return
        if isinstance(failure, HostRefused):
            raise errors.NodeRefused(str(failure))
        raise rendezvous.RendezvousConnectionError(str(failure)) if isinstance(failure, EtcdError) else failure

    def leave(self) -> None:
        """Leave the job to the other nodes."""
        self.links.close()  # first: the goodbye must arrive before the node is gone
        self.fence.close(LEAVE_TIMEOUT_S)
        self.participant.leave(LEAVE_TIMEOUT_S)
        self.participant.client.close()  # before the dispatcher, which may be in a call that never returns
        self.dispatcher.close(LEAVE_TIMEOUT_S)


def _show_difference(differs: str, left_s: float) -> None:
    if differs:
        logger.warning("no round is formed: %s; unless that is mended, this node leaves with 78 in %.0f s", differs, left_s)
    else:
        logger.warning("the nodes do not differ any more in what must be alike")


@functools.lru_cache(1)  # a waiting node looks at the same verdict again and again
def _decoded(text: str) -> ledger.JobVerdict | None:
    try:
        return ledger.decode_verdict(text)
    except RecordError as error:
        logger.debug("a verdict that cannot be read: %s", error)
        return None


def take_place(
    params: rendezvous.RendezvousParameters,
    settings: Settings,
    policy: judging.AgentPolicy,
    on_event: Callable[[], None],
    on_wait: Callable[[], None],
    own_store: bool,
) -> Place:
    """Connect, and begin the threads of this node; it enters the job with its first round.

    Args:
        on_event: called from any thread after `changed` is notified.
        on_wait: called while the main thread waits; it may raise.
        own_store: see NodeConfig.

    Raises:
        UsageError: no run id, or etcd is unusable with these settings; the message says why.
        NoAnswer: etcd does not answer.
    """
    # A job on the embedded store has it for itself, where no other job could share its state.
    check = checked_given if params.backend == ETCD else checked
    on_one_host = own_store and "," not in params.endpoint
    job, timeout_s = check(params.run_id), torch_number(params.config, "join_timeout", JOIN_TIMEOUT_S)
    patience = Patience(timeout_s, params.min_nodes, params.max_nodes, silent_s(settings, os.environ, on_one_host))
    wait_s = min(torch_number(params.config, "read_timeout", START_S), timeout_s)
    client = running_job.connect(params.endpoint, settings, wait_s, own=params.backend != ETCD)
    address = own_address(params.local_addr, host_of(params.endpoint.split(",")[0]), params.max_nodes, settings.address)
    checked_address(address)
    check_own(params.local_addr, address)
    name_lookup.ask(address)
    changed, dispatcher = InterruptibleCondition(on_wait), Dispatcher()
    notify = functools.partial(_notify, changed, on_event)
    host = own_name(settings)
    node_id = f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
    limits = limits_of(params, settings, os.environ)
    loopback = network() if params.max_nodes > 1 and is_loopback(address) else ""
    config = NodeConfig(job, node_id, limits, settings.lease_ttl, host, loopback, own_store)
    participant = Participant(client, dispatcher, config, notify, policy)
    registration, keys = participant.registration, participant.context.keys
    fence = Fence(lambda: registration.lease, settings.lease_ttl, notify)
    records = Peers(client, keys, RecordReader(), node_id, lambda: registration.lease[0])
    links = Links(job, node_id, round_store.listen_at(address), records, fence.give_up)
    late_joins = LateJoins(client, keys, host, settings.refuse_node)
    stores = round_store.StoreConnector(changed, host if host == address else f"{host} ({address})")
    return Place(params, settings, policy, address, patience, participant, dispatcher, fence, links, late_joins, stores, changed)


def _notify(changed: threading.Condition, on_event: Callable[[], None]) -> None:
    with changed:
        changed.notify_all()
    on_event()
