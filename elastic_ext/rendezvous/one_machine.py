"""`ext_c10d` on one machine: there is no node to wait for and no shared store. Each round has its own store server."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic_ext.base import round_store
from elastic_ext.base.exchange import Exchange, SingleNode
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.settings import Settings
from elastic_ext.failures import judgement
from elastic_ext.failures.cuts import Reach
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report
from elastic_ext.rendezvous import foreign_agent, judging, run_id
from elastic_ext.rendezvous.address import check_own, host_of, own_address
from elastic_ext.rendezvous.goodput_folder import GoodputFolder
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.job_state import JobStatus
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.rendezvous.round_server import serve
from elastic_ext.rendezvous.rounds import STALLED

if TYPE_CHECKING:
    from elastic_ext.etcd import CallObserver

logger = logging.getLogger(__name__)


class OneMachine(RendezvousHandler):  # type: ignore[misc, unused-ignore]  # torch's types are not checked
    """A `rendezvous.handler.Rendezvous`, which documents the attributes and the methods without a docstring.

    Invariant: two rounds never share a store.
    """

    is_elastic_ext = True

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        """Raises UsageError if the run id, the address of this node or the path of the ledger cannot be used."""
        run_id.checked(params.run_id)
        if params.local_addr:
            run_id.checked_address(params.local_addr)
        self.address = own_address(params.local_addr, host_of(params.endpoint), params.max_nodes)
        check_own(params.local_addr, self.address)
        self.settings = settings
        self.torch_conf = dict(params.config)
        self.host = self.node_id = run_id.host_name(settings)
        self.attached = False
        self.reaper_runs: Callable[[], bool] = lambda: False
        self.on_event: Callable[[], None] = lambda: None
        self.on_verdict: Callable[[JobVerdict], None] = lambda verdict: None
        self.on_wait: Callable[[], None] = lambda: None
        self.round = self.save_wanted = 0
        self.launch = secrets.token_hex(8)
        self._run_id: str = params.run_id
        self._backend: str = params.backend
        self._max_restarts = 0
        self._file = judging.LedgerFile(settings.ledger_file, params.run_id)
        self._goodput = GoodputFolder(settings.ledger_file, params.run_id, self.host)
        if self._file.job_ended:
            self._goodput.drop()
            self._file.write(Ledger())
        # Monotonic, one per charged restart. The file does not say when, so each in it counts as charged now.
        self._charged_at = [time.monotonic()] * self._file.ledger.charged
        self._server: TCPStore | None = None
        self._stalled = self._done = self._closed = False

    # For torch

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Tell torch that the workers connect to the round's store, which is up before they start."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        foreign_agent.warn_once(self)
        if self._closed:
            raise RendezvousClosedError(f"the job {self._run_id} is over: this agent closed it")
        self.round += 1
        self.save_wanted, self._stalled = 0, False
        self._server = serve(self.address)
        store = PrefixStore(round_store.PREFIX, self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.address, self._server.port))

    def num_nodes_waiting(self) -> int:
        """Return 0; 1 once the round is over, for an agent that is not ours: that is all it wants to know."""
        return int(self._stalled and not self.attached)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed = True
        return True

    # For our agent

    def prepare(self, spec: WorkerSpec, max_restarts: int) -> None:
        self._max_restarts = max_restarts

    def workers(self) -> None:
        """Return None: torch works the ranks out through its store."""

    @property
    def exchange(self) -> Exchange:
        return SingleNode()

    def round_over(self) -> RoundEnd | None:
        return RoundEnd(EndKind.STALLED, STALLED) if self._stalled else None

    def break_round(self, reason: str) -> None:
        """Do nothing: there is no other node."""

    def report_stall(self, stalled: bool) -> None:
        if stalled:
            self._stalled = True
            self.on_event()

    def report_quiet(self, reach: Reach | None) -> None:
        """Do nothing: there is no other node to reach."""

    def conclude(self, report: Report) -> JobVerdict:
        circumstances = judging.circumstances(self.settings, self._max_restarts, nodes=1, min_nodes=1)
        if self.settings.budget_window:
            begin = time.monotonic() - self.settings.budget_window
            self._charged_at = [at for at in self._charged_at if at > begin]
            circumstances = replace(circumstances, charges=len(self._charged_at))
        ledger, verdict = judgement.judge({self.node_id: report}, self._file.ledger, circumstances, self.round)
        self._file.write(ledger)
        if ledger.charged == verdict.decision.charged:  # all earlier charges were refunded
            self._charged_at.clear()
        if verdict.decision.charged:
            self._charged_at.append(time.monotonic())
        return verdict

    def finished(self) -> None:
        self._done = True
        self._file.forget()
        self._goodput.forget()

    def await_all_done(self) -> bool:
        return True

    def request_save(self, reason: str) -> None:
        self.save_wanted += 1
        self.on_event()

    def save_completed(self, number: int, step: int) -> None:
        """Do nothing: nobody outside this agent requests saves."""

    def stop_by(self) -> float | None:
        """Return None: the workers always get the usual grace."""
        return None

    def share_goodput(self, spent: Spent) -> Shared:
        return self._goodput.share(spent)

    def announce_leaving(self, reason: str) -> None:
        logger.info("leaving the round: %s", reason)

    @property
    def drain(self) -> None:
        """Return None: the only node cannot leave the job."""

    def report_ready_to_leave(self, number: int, step: int | None) -> None:
        """Do nothing: no node is drained."""

    @property
    def link_fds(self) -> tuple[int, ...]:
        return ()

    def observe_etcd(self, observer: CallObserver) -> None:
        """Return None: there is no etcd."""

    def last_will(self) -> None:
        """Return None: there is no other node."""

    def show(self, report: str, last: bool) -> None:
        """Do nothing: there is nowhere to show it; the agent has its own page."""

    def status(self) -> JobStatus:
        state = State.FORMING if not self.round else State.DONE if self._done else State.RUNNING
        header = Header(self.round, state, job=self.launch)
        return JobStatus(self._run_id, header, {}, {}, self._file.ledger, {}, unknown={})

    def leave(self) -> None:
        """Do nothing: there are no other nodes."""
