"""`ext_c10d`: the embedded rendezvous, which needs no service. One machine, or several nodes through torch's c10d rendezvous."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

from elastic_ext.base.exchange import Exchange
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.settings import Settings
from elastic_ext.failures.cuts import Reach
from elastic_ext.failures.ledger import JobVerdict, Report
from elastic_ext.rendezvous import foreign_agent, run_id
from elastic_ext.rendezvous.address import check_own, endpoint_of, host_of, own_address
from elastic_ext.rendezvous.c10d.agent_ledger import AgentLedger
from elastic_ext.rendezvous.c10d.one_machine import OneMachine
from elastic_ext.rendezvous.c10d.several_nodes import SeveralNodes
from elastic_ext.rendezvous.handler import RoundEnd
from elastic_ext.rendezvous.job_state import JobStatus
from elastic_ext.rendezvous.round_records import Header, State

if TYPE_CHECKING:
    from elastic_ext.etcd import CallObserver

logger = logging.getLogger(__name__)

BACKEND = "ext_c10d"
ALL_DONE_S = 300.0  # torch's exit_barrier_timeout

# By what a status cannot show of a job over several nodes.
UNKNOWN = {
    "nodes": "torch's store holds no reports of the other nodes: ask each agent's own page",
    "failures": "only verdicts that this node has heard; another node may know a later one",
}
UNKNOWN_END = "the workers of this node have finished; it has not heard of those of the other nodes"


def header_of(round_: int, launch: str, done: bool | None) -> Header:
    """Return the state of the job as far as one node knows it, without any failure. done: see `several_nodes.Round`."""
    state = State.FORMING if not round_ else State.DONE if done else State.RUNNING
    return Header(round_, state, reason=UNKNOWN_END if done is False else "", job=launch)


class EmbeddedRendezvous(RendezvousHandler):  # type: ignore[misc, unused-ignore]  # torch's types are not checked
    """A `rendezvous.handler.Rendezvous`, which documents the attributes and the methods without a docstring.

    `OneMachine` and `SeveralNodes` hold what differs between one machine and several nodes.
    """

    is_elastic_ext = True

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        """Raises UsageError if the run id, the address of this node or the path of the ledger cannot be used."""
        run_id.checked(params.run_id)
        params.endpoint = endpoint_of(params.endpoint, params.max_nodes, os.environ)
        if params.local_addr:
            run_id.checked_address(params.local_addr)
        self.settings = settings
        self.torch_conf = dict(params.config)
        self.host = run_id.host_name(settings)
        self.attached = False
        self.reaper_runs: Callable[[], bool] = lambda: False
        self.on_event: Callable[[], None] = lambda: None
        self.on_verdict: Callable[[JobVerdict], None] = lambda verdict: None
        self.on_wait: Callable[[], None] = lambda: None
        self._run_id: str = params.run_id
        self._closed: bool | None = None  # what the first shutdown has returned
        self._ledger = AgentLedger(settings, params.run_id, params.min_nodes, self.host)
        self._nodes = self._enter(params)

    def _enter(self, params: RendezvousParameters) -> OneMachine | SeveralNodes:
        address = own_address(params.local_addr, host_of(params.endpoint), params.max_nodes)
        check_own(params.local_addr, address)
        myself = weakref.ref(self)  # no reference cycle: an unused handler must be gone at once, see `install_agent`

        def notify() -> None:
            if (handler := myself()) is not None:
                handler.on_event()

        if params.max_nodes == 1:
            return OneMachine(params.run_id, self.host, address, self._ledger, notify)
        return SeveralNodes(params, self.settings, self.host, address, self._ledger, notify)

    # For torch

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Tell torch that the workers connect to the round's store, which is up before they start."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        foreign_agent.warn_once(self)
        with foreign_agent.closed_by_verdict(self):
            return self._nodes.next_round()

    def num_nodes_waiting(self) -> int:
        if not self.attached and self._nodes.events.ended_by is not None:
            return 1  # the round is over, and that is all other agents want to know
        return self._nodes.num_nodes_waiting()

    def is_closed(self) -> bool:
        return self._nodes.is_closed()

    def set_closed(self) -> None:
        self._nodes.set_closed()

    def shutdown(self) -> bool:
        """Close the job for all nodes and leave it. If the job goes on without this node, only leave. A second call: nothing."""
        if self._closed is None:
            self._closed = self._nodes.shutdown()
        return self._closed

    # For our agent

    @property
    def address(self) -> str:
        return self._nodes.address

    @property
    def may_linger(self) -> bool:
        """Return whether another process can have the port of the job's store, which torch holds until this one ends."""
        return not self._nodes.hosts_store

    @property
    def round(self) -> int:
        return self._nodes.number

    @property
    def launch(self) -> str:
        return self._nodes.launch

    @property
    def node_id(self) -> str:
        return self._nodes.node_id

    @property
    def poll_interval_s(self) -> float | None:
        return self._nodes.poll_interval_s

    def prepare(self, spec: WorkerSpec, max_restarts: int) -> None:
        self._ledger.max_restarts = max_restarts

    def workers(self) -> None:
        """Return None: torch works the ranks out through its store."""

    @property
    def exchange(self) -> Exchange:
        return self._nodes.exchange

    def round_over(self) -> RoundEnd | None:
        return self._nodes.round_over()

    def break_round(self, reason: str) -> None:
        self._nodes.events.failed(reason, self.host)

    def report_stall(self, stalled: bool) -> None:
        self._nodes.events.stalled(stalled)

    def conclude(self, report: Report) -> JobVerdict:
        return self._nodes.conclude(report)

    def finished(self) -> None:
        self._nodes.finished()
        self._ledger.forget()
        self._ledger.goodput.forget()

    def await_all_done(self) -> bool:
        """Wait for all nodes. Torch's barrier would cut this node off from all events, and the rendezvous from its keep-alives.

        As in torch, the wait lasts at most ALL_DONE_S, and no longer than the round's store lives.
        """
        return self._nodes.events.await_all_done(ALL_DONE_S)

    @property
    def save_wanted(self) -> int:
        return self._nodes.events.saves

    def report_quiet(self, reach: Reach | None) -> None:
        self._nodes.events.quiet(reach)

    def request_save(self, reason: str) -> None:
        self._nodes.events.request_save()

    def save_completed(self, number: int, step: int) -> None:
        """Do nothing: nobody outside the round requests saves."""

    def stop_by(self) -> float | None:
        """Return None: the workers always get the usual grace."""
        return None

    def share_goodput(self, spent: Spent) -> Shared:
        return self._ledger.goodput.share(spent)

    def announce_leaving(self, reason: str) -> None:
        logger.info("leaving the round: %s", reason)
        self._nodes.events.leaving(self.host)

    @property
    def drain(self) -> None:
        """Return None: torch's store lies in an agent, and no command can reach it as a part of the job."""

    def report_ready_to_leave(self, number: int, step: int | None) -> None:
        """Do nothing: no node is drained."""

    @property
    def link_fds(self) -> tuple[int, ...]:
        return ()

    def observe_etcd(self, observer: CallObserver) -> None:
        """Return None: there is no etcd."""

    def last_will(self) -> None:
        """Return None: nobody else can take a node out of torch's rendezvous."""

    def show(self, report: str, last: bool) -> None:
        """Do nothing: torch's store must not hear of every node every few seconds, and nobody could list the keys."""

    def status(self) -> JobStatus:
        unknown = {} if isinstance(self._nodes, OneMachine) else dict(UNKNOWN)
        header = header_of(self.round, self.launch, self._nodes.done)
        return JobStatus(self._run_id, header, {}, {}, self._ledger.ledger, {}, unknown=unknown)

    def leave(self) -> None:
        self._nodes.leave()
