"""The agent: a LocalElasticAgent whose loop waits for events, asks what a failure means, and carries out the decision.

A worker dies -> evidence -> classify -> verdict of the job -> restart in a new round, or stop with the reason.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException

import elastic_ext
from elastic_ext.agent import companions, exits, feature, launch, leaving, verdicts
from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.round import RoundStart, RoundWatch, RunningRound
from elastic_ext.base import settings as settings_module
from elastic_ext.base.errors import BadCheckpoints, NodeDrained, NodeUnfit, RoundOver, StorageAway, usage_errors_exit
from elastic_ext.base.torch_private import TorchAgent, hangup_ignored, received, reraise_signals, taken_for_sigterm
from elastic_ext.base.wakeup import Wakeup, readable
from elastic_ext.failures import ledger, policy
from elastic_ext.rendezvous.address import own_name
from elastic_ext.rendezvous.contract import AgentHooks, JobDone, Rendezvous
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import AgentMetrics, GpuQuery, gpu_uuids, gpus_by_local_rank
from elastic_ext.workers import limits, logs, processes

logger = logging.getLogger(__name__)

# Errors of a host that lacks descriptors, processes, memory or room for files; another host may have them.
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)


class Supervisor(TorchAgent):
    """Supervises the workers of one node, from the first round of the job to its end.

    It holds the state of the job: rendezvous, settings, rules, metrics, companions. State that lives for one round only is in a
    `RunningRound`, which `RoundStart` makes and `RoundWatch` watches. Between two rounds there is no `RunningRound`.

    Invariants: the restart count that workers see only grows and is not a budget; a membership change is never charged; whenever
    the agent gives up, its result is FAILED.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, *args: Any, **kwargs: Any) -> None:
        self._handler = cast("Rendezvous", spec.rdzv_handler)  # one of ours: see OneShot
        self._settings: settings_module.Settings = self._handler.settings
        self._logs = logs.WorkerLogs(logs_specs)
        with usage_errors_exit():
            self._rules = verdicts.rules_of_users(self._settings.rules)
            # All before the run, because an error during it closes the job for all nodes.
            found = feature.load(feature.facts_of(self._handler, spec))
            self._on = companions.TurnedOn(found, launch.extras_fit(spec.local_world_size, limits.files_left()))
            os.rmdir(launch.make_run_dir(spec.local_world_size))
            super().__init__(launch.prepare(spec, self._settings), self._logs, *args, **kwargs)
            settings_module.check_times(self._settings, self._handler.torch_conf, self.shutdown_timeout_s)
        self._verdicts = verdicts.Verdicts(self._settings, self._handler)
        self._metrics = _metrics(self._settings, self._handler, spec.local_world_size, lambda: self._round)
        self._companions: companions.JobCompanions  # set while run() is under way
        self._beginning: RoundBeginning | None = None  # of the last round that was joined
        self._round: RunningRound | None = None
        self._leave_by: float | None = None  # monotonic time when the platform kills this agent; None if it need not leave
        self._hooks = AgentHooks(closing=lambda: self._verdicts.closing, topics=feature.TOPICS)
        self._handler.prepare(launch.program_of(spec, self._settings), self._hooks)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job on this node; see torch's agent. Unless it ends well, no process that was started here outlives it."""
        exits.install(self._settings.exit_codes)
        with limits.raised(), taken_for_sigterm(leaving.signals(os.environ)), self._verdicts.left(), ExitStack() as stack:
            self._companions = companions.JobCompanions(self.spec, self._handler, self._logs, self._metrics, self._on, stack)
            self._hooks.on_event = self._companions.wakeup.set
            self._hooks.on_wait = lambda: reraise_signals(self._companions.wakeup.signals())
            self._hooks.on_verdict, self._hooks.reaper_runs = self._companions.heard, self._companions.reaper.runs
            clean = False
            try:
                result = super().run(role)
                clean = result is not None and not result.is_failed()
                self._logs.failed = not clean
            except (SignalException, NodeDrained) as error:
                try:
                    self._verdicts.publish_leaving(error, self._companions.host)
                    self._close_round()
                finally:  # even if another signal comes
                    # The job stays open: the others form a round without this node at once, not only when its lease expires.
                    self._companions.leave(self._handler, error)
                raise
            finally:
                self._hooks.on_event = self._hooks.on_wait = lambda: None
                copy_s: float | None = 0.0  # if a signal interrupts what follows
                try:
                    self._close_round()
                    copy_s = None if self._leave_by is None else max(0.0, self._leave_by - time.monotonic())
                finally:
                    left = self._companions.finish(clean, copy_s)
            result = self._verdicts.stop_not_copied(left) if clean and left else result
            self._companions.observation.linger_at_close()
            return result

    # The loop: watch a round until it ends, classify its failure, carry out the decision.

    def supervise(self) -> RunResult:
        try:
            with usage_errors_exit():
                self.first_round()
                return self._run_rounds()
        except ledger.JobStopped as stopped:
            if not stopped.verdict.ends_job:
                self._handler.leave()  # the others continue without this node
            return self._stop_for(stopped.verdict)
        except JobDone as done:
            return exits.succeeded_without(self.group, done)
        except (BadCheckpoints, StorageAway) as error:
            return self._stop_for(self._verdicts.of_checkpoints(error))
        except (NodeUnfit, OSError) as error:
            if isinstance(error, OSError) and error.errno not in RESOURCE_ERRNOS:
                raise
            self._handler.leave()  # the others continue without this node
            return self._stop_for(self._verdicts.of_this_host(error))
        except SignalException as error:
            try:
                self._save_before_leaving(error)
            except SignalException as again:
                if again.sigval in exits.USER_SIGNALS or self._leave_by is not None:
                    raise
                self._save_before_leaving(error)  # timeout(1) sends two at once, before they are taken as one
            name = received(error).name
            self._handler.part.break_off(f"{self._handler.node.host} leaves: its agent received {name}", signal=name)
            raise

    def _run_rounds(self) -> RunResult:
        while True:
            result = RoundWatch(self, self._handler, self._companions, self._running, self._logs.stderr, self._stop_round).run()
            if result is not None and result.state is WorkerState.SUCCEEDED:
                self._count_workers("succeeded")
                if self._running.all_done(self._handler):
                    exits.set_succeeded()
                    logger.info("all workers of all nodes have succeeded")
                    return result
            if result is None or result.state is WorkerState.SUCCEEDED:
                self._metrics.restarted(self._companions.journal.restarts_unfailed(self._handler.part.over()))
                self.next_round()
                continue
            cause, others = verdicts.cause_and_others(self._failed_workers(result))
            verdict = self._conclude(result, cause)
            decision = self._for_this_node(verdict)
            logger.error("%s", self._companions.journal.failed(cause, others, verdict, decision))
            self._companions.observation.decided(verdict, decision)
            self._running.beginning.go_back(verdict, self._handler.node.id)
            if decision.action is policy.Action.STOP:
                return self._stop(verdict, decision, verdicts.process_failures(cause, others))
            self._prepare_restart(verdict, decision)
            self._metrics.restarted(decision.kind)
            self.next_round()

    def _failed_workers(self, result: RunResult) -> list[verdicts.FailedWorker]:
        """Gather the evidence of each worker that failed here, and classify it."""
        self._logs.stderr.flush()
        ended = self._running.ended(self._handler.node.host, self._companions.host.evidence(), self._logs.stderr, result)
        return verdicts.failed_workers(ended, self._rules)

    def _conclude(self, result: RunResult, cause: verdicts.FailedWorker) -> ledger.JobVerdict:
        """Return the verdict of the whole job."""
        if result.state is WorkerState.UNHEALTHY:
            return self._verdicts.kernel_sleep()
        with self._phase("verdict"):
            return self._handler.part.conclude(self._running.report(self._handler.node.host, cause.diagnosis))

    def _prepare_restart(self, verdict: ledger.JobVerdict, decision: policy.Decision) -> None:
        """Do what the verdict requires before the next round, and wait as long as it says. A signal ends the wait."""
        if decision.charged:
            self.charge_restart()
        if decision.cold:
            self._companions.warm_starts.skip_next_round()
        self._metrics.enter(families.BACKOFF)
        _wait(decision.delay_s, self._companions.wakeup)

    def _stop(self, verdict: ledger.JobVerdict, decision: policy.Decision, failures: Mapping[int, ProcessFailure]) -> RunResult:
        self._count_workers("failed")
        self.group.state = WorkerState.FAILED
        return self._verdicts.stop(verdict, decision, failures)

    def _stop_for(self, verdict: ledger.JobVerdict) -> RunResult:
        """Stop for a reason other than a failed worker on this node."""
        self._stop_round()
        decision = self._for_this_node(verdict)
        logger.error("%s", self._companions.journal.stopped(verdict, decision))
        self._companions.observation.decided(verdict, decision)
        return self._stop(verdict, decision, verdicts.remote_failure(verdict))

    def _for_this_node(self, verdict: ledger.JobVerdict) -> policy.Decision:
        return verdict.for_node(self._handler.node.id, self._settings.exit_codes)

    def _save_before_leaving(self, error: SignalException) -> None:
        """Ask the job for a checkpoint in the time that is left, unless the user stops the job."""
        leaving.take_as_one(error.sigval, lambda: self._leave_by)  # first: asking for the time takes some
        grace_s = leaving.time_left_s(self._settings, self.shutdown_timeout_s)
        self._leave_by = self._companions.journal.must_leave(received(error), grace_s)
        round_, wakeup, wake_pipe = self._round, self._companions.wakeup, self._companions.wake_pipe
        if error.sigval in exits.USER_SIGNALS or round_ is None or round_.saves is None:
            return
        name, stop_s = received(error).name, _stop_grace_s(self.shutdown_timeout_s)
        took_s = round_.saves.save_before_leaving(name, grace_s, stop_s, round_.workers, wakeup, wake_pipe)
        if took_s is not None:
            self.shorten_shutdown(max(1.0, grace_s - took_s))

    def join_round(self) -> None:
        """Rendezvous and agree on the checkpoint to resume from. If the round ends first, start over."""
        launch.check_health(self._settings, self.spec.local_world_size)
        if first := self._beginning is None:
            self._companions.warm_starts.await_first(self._handler)
        while True:
            with self._phase("rendezvous"):
                super().join_round()
            try:
                self._beginning = self._companions.agree(self.group)
                break
            except RoundOver as over:
                logger.warning("round %s ended before its workers were started: %s", self._handler.part.round, over)
        self._companions.observation.joined(self.group, self._handler.part.round, self._beginning.step)
        self._companions.journal.joined(self.group, self._beginning)
        if first:  # logged as a warning, because torchrun shows nothing below that level
            backend, run_id, url = self._handler.get_backend(), self._handler.get_run_id(), self._companions.observation.url
            logger.warning("%s", launch.start_line(backend, run_id, url, self._settings, self._beginning.checkpoint))

    def known_workers(self) -> list[Worker] | None:
        return self._handler.part.workers()

    def start_workers(self) -> dict[int, int]:
        """Start the workers of the joined round; see `RoundStart.run`. Return their pids by local rank."""
        assert self._beginning is not None, "start_workers before join_round"
        start = RoundStart(self._handler, self._settings, self._logs, self._companions, self.group)
        with self._phase("start"), hangup_ignored():
            self._round = start.run(self._beginning, super().start_workers, lambda: self.leads_groups)
        self._metrics.enter(families.RUNNING)
        self._count_workers("running")
        return self._round.workers.processes.pids

    def stop_workers(self) -> None:
        """Stop the workers if they still run, let torch reap them, and close the round."""
        self._stop_round()
        super().stop_workers()
        self._close_round()

    def _stop_round(self, grace_s: float | None = None, after_failure: bool = False) -> None:
        """Stop the workers that still run, once per round.

        grace_s: overrides the usual grace, in seconds; the stacks of workers that outlive it are then not dumped. after_failure:
        whether they are stopped because a worker of the job has failed.
        """
        round_ = self._round
        if round_ is None or round_.stopped:
            return
        limit = processes.StopLimit(self._companions.wakeup, self._handler.part.stop_by)
        with self._phase("stop"):
            given_s = _stop_grace_s(self.shutdown_timeout_s) if grace_s is None else grace_s
            round_.stop(given_s, show_stacks=grace_s is None, limit=limit, after_failure=after_failure)
        self._count_workers("stopped")

    def _close_round(self) -> None:
        """Close the round; only this sets it to None. A signal may interrupt this call, and a second call is safe."""
        if self._round is not None:
            self._round.close()
            self._round = None
        elif self._beginning is not None:
            self._beginning.release()  # the workers of the joined round were never started

    @property
    def _running(self) -> RunningRound:
        assert self._round is not None, "between two rounds"
        return self._round

    def _count_workers(self, state: str) -> None:
        self._metrics.workers(**{state: self.spec.local_world_size})

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a recovery. The first start of a job is not a recovery."""
        start = self._companions.journal.begin(name)
        self._metrics.enter(name)
        yield
        if name == "stop" or self._handler.part.round > 1:
            self._metrics.phase(name, time.monotonic() - start)


def _stop_grace_s(shutdown_s: float) -> float:
    """Return how long workers get to end. shutdown_s: the --shutdown-timeout, or what is left of it."""
    return min(settings_module.STOP_GRACE_S, shutdown_s)


def _metrics(
    settings: settings_module.Settings, handler: Rendezvous, workers: int, running: Callable[[], RunningRound | None]
) -> AgentMetrics:
    return AgentMetrics(
        version=elastic_ext.__version__,
        torch=torch.__version__,
        run_id=handler.get_run_id(),
        node=own_name(settings),
        gpus=GpuQuery(lambda: gpus_by_local_rank(workers, gpu_uuids(), os.environ)).answer,
        progress=lambda: round_.workers.rows() if (round_ := running()) is not None else [],
    )


def _wait(delay_s: float, wakeup: Wakeup) -> None:
    """Wait, unless a signal ends this agent."""
    deadline = time.monotonic() + delay_s
    while (left_s := deadline - time.monotonic()) > 0:
        readable(wakeup, left_s)
        reraise_signals(wakeup.clear())
