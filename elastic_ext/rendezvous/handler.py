"""The contract between the agent and a rendezvous: the agent uses nothing else of it.

`rendezvous.etcd.handler` and `rendezvous.c10d.handler` implement it, as well as torch's own RendezvousHandler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec

from elastic_ext.base.exchange import Exchange
from elastic_ext.base.last_will import LastWill
from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import JobVerdict, Report
from elastic_ext.rendezvous.round_records import EndKind

__all__ = ["EndKind", "Rendezvous", "RoundEnd"]


@dataclass(frozen=True)
class RoundEnd:
    """Why the workers of a round must stop. reason: for people, one line."""

    kind: EndKind
    reason: str

    def __str__(self) -> str:
        return self.reason


class Rendezvous(Protocol):
    """What the agent uses of its rendezvous.

    Attributes:
        settings: this agent's settings, read once.
        torch_conf: the user's --rdzv-conf, as torch parsed it.
        attached: set by our agent when it begins to use this handler; else another agent uses the rendezvous (`plain`).
        round: number of the current round, from 1, the same on every node, never used twice in a job; 0 before the first.
        host, node_id: this machine's name, and this agent's unique name within the job.
        launch: names this launch of the job, the same on every node; rounds of one launch count up.
        poll_interval_s: seconds between two looks at `round_over` if there is no event for nodes that wait; None: there is.
        on_event: called from any thread when `round_over` or `save_wanted` may have changed; set by our agent.
        on_wait: a main thread that waits for other nodes calls it every second, and it may raise; set by our agent.
    """

    settings: Settings
    torch_conf: Mapping[str, Any]
    attached: bool
    round: int
    host: str
    node_id: str
    poll_interval_s: float | None
    on_event: Callable[[], None]
    on_wait: Callable[[], None]

    @property
    def launch(self) -> str:
        """See above."""

    def get_backend(self) -> str:
        """The value of --rdzv-backend."""

    def get_run_id(self) -> str:
        """The value of --rdzv-id, or what stands in for it."""

    def prepare(self, spec: WorkerSpec, max_restarts: int) -> None:
        """Say what this node offers to a round, and the job's budget; the agent calls it before the first round."""

    def workers(self) -> list[Worker] | None:
        """The ranks of this node's workers where the rendezvous knows them; None: torch is to work them out."""

    @property
    def exchange(self) -> Exchange:
        """For the current round."""

    def round_over(self) -> RoundEnd | None:
        """Why the workers of the current round must stop; None while it runs."""

    def break_round(self, reason: str) -> None:
        """Tell all nodes that this round is over; returns at once."""

    def stalled(self, stalled: bool) -> None:
        """Claim that all workers of this node stall, or take it back. When all nodes claim it, the round ends as STALLED."""

    def conclude(self, report: Report) -> JobVerdict:
        """The workers of this node have failed and been stopped: return the one verdict of the whole job."""

    def finished(self) -> None:
        """The job has ended well on all nodes."""

    def await_all_done(self) -> bool:
        """This node's workers have finished: True when those of all nodes have, False if the round ends otherwise."""

    @property
    def save_wanted(self) -> int:
        """Number of the last save on demand requested in this round; 0: none."""

    def request_save(self, reason: str) -> None:
        """Ask all nodes of this round for a save on demand; returns at once."""

    def saved(self, number: int, step: int) -> None:
        """The save on demand with this number is complete."""

    def stop_by(self) -> float | None:
        """Monotonic time by which the workers must be gone; None: they get the usual grace."""

    def leaving(self, reason: str) -> None:
        """This node was told to leave; its workers still run. What their end causes on other nodes is not a failure."""

    def last_will(self) -> LastWill | None:
        """What the reaper needs to take this node out of the job when the agent is killed; None: nothing."""

    def leave(self) -> None:
        """Leave the job to the others. A second call does nothing."""
