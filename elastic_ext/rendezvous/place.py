"""A node's place in a job, from the agent's start until it leaves: what outlives a round, and the waits of the main thread."""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed.elastic import rendezvous

from elastic_ext.base import names
from elastic_ext.base.contracts import LeaseRevocation
from elastic_ext.base.errors import NodeDrained, NodeRefused, UsageError
from elastic_ext.base.kinds import Response
from elastic_ext.base.printable import shown
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings, torch_number
from elastic_ext.etcd import EtcdError, QuotaExceeded
from elastic_ext.failures import slurm
from elastic_ext.failures.ledger import JobStopped, JobVerdict, decode_verdict
from elastic_ext.rendezvous import drains
from elastic_ext.rendezvous.address import check_own, checked_address, host_of, is_loopback, network, own_address, own_name
from elastic_ext.rendezvous.connect import connect
from elastic_ext.rendezvous.contract import ETCD, JOIN_TIMEOUT_S, JobDone
from elastic_ext.rendezvous.fence import Fence
from elastic_ext.rendezvous.job_records import LateJoins
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.keys import checked, checked_given
from elastic_ext.rendezvous.links import Links, Peers
from elastic_ext.rendezvous.participant import Participant
from elastic_ext.rendezvous.round_records import Assignment, Header, RecordReader, State
from elastic_ext.rendezvous.round_store import StoreConnector, listen_at
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import Dispatcher, HostRefused, NodeConfig

logger = logging.getLogger(__name__)

# For etcd to answer at all: longer than a member takes to start; a wrong address should not cost join_timeout. Torch's default
# for `read_timeout`, which may say otherwise.
START_S = 60.0
LEAVE_TIMEOUT_S = 3.0
POLL_S = 1.0  # how often a waiting main thread looks for a signal that was lost


@dataclass(frozen=True)
class Patience:
    """How long a node waits for a round (`join_timeout`), and for how many nodes."""

    timeout_s: float
    min_nodes: int
    max_nodes: int
    # For the job's own store, once the lease has expired without an answer; then it counts as lost, with its host.
    silent_s: float = math.inf

    @property
    def over(self) -> str:
        """What the node says when it leaves."""
        return (
            f"no round was formed in {self.timeout_s:g} s (join_timeout), --nnodes={self.min_nodes}:{self.max_nodes}: too few "
            "nodes came, so this one leaves; start it again when more are there, or raise join_timeout"
        )

    @property
    def store_lost(self) -> str:
        """What the node says when it leaves because the job's own store is lost."""
        return (
            f"the job's own store has not answered for {self.silent_s:g} s since this node's lease expired (rejoin_timeout): it "
            "is lost with its host, which cannot come back in a step of Slurm, or this node is cut off for longer than the job "
            "waits for it, so this node leaves; start the job again unless other nodes go on"
        )


class Silence:
    """For how long one wait has seen this node without a lease. The time before counts for nothing: it may have been paused."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = math.inf

    def is_over(self, alive_until: float | None, now: float) -> bool:
        """Return whether that was the limit. alive_until: monotonic, as `now`; None: it has no lease yet."""
        expired = alive_until is not None and alive_until <= now
        self._since = min(self._since, now) if expired else math.inf
        return now >= self._since + self._limit_s


REJOIN_MARGIN_S = 5.0  # for the agent of a node that was only cut off: to hear of it, and to register again


def rejoin_s(settings: Settings, environ: Mapping[str, str]) -> float | None:
    """Return how many seconds the job waits for lost nodes; None: as long as each node waits for a round (`join_timeout`).

    In a step of Slurm no agent is started again, so nobody can come but a node that was cut off.
    """
    if settings.rejoin_timeout is None and slurm.in_step(environ):
        return settings.lease_ttl + REJOIN_MARGIN_S
    return settings.rejoin_timeout


def silent_s(settings: Settings, environ: Mapping[str, str], on_one_host: bool) -> float:
    """Return `Patience.silent_s`. on_one_host: the job has brought its store, on one of its hosts.

    Elsewhere than in a step of Slurm that may come back, and so may a store that is not the job's. One on several hosts outlives
    the loss of one: where it is silent this node is cut off, more likely, and the job goes on meanwhile.

    Invariant: a node that is only cut off does not leave while the others wait for it; they do so from the end of its lease on.
    """
    rejoin = rejoin_s(settings, environ)
    return rejoin if rejoin is not None and on_one_host and slurm.in_step(environ) else math.inf


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
    policy: AgentPolicy
    address: str  # the address by which the other nodes reach this one
    patience: Patience
    participant: Participant
    dispatcher: Dispatcher
    fence: Fence
    links: Links
    late_joins: LateJoins
    stores: StoreConnector
    changed: InterruptibleCondition  # notified when anything in the participant or the fence has changed

    @property
    def node_id(self) -> str:
        return self.participant.context.config.node_id

    def alive_until(self) -> float | None:
        """Return until when, monotonic, etcd certainly keeps this node; None without a lease."""
        lease_id, until = self.participant.registration.lease
        return until if lease_id is not None else None

    def revocation(self) -> LeaseRevocation | None:
        """See `contract.Rendezvous`. Secrets go through the reaper's pipe only."""
        lease_id, _ = self.participant.registration.lease
        if lease_id is None or self.params.backend != ETCD:  # c10d has no JSON gateway: the reaper ends, which the links report
            return None
        settings = self.settings
        scheme = "https" if settings.etcd_ca or settings.etcd_cert else "http"
        given = [each.strip() for each in self.params.endpoint.split(",")]
        bare = [each.rpartition("://")[2].rstrip("/") for each in given]
        # What the client uses now, if that is something else: members were replaced.
        endpoints = given + [each for each in self.participant.client.endpoints if each not in bare]
        return {
            "endpoints": [each if "://" in each else f"{scheme}://{each}" for each in endpoints],
            "lease": lease_id,
            "ca": settings.etcd_ca,
            "cert": settings.etcd_cert,
            "key": settings.etcd_key,
            "user": settings.etcd_user,
            "password": settings.etcd_password,
        }

    def await_round(self, after: int, on_verdict: Callable[[JobVerdict], None]) -> tuple[Header, Assignment]:
        """Return the next round after round `after`, and this node's assignment to it.

        on_verdict: called with the verdict on round `after`. A node on which nothing failed learns of it only here.

        Raises:
            JobStopped: a verdict has ended the job, or has this node leave.
            NodeDrained: an operator has this node leave.
            JobDone: without this node.
            NodeRefused, RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError, UsageError
        """
        participant = self.participant
        deadline, notified = time.monotonic() + self.patience.timeout_s, ""
        silence = Silence(self.patience.silent_s)
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
                    raise NodeDrained(drain.reason, drain.refused_s, drain.step if drain.step >= 0 else None)
                self.raise_failure(started=after > 0)
                if header.ended:
                    over = JobDone if header.state is State.DONE else rendezvous.RendezvousClosedError
                    raise over(f"the job {participant.context.config.run_id} is over: {shown(header.reason)}")
                if self._is_spare(header, after):
                    deadline = time.monotonic() + self.patience.timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    why = f": {participant.tasks.etcd_full}" if participant.tasks.etcd_full is not None else ""
                    raise rendezvous.RendezvousTimeoutError(f"{self.patience.over}{why}")
                if silence.is_over(self.alive_until(), time.monotonic()):
                    raise rendezvous.RendezvousTimeoutError(self.patience.store_lost)
                self.changed.wait(left)

    def _heed(self, header: Header, on_news: Callable[[JobVerdict], None] | None) -> None:
        """Pass a new verdict on. on_news: None if it is not new. Raises JobStopped if it ends the job, or has this node leave.

        It may though nothing failed here: others got no answer from it. A job can also be closed between a verdict that lets it
        go on and the next round.
        """
        verdict = _decoded(header.verdict)
        if verdict is None:
            return
        leaves = verdict.decision.response is Response.REPLACE_NODE and verdict.node == self.node_id
        if on_news is not None and not leaves:
            on_news(verdict)
        if leaves or (header.state is State.CLOSED and verdict.ends_job):
            raise JobStopped(verdict)

    def _is_spare(self, header: Header, after: int) -> bool:
        """Return whether the job trains without this node, which waits for as long as it does. Without etcd nothing is known."""
        alive_until = self.alive_until()
        return header.state is State.RUNNING and header.round > after and (alive_until or 0.0) > time.monotonic()

    def raise_failure(self, started: bool = True) -> None:
        """Raise the reason why this node can no longer take part in the job, if any. started: it has been in a round."""
        failure = self.participant.failure
        if failure is None:
            return
        if isinstance(failure, QuotaExceeded) and not started:  # nothing has started yet: an operator must act first
            raise UsageError(str(failure))
        if isinstance(failure, HostRefused):
            raise NodeRefused(str(failure))
        raise rendezvous.RendezvousConnectionError(str(failure)) if isinstance(failure, EtcdError) else failure

    def leave(self) -> None:
        """Leave the job to the other nodes."""
        self.links.close()  # first: the goodbye must arrive before the node is gone
        self.fence.close(LEAVE_TIMEOUT_S)
        self.participant.leave(LEAVE_TIMEOUT_S)
        self.participant.client.close()  # before the dispatcher, which may be in a call that never returns
        self.dispatcher.close(LEAVE_TIMEOUT_S)


@functools.lru_cache(1)  # a waiting node looks at the same verdict again and again
def _decoded(text: str) -> JobVerdict | None:
    try:
        return decode_verdict(text)
    except RecordError as error:
        logger.debug("a verdict that cannot be read: %s", error)
        return None


def take_place(
    params: rendezvous.RendezvousParameters,
    settings: Settings,
    policy: AgentPolicy,
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
    client = connect(params.endpoint, settings, wait_s, own=params.backend != ETCD)
    address = own_address(params.local_addr, host_of(params.endpoint.split(",")[0]), params.max_nodes, settings.address)
    checked_address(address)
    check_own(params.local_addr, address)
    names.ask(address)
    changed, dispatcher = InterruptibleCondition(on_wait), Dispatcher()
    notify = functools.partial(_notify, changed, on_event)
    host = own_name(settings)
    node_id = f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
    rejoin = rejoin_s(settings, os.environ)
    limits = Limits(params.min_nodes, params.max_nodes, settings.last_call, settings.settle, rejoin)
    loopback = network() if params.max_nodes > 1 and is_loopback(address) else ""
    config = NodeConfig(job, node_id, limits, settings.lease_ttl, host, loopback, own_store)
    participant = Participant(client, dispatcher, config, notify, policy)
    registration, keys = participant.registration, participant.context.keys
    fence = Fence(lambda: registration.lease, settings.lease_ttl, notify)
    records = Peers(client, keys, RecordReader(), node_id, lambda: registration.lease[0])
    links = Links(job, node_id, listen_at(address), records, fence.give_up)
    late_joins = LateJoins(client, keys, host, settings.max_rejoins, settings.refuse_node)
    stores = StoreConnector(changed)
    return Place(params, settings, policy, address, patience, participant, dispatcher, fence, links, late_joins, stores, changed)


def _notify(changed: threading.Condition, on_event: Callable[[], None]) -> None:
    with changed:
        changed.notify_all()
    on_event()
