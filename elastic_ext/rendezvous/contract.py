"""The contract between the agent and a rendezvous: the agent uses nothing else of it.

`rendezvous.handler` and `embedded.one_machine` implement it, on top of torch's own RendezvousHandler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters

from elastic_ext.base.contracts import Exchange
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.printable import printable
from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import JobStopped, JobVerdict, Report
from elastic_ext.rendezvous.board import Topic, Topics
from elastic_ext.rendezvous.configuration import WorkerProgram
from elastic_ext.rendezvous.drains import Admission
from elastic_ext.rendezvous.round_records import Drain, EndKind

if TYPE_CHECKING:
    from elastic_ext.etcd import CallObserver
    from elastic_ext.rendezvous.job_status import JobStatus

__all__ = ["AgentHooks", "EndKind", "JobDone", "NodeIdentity", "Rendezvous", "RoundEnd", "RoundPart"]

logger = logging.getLogger(__name__)

V = TypeVar("V")

ETCD, C10D = "ext_etcd", "ext_c10d"  # our backends
JOIN_TIMEOUT_S = 600.0  # torch's default for its own rendezvous


class JobDone(RendezvousClosedError):  # type: ignore[misc, unused-ignore]  # torch's types are not checked
    """All workers of the job have finished while this node waited as a spare, or before it came: nothing went wrong."""


@dataclass(frozen=True)
class RoundEnd:
    """The end of a round, after which its workers must stop. reason: one line, for people. lost: a node's loss has ended it."""

    kind: EndKind
    reason: str
    lost: bool = False

    def __str__(self) -> str:
        return self.reason


class RoundPart(Protocol):
    """This node's part in one round. After the round's end it stays that of the last round until the next one begins."""

    round: int  # number of the round, from 1; 0 before the first. It is the same on every node and never reused in a job

    def workers(self) -> list[Worker] | None:
        """Return the ranks of this node's workers if the rendezvous knows them; None if torch is to work them out."""

    @property
    def exchange(self) -> Exchange:
        """Return the exchange by which the nodes agree on what to resume from."""

    def over(self) -> RoundEnd | None:
        """Return why the workers of this round must stop; None while it runs."""

    def stop_by(self) -> float | None:
        """Return the monotonic time by which the workers must be gone; None if they get the usual grace."""

    def break_off(self, reason: str, failed: bool = False, signal: str = "") -> None:
        """Have all nodes end this round; return at once. What the end of the workers here causes elsewhere is no failure then.

        failed: as workers of this node have failed. signal: name of the one for which this node leaves; "": it does not.
        """

    def post(self, topic: Topic[V], value: V | None) -> None:
        """Post a value for all nodes of this round, in place of this node's last one on the topic; None: withdraw that.

        What follows is the topic's rule (`topics`). Returns at once.
        """

    def agreed(self, topic: Topic[V]) -> V | None:
        """Return the topic's value for all nodes of this round; None: there is none yet."""

    def conclude(self, report: Report) -> JobVerdict:
        """Return the one verdict of the whole job. The workers of this node have failed and been stopped."""

    def await_all_done(self) -> bool:
        """Wait, after this node's workers have finished, for those of all nodes; then the job has ended well.

        Return False if the round ends otherwise.
        """


@dataclass(frozen=True)
class NodeIdentity:
    """Who this node is in the job."""

    id: str  # this agent's unique name within the job
    host: str  # this machine's name
    address: str  # by which the other nodes reach this one


@dataclass
class AgentHooks:
    """What a rendezvous asks of the agent that uses it, and says to it. The agent may replace each of them at any time."""

    on_event: Callable[[], None] = lambda: None  # called from any thread when `part.over` or `part.agreed` may have changed
    on_wait: Callable[[], None] = lambda: None  # called every second by a main thread that waits for other nodes; it may raise
    # Called, while this node waits for the next round, with the verdict on the last one, maybe again.
    on_verdict: Callable[[JobVerdict], None] = lambda verdict: None
    reaper_runs: Callable[[], bool] = lambda: False  # returns whether one runs that ends the workers if the agent is killed
    # Returns what the other nodes do if this one closes the job, once it fails; None: nothing is known.
    closing: Callable[[], JobVerdict | None] = lambda: None
    topics: Topics = ()  # of features, with a rule each, for the leader; the same on all nodes


class Rendezvous(Protocol):
    """The part of a rendezvous that the agent uses for as long as it is in the job; `part` is for one round."""

    settings: Settings  # this agent's, read once
    torch_conf: Mapping[str, Any]  # the user's --rdzv-conf, as torch parsed it
    node: NodeIdentity

    @property
    def launch(self) -> str:
        """Return the name of this launch of the job, the same on every node; round numbers increase within one launch."""

    @property
    def part(self) -> RoundPart:
        """Return this node's part in the current round."""

    def get_backend(self) -> str:
        """Return the value of --rdzv-backend."""

    def get_run_id(self) -> str:
        """Return the value of --rdzv-id, or its substitute."""

    def prepare(self, program: WorkerProgram, hooks: AgentHooks) -> None:
        """Set what this node offers to a round, and the job's budget. Our agent calls it, once, before the first round."""

    def trains_without_us(self) -> bool:
        """Return whether the job trains, before this node has entered it; False if that is unknown."""

    @property
    def drain(self) -> Drain | None:
        """An operator's request that this node leave the job; None: there is none. When it may go, it is in no round any more."""

    def replace_host(self, host: str, reason: str, because: str) -> Admission:
        """Have the nodes of a host leave at the next checkpoint, if a spare waits. From a thread that may wait for seconds.

        because: how the reason begins; if another host has left for the same, this one stays.

        Raises ElasticExtError, OSError: it is unknown whether it leaves.
        """

    def share_goodput(self, spent: Spent) -> Shared:
        """Add what this agent has spent since the last call; return the sum of the job as far as known. For a thread of its own.

        Raises ElasticExtError or OSError; then nothing was added, as far as this node knows.
        """

    @property
    def link_fds(self) -> tuple[int, ...]:
        """Descriptors for the reaper to inherit: while a process has them open, the other nodes do not take this one for dead."""

    def observe_etcd(self, observer: CallObserver) -> Callable[[], float | None] | None:
        """Let `observer` hear of all calls to etcd. Return None on a backend without etcd.

        Returns:
            A function that returns until when, monotonic, etcd certainly keeps this node in the job; None: it does not now.
        """

    def show(self, report: str, last: bool) -> None:
        """Publish this node's report for the job's status. From a thread that may wait for seconds.

        last: nothing follows. Raises ElasticExtError, OSError: the report is not published.
        """

    def status(self) -> JobStatus:
        """Return what can be known of the whole job, for people. As for `show`, from a thread that may wait."""

    def shutdown(self) -> bool:
        """End the job for all nodes if it is to end, then leave it. A second call does nothing."""

    def leave(self) -> None:
        """Leave the job to the other nodes. A second call does nothing."""


class Base(RendezvousHandler):  # type: ignore[misc, unused-ignore]  # torch's types are not checked
    """What both implementations of `Rendezvous` have in common."""

    is_elastic_ext = True
    node: NodeIdentity
    part: RoundPart

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        self.settings = settings
        self.torch_conf = dict(params.config)
        self.attached = False  # to our agent; otherwise another agent uses this (`warn_other_agent`)
        self.hooks = AgentHooks()
        self._backend: str = params.backend
        self._run_id: str = params.run_id

    def prepare(self, program: WorkerProgram, hooks: AgentHooks) -> None:
        self.attached, self.hooks = True, hooks

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Return True, for torch: the workers connect to the round's store, which is up before they start."""
        return True


# The rendezvous under an agent that is not ours: torch's LocalElasticAgent, a project's own, or a loop. It only forms rounds: the
# next one starts when a node calls `next_rendezvous` again, is lost, or joins. One warning says so. It also appears when torch's
# launcher does not build our agent because it is patched or newer than this package.


def warn_other_agent(handler: Base) -> None:
    """Warn before the first round if the agent is not ours. The handler calls it before each round."""
    if not handler.attached and handler.part.round == 0:
        logger.warning(
            "elastic_ext: this rendezvous is used by an agent other than elastic_ext's: it forms rounds, but there are no "
            "verdicts, no job-wide budget, no choice of a checkpoint, no warm standbys, no hang detection and no metrics; if you "
            "use torchrun, its launcher is patched or newer than elastic_ext supports: run `python -m elastic_ext.agent`, which "
            "takes the same options"
        )


@contextmanager
def closed_by_verdict(handler: Base) -> Iterator[None]:
    """Present a job ended by a verdict as closed: another agent does not know verdicts."""
    try:
        yield
    except JobStopped as stopped:
        if handler.attached:
            raise
        raise RendezvousClosedError(f"the job is over: {printable(str(stopped))}") from stopped
