"""One round on this node: everything that is created when its workers start and closed when the round ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.hangs import HangHandling, show_stragglers
from elastic_ext.agent.postmortem import EndedRound
from elastic_ext.agent.progress_rows import progress_rows
from elastic_ext.agent.resume import ResumePoint
from elastic_ext.agent.saves import SaveOnDemand
from elastic_ext.base.printable import redacted
from elastic_ext.base.torch_private import reraise_signals
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.cuts import NOTHING_KNOWN
from elastic_ext.failures.host import HostEvidence
from elastic_ext.failures.ledger import MAX_STACKS, Report
from elastic_ext.observe.metrics import WorkerProgress
from elastic_ext.workers.hangs.detector import Stuck
from elastic_ext.workers.processes import HasStopBy
from elastic_ext.workers.progress import EndingWorkers
from elastic_ext.workers.stderr.tails import StderrTails


@dataclass(frozen=True)
class StopLimit:
    """The time by which the rendezvous wants this node's workers gone; see `RoundPart.stop_by`. wakeup: set when it changes."""

    wakeup: Wakeup
    stop_by: Callable[[], float | None]

    def fileno(self) -> int:
        return self.wakeup.fileno()

    def clear(self) -> None:
        reraise_signals(self.wakeup.clear())


class RunningRound:
    """The workers of this node from their start to the end of the round, with their companions.

    It is made when all workers run, and closed once. Invariant: after stop() no worker runs and none is sent a signal.

    Attributes:
        workers: their processes, progress and files.
        resume: the checkpoint that they were told to resume from.
        hangs: None if hang detection is off.
        saves: None if workers cannot be asked to save.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        ending: EndingWorkers,
        warm: Collection[int],
        resume: ResumePoint,
        hangs: HangHandling | None,
        saves: SaveOnDemand | None,
        others: Iterable[Companion],
    ) -> None:
        """Tell all companions that the workers have started.

        Args:
            ending: tells which workers are about to end with an error.
            warm: local ranks of the workers that were warm standbys.
            others: companions that live longer than this round.
        """
        self.workers, self.resume, self.hangs, self.saves = workers, resume, hangs, saves
        self._ending, self._warm = ending, warm
        self._stacks: list[str] = []  # for the verdict: the positions of workers that did not end by themselves
        self._companions = [*others, *filter(None, (saves, hangs, resume))]
        for companion in self._companions:
            companion.workers_started(workers)

    @property
    def failed(self) -> bool:
        """Whether a worker has failed, or says that it is about to end with an error."""
        return self.workers.processes.failed or bool(self._ending.exit_codes())

    @property
    def stopped(self) -> bool:
        """Whether the workers have been stopped."""
        return self.workers.processes.stopped

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stall."""
        return self.hangs is not None and self.hangs.stalled

    def failed_since(self) -> float | None:
        """Return when the first worker that failed has ended, monotonic; None if that is unknown.

        Of one that was killed, it is when the agent saw it: nothing tells when it ended.
        """
        ended = [row.ended_ns for row in self.workers.read_progress() if row.ends_with and row.ended_ns]
        ended += [each.seen_ns for each in self.workers.processes.exits.values() if each.failed]
        return min(ended) / 1e9 if ended else None

    def quiet_since(self) -> float | None:
        """Return when a worker of this node last gave a sign of life, monotonic; None if not all have given one."""
        signs = [row.sign_ns for row in self.workers.read_progress()]
        return max(signs) / 1e9 if signs and all(signs) else None

    def check(self) -> None:
        """Let each companion check the workers, which keep running."""
        for companion in self._companions:
            companion.check(self.workers)

    def stop(self, grace_s: float, show_stacks: bool = True, limit: HasStopBy | None = None) -> None:
        """Stop the workers that still run; kill those that outlive grace_s seconds.

        show_stacks: before killing those, dump their stacks. limit: may shorten grace_s at any time.
        """

        def on_stragglers(local_ranks: list[int]) -> None:
            if show_stacks and (limit is None or limit.stop_by() is None):  # dumping takes time
                self._stacks += show_stragglers(self.workers, local_ranks, grace_s)

        self.workers.processes.stop(grace_s, on_stragglers, ending=self._ending, limit=limit)

    def examine_hung(self) -> Mapping[int, Stuck]:
        """Find out where each worker hangs, while it still runs. Return those that the others wait for, by local rank."""
        assert self.hangs is not None
        self._stacks += self.hangs.examine(self.workers)
        return self.hangs.hung

    def ended(self, node: str, host: HostEvidence, stderr: StderrTails, result: RunResult) -> EndedRound:
        """Return the evidence of how the workers of this node ended. result: torch's."""
        hung = self.hangs.hung if self.hangs is not None else {}
        asked_to_end = result.state is WorkerState.UNHEALTHY
        return EndedRound(node, host, self.workers, stderr, self._warm, hung, result.failures, asked_to_end)

    def report(self, node: str, diagnosis: Diagnosis) -> Report:
        """Return this node's report on its failure, for the verdict of the job."""
        share = MAX_STACKS // max(1, len(self._stacks)) - 1  # the beginning of each is in the report
        stacks = "\n".join(text[:share] for text in self._stacks)
        reach = self.hangs.reach if self.hangs is not None else NOTHING_KNOWN
        newest = self.resume.newest_steps(self.workers.read_progress())
        path, ranks = redacted(self.resume.checkpoint.path), tuple(self.workers.ranks.values())
        return Report(node, diagnosis, self.resume.step, stacks, path, reach, *newest, ranks)

    def progress_rows(self) -> list[WorkerProgress]:
        """Return the workers' progress for the metrics. Any thread may call this."""
        step_s = self.hangs.step_s if self.hangs is not None else {}
        return progress_rows(self.workers.read_progress(), self.workers.ranks, step_s)

    def close(self) -> None:
        """Close everything that belongs to this round only. The workers have been stopped, or torch will stop them."""
        for companion in self._companions:
            companion.workers_ended(self.workers)
        self.workers.processes.close()
        if self.workers.progress is not None:
            self.workers.progress.remove()
