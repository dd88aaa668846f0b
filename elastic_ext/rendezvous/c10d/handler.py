"""`ext_c10d`: the embedded rendezvous. No service to run: one node alone, or a few nodes through torch's own c10d rendezvous.

Torch's c10d hands the same TCPStore to every round, with the last round's keys in it; a restart then reads its dead predecessors'
addresses. Here each round gets a store of its own: a new server, in the agent of group rank 0, its address published in the round
together with the round's number, which is the same for the whole job.

The job's verdicts and its ledger are in the store of torch's rendezvous (`store_job`), which lives as long as the agent that
hosts it. A store that is slow is asked twice. Once it is lost each node judges for itself, and no node can join or start again;
if it is there after all, all nodes hear of a verdict that ends the job, whoever has judged.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from elastic_ext.base import torch_private
from elastic_ext.base.errors import NodeRefused
from elastic_ext.base.exchange import Alone, Exchange
from elastic_ext.base.kinds import Response as Asked
from elastic_ext.base.records import Count, Name, Port
from elastic_ext.base.settings import DEFAULT_STOP_GRACE, Settings
from elastic_ext.failures import judgement
from elastic_ext.failures import ledger as job
from elastic_ext.failures.ledger import JobStopped
from elastic_ext.rendezvous import judging, plain, run_id
from elastic_ext.rendezvous.address import check_own, host_of, listens_on, own_address
from elastic_ext.rendezvous.c10d.backend import create
from elastic_ext.rendezvous.c10d.exchange import StoreExchange
from elastic_ext.rendezvous.c10d.round_events import ALL_DONE, LEAVES, RoundEvents
from elastic_ext.rendezvous.c10d.store_calls import StoreLost
from elastic_ext.rendezvous.c10d.store_job import JUDGING_S, Part, StoreJob
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.round_server import serve
from elastic_ext.rendezvous.rounds import STALLED

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKEND = "ext_c10d"
ROUND_KEY = "elastic_ext.round"
LAUNCH_KEY = "elastic_ext.agent.launch"
SCHEMA = 1  # of `Published`
ROUND_TRIES = 3
LEAVE_TIMEOUT_S = 3.0
ALL_DONE_S = 300.0  # torch's exit_barrier_timeout
TELL_S = 5.0  # beside its grace and the settle window: that a node with a cause may need to tell of it
HUNG_S = 10.0  # as much at least: where a job hung all nodes look where their workers are, and then tell
OTHERS_S = JUDGING_S  # beside their grace and their patience: that the other nodes may need to judge and read a verdict


@dataclass(frozen=True)
class Published:
    """Of a round: address and port of its store, its number, and what names the launch of the job."""

    addr: Name
    port: Port
    round: Count
    launch: str


class EmbeddedRendezvous(RendezvousHandler):
    """Forms rounds; the supervisor reads `round` and `settings` from it.

    Invariant: two rounds never share a store.

    Attributes:
        settings: of this agent.
        launch: names this launch of the job, the same on every node; rounds of one launch count up.
        round: number of the current round, from 1, the same on every node, never used twice in a job; 0 before the first.
        poll_interval_s: how often num_nodes_waiting() must be asked; None: never, nobody can join.
        on_event: set by our agent; called from any thread when round_over() may have an answer.
        on_wait: set by our agent; a main thread that waits for other nodes by a condition asks it every second, and it may raise.
        attached: set by our agent when it takes this handler; without it another one uses the rendezvous alone (see `plain`).
    """

    is_elastic_ext = True

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        """Raises UsageError: the run id, or the address of this node, is none."""
        run_id.checked(params.run_id)
        if params.local_addr:
            run_id.checked_address(params.local_addr)
        self.settings = settings
        self.round = 0
        self.attached = False
        self.on_event: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        self.torch_conf = dict(params.config)
        self._run_id = params.run_id
        self._reader = RecordReader()
        self._address = own_address(params.local_addr, host_of(params.endpoint), params.max_nodes)
        self._server: TCPStore | None = None
        self._store: Store | None = None
        self._inner: RendezvousHandler | None = None
        self._news: RoundEvents | None = None
        self._unreachable = self._store_lost = False
        self._saves_alone = 0
        self.launch = secrets.token_hex(8)
        self._stalled_alone = self._closed_alone = False
        self.host = self.node_id = run_id.host_name(settings)
        self._min_nodes = params.min_nodes
        self._max_restarts = 0
        self._ledger = judging.LedgerFile(settings.ledger_file, params.run_id)
        self.poll_interval_s: float | None = None
        self._part = Part(0, 0, 1)
        self._shared: StoreJob | None = None
        self._hosts = False  # the store lives in this agent
        self._concluded = 0  # the last round that this node knows the verdict on
        self._stopped = False  # by a verdict, for all nodes
        self._stays_open = False  # this node leaves, the job goes on
        self._refusals: list[tuple[float, str, str]] = []  # when it is over, the host, the reason
        grace_s = DEFAULT_STOP_GRACE if settings.stop_grace is None else settings.stop_grace
        self._patience_s = max(grace_s + settings.settle + TELL_S, HUNG_S)
        self._others_s = grace_s + self._patience_s + OTHERS_S
        check_own(params.local_addr, self._address)
        if params.max_nodes > 1:
            self.node_id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
            backend, self._store = create(params)
            self._inner = create_handler(self._store, backend, params)
            self.poll_interval_s = 0.1
            if isinstance(self._store, TCPStore):
                self._hosts = listens_on(self._store.port)
                where = f"{self._store.host}:{self._store.port}"
                logger.info("the rendezvous store is at %s, %s", where, "in this agent" if self._hosts else "in another process")
            self._shared = StoreJob(self._store, params.run_id, self.node_id, self._hosts, self._ledger.ledger)
            self._ledger.ledger = self._ask(StoreJob.come_in) or self._ledger.ledger
        # When each was charged. Of those before this agent (ledger_file, the store) that is not known: as if it were now.
        self._charged_at = [time.monotonic()] * self._ledger.ledger.charged

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """The workers connect to the round's store, which is up before they start."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        plain.note(self)
        with plain.closed_by_verdict(self):
            return self._next_alone() if self._inner is None else self._next_among(self._inner)

    def _next_alone(self) -> RendezvousInfo:
        if self._closed_alone:
            raise RendezvousClosedError(f"the job {self._run_id} is over: it was closed here")
        self.round += 1
        self._saves_alone = 0
        self._stalled_alone = False
        self._server = serve(self._address)
        store = PrefixStore("elastic_ext", self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, self._server.port))

    def _next_among(self, inner: RendezvousHandler) -> RendezvousInfo:
        self._come_in() if self.round == 0 else self._go_on()
        for _ in range(ROUND_TRIES):
            joined = self._join(inner)
            published = self._publish(joined) if joined.rank == 0 else self._published(joined.store)
            if published is not None:
                break
            # Somebody else has written there. Another round has another key, and the others will come when this node waits.
        else:
            raise RendezvousConnectionError(f"the address of the round could not be read {ROUND_TRIES} times")
        self.round, self.launch = published.round, published.launch
        self._part = Part(self.round, joined.rank, joined.world_size)
        self._listen(published.addr, published.port)
        return RendezvousInfo(joined.store, joined.rank, joined.world_size, RendezvousStoreInfo(published.addr, published.port))

    def _join(self, inner: RendezvousHandler) -> RendezvousInfo:
        try:
            with _no_shared_store():
                return inner.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError):  # the latter is for a node beyond max_nodes
            if (verdict := self._ask(StoreJob.stopped)) is not None:
                self._learn(self._ask(StoreJob.ledger) or self._ledger.ledger, verdict)
                raise JobStopped(verdict) from None
            raise

    def _publish(self, joined: RendezvousInfo) -> Published:
        """On the node of rank 0: where the store of this round is."""
        assert self._store is not None
        self._server = serve(self._address)
        number = self._store.add(f"{ROUND_KEY}.{self._run_id}", 1)
        launch = self._store.compare_set(f"{LAUNCH_KEY}.{self._run_id}", "", self.launch).decode(errors="replace")
        published = Published(self._address, self._server.port, number, launch)
        joined.store.set(ROUND_KEY, json.dumps({"schema": SCHEMA, **vars(published)}))
        return published

    def _published(self, store: Store) -> Published | None:
        self._server = None
        text = store.get(ROUND_KEY).decode(errors="replace")
        return self._reader.read(Published, text, ROUND_KEY, SCHEMA)

    def _come_in(self) -> None:
        """Before the first round. Raises NodeRefused: this host may not come back yet."""
        if why := self._ask(lambda shared: shared.refused(self.host)):
            self._stays_open = True
            raise NodeRefused(f"this host was told to leave the job and may not come back yet: {why}")

    def _go_on(self) -> None:
        """From the round that is over. If that was for a failure on other nodes, hear what it means. Raises JobStopped."""
        if self._news is None:
            return
        if self._news.of_failure and self._concluded < self.round:
            told = self._ask(lambda shared: shared.hear(self._part, self._others_s))
            if told is None:
                logger.warning("no verdict on round %s came from the node that has failed: all start again", self.round)
            else:
                self._learn(*told)
                if told[1].ends_job:
                    raise JobStopped(told[1])
                threading.Event().wait(told[1].decision.delay_s)  # as the nodes that failed do; a round needs all
        self._news.close()
        self._news = None

    def _listen(self, address: str, port: int) -> None:
        try:
            self._news = RoundEvents(address, port, "elastic_ext/over", lambda: self.on_event())
        except (RuntimeError, ValueError) as error:
            logger.warning("no news from other nodes in this round, its store does not answer: %s", error)

    def prepare(self, spec: WorkerSpec, max_restarts: int, newest_checkpoint: Callable[[], str | None] = lambda: None) -> None:
        """Nothing to say before the first round: torch's agents tell each other through the store."""
        self._max_restarts = max_restarts

    def conclude(self, report: job.Report) -> job.JobVerdict:
        """The workers of this node have failed and been stopped; return what to do.

        One verdict for the whole job. Where there is no store for it, this node judges for itself.
        """
        settle_s = self.settings.settle
        patience_s = settle_s if self._news is not None and self._news.of_no_failure else self._patience_s
        told = self._ask(lambda shared: shared.conclude(self._part, report, self._judge, settle_s, patience_s))
        if told is None:
            self._part = Part(self.round, 0, 1)
            ledger, verdict = self._judge({self.node_id: report}, self._ledger.ledger, "")
            if verdict.ends_job:
                verdict = self._ask(functools.partial(StoreJob.stop, verdict=verdict)) or verdict
            told = ledger, verdict
        self._learn(*told)
        return told[1]

    def _judge(self, reports: Mapping[str, job.Report], ledger: job.Ledger, store_host: str) -> tuple[job.Ledger, job.JobVerdict]:
        nodes = self._part.nodes
        left = self._news.left_by if self._news is not None else None
        lost = (left,) if left is not None else ()
        rules = judging.rules(self.settings, self._max_restarts, nodes=nodes, min_nodes=self._min_nodes, lost=lost)
        if self.settings.budget_window:
            begin = time.monotonic() - self.settings.budget_window
            self._charged_at = [at for at in self._charged_at if at > begin]
            rules = replace(rules, charges=len(self._charged_at))
        after, verdict = judgement.judge(reports, ledger, rules, self.round)
        if verdict.decision.response is Asked.REPLACE_NODE and verdict.node == store_host:
            # The store would go with it, and no node could start again.
            after, verdict = judgement.judge(reports, ledger, replace(rules, min_nodes=nodes), self.round)
        return after, verdict

    def _learn(self, ledger: job.Ledger, verdict: job.JobVerdict) -> None:
        """Keep what has been decided, whoever has."""
        self._concluded = self.round
        self._stopped = verdict.ends_job
        self._ledger.write(ledger)
        if ledger.charged == verdict.decision.charged:  # all before have been given back
            self._charged_at.clear()
        if verdict.decision.charged:
            self._charged_at.append(time.monotonic())
        if verdict.decision.response is Asked.REPLACE_NODE:
            self._stays_open = verdict.node == self.node_id
            self._refusals.append((time.monotonic() + self.settings.refuse_node, verdict.host, verdict.decision.reason))

    def _ask(self, question: Callable[[StoreJob], T], again: bool = True) -> T | None:
        """What the job's records in the store of the rendezvous say; None: there is none, or it is lost.

        again: a store that does not answer is asked once more: it may have been slow, or what lies between has forgotten an idle
        connection. Where its host has gone that takes CALL_S, and no time where the host refuses the connection.
        """
        shared = self._shared
        if shared is None:
            return None
        try:
            try:
                answer = question(shared)
            except StoreLost as error:
                if not again:
                    raise
                if not self._store_lost:
                    logger.warning("the rendezvous store does not answer, it is asked again on new connections: %s", error)
                shared.reconnect()
                answer = question(shared)
        except StoreLost as error:
            if not self._store_lost:
                logger.warning("the rendezvous store is lost, from now on each node judges failures for itself: %s", error)
            self._store_lost = True
            return None
        self._store_lost = False
        return answer

    def finished(self) -> None:
        """The job has ended well on all nodes."""
        self._ledger.forget()

    def await_all_done(self) -> bool:
        """This node's workers have finished. Return True when those of all nodes have; False if the round is over otherwise.

        Torch's barrier would keep this node from all news, and its keep-alives from the rendezvous. As there, the end of the
        others is waited for so long, and no longer than the round's store lives.
        """
        if self._news is None:
            return True
        reason = self._news.await_all_done(self._part.nodes, ALL_DONE_S)
        if reason is None:
            logger.info("what the workers of the other nodes came to is not known here; those of this node have finished")
        return reason in (None, ALL_DONE)

    @property
    def exchange(self) -> Exchange:
        """By which the nodes of the current round agree what to resume from."""
        if self._part.nodes == 1:
            return Alone()
        return StoreExchange(self._part, self._ask, self._over_before_it_began)

    def _over_before_it_began(self) -> RoundEnd | None:
        if self._news is not None and self._news.lost:
            return RoundEnd(EndKind.BROKEN, "the agent of rank 0 is gone")
        return self.round_over()

    def workers(self) -> None:
        """Torch works the ranks out."""

    def round_over(self) -> RoundEnd | None:
        """Why the workers of the current round must stop; None while it runs."""
        if self._news is not None and self._news.reason is not None:
            return RoundEnd(EndKind.STALLED if self._news.reason == STALLED else EndKind.BROKEN, self._news.reason)
        if self._stalled_alone:
            return RoundEnd(EndKind.STALLED, STALLED)
        waiting = self.num_nodes_waiting()
        return RoundEnd(EndKind.BROKEN, f"{waiting} nodes wait to join") if waiting else None

    def stalled(self, stalled: bool) -> None:
        """Whether all workers of this node stall. When those of all nodes do, the round is over for the reason STALLED."""
        if self._news is not None:
            self._news.stalled(stalled, self._part.nodes)
        elif stalled:
            self._stalled_alone = True
            self.on_event()

    def request_save(self, reason: str) -> None:
        """Ask all nodes of this round for a save on demand; returns at once."""
        if self._news is not None:
            self._news.request_save()
        else:
            self._saves_alone += 1
            self.on_event()

    @property
    def save_wanted(self) -> int:
        """Number of the last save on demand that was asked for in this round; 0: none."""
        return self._news.saves if self._news is not None else self._saves_alone

    def saved(self, number: int, step: int) -> None:
        """That save is complete."""

    def stop_by(self) -> float | None:
        """Monotonic time by which the workers must be gone; None: they get the usual grace."""
        return None

    def break_round(self, reason: str) -> None:
        """Tell all nodes that this round is over; returns at once."""
        if self._news is not None:
            self._news.tell(reason)

    def leaving(self, reason: str) -> None:
        """This node was told to leave, its workers are still there: what theirs do to those of others is no failure."""
        logger.info("leaving the round: %s", reason)
        if self._news is not None:
            self._news.tell(LEAVES + self.host, LEAVE_TIMEOUT_S)

    def last_will(self) -> None:
        """Nothing in torch's rendezvous could be ended by somebody else."""

    def leave(self) -> None:
        """Leave the job to the others; the end of an agent that was told to stop, or to leave."""
        self._say_goodbye()
        self._ask(self._step_out, again=False)  # there may be no time
        self._end_calls()

    def _step_out(self, shared: StoreJob) -> None:
        inner = self._inner
        assert inner is not None, "there is a store"
        shared.calls.run(lambda: torch_private.step_out(inner, LEAVE_TIMEOUT_S), LEAVE_TIMEOUT_S)
        shared.leave()

    def num_nodes_waiting(self) -> int:
        if self._inner is None:
            return 0
        if not self.attached and self._news is not None and self._news.reason is not None:
            return 1  # the round is over, and this is all that another agent asks
        self._forgive()
        try:
            waiting = self._inner.num_nodes_waiting()
        except RendezvousConnectionError as error:
            # The host of the rendezvous store is gone. Nobody can join; that is no reason to stop training.
            if not self._unreachable:
                logger.warning("the rendezvous store cannot be reached, training goes on without it: %s", error)
            self._unreachable = True
            return 0
        self._unreachable = False
        return waiting

    def _forgive(self) -> None:
        while self._refusals and self._refusals[0][0] <= time.monotonic():
            _, host, reason = self._refusals.pop(0)
            self._ask(functools.partial(StoreJob.forgive, host=host, reason=reason))

    def is_closed(self) -> bool:
        return self._closed_alone if self._inner is None else self._inner.is_closed()

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()
        else:
            self._closed_alone = True

    def shutdown(self) -> bool:
        """Close the job for all nodes and leave it; a node that the others go on without leaves only."""
        if self._inner is None:
            self._closed_alone = True
            return True
        if self._stays_open:
            self.leave()
            return True
        self._say_goodbye()
        closed = self._close(self._inner)
        self._ask(self._part_from_others, again=False)
        self._end_calls()
        self._server = None
        return closed

    def _close(self, inner: RendezvousHandler) -> bool:
        try:
            return inner.shutdown()
        except RendezvousConnectionError as error:
            logger.warning("the rendezvous could not be closed, its store is gone: %s", error)
            return False

    def _part_from_others(self, shared: StoreJob) -> None:
        shared.leave()
        if self._stopped and (self._hosts or self._server is not None):
            shared.await_others(self._others_s)  # they have yet to read why

    def _end_calls(self) -> None:
        if self._shared is not None:
            self._shared.calls.end(LEAVE_TIMEOUT_S)

    def _say_goodbye(self) -> None:
        if self._news is not None:
            self._news.end()
            self._news = None


@contextmanager
def _no_shared_store() -> Iterator[None]:
    """Torch's documented switch. With it on, a node that joins waits 60 s for an address nobody publishes, then the job dies."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
