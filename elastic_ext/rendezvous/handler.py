"""The contract between the agent and a rendezvous of ours: the agent sees nothing else of it.

`rendezvous.etcd.handler` and `rendezvous.c10d.handler` implement it. Torch's own half, RendezvousHandler, is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec

from elastic_ext.base.exchange import Exchange
from elastic_ext.base.last_will import LastWill
from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import JobVerdict, Report


class EndKind(str, Enum):
    """How a round ends while its workers run. Code decides on this, never on the reason, which is for people."""

    STALLED = "stalled"  # no worker of the job makes progress any more
    BROKEN = "broken"  # a node's workers failed, a node was lost or goes, or nodes wait to join
    CUT_OFF = "cut_off"  # this node is the one that can take no further part
    CLOSED = "closed"  # the job is over


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
        settings: of this agent, read once.
        torch_conf: what the user gave in --rdzv-conf, as torch parsed it.
        attached: set by our agent when it takes this handler; without it another agent uses the rendezvous alone (`plain`).
        round: number of the current round, from 1, the same on every node, never used twice in a job; 0 before the first.
        host, node_id: this machine's name, and this agent's unique name within the job.
        launch: names this launch of the job, the same on every node; rounds of one launch count up.
        poll_interval_s: seconds between two looks at `round_over` where no event tells of nodes that wait; None: events tell all.
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
    def launch(self) -> str: ...

    def get_backend(self) -> str: ...

    def get_run_id(self) -> str: ...

    def prepare(self, spec: WorkerSpec, max_restarts: int, newest_checkpoint: Callable[[], str | None]) -> None:
        """Say what this node offers to a round, and the job's budget; the agent calls it before the first round.

        newest_checkpoint: finds the newest complete checkpoint in `checkpoint_dir`, for `grow_at=checkpoint`.
        """

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
        """Number of the last save on demand that was asked for in this round; 0: none."""

    def request_save(self, reason: str) -> None:
        """Ask all nodes of this round for a save on demand; returns at once."""

    def saved(self, number: int, step: int) -> None:
        """The save on demand with this number is complete."""

    def stop_by(self) -> float | None:
        """Monotonic time by which the workers must be gone; None: they get the usual grace."""

    def leaving(self, reason: str) -> None:
        """This node was told to leave; its workers still run. What their end does to the others' workers is no failure."""

    def last_will(self) -> LastWill | None:
        """What the reaper needs to take this node out of the job when the agent is killed; None: nothing."""

    def leave(self) -> None:
        """Leave the job to the others. A second call does nothing."""
