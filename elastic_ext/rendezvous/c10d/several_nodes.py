"""One node of a multi-node job without etcd, through torch's own c10d rendezvous.

Torch decides which nodes are in a round (`torch_rendezvous`). Each round gets its own store server, in the agent of group
rank 0; through it the agents hear of each other's failures (`round_events`).

The job's verdicts and its ledger are in the job's store (`store_job`), which lives as long as the agent that hosts it. A slow
store is asked twice. Once the store is lost, each node judges for itself, and no node can join or start again. If the store
comes back, all nodes hear of a verdict that ends the job, whichever node has judged.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_ext.base import kinds
from elastic_ext.base.errors import NodeRefused
from elastic_ext.base.exchange import Exchange, SingleNode
from elastic_ext.base.settings import DEFAULT_STOP_GRACE, Settings
from elastic_ext.failures.ledger import JobStopped, JobVerdict, Ledger, Report
from elastic_ext.rendezvous.c10d.admission import Admission
from elastic_ext.rendezvous.c10d.agent_ledger import AgentLedger
from elastic_ext.rendezvous.c10d.exchange import StoreExchange
from elastic_ext.rendezvous.c10d.job_keys import PublishedRound
from elastic_ext.rendezvous.c10d.round_events import LocalEvents, RoundEvents
from elastic_ext.rendezvous.c10d.store_job import JUDGING_S, Membership, RetryingJob, StoreJob
from elastic_ext.rendezvous.c10d.torch_rendezvous import TorchRendezvous
from elastic_ext.rendezvous.handler import EndKind, RoundEnd

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
REPORT_S = 5.0  # beyond its grace and the settle window: time for a node with a cause to report it
HANG_S = 10.0  # minimum: when a job hangs, all nodes look at the stacks of their workers before they report
POLL_S = 0.1


@dataclass
class Round:
    """The state of one round.

    Attributes:
        membership: this node's place in the round.
        events: of all its nodes; local events before the first round, after this node has left, and if the store does not answer.
        server: of the round's store, if this agent hosts it.
        concluded: this node knows the verdict on the round.
        done: whether the workers of all nodes have finished; None before those of this node have, False if it has not heard.
    """

    membership: Membership
    events: RoundEvents | LocalEvents
    server: TCPStore | None = None
    concluded: bool = False
    done: bool | None = None


@dataclass(frozen=True)
class Waits:
    """The limits on this node's waits for the others, in seconds.

    Attributes:
        settle_s: for reports of other nodes, before it judges.
        patience_s: the same, if no report names a cause.
        others_s: for other nodes to judge or to read a verdict.
    """

    settle_s: float
    patience_s: float
    others_s: float

    @classmethod
    def of(cls, settings: Settings) -> Waits:
        """Derive the waits from the user's settings."""
        grace_s = DEFAULT_STOP_GRACE if settings.stop_grace is None else settings.stop_grace
        patience_s = max(grace_s + settings.settle + REPORT_S, HANG_S)
        return cls(settings.settle, patience_s, grace_s + patience_s + JUDGING_S)


class SeveralNodes:
    """This node's place in the job.

    `exchange`, `round_over`, `conclude` and `leave` are those of `rendezvous.handler.Rendezvous`. `num_nodes_waiting`,
    `is_closed`, `set_closed` and `shutdown` are those of torch's RendezvousHandler.

    Attributes:
        poll_interval_s, node_id, launch: see `rendezvous.handler.Rendezvous`.
        number: of the current round, from 1; 0 before the first.
        events: of the current round.
    """

    poll_interval_s: float | None = POLL_S  # torch's rendezvous has no event for a waiting node

    def __init__(
        self,
        params: RendezvousParameters,
        settings: Settings,
        host: str,
        address: str,
        ledger: AgentLedger,
        on_event: Callable[[], None],
    ) -> None:
        """host, address: this machine's."""
        self.node_id = f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
        self._host = host
        self._ledger = ledger
        self._on_event = on_event
        self._waits = Waits.of(settings)
        self._stopped = False  # by a verdict, for all nodes
        self._job_continues = False  # this node leaves and the job goes on
        self._torch = TorchRendezvous(params, address)
        self._job = RetryingJob(StoreJob(self._torch.store, params.run_id, self.node_id, self._torch.hosts_store, ledger.ledger))
        self._admission = Admission(self._job, host, settings)
        self._round = Round(Membership(0, 0, 1), LocalEvents(on_event), concluded=True)
        if (known := self._job.call(StoreJob.enter_job)) is not None:
            ledger.begin(known)

    @property
    def launch(self) -> str:
        return self._torch.launch

    @property
    def address(self) -> str:
        return self._torch.address

    @property
    def number(self) -> int:
        return self._round.membership.round

    @property
    def events(self) -> RoundEvents | LocalEvents:
        return self._round.events

    @property
    def done(self) -> bool | None:
        return self._round.done

    # Forming a round

    def next_round(self) -> RendezvousInfo:
        """Form the next round. Raises what `RendezvousHandler.next_rendezvous` raises, JobStopped and NodeRefused."""
        if self.number:
            self._leave_round()
        self._check_refused()
        joined, published, server = self._join()
        membership = Membership(published.round, joined.rank, joined.world_size)
        self._round = Round(membership, self._connect(published, membership), server)
        if self._admission.entered(published.round):
            # It goes through the start of the round nonetheless: torch lets the nodes of a round wait for each other there.
            self.events.leaving(self._host)
        return RendezvousInfo(joined.store, joined.rank, joined.world_size, RendezvousStoreInfo(published.addr, published.port))

    def _check_refused(self) -> None:
        """Raise NodeRefused if this host may not come back yet, or has to leave."""
        if why := self._admission.refused():
            self._job_continues = True
            raise NodeRefused(why)

    def _leave_round(self) -> None:
        """If the round has failed on other nodes, get the verdict. Raises JobStopped."""
        ended = self._round
        if ended.events.ended_by_failure and not ended.concluded:
            heard = self._job.call(lambda job_: job_.await_verdict(ended.membership, self._waits.others_s))
            if heard is None:
                logger.warning("the node that failed sent no verdict on round %s; all nodes start another round", self.number)
            else:
                self._adopt(*heard)
                if heard[1].ends_job:
                    raise JobStopped(heard[1])
                threading.Event().wait(heard[1].decision.delay_s)  # like the nodes that failed; a round needs all nodes
        ended.events.close()
        ended.events = LocalEvents(self._on_event)

    def _join(self) -> tuple[RendezvousInfo, PublishedRound, TCPStore | None]:
        try:
            return self._torch.next_round()
        except RendezvousTimeoutError as error:  # torch's says nothing
            self._job_continues = True  # others may wait longer, or come later
            raise RendezvousTimeoutError(self._torch.patience.over) from error
        except (RendezvousClosedError, RendezvousGracefulExitError):  # the latter if the job has enough nodes without this one
            if (verdict := self._job.call(StoreJob.stopped)) is not None:
                self._adopt(self._job.call(StoreJob.ledger) or self._ledger.ledger, verdict)
                raise JobStopped(verdict) from None
            raise

    def _connect(self, published: PublishedRound, membership: Membership) -> RoundEvents | LocalEvents:
        try:
            return RoundEvents(published.addr, published.port, membership.rank, membership.nodes, self._on_event)
        except (RuntimeError, ValueError) as error:
            logger.warning("this round's store does not answer, so this node receives no events from other nodes: %s", error)
            return LocalEvents(self._on_event)

    # While a round runs

    @property
    def exchange(self) -> Exchange:
        if self._round.membership.nodes == 1:
            return SingleNode()
        return StoreExchange(self._round.membership, self._job.call, self._over_or_lost)

    def _over_or_lost(self) -> RoundEnd | None:
        if self.events.lost:
            return RoundEnd(EndKind.BROKEN, "the agent of rank 0 is gone")
        return self.round_over()

    def round_over(self) -> RoundEnd | None:
        if self.events.ended_by is not None:
            return self.events.ended_by.end
        waiting = self.num_nodes_waiting()
        return RoundEnd(EndKind.BROKEN, f"nodes waiting to join: {waiting}") if waiting else None

    def num_nodes_waiting(self) -> int:
        self._admission.keep_time()
        return self._torch.num_nodes_waiting()

    # Verdicts

    def conclude(self, report: Report) -> JobVerdict:
        """Conclude through the store; if it is lost, this node judges for itself."""
        waits = self._waits
        patience_s = waits.settle_s if self.events.ended_without_failure else waits.patience_s
        membership = self._round.membership
        concluded = self._job.call(lambda job_: job_.conclude(membership, report, self._judge, waits.settle_s, patience_s))
        if concluded is None:
            ledger, verdict = self._ledger.judge(
                {self.node_id: report}, self._ledger.ledger, membership.round, left=self.events.left_by
            )
            if verdict.ends_job:
                verdict = self._job.call(functools.partial(StoreJob.stop, verdict=verdict)) or verdict
            concluded = ledger, verdict
        self._adopt(*concluded)
        return concluded[1]

    def _judge(self, reports: Mapping[str, Report], ledger: Ledger, store_host: str) -> tuple[Ledger, JobVerdict]:
        membership = self._round.membership
        return self._ledger.judge(reports, ledger, membership.round, membership.nodes, self.events.left_by, store_host)

    def _adopt(self, ledger: Ledger, verdict: JobVerdict) -> None:
        self._round.concluded = True
        self._stopped = verdict.ends_job
        self._ledger.adopt(ledger, verdict)
        self._admission.judged(verdict)
        if verdict.decision.response is kinds.Response.REPLACE_NODE:
            self._job_continues = verdict.node == self.node_id

    # The end

    def finished(self) -> None:
        """Note that this node's workers have finished, and those of the others, as far as it knows."""
        self._round.done = self._round.membership.nodes == 1 or self.events.all_done

    def is_closed(self) -> bool:
        return self._torch.is_closed()

    def set_closed(self) -> None:
        self._torch.set_closed()

    def leave(self) -> None:
        self._end_events()
        self._job.call(self._step_out, again=False)  # there may be no time for a second try
        self._job.end(LEAVE_TIMEOUT_S)

    def _step_out(self, job_: StoreJob) -> None:
        job_.calls.run(lambda: self._torch.step_out(LEAVE_TIMEOUT_S), LEAVE_TIMEOUT_S)
        job_.leave()

    @property
    def hosts_store(self) -> bool:
        """Whether the job's store is in this process."""
        return self._torch.hosts_store

    def shutdown(self) -> bool:
        """Close the job. If the job goes on without this node, only leave."""
        if self._job_continues:
            self.leave()
            return True
        self._end_events()
        closed = self._torch.close()
        self._job.call(self._leave_closed, again=False)
        self._job.end(LEAVE_TIMEOUT_S)
        self._round.server = None
        return closed

    def _leave_closed(self, job_: StoreJob) -> None:
        job_.leave()
        hosts_a_store = self._torch.hosts_store or self._round.server is not None
        if self._stopped and hosts_a_store:
            job_.await_others(self._waits.others_s)  # they have yet to read why

    def _end_events(self) -> None:
        self.events.shut_down()
        self._round.events = LocalEvents(self._on_event)
