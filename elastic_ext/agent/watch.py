"""The watch over a running round: it waits for events, checks the workers, and says how the round ended for this node."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.metrics import put_metric

from elastic_ext.agent import postmortem
from elastic_ext.agent.companions import JobCompanions
from elastic_ext.agent.round import RunningRound
from elastic_ext.base.torch_private import TorchAgent, reraise_signals
from elastic_ext.rendezvous.contract import EndKind, Rendezvous, RoundEnd

logger = logging.getLogger(__name__)

KERNEL_SLEEP_CHECK_S = 1.0  # how often torch's check for workers asleep in the kernel runs, if the user turned it on


class RoundWatch:
    """Watches the workers of one round until they have finished or failed, or until the round is over."""

    def __init__(
        self,
        agent: TorchAgent,
        handler: Rendezvous,
        companions: JobCompanions,
        running: RunningRound,
        stop: Callable[[float | None], None],
    ) -> None:
        """stop: stops the workers that still run, with the given grace in seconds, or the usual one for None."""
        self._agent, self._handler, self._companions = agent, handler, companions
        self._running, self._stop = running, stop

    def run(self) -> RunResult | None:
        """Return how the workers ended; None if the round is over and no worker of this node has failed.

        Unless the workers have finished, none runs when this returns.
        """
        agent = self._agent
        while True:
            self._await_event()
            result = self._check_workers()
            agent.group.state = result.state
            put_metric(f"workers.{agent.spec.role}.remaining_restarts", agent.remaining_restarts)
            put_metric(f"workers.{agent.spec.role}.{result.state.name.lower()}", 1)
            if result.state is WorkerState.UNKNOWN:  # torch has lost track of the processes; we have not
                self._stop(None)
            if result.state is not WorkerState.HEALTHY:
                return result
            self._running.check()
            over = self._handler.part.over()
            if over is not None:
                return self._end(over)

    def _await_event(self) -> None:
        """Block until a worker ends or wakes us, a function returns, the reaper dies, a signal arrives, or a check is due."""
        checks_s: list[float] = []
        if self._agent.watches_kernel_sleep:
            checks_s.append(KERNEL_SLEEP_CHECK_S)
        if self._running.hangs is not None:
            checks_s.append(self._running.hangs.next_check_s())
        wakeup, wake_pipe, reaper = self._companions.wakeup, self._companions.wake_pipe, self._companions.reaper
        reaper_fd = [reaper.pidfd] if reaper.pidfd is not None else []
        processes = self._running.workers.processes
        processes.wait(min(checks_s, default=None), wakeup, wake_pipe, *reaper_fd, *self._agent.result_readers)
        reraise_signals(wakeup.clear())  # after the wait, before the check: an event during the check must end the next wait
        wake_pipe.clear()
        reaper.revive()

    def _check_workers(self) -> RunResult:
        """Return the state of the worker group. If one worker failed, all are stopped when this returns."""
        processes = self._running.workers.processes
        if self._running.failed:
            self._handler.part.break_off(
                f"workers failed on {self._handler.host}"
            )  # first: workers elsewhere wait in collectives
            self._companions.observation.acts(self._running.failed_since())
            self._companions.host.start_asking()
            self._stop(None)
            return self._agent.close_failed()
        if self._agent.result_readers or not processes.running:
            result = self._agent.reap()
            processes.poll()
            return result
        asleep = self._agent.asleep_in_kernel()
        if asleep is not None:
            self._stop(None)
            return asleep
        return RunResult(WorkerState.HEALTHY)

    def _end(self, over: RoundEnd) -> RunResult | None:
        """Stop the workers of a round that is over; return their failure, or None if none failed by itself."""
        logger.warning("elastic_ext: round %s is over: %s; stopping all workers", self._handler.round, over)
        self._companions.journal.round_over(over)
        hung = over.kind is EndKind.STALLED and self._running.stalled
        if over.kind is EndKind.STALLED:
            self._companions.observation.hung()
        if hung:
            quiet_since = self._running.quiet_since()
            self._companions.observation.acts(quiet_since)
            self._companions.journal.hung(self._running.examine_hung(), quiet_since)
        self._stop(0.0 if hung else None)  # a worker that waits forever cannot end cleanly
        self._companions.observation.round_ended(over.reason)
        if not hung and not postmortem.failed_by_itself(self._running.workers):
            return None
        self._companions.host.start_asking()
        return self._agent.close_failed()
