"""The parts that work beside the workers as long as the agent runs: opened before the first round, closed after the last."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import time
from contextlib import ExitStack, closing

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch, trainjob
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.agent.journal import Journal
from elastic_ext.agent.last_words import HURRIED_S, LAST_WORDS_S
from elastic_ext.agent.memory import MemoryCopies
from elastic_ext.agent.observation import Observation
from elastic_ext.agent.standbys import WarmStarts, warm_starts
from elastic_ext.base.held_signals import held, raise_again
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.checkpoints.copying import copier
from elastic_ext.checkpoints.copying.copier import Copier
from elastic_ext.failures.host import HostProbe
from elastic_ext.observe.metrics import bridge_torchelastic
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers.hangs.flight_recorder import FlightRecorder
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.reaper.client import Reaper
from elastic_ext.workers.standby.rules import ColdReason
from elastic_ext.workers.stderr.tails import StderrTails
from elastic_ext.workers.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

HURRIED_SHARE_S = 0.3  # the other nodes wait for this one to leave
_LACKING = "the limit on open files is low: no warm standbys, and no stderr tails as evidence; raise it (ulimit -Hn)"


class Copying(Companion):
    """Tells the checkpoint copier about saves."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def check(self, workers: LocalWorkers) -> None:
        self._copier.update_saves(sum(progress.saves for progress in workers.read_progress()))

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._copier.look_now()  # a worker may have saved just before it ended


class EvidenceGathering(Companion):
    """Tells the host evidence when a round starts, because earlier events have nothing to do with that round."""

    def __init__(self, host: HostProbe) -> None:
        self._host = host

    def workers_started(self, workers: LocalWorkers) -> None:
        self._host.round_started(workers.processes.pids.values())


class Reaping(Companion):
    """Tells the reaper which workers to end, and how to take this node out of the job, if the agent is killed."""

    def __init__(self, reaper: Reaper, handler: Rendezvous) -> None:
        self._reaper, self._handler = reaper, handler
        handler.reaper_runs = reaper.runs

    def workers_started(self, workers: LocalWorkers) -> None:
        self._reaper.watch(workers.processes.pids.values(), self._handler.last_will())


class JobCompanions:
    """The companions that outlive a round, and the descriptors that the loop waits for.

    Attributes:
        token: marks every process that this agent starts, for the reaper.
        journal: what the agent tells in events.
        observation: what the agent shows.
        wakeup: readable when a signal arrives or the rendezvous has an event.
        wake_pipe: readable when a worker has news.
        memory: the copies of the workers' state in memory.
        flight_recorder: None without NCCL, or if hang detection is off.
        copier: None without a local tier.
        round_companions: those that the loop calls as a `Companion`, in this order. A new companion is one more line here.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        handler: Rendezvous,
        logs: WorkerLogs,
        metrics: AccountedMetrics,
        extras: bool,
        stack: ExitStack,
    ) -> None:
        """Open all of them. The wakeup comes first, so that no signal is missed; then the run directory, which holds the files of
        the others; then the reaper, before the processes that it has to end.

        Args:
            extras: whether enough descriptors are left for warm standbys and for the workers' stderr.
            stack: closes everything that `finish` does not end, in reverse order.
        """
        self.token = secrets.token_hex(16)
        self.wakeup = stack.enter_context(Wakeup())
        after_journal = stack.enter_context(ExitStack())
        self.journal = stack.enter_context(Journal(spec, settings, handler, metrics))
        self.observation = Observation(metrics, settings, handler, self.wakeup, self.journal.of_etcd)
        after_journal.callback(self.observation.close)  # it may linger
        stack.enter_context(bridge_torchelastic(metrics))
        stack.enter_context(logs.owned_directory())
        logs.run_dir = launch.make_run_dir(spec.local_world_size)
        stack.callback(shutil.rmtree, logs.run_dir, ignore_errors=True)
        stack.callback(logs.remove)
        self.observation.read_scripts(logs.run_dir)
        self.wake_pipe = stack.enter_context(closing(WakePipe(os.path.join(logs.run_dir, "wake"))))
        logs.stderr = stack.enter_context(closing(StderrTails(extras and settings.stderr_tail and settings.bootstrap)))
        self.memory = stack.enter_context(MemoryCopies(settings, logs.run_dir, lambda: handler.address, metrics))
        self.host = HostProbe(settings)
        stack.callback(self.host.close)
        self.reaper = Reaper(self.token, logs.run_dir, lambda: handler.link_fds)
        if extras:
            self.warm_starts = warm_starts(spec, settings, self.token, logs, metrics)
        else:
            logger.warning("%s", _LACKING)
            self.warm_starts = WarmStarts(None, ColdReason.LACKING, logs, metrics)
        self.flight_recorder: FlightRecorder | None = None
        if settings.hang and torch.distributed.is_nccl_available():
            self.flight_recorder = FlightRecorder(logs.run_dir, os.environ)
            stack.callback(self.flight_recorder.close)
        self.copier = copier.start(settings, self.token, self.journal.of_copies(metrics))
        self.round_companions: list[Companion] = [
            Reaping(self.reaper, handler), EvidenceGathering(self.host), self.warm_starts, self.observation,
            self.journal, *([Copying(self.copier)] if self.copier is not None else []),
            *trainjob.reporting(settings, os.environ, lambda: handler.round - 1, lambda: self.observation.gauges(0)),
        ]  # fmt: skip

    def leave(self, handler: Rendezvous, error: BaseException) -> None:
        """Leave the job to the other nodes, after this agent's last words. error: what ends it."""
        try:
            self.journal.end(error)  # not after the copies of checkpoints, which may take all the time until it is killed
            self.observation.goodput.close(HURRIED_SHARE_S)
        finally:  # even if another signal ends the wait
            handler.leave()
        self.observation.show_last(HURRIED_SHARE_S)

    def finish(self, clean: bool, copy_s: float | None) -> tuple[str, ...]:
        """End the processes that this agent started; return the checkpoints that exist on this node only.

        Args:
            clean: whether the job ended well. If it did not, no process that was started here is alive when this returns.
            copy_s: seconds that copying checkpoints may still take; None means as long as it makes progress.
        """
        left: tuple[str, ...] = ()
        kill_at = math.inf if copy_s is None else time.monotonic() + copy_s
        self.journal.clean = clean
        told: list[int] = []
        well, limit_s = False, HURRIED_S  # if a signal ends a wait
        try:
            try:
                left = self._end_starts_and_copies(copy_s)  # before the reaper is closed, which would end the copier
                well, limit_s = clean and not left, LAST_WORDS_S if copy_s is None else HURRIED_S
            finally:
                self.reaper.close(clean)
        finally:
            with held() as told:
                self._say_last_words(well, min(limit_s, kill_at - time.monotonic()))
        raise_again(told)  # unless this agent ends by an exception anyway
        return left

    def _end_starts_and_copies(self, copy_s: float | None) -> tuple[str, ...]:
        left: tuple[str, ...] = ()
        try:
            self.warm_starts.close()
        except BaseException:
            copy_s = 0.0  # a signal: what is not copied is named only
            raise
        finally:
            if self.copier is not None:
                left = self.copier.close(copy_s)
        return left

    def _say_last_words(self, well: bool, limit_s: float) -> None:
        """Tell of the end. well: the job ended well. limit_s: seconds for all who take it. No signal may come between."""
        last_words = self.journal.last_words
        last_words.begin(limit_s)
        for companion in self.round_companions:
            companion.job_ended(well)
        self.observation.goodput.end()
        for companion in self.round_companions:
            companion.flush(last_words.left_s())
        self.observation.goodput.close(last_words.left_s())
        self.observation.show_last(last_words.left_s())
