"""The parts that work beside the workers as long as the agent runs: opened before the first round, closed after the last."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

from elastic_ext.agent import journal, launch
from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import END_S, HURRIED_S, Companion, LocalWorkers
from elastic_ext.agent.feature import Feature, JobParts
from elastic_ext.agent.observation import Observation
from elastic_ext.base import threads, torch_private, wakeup
from elastic_ext.base.settings import Settings
from elastic_ext.failures.host import HostProbe
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.rendezvous.address import own_interface
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.telemetry.agent_metrics import AgentMetrics, bridge_torchelastic
from elastic_ext.workers.helper_processes import Reaper
from elastic_ext.workers.logs import StderrTails, WorkerLogs
from elastic_ext.workers.progress import WakePipe
from elastic_ext.workers.standby.rules import ColdReason

if TYPE_CHECKING:
    from elastic_ext.workers.standby.pool import StandbyPool

logger = logging.getLogger(__name__)

HURRIED_SHARE_S = 0.3  # the other nodes wait for this one to leave


class WarmStarts(Companion):
    """The standby pool of this agent, or the reason why it has no pool."""

    def __init__(self, pool: StandbyPool | None, cold: ColdReason, logs: WorkerLogs, metrics: AgentMetrics) -> None:
        """cold: the reason to count for each worker that is started without a pool."""
        self._pool, self._cold, self._logs, self._metrics = pool, cold, logs, metrics

    def before_start(self) -> None:
        """Make a worker of the next round record its imports. Call this when `logs.messages` holds the other messages."""
        if self._pool is not None:
            self._pool.learn(self._logs.modules_file)  # of the previous round: a worker may have written it at the very end
            self._logs.messages[0]["modules"] = self._logs.modules_file = os.path.join(self._logs.run_dir, "modules")

    @property
    def start(self) -> torch_private.Start | None:
        """The function that torch asks for the process of each worker; None without standbys."""
        return self._pool.start if self._pool is not None else None

    def await_first(self, job: Rendezvous) -> None:
        """Where the job trains without this node, wait for the first standbys: the others stop once this node comes."""
        if self._pool is not None and job.trains_without_us():
            self._pool.await_first()

    def after_start(self, pids: Mapping[int, int]) -> frozenset[int]:
        """Count the workers that have been started; return the local ranks of those that were warm standbys."""
        if self._pool is None:
            for _ in pids:
                self._metrics.worker_started("cold", self._cold.value)
            return frozenset()
        released = self._pool.round_started()
        return frozenset(local_rank for local_rank, pid in pids.items() if pid in released)

    def check(self, workers: LocalWorkers) -> None:
        if self._pool is not None:
            self._pool.learn(self._logs.modules_file)

    def workers_ended(self, workers: LocalWorkers) -> None:
        if self._pool is not None and any(progress.has_torch for progress in workers.read_progress()):
            self._pool.workers_import_torch = True

    def skip_next_round(self) -> None:
        """Make the workers of the next round start the usual way."""
        if self._pool is not None:
            self._pool.skip_next_round("the last round failed before its first step")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def warm_starts(
    spec: WorkerSpec, settings: Settings, token: str, logs: WorkerLogs, metrics: AgentMetrics, extras: bool
) -> WarmStarts:
    """Start the standby pool if the settings want one and the host has room for it. extras: whether descriptors are left.

    Call this before the first rendezvous, so that the standbys import what workers need during it.
    """
    wanted, pool = launch.standby_spec(spec, settings, token), None
    if not extras:
        logger.warning("the limit on open files is low: no warm standbys, and no stderr tails as evidence; raise it (ulimit -Hn)")
    elif isinstance(wanted, str):
        logger.info("no warm standbys: %s", wanted)
        return WarmStarts(None, ColdReason.OFF, logs, metrics)
    elif torch_private.starts_commands():  # else `torch_names.check` has said that they are off
        from elastic_ext.workers.standby.pool import StandbyPool

        try:
            pool = StandbyPool(wanted, logs.run_dir, metrics.worker_started, metrics.standbys)
        except (OSError, RuntimeError) as error:  # out of descriptors or threads
            logger.warning("no warm standbys: they could not be started: %s", error)
    return WarmStarts(pool, ColdReason.LACKING, logs, metrics)


class LinkLooks(Companion):
    """Looks at the links of this host from time to time."""

    def __init__(self, host: HostProbe) -> None:
        self._links = host.links

    def check(self, workers: LocalWorkers) -> None:
        if self._links.next_look_s() <= 0:
            self._links.look()

    def next_check_s(self) -> float:
        return self._links.next_look_s()


@dataclass(frozen=True)
class TurnedOn:
    """extras: enough descriptors are left for warm standbys and for the workers' stderr."""

    features: Sequence[type[Feature]]
    extras: bool


class JobCompanions:
    """The companions that outlive a round, and the descriptors that the loop waits for."""

    def __init__(
        self,
        spec: WorkerSpec,
        handler: Rendezvous,
        logs: WorkerLogs,
        metrics: AgentMetrics,
        on: TurnedOn,
        stack: ExitStack,
    ) -> None:
        """Open all of them. The wakeup comes first, so that no signal is missed; then the run directory, which holds the files of
        the others; then the reaper, before the processes that it has to end.

        stack: closes everything that `finish` does not end, in reverse order.
        """
        settings = handler.settings
        self.token = secrets.token_hex(16)  # marks every process that this agent starts, for the reaper
        self.wakeup = stack.enter_context(wakeup.Wakeup())  # readable when a signal arrives or the rendezvous has an event
        after_journal = stack.enter_context(ExitStack())
        self.journal = stack.enter_context(journal.Journal(spec, settings, handler, metrics))  # the agent's events
        self.observation = Observation(metrics, settings, handler, self.wakeup, self.journal.of_etcd)  # what the agent shows
        after_journal.callback(self.observation.close)  # it may linger
        stack.enter_context(bridge_torchelastic(metrics))
        stack.enter_context(logs.owned_directory())
        logs.run_dir, lock = stack.enter_context(launch.own_run_dir(spec.local_world_size))
        stack.callback(logs.remove)
        # readable when a worker has news
        self.wake_pipe = stack.enter_context(closing(WakePipe(os.path.join(logs.run_dir, "wake"))))
        tails = on.extras and settings.stderr_tail and isinstance(spec.entrypoint, str)  # a function has the agent's own stderr
        logs.stderr = stack.enter_context(closing(StderrTails(tails, launch.has_bootstrap(spec))))
        root = os.path.abspath(logs.root_log_dir)
        self.host = HostProbe(settings, interface=own_interface(handler.node.address), logs_dir=root)
        stack.callback(self.host.close)
        self.reaper = Reaper(self.token, logs.run_dir, lambda: [*handler.link_fds, *lock])
        self.warm_starts = warm_starts(spec, settings, self.token, logs, metrics, on.extras)
        parts = JobParts(settings, handler, self.token, logs.run_dir, metrics, self.observation, self.journal, self.wakeup.set)
        self.features: list[Feature] = []
        for each in on.features:
            self.features.append(feature := each(parts))
            stack.callback(feature.close)
        # those that the loop calls as a `Companion` beside the workers of each round, in this order
        own: list[Companion] = [LinkLooks(self.host), self.warm_starts, self.observation, self.journal]
        self.beside_workers = [*own, *filter(None, (each.beside_job() for each in self.features))]

    def agree(self, group: WorkerGroup) -> RoundBeginning:
        """Return where this round begins, the same on every node. group: torch's worker group, after the rendezvous."""
        return next((found for each in self.features if (found := each.agree(group)) is not None), None) or RoundBeginning()

    def heard(self, verdict: JobVerdict) -> None:
        """Act on a verdict after which the job goes on. Where only other nodes have failed, the agent learns of it only here."""
        self.observation.heard(verdict)
        if verdict.decision.cold:  # on all nodes: a worker that starts warm fails first, and would be tried cold in its turn
            self.warm_starts.skip_next_round()

    def leave(self, handler: Rendezvous, error: BaseException) -> None:
        """Leave the job to the other nodes, once this agent's end is on record. error: what ends it."""
        try:
            self.journal.end(error)  # not after the copies of checkpoints, which may take all the time until it is killed
            self.observation.goodput.close(HURRIED_SHARE_S)
        finally:  # even if another signal ends the wait
            handler.leave()
        self.observation.show_last(HURRIED_SHARE_S)

    def finish(self, clean: bool, copy_s: float | None) -> tuple[str, ...]:
        """End the processes that this agent started; return the checkpoints that exist on this node only.

        clean: whether the job ended well. If it did not, no process that was started here is alive when this returns. copy_s:
        seconds that copying checkpoints may still take; None means as long as it makes progress.
        """
        left: tuple[str, ...] = ()
        kill_at = math.inf if copy_s is None else time.monotonic() + copy_s
        self.journal.clean = clean
        received: list[int] = []
        limit_s = HURRIED_S  # if a signal ends a wait
        try:
            try:
                left = self._end_starts_and_copies(copy_s)  # before the reaper is closed, which would end the copier
                limit_s = END_S if copy_s is None else HURRIED_S
            finally:
                self.reaper.close(clean)
        finally:
            with threads.held() as received:
                self._report_end(min(limit_s, kill_at - time.monotonic()))
        threads.raise_again(received)  # unless this agent ends by an exception anyway
        return left

    def _end_starts_and_copies(self, copy_s: float | None) -> tuple[str, ...]:
        left: tuple[str, ...] = ()
        try:
            self.warm_starts.close()
        except BaseException:
            copy_s = 0.0  # a signal: what is not copied is named only
            raise
        finally:
            for each in self.features:
                left += each.end(copy_s)
        return left

    def _report_end(self, limit_s: float) -> None:
        """Report the end. limit_s: seconds for all who take it. No signal may come between."""
        end_limit = self.journal.end_limit
        end_limit.begin(limit_s)
        self.observation.goodput.close(end_limit.left_s())
        self.observation.show_last(end_limit.left_s())
