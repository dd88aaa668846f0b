"""The agent's structured events and spans; `events.event_table` says what each event means.

A companion for what happens to the workers; the agent's loop calls it for the rest, where it logs the same. It never decides.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from signal import Signals
from types import TracebackType

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

import elastic_ext
from elastic_ext.agent import beginning, companion, exits, launch, verdicts
from elastic_ext.agent.verdicts import FailedWorker
from elastic_ext.base import errors, threads
from elastic_ext.base.diagnosis import NODE_LOST
from elastic_ext.base.settings import Settings
from elastic_ext.events import receivers
from elastic_ext.events.event_table import MEMBERSHIP, Cause, PastRecovery, RecoveryTrace, Source
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Decision
from elastic_ext.hangs.detector import Stuck
from elastic_ext.rendezvous.address import own_name
from elastic_ext.rendezvous.contract import EndKind, Rendezvous, RoundEnd
from elastic_ext.telemetry import agent_metrics, families

logger = logging.getLogger(__name__)

FIRST = "start"  # cause of the first round of an agent


@dataclass
class _Reported:
    """What was last reported, since only changes are."""

    members: tuple[int, int] | None = None  # nodes and workers of the last round
    saved_step: int | None = None  # of this round
    again: bool = False  # whether this agent tells the console what comes of a restart


class Journal(companion.Companion):
    """The events of one agent, from its start to its end, which it reports as a context manager."""

    def __init__(self, spec: WorkerSpec, settings: Settings, handler: Rendezvous, metrics: agent_metrics.AgentMetrics) -> None:
        """metrics: count recoveries, too."""
        source = Source(handler.get_run_id(), own_name(settings), os.getpid())
        self.events = receivers.of_events(settings.events_file, source, lambda: handler.part.round)  # also for the agent
        self.warm = 0  # workers of this round that were warm standbys; set before their start is reported
        self.clean = False  # whether the job has ended well
        self._spans = receivers.of_recoveries(elastic_ext.__version__, source)
        self.end_limit = companion.EndLimit()  # for how long the end of the agent may wait
        self._handler, self._metrics = handler, metrics
        metrics.on_copied = lambda lag_steps: self.events.emit("checkpoint_copied", lag_steps=lag_steps)
        self._ended = False
        self._trace = RecoveryTrace()
        self._workers: companion.LocalWorkers | None = None  # while they run, and have not all made a step
        self._began = time.monotonic()  # of the phase, then of the workers
        self._reported = _Reported()
        self.events.emit(
            "agent_started",
            version=elastic_ext.__version__,
            torch=torch.__version__,
            backend=handler.get_backend(),
            workers=spec.local_world_size,
            max_restarts=launch.max_restarts(spec, settings),
            settings=shown_settings(settings),
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with threads.held() as received:
            self.end(error)
            self.events.close(self.end_limit.left_s())
            self._spans.close(self.end_limit.left_s())
        if error is None:
            threads.raise_again(received)

    def end(self, error: BaseException | None) -> None:
        """Report that the agent ends, and why. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if isinstance(error, errors.NodeDrained):
            self.events.emit("node_drained", reason=error.reason, step=error.step)
        elif isinstance(error, errors.NodeRefused):
            self.events.emit("node_refused", reason=str(error))
        code, state = ended(error, exits.job.verdict_code, self.clean)
        self._recovered(self._trace.given_up(time.monotonic()))
        self.events.emit("agent_ended", exit_code=code, state=state, error=None if error is None else type(error).__name__)

    # The loop calls these.

    def begin(self, phase: str) -> float:
        """Note that a phase of a recovery begins; return when, in monotonic seconds."""
        self._look_for_first_steps()
        now = time.monotonic()
        self._trace.entered(phase, self._handler.part.round, now)
        if phase == families.STARTING:
            self._began = now
        return now

    def joined(self, group: WorkerGroup, resumed: beginning.RoundBeginning) -> None:
        """Report a new round and of what it resumes from, also in the log."""
        # Who has seen a failure looks for what came of it: one line for a job is a warning, as the failure is.
        self._reported.again = group.group_rank == 0 and self._reported.members is not None
        resumed.log(logging.WARNING if self._reported.again else logging.INFO)
        if resumed.checkpoint.lost:
            self._metrics.copies_lost()
        cause, self._trace.cause = self._trace.cause, None
        members = group.group_world_size, group.workers[0].world_size
        before, self._reported.members = self._reported.members, members
        self.events.emit(
            "round_started",
            nodes=members[0],
            node_rank=group.group_rank,
            world_size=members[1],
            ranks=[worker.global_rank for worker in group.workers],
            cause=FIRST if before is None else (cause or Cause()).kind,
        )
        if before is not None and before != members:
            self.events.emit(
                "membership_changed",
                nodes_before=before[0],
                nodes=members[0],
                world_size_before=before[1],
                world_size=members[1],
            )
        if self._handler.settings.checkpoint_dir is not None:
            chosen = resumed.checkpoint
            self.events.emit("checkpoint_chosen", path=chosen.path or None, step=chosen.at, reason=chosen.reason)

    def of_etcd(self, outage: agent_metrics.OutageChange) -> None:
        """Report that etcd does not answer, or does so again. Any thread may call this."""
        if outage.over:
            self.events.emit("etcd_available", endpoint=outage.endpoint, seconds=outage.seconds)
        else:
            self.events.emit("etcd_unavailable", endpoint=outage.endpoint, seconds=outage.seconds)

    def round_over(self, over: RoundEnd) -> None:
        """Report that the workers of this node must stop, though none of them has failed."""
        cause = cause_of(over)
        self._trace.stopped_for(cause)
        self.events.emit("round_over", cause=over.kind.value, reason=over.reason, kind=cause.kind)

    def restarts_unfailed(self, over: RoundEnd | None) -> str:
        """Return the kind of a restart before which no worker of this node has failed. over: how the round has ended, if known.

        Invariant: metrics and events name the same kind, that of the end as this agent first saw it.
        """
        if self._trace.cause is None and over is not None:  # the workers had finished, so nothing had to stop
            self._trace.stopped_for(cause_of(over))
        return (self._trace.cause or Cause()).kind

    def hung(self, culprits: Mapping[int, Stuck], since: float | None) -> None:
        """Report whom the others wait for. culprits: by local rank. since: the last sign of life, monotonic; None: unknown."""
        found, quiet_s = culprits.values(), None if since is None else max(0.0, time.monotonic() - since)
        self.events.emit("hang", culprits=[each.rank for each in found], reasons=[each.reason for each in found], seconds=quiet_s)

    def failed(self, cause: FailedWorker, others: Sequence[FailedWorker], verdict: JobVerdict, decision: Decision) -> str:
        """Report a failure on this node and of the verdict; return the text for the log. See `verdicts.failure_text`."""
        diagnosis, evidence = cause.diagnosis, cause.diagnosis.evidence
        self._trace.failed(verdicts.seen_failure(cause))
        self.events.emit(
            "failure",
            rank=cause.rank,
            local_rank=cause.local_rank,
            worker_pid=cause.pid,
            exit_code=evidence.exit_code,
            signal=evidence.signal,
            exception=evidence.exception.type if evidence.exception is not None else None,
            step=evidence.step,
            kind=diagnosis.kind,
            rule=diagnosis.rule,
            fingerprint=diagnosis.fingerprint,
            reason=diagnosis.reason,
            others=[other.rank for other in others],
        )
        self._decided(verdict, decision)
        return verdicts.failure_text(cause, others, verdict, decision, self._handler.node.id)

    def stopped(self, verdict: JobVerdict, decision: Decision) -> str:
        """Report a verdict that no failure on this node has caused; return the text for the log. decision: for this node."""
        self._decided(verdict, decision)
        return verdicts.line_elsewhere(verdict, decision, self._handler.node.id)

    def _decided(self, verdict: JobVerdict, decision: Decision) -> None:
        phases = self._trace.seconds(time.monotonic())
        self._trace.stopped_for(Cause(decision.kind, decision.word, decision.reason))
        if decision.delay_s > 0:
            self.begin(families.BACKOFF)
        self.events.emit(
            "decision",
            decision=decision.word,
            action=decision.action.value,
            kind=decision.kind,
            rule=decision.rule,
            reason=decision.reason,
            culprit_rank=verdict.rank,
            culprit_host=verdict.host,
            charged=decision.charged,
            restarts=verdict.restarts,
            max_restarts=verdict.limit,
            delay=decision.delay_s,
            phases=phases,
            exit_code=decision.exit_code,
        )

    def must_leave(self, received: Signals, grace_s: float) -> float:
        """Report that a signal ends this agent; return the monotonic time, grace_s from now, by which it must have ended."""
        if received in exits.USER_SIGNALS:
            self.events.emit("interrupted", signal=received.name)
        else:
            self.events.emit("preemption_noticed", signal=received.name, grace=grace_s)
        return time.monotonic() + grace_s

    # What happens to the workers.

    def workers_started(self, workers: companion.LocalWorkers) -> None:
        now = time.monotonic()
        self._trace.ran(now)
        pids = [workers.processes.pids[local_rank] for local_rank in sorted(workers.processes.pids)]
        self.events.emit(
            "workers_started", pids=pids, warm=self.warm, cold=len(pids) - self.warm, seconds=max(0.0, now - self._began)
        )
        self._workers, self._began = workers, now

    def check(self, workers: companion.LocalWorkers) -> None:
        self._look_for_first_steps()
        saved = [progress for progress in workers.read_progress() if progress.saved_step is not None]
        newest = max(saved, key=lambda progress: progress.saved_ns, default=None)
        if newest is not None and newest.saved_step is not None and newest.saved_step != self._reported.saved_step:
            self._reported.saved_step = newest.saved_step
            self.events.emit("checkpoint_saved", step=newest.saved_step, seconds=newest.save_s)

    def workers_ended(self, workers: companion.LocalWorkers) -> None:
        self.check(workers)
        exits_ = workers.processes.exits
        codes = {str(rank): exits_[local].exitcode if local in exits_ else None for local, rank in workers.ranks.items()}
        self.events.emit("workers_stopped", exit_codes=codes, seconds=max(0.0, time.monotonic() - self._began))
        self._workers = self._reported.saved_step = None

    def _look_for_first_steps(self) -> None:
        """Report once per round when all workers of this node have made a step."""
        rows = self._workers.read_progress() if self._workers is not None else []
        if not rows or not all(row.first_step_ns for row in rows):
            return
        self._workers, at = None, max(row.first_step_ns for row in rows) / 1e9
        self.events.emit("first_step", seconds=max(0.0, at - self._began))
        if (recovery := self._trace.first_steps(at)) is not None:
            self._metrics.recovered(recovery, max(row.loading_s for row in rows))
            self._recovered(recovery)

    def _recovered(self, recovery: PastRecovery | None) -> None:
        if recovery is None:
            return
        self._spans.recovered(recovery)
        if recovery.recovered:
            cause = recovery.cause
            self.events.emit(
                "recovered",
                cause=cause.kind,
                reason=cause.reason,
                seconds=recovery.end - recovery.begin,
                phases=recovery.seconds(),
            )
            if self._reported.again:
                logger.warning("training again after %.2f s", recovery.end - recovery.begin)


def cause_of(over: RoundEnd) -> Cause:
    """Return why workers stop of which none has failed: a node was lost, this one included, or nodes come or leave."""
    lost = over.lost or over.kind is EndKind.CUT_OFF
    return Cause(NODE_LOST if lost else MEMBERSHIP, reason=over.reason)


def shown_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from their defaults, as texts, without secrets."""
    found = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default and not each.metadata["type"].secret:
            found[each.name] = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return found


def ended(error: BaseException | None, verdict_code: int | None, clean: bool) -> tuple[int, str]:
    """Return exit code and state of an agent that ends.

    error: what ends it. verdict_code: of the verdict that ended the job. clean: whether the job ended well. Without all three the
    rendezvous was closed, and torch ends with an error.
    """
    if error is None and verdict_code is None:
        return (0, "succeeded") if clean else (1, "error")
    if error is None:
        return (verdict_code or 0, "failed")
    code = exits.exit_code_of(error)
    if code is None:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    if isinstance(error, errors.NodeDrained):
        return code, "drained"
    return code, "signalled" if isinstance(error, SignalException) else "error"
