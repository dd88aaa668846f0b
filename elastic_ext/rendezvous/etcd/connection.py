"""An agent's place in a job on etcd, from the agent's start until it leaves: everything that outlives a round."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from elastic_ext.base.errors import NodeDrained, NodeRefused, UsageError
from elastic_ext.base.last_will import LastWill
from elastic_ext.base.printable import shown
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings, torch_number
from elastic_ext.etcd import EtcdClient, EtcdError, Put, QuotaExceeded
from elastic_ext.failures.ledger import JobStopped, JobVerdict, decode_verdict
from elastic_ext.rendezvous import drains, run_id
from elastic_ext.rendezvous.address import check_own, host_of, own_address
from elastic_ext.rendezvous.etcd import job_status
from elastic_ext.rendezvous.etcd.condition import InterruptibleCondition
from elastic_ext.rendezvous.etcd.connect import connect
from elastic_ext.rendezvous.etcd.context import NodeConfig
from elastic_ext.rendezvous.etcd.dispatcher import Dispatcher
from elastic_ext.rendezvous.etcd.fence import Fence
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.links.links import Links
from elastic_ext.rendezvous.etcd.links.peers import Peers
from elastic_ext.rendezvous.etcd.node_states import RoundStore
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.tasks import HostRefused
from elastic_ext.rendezvous.etcd.verdict import LeaderPolicy
from elastic_ext.rendezvous.handler import ETCD, JobDone, Patience
from elastic_ext.rendezvous.job_state import JobStatus
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.round_records import Assignment, Header, State
from elastic_ext.rendezvous.round_server import listen_at
from elastic_ext.rendezvous.rounds import Limits

logger = logging.getLogger(__name__)

# For etcd to answer at all: longer than a member takes to start; a wrong address should not cost join_timeout. Torch's default
# for `read_timeout`, which may say otherwise.
START_S = 60.0
LEAVE_TIMEOUT_S = 3.0
WARN_AFTER_S = 10.0  # for a verdict; longer than workers on other nodes take to end. Then a warning says what the agent waits for


class JobConnection:
    """The agent's node in etcd, the thread that does its work, the links to other agents, and the fence.

    Attributes:
        address: the address by which the other nodes reach this one.
        left: `leave` has been called.
        changed: notified when anything in the participant or the fence has changed.
    """

    def __init__(
        self,
        params: RendezvousParameters,
        settings: Settings,
        policy: LeaderPolicy,
        on_event: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> None:
        """
        Args:
            on_event: called from any thread after `changed` is notified.
            on_wait: called while the main thread waits; it may raise.

        Raises:
            UsageError: no run id, or etcd is unusable with these settings; the message says why.
            NoAnswer: etcd does not answer.
        """
        # A job on the embedded store has it for itself, where no other job could share its state.
        check = run_id.checked_given if params.backend == ETCD else run_id.checked
        self.run_id = check(params.run_id)
        self._patience = Patience.of(params)
        wait_s = min(torch_number(params.config, "read_timeout", START_S), self._patience.timeout_s)
        client = connect(params.endpoint, settings, wait_s, own=params.backend != ETCD)
        will = functools.partial(_last_will, params.endpoint, settings, client)
        self._will = will if params.backend == ETCD else None  # the embedded store has no JSON gateway
        address = own_address(params.local_addr, host_of(params.endpoint.split(",")[0]), params.max_nodes, settings.address)
        self.address = run_id.checked_address(address)
        check_own(params.local_addr, self.address)
        self.left = False
        self.changed = InterruptibleCondition(on_wait)
        notify = functools.partial(_notify, self.changed, on_event)
        self._dispatcher = Dispatcher()
        self.host = run_id.host_name(settings)
        self.node_id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
        limits = Limits(params.min_nodes, params.max_nodes, settings.last_call, settings.settle)
        config = NodeConfig(params.run_id, self.node_id, limits, settings.lease_ttl, self.host)
        self.participant = Participant(client, self._dispatcher, config, notify, policy)
        self.fence = Fence(lambda: self.participant.lease, settings.lease_ttl, notify)
        records = Peers(client, JobKeys(params.run_id), RecordReader(), self.node_id, lambda: self.participant.lease[0])
        self.links = Links(params.run_id, self.node_id, listen_at(self.address), records, self.fence.give_up)

    # Waits of the main thread.

    def await_round(self, after: int, on_verdict: Callable[[JobVerdict], None]) -> tuple[Header, Assignment]:
        """Return the next round after round `after`, and this node's assignment to it.

        on_verdict: called with the verdict on round `after`. A node on which nothing failed learns of it only here.

        Raises:
            JobStopped: a verdict has ended the job.
            NodeDrained: an operator has this node leave.
            JobDone: without this node.
            NodeRefused, RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError, UsageError
        """
        participant = self.participant
        deadline, told = time.monotonic() + self._patience.timeout_s, ""
        with self.changed:
            while True:
                header = participant.header
                if header.round == after and header.verdict not in ("", told):
                    told = header.verdict
                    _tell(told, on_verdict)
                joined = participant.joined
                if joined is not None and joined[0].round > after:
                    return joined
                if (drain := drains.of_node(header, self.node_id)) is not None and drain.released:
                    raise NodeDrained(drain.reason, drain.refused_s, drain.step if drain.step >= 0 else None)
                self.raise_failure(started=after > 0)
                if (verdict := self._verdict_that_ends()) is not None:
                    raise JobStopped(verdict)
                if participant.header.state in (State.CLOSED, State.DONE):
                    over = JobDone if participant.header.state is State.DONE else RendezvousClosedError
                    raise over(f"the job {self.run_id} is over: {shown(participant.header.reason)}")
                if self._is_spare(header, after):
                    deadline = time.monotonic() + self._patience.timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    why = f": {participant.etcd_full}" if participant.etcd_full is not None else ""
                    raise RendezvousTimeoutError(f"{self._patience.over}{why}")
                self.changed.wait(left)

    def _is_spare(self, header: Header, after: int) -> bool:
        """Return whether the job trains without this node, which waits for as long as it does. Without etcd nothing is known."""
        alive_until = self.alive_until()
        return header.state is State.RUNNING and header.round > after and (alive_until or 0.0) > time.monotonic()

    def _verdict_that_ends(self) -> JobVerdict | None:
        header = self.participant.header
        if header.state is not State.CLOSED or not header.verdict:
            return None
        # A job can also be closed between a verdict that lets it go on and the next round.
        verdict = decode_verdict(header.verdict)
        return verdict if verdict.ends_job else None

    def await_verdict(self, round_: int) -> JobVerdict | None:
        """Return the job's verdict on this round; None if there is none and none will come in time."""
        participant = self.participant
        now = time.monotonic()
        deadline, warn_at = now + self._patience.timeout_s, now + WARN_AFTER_S
        with self.changed:
            while True:
                header = participant.header
                if header.round == round_ and header.verdict:
                    return decode_verdict(header.verdict)
                over = header.round != round_ or header.state in (State.CLOSED, State.DONE)
                now = time.monotonic()
                if over or participant.failure is not None or now >= deadline:
                    return None
                if now >= warn_at:
                    logger.warning("the workers of round %s have failed; still waiting for the job's verdict in etcd", round_)
                    warn_at = deadline
                self.changed.wait(min(deadline, warn_at) - now)

    def raise_failure(self, started: bool = True) -> None:
        """Raise the reason why this node can no longer take part in the job, if any. started: it has been in a round."""
        failure = self.participant.failure
        if failure is None:
            return
        if isinstance(failure, QuotaExceeded) and not started:  # nothing has started yet: an operator must act first
            raise UsageError(str(failure))
        if isinstance(failure, HostRefused):
            raise NodeRefused(str(failure))
        raise RendezvousConnectionError(str(failure)) if isinstance(failure, EtcdError) else failure

    # The end.

    def enter_round(self, header: Header, assignment: Assignment) -> None:
        """Guard the workers of this round, and link to its neighbors."""
        # First: what was said of earlier rounds must not end this one.
        self.links.follow(assignment.neighbors, self.participant.registration.created)
        self.fence.watch(RoundStore(header.address, header.port, assignment.rank, header.nodes))

    def alive_until(self) -> float | None:
        """Return until when, monotonic, etcd certainly keeps this node; None without a lease."""
        lease_id, until = self.participant.lease
        return until if lease_id is not None else None

    def last_will(self) -> LastWill | None:
        """Return what the reaper needs to revoke this node's lease, if any. Secrets go through the reaper's pipe only.

        None on the embedded store: there the reaper ends at once, and the links report that.
        """
        lease_id, _ = self.participant.lease
        if lease_id is None or self._will is None:
            return None
        return self._will(lease_id)

    def show(self, report: str, last: bool) -> None:
        """Write what this node tells of itself; if the job has ended, so that it outlives the node. Raises EtcdError."""
        participant, keys = self.participant, JobKeys(self.run_id)
        header = participant.header
        ended = header.state in (State.CLOSED, State.DONE)
        over = last and (ended or (bool(header.verdict) and decode_verdict(header.verdict).ends_job))
        lease_id = participant.header_record.lease_id if over else participant.lease[0]
        if lease_id:  # else it is not in the job, or not any more
            participant.client.txn([], [Put(keys.report(self.node_id), report, lease_id=lease_id)])

    def status(self) -> JobStatus:
        """Return the state of the job in etcd. Raises UsageError."""
        return job_status.read(self.participant.client, self.run_id)

    def leave(self) -> None:
        """Leave the job to the other nodes. A second call does nothing."""
        if self.left:
            return
        self.left = True
        self.links.close()  # first: the goodbye must arrive before the node is gone
        self.fence.close(LEAVE_TIMEOUT_S)
        self.participant.leave(LEAVE_TIMEOUT_S)
        self.participant.client.close()  # before the dispatcher, which may be in a call that never returns
        self._dispatcher.close(LEAVE_TIMEOUT_S)


def _notify(changed: threading.Condition, on_event: Callable[[], None]) -> None:
    with changed:
        changed.notify_all()
    on_event()


def _tell(text: str, on_verdict: Callable[[JobVerdict], None]) -> None:
    try:
        on_verdict(decode_verdict(text))
    except RecordError as error:
        logger.debug("a verdict that cannot be read: %s", error)


def _last_will(endpoint: str, settings: Settings, client: EtcdClient, lease_id: int) -> LastWill:
    scheme = "https" if settings.etcd_ca or settings.etcd_cert else "http"
    given = [each.strip() for each in endpoint.split(",")]
    bare = [each.rpartition("://")[2].rstrip("/") for each in given]
    # What the client uses now, if that is something else: members were replaced.
    endpoints = given + [each for each in client.endpoints if each not in bare]
    return {
        "endpoints": [each if "://" in each else f"{scheme}://{each}" for each in endpoints],
        "lease": lease_id,
        "ca": settings.etcd_ca,
        "cert": settings.etcd_cert,
        "key": settings.etcd_key,
        "user": settings.etcd_user,
        "password": settings.etcd_password,
    }
