"""`ext_c10d`: the embedded rendezvous. No service to run: one node alone, or a few nodes through torch's own c10d rendezvous.

Torch's c10d hands the same TCPStore to every round, with the last round's keys in it; a restart then reads its dead predecessors'
addresses. Here each round gets a store of its own: a new server, in the agent of group rank 0, its address published in the round
together with the round's number, which is the same for the whole job.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from elastic_ext import job
from elastic_ext.errors import SeamError
from elastic_ext.rendezvous import judging
from elastic_ext.rendezvous.address import address_towards, host_of
from elastic_ext.rendezvous.store_news import RoundNews
from elastic_ext.settings import Settings

logger = logging.getLogger(__name__)

BACKEND = "ext_c10d"
ROUND_KEY = "elastic_ext.round"


class EmbeddedRendezvous(RendezvousHandler):
    """Forms rounds; the supervisor reads `round` and `settings` from it.

    Invariant: two rounds never share a store.

    Attributes:
        settings: of this agent.
        round: number of the current round, from 1, the same on every node, never used twice in a job; 0 before the first.
        poll_interval_s: how often num_nodes_waiting() must be asked; None: never, nobody can join.
        on_news: set by our agent; called from any thread when round_over() may have an answer.
        attached: set by our agent when it takes this handler; without it the rounds would be run by an agent that is not ours.
    """

    is_elastic_ext = True

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        self.settings = settings
        self.round = 0
        self.attached = False
        self.on_news: Callable[[], None] = lambda: None
        self.torch_conf = dict(params.config)
        self._run_id = params.run_id
        self._endpoint_host = host_of(params.endpoint)
        self._local_addr = params.local_addr
        self._server: TCPStore | None = None
        self._store: Store | None = None
        self._inner: RendezvousHandler | None = None
        self._news: RoundNews | None = None
        self._unreachable = False
        self.host = self.node_id = settings.node_name or platform.node()
        self._max_restarts = 0
        self._ledger = judging.LedgerFile(settings.ledger_file, params.run_id)
        # When each was charged. Of those of an earlier agent (ledger_file) that is not known: as if it were now.
        self._charged_at = [time.monotonic()] * self._ledger.ledger.charged
        self.poll_interval_s: float | None = None
        if params.max_nodes > 1:
            backend, self._store = create_backend(params)
            self._inner = create_handler(self._store, backend, params)
            self.poll_interval_s = 0.1

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """The workers connect to the round's store, which is up before they start."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if not self.attached:
            raise SeamError(
                "torch built another agent than elastic_ext's for this rendezvous; expected torch 2.8 or newer with an unpatched "
                "launcher; use --rdzv-backend=c10d, or `python -m elastic_ext.agent`"
            )
        return self._next_alone() if self._inner is None else self._next_among(self._inner)

    def _next_alone(self) -> RendezvousInfo:
        self.round += 1
        address = self._local_addr or "localhost"
        self._server = _serve(address)
        store = PrefixStore("elastic_ext", self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address, self._server.port))

    def _next_among(self, inner: RendezvousHandler) -> RendezvousInfo:
        if self._news is not None:
            self._news.close()
            self._news = None
        with _no_shared_store():
            joined = inner.next_rendezvous()
        if joined.rank == 0:
            assert self._store is not None
            address = self._local_addr or address_towards(self._endpoint_host)
            self._server = _serve(address)
            number = self._store.add(f"{ROUND_KEY}.{self._run_id}", 1)
            joined.store.set(ROUND_KEY, json.dumps({"addr": address, "port": self._server.port, "round": number}))
        else:
            self._server = None
        published = json.loads(joined.store.get(ROUND_KEY))
        self.round = published["round"]
        self._listen(published["addr"], published["port"])
        return RendezvousInfo(
            joined.store, joined.rank, joined.world_size, RendezvousStoreInfo(published["addr"], published["port"])
        )

    def _listen(self, address: str, port: int) -> None:
        try:
            self._news = RoundNews(address, port, "elastic_ext/over", lambda: self.on_news())
        except (RuntimeError, ValueError) as error:
            logger.warning("no news from other nodes in this round, its store does not answer: %s", error)

    def prepare(self, spec: WorkerSpec, max_restarts: int) -> None:
        """Nothing to say before the first round: torch's agents tell each other through the store."""
        self._max_restarts = max_restarts

    def conclude(self, report: job.Report) -> job.Verdict:
        """The workers of this node have failed and been stopped; what to do. Each node judges for itself, by what it has seen."""
        rules = judging.rules(self.settings, self._max_restarts, nodes=1)
        if self.settings.budget_window:
            begin = time.monotonic() - self.settings.budget_window
            self._charged_at = [at for at in self._charged_at if at > begin]
            rules = replace(rules, charges=len(self._charged_at))
        ledger, verdict = job.judge({self.node_id: report}, self._ledger.ledger, rules, self.round)
        self._ledger.write(ledger)
        if ledger.charged == verdict.decision.charged:  # all before have been given back
            self._charged_at.clear()
        if verdict.decision.charged:
            self._charged_at.append(time.monotonic())
        return verdict

    def finished(self) -> None:
        """The job has ended well on all nodes."""
        self._ledger.forget()

    def round_over(self) -> str | None:
        """Why the workers of the current round must stop; None while it runs."""
        if self._news is not None and self._news.reason is not None:
            return self._news.reason
        waiting = self.num_nodes_waiting()
        return f"{waiting} nodes wait to join" if waiting else None

    def stop_by(self) -> float | None:
        """Monotonic time by which the workers must be gone; None: they get the usual grace."""
        return None

    def break_round(self, reason: str) -> None:
        """Tell all nodes that this round is over; returns at once."""
        if self._news is not None:
            self._news.tell(reason)

    def last_will(self) -> None:
        """Nothing in torch's rendezvous could be ended by somebody else."""

    def leave(self) -> None:
        """Torch's rendezvous notices it by missed keep-alives."""
        if self._news is not None:
            self._news.end()
            self._news = None

    def num_nodes_waiting(self) -> int:
        if self._inner is None:
            return 0
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

    def is_closed(self) -> bool:
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()

    def shutdown(self) -> bool:
        self.leave()
        self._server = None
        if self._inner is None:
            return True
        try:
            return self._inner.shutdown()
        except RendezvousConnectionError as error:
            logger.warning("the rendezvous could not be closed, its store is gone: %s", error)
            return False


def _serve(address: str) -> TCPStore:
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


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
