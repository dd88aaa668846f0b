"""`ext_etcd`: torch's rendezvous interface over a `Participant` on etcd v3. The loss of no single host ends the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, Worker, WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_ext.base.exchange import Exchange, SingleNode
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.last_will import LastWill
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import CallObserver, EtcdClient
from elastic_ext.failures.cuts import Reach
from elastic_ext.failures.ledger import JobVerdict, Report, encode_report
from elastic_ext.rendezvous import drains, foreign_agent
from elastic_ext.rendezvous.etcd.agent_policy import AgentPolicy
from elastic_ext.rendezvous.etcd.connection import JobConnection
from elastic_ext.rendezvous.etcd.exchange import EtcdExchange
from elastic_ext.rendezvous.etcd.goodput import EtcdGoodput, Place
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.late_joins import LateJoins
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.round_store import StoreConnector
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.job_state import JobStatus
from elastic_ext.rendezvous.round_records import Assignment, Drain, Header, Node, State
from elastic_ext.rendezvous.round_server import serve

logger = logging.getLogger(__name__)

DELETED_S = 2.0  # a round that ends this soon after somebody has deleted the node's record has probably ended because of that


def round_end(header: Header, round_: int, seal: str | None) -> RoundEnd | None:
    """Return how a round has ended according to the newest header; None if it runs.

    seal: of the round's own header; None before the first round. Two rounds may have one number if all records were lost and a
    node that never saw them began again from 1.
    """
    if header.round == round_ and header.state is State.CLOSED:
        return RoundEnd(EndKind.CLOSED, header.reason)
    if header.round != round_ or seal not in (None, header.seal):
        return RoundEnd(EndKind.BROKEN, header.reason)
    if header.state is State.BROKEN:
        return RoundEnd(header.end or EndKind.BROKEN, header.reason)
    return None


class OwnStore(Protocol):
    """A store that the job has brought: its etcd (`own_etcd.attachment`), or the embedded one (`embedded.hosting`)."""

    @property
    def hosted_here(self) -> bool:
        """Return whether it would be lost with this node."""

    def follow(self, client: EtcdClient) -> None:
        """Keep this client's endpoints up to date: members may be replaced."""

    def close(self) -> None:
        """Leave; the store ends with the job."""


class EtcdRendezvous(RendezvousHandler):  # type: ignore[misc, unused-ignore]  # torch is untyped
    """One agent's rendezvous; see `rendezvous.handler.Rendezvous`, which documents most attributes of this class.

    `JobConnection` holds what lives as long as the agent's place in the job; this class holds what lives as long as a round.

    Invariant: each round has its own store server, which listened before the round was sealed.
    """

    is_elastic_ext = True

    def __init__(
        self,
        params: RendezvousParameters,
        settings: Settings,
        newest_checkpoint: Callable[[], str | None] = lambda: None,
        own_store: OwnStore | None = None,
    ) -> None:
        """newest_checkpoint: see AgentPolicy. own_store: of a job that brings its own. Raises UsageError: see `JobConnection`."""
        self.settings = settings
        self._backend: str = params.backend
        self.torch_conf = dict(params.config)
        self.attached = False
        self.reaper_runs: Callable[[], bool] = lambda: False
        self.round = 0
        self.on_event: Callable[[], None] = lambda: None
        self.on_verdict: Callable[[JobVerdict], None] = lambda verdict: None
        self.on_wait: Callable[[], None] = lambda: None
        self._policy = AgentPolicy(settings, params.min_nodes, newest_checkpoint)
        self._connection = JobConnection(params, settings, self._policy, lambda: self.on_event(), lambda: self.on_wait())
        self._own_store = own_store
        if own_store is not None:
            own_store.follow(self._participant.client)
        self.host, self.node_id = self._connection.host, self._connection.node_id
        client, keys = self._participant.client, JobKeys(self._connection.run_id)
        self._goodput = EtcdGoodput(client, keys, self.host, self._place)
        self._late_joins = LateJoins(client, keys, self.host, settings.max_rejoins, settings.refuse_node)
        self._stores = StoreConnector(self._connection.changed, self.break_round)
        # For a node whose agent is not ours: such agents exchange their numbers of workers through the round's store.
        self._workers, self._role = 1, DEFAULT_ROLE
        self._current: tuple[Header, Assignment] | None = None  # the round's first header, and this node's assignment
        self._server: TCPStore | None = None  # the round's store, on the node of rank 0
        self._job_continues = False  # this node leaves and the job goes on

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._connection.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    @property
    def launch(self) -> str:
        return self._participant.header.job

    @property
    def _participant(self) -> Participant:
        return self._connection.participant

    # A round begins.

    def prepare(self, spec: WorkerSpec, max_restarts: int) -> None:
        """See `rendezvous.handler.Rendezvous`."""
        self._workers, self._role = spec.local_world_size, spec.role
        self._policy.max_restarts = max_restarts

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; see `JobConnection.await_round` for the exceptions."""
        foreign_agent.warn_once(self)
        try:
            with foreign_agent.closed_by_verdict(self):
                while (info := self._next_round()) is None:
                    pass
                return info
        except RendezvousTimeoutError:
            self._job_continues = True  # others may wait for longer, and more may come
            raise

    def _next_round(self) -> RendezvousInfo | None:
        """Wait for the next round; return None if it was over before this node entered it."""
        fence = self._connection.fence
        cut = self.round if fence.closed else 0
        fence.watch(None)
        server = serve(self._connection.address)
        self._participant.ready(self._node(server.port, cut))
        header, assignment = self._current = self._connection.await_round(self.round, self.on_verdict)
        self.round = header.round
        if assignment.rank == 0 and header.port != server.port:
            # This node was frozen or lost its lease, and the round was sealed with its earlier record: that store is used up.
            self.break_round("the store of rank 0 is from an earlier attempt")
            return None
        self._server = server if assignment.rank == 0 else None
        store = self._server or self._stores.connect(header, self.round_over)
        if store is None:
            return None
        self._connection.enter_round(header, assignment)
        self._late_joins.entered(header.round, self._participant.tasks)
        address = RendezvousStoreInfo(header.address, header.port)
        return RendezvousInfo(PrefixStore("elastic_ext", store), assignment.rank, header.nodes, address)

    def _node(self, port: int, cut: int) -> Node:
        return Node(
            after=self.round,
            workers=self._workers,
            role=self._role,
            address=self._connection.address,
            port=port,
            topology=self.settings.topology or "",
            local=self.settings.local_dir is not None or self.settings.copies_to_memory,
            cut=cut,
            # Without a reaper the workers may outlive a killed agent. Then only the lease may tell.
            link_port=self._connection.links.port if self.reaper_runs() else 0,
            silent=self._stores.silent(self.round),
            hosts_store=self._own_store is not None and self._own_store.hosted_here,
        )

    @property
    def address(self) -> str:
        return self._connection.address

    def workers(self) -> list[Worker]:
        """Return the ranks of this node's workers, from the assignment."""
        assert self._current is not None
        header, assignment = self._current
        return [
            Worker(local, assignment.base_rank + local, assignment.base_role_rank + local, header.world, assignment.role_world)
            for local in range(self._workers)
        ]

    @property
    def exchange(self) -> Exchange:
        """The exchange by which the nodes of the current round agree on what to resume from."""
        assert self._current is not None, "before the first round"
        header, assignment = self._current
        if header.nodes == 1:
            return SingleNode()
        return EtcdExchange(self._participant, header, assignment, self._connection.changed, self.round_over)

    # While it runs.

    def round_over(self) -> RoundEnd | None:
        """Return why the workers of the current round must stop; None while it runs."""
        if self._connection.fence.closed:
            return RoundEnd(
                EndKind.CUT_OFF, "the other nodes may continue without this one, which is cut off from etcd or was declared dead"
            )
        if (failure := self._participant.failure) is not None:
            # It may be the leader, and the others would wait for it: they go on without it when its workers are gone.
            return RoundEnd(EndKind.CUT_OFF, f"this node can no longer take part in the job: {failure}")
        return round_end(self._participant.header, self.round, self._current[0].seal if self._current is not None else None)

    def stop_by(self) -> float | None:
        """Return the monotonic time by which the workers must be gone, killed if necessary; None if they get the usual grace."""
        now = time.monotonic()
        if now < self._participant.registration.deleted_at + DELETED_S:
            return now
        return self._connection.fence.stop_by

    def break_round(self, reason: str) -> None:
        """Tell all nodes that this round is over; return at once."""
        self._participant.end_round(self.round, State.BROKEN, reason)

    def report_stall(self, stalled: bool) -> None:
        """Claim that all workers of this node stall, or withdraw it. If all nodes claim it, the round ends as EndKind.STALLED."""
        self._participant.stalled(self.round, stalled)

    def report_quiet(self, reach: Reach | None) -> None:
        """See `rendezvous.handler.Rendezvous`."""
        self._participant.quiet(self.round, reach)

    def request_save(self, reason: str) -> None:
        """Ask all nodes of this round for a save on demand; return at once."""
        self._participant.request_save(self.round, reason)

    @property
    def save_wanted(self) -> int:
        """Number of the last save on demand requested in this round; 0 if none was."""
        header = self._participant.header
        return header.save if header.round == self.round else 0

    def save_completed(self, number: int, step: int) -> None:
        """Note that this save on demand is complete."""
        self._participant.saved(number, step)

    @property
    def drain(self) -> Drain | None:
        return drains.of_node(self._participant.header, self.node_id)

    def report_ready_to_leave(self, number: int, step: int | None) -> None:
        """See `rendezvous.handler.Rendezvous`."""
        self._participant.ready_to_leave(number, -1 if step is None else step)

    # It ends.

    def conclude(self, report: Report) -> JobVerdict:
        """Return the one verdict of the whole job once it is there. The workers of this node have failed and been stopped.

        If etcd does not answer for as long as a rendezvous may take, this node judges for itself.
        """
        self._participant.report(self.round, encode_report(report), report.waits_for_others)
        verdict = self._connection.await_verdict(self.round)
        if verdict is None:
            logger.warning("no verdict from the job on round %s; this node judges for itself", self.round)
            left_behind = self._participant.header.round > self.round
            verdict = self._policy.judge_alone(self.node_id, report, self.round, left_behind)
        self._job_continues = not verdict.ends_job
        return verdict

    def await_all_done(self) -> bool:
        """Wait, after this node's workers have finished, for those of all nodes. Return False if the round ends otherwise.

        There is no time limit, unlike in torch's barrier: a node that left the round before its end would break it.
        """
        self._participant.done()
        changed = self._connection.changed
        with changed:
            while self._participant.header.state is not State.DONE:
                self._connection.raise_failure()  # a node that can neither write nor read any more would wait forever
                if self.round_over() is not None:
                    return False
                changed.wait()
        return True

    def finished(self) -> None:
        """Do nothing: what the job leaves in etcd has a lease, or is deleted when the run id is used again."""

    def num_nodes_waiting(self) -> int:
        """Return 1 once the round is over, for whatever reason: agents ask this to learn of a new round."""
        return 0 if self.round_over() is None else 1

    def share_goodput(self, spent: Spent) -> Shared:
        """See `rendezvous.handler.Rendezvous`."""
        return self._goodput.share(spent)

    def _place(self) -> Place:
        assert self._current is not None, "before the first round"
        header, assignment = self._current
        return Place(header.job, assignment.rank, header.round)

    # The job ends, or this node's part in it.

    def announce_leaving(self, reason: str) -> None:
        """Note that this node was told to leave; its workers still run, but the others need not wait for them to end."""
        self.break_round(f"{self.host} leaves: {reason}")

    @property
    def link_fds(self) -> tuple[int, ...]:
        return self._connection.links.fds

    def observe_etcd(self, observer: CallObserver) -> Callable[[], float | None]:
        """See `rendezvous.handler.Rendezvous`."""
        self._participant.client.observe(observer)
        return self._connection.alive_until

    def last_will(self) -> LastWill | None:
        """See `JobConnection.last_will`."""
        return self._connection.last_will()

    def is_closed(self) -> bool:
        return self._participant.header.state in (State.CLOSED, State.DONE)

    def set_closed(self) -> None:
        """Close the job for all nodes, unless it is done or is to go on without this node."""
        drain = self.drain
        continues = self._job_continues or (drain is not None and drain.released)
        if self._participant.header.state is not State.DONE and not continues:
            self._participant.end_round(self.round, State.CLOSED, f"{self.host} closed the job")

    def shutdown(self) -> bool:
        """Close the job like `set_closed`, then leave. A second call does nothing."""
        if not self._connection.left:
            self.set_closed()
        self.leave()
        return True

    def show(self, report: str, last: bool) -> None:
        self._connection.show(report, last)

    def status(self) -> JobStatus:
        return self._connection.status()

    def leave(self) -> None:
        """Leave the job to the other nodes. A second call does nothing."""
        self._connection.leave()
        if self._own_store is not None:  # last: the farewell went through it
            self._own_store.close()
        self._server = None
