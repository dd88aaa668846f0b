"""A job on one machine: no node to wait for, and no shared store. Each round has its own store server."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousStoreInfo

from elastic_ext.base import round_store
from elastic_ext.base.exchange import Exchange, SingleNode
from elastic_ext.failures.ledger import JobVerdict, Report
from elastic_ext.rendezvous.c10d.agent_ledger import AgentLedger
from elastic_ext.rendezvous.c10d.round_events import LocalEvents
from elastic_ext.rendezvous.handler import RoundEnd
from elastic_ext.rendezvous.round_server import serve

logger = logging.getLogger(__name__)


class OneMachine:
    """The only node of a job, with the attributes and methods of `several_nodes.SeveralNodes`.

    Invariant: two rounds never share a store.
    """

    poll_interval_s: float | None = None  # nobody can join
    hosts_store = False  # other processes use none

    def __init__(self, run_id: str, node_id: str, address: str, ledger: AgentLedger, on_event: Callable[[], None]) -> None:
        """address: this machine's; the store servers listen there."""
        self.number = 0
        self.launch = secrets.token_hex(8)
        self.node_id = node_id
        self.events = LocalEvents(on_event)
        self._run_id = run_id
        self.address = address
        self._ledger = ledger
        self._on_event = on_event
        self._server: TCPStore | None = None
        self._closed = False
        self.done: bool | None = None

    def next_round(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the job {self._run_id} is over: this agent closed it")
        self.number += 1
        self.events = LocalEvents(self._on_event)
        self._server = serve(self.address)
        store = PrefixStore(round_store.PREFIX, self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.address, self._server.port))

    @property
    def exchange(self) -> Exchange:
        return SingleNode()

    def round_over(self) -> RoundEnd | None:
        return self.events.ended_by.end if self.events.ended_by is not None else None

    def conclude(self, report: Report) -> JobVerdict:
        ledger, verdict = self._ledger.judge({self.node_id: report}, self._ledger.ledger, self.number)
        self._ledger.adopt(ledger, verdict)
        return verdict

    def finished(self) -> None:
        self.done = True

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def leave(self) -> None:
        """Do nothing: there are no other nodes."""

    def shutdown(self) -> bool:
        self._closed = True
        return True
