"""Starts the workers of a round from warm standbys if there are any, else the usual way, and counts the reason."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_private import Start
from elastic_ext.observe.metrics import AgentMetrics
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.standby.pool import StandbyPool
from elastic_ext.workers.standby.rules import ColdReason

logger = logging.getLogger(__name__)


class WarmStarts(Companion):
    """The standby pool of this agent, or the reason why it has none."""

    def __init__(self, pool: StandbyPool | None, cold: ColdReason, logs: WorkerLogs, metrics: AgentMetrics) -> None:
        """cold: the reason to count for each worker that is started without a pool."""
        self._pool, self._cold, self._logs, self._metrics = pool, cold, logs, metrics

    def before_start(self) -> None:
        """Make a worker of the next round record its imports. Call this when `logs.messages` holds the other messages."""
        if self._pool is not None:
            self._pool.learn(self._logs.modules_file)  # of the previous round: a worker may have written it at the very end
            self._logs.messages[0]["modules"] = self._logs.modules_file = os.path.join(self._logs.run_dir, "modules")

    @property
    def start(self) -> Start | None:
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

    def skip_next_round(self, reason: str) -> None:
        """Make the workers of the next round start the usual way."""
        if self._pool is not None:
            self._pool.skip_next_round(reason)

    def close(self) -> None:
        """End the standbys."""
        if self._pool is not None:
            self._pool.close()


def warm_starts(spec: WorkerSpec, settings: Settings, token: str, logs: WorkerLogs, metrics: AgentMetrics) -> WarmStarts:
    """Start the standby pool if the settings want one and the host has room for it.

    Call this before the first rendezvous, so that the standbys import what workers need during it.
    """
    wanted = launch.standby_spec(spec, settings, token)
    if isinstance(wanted, str):
        logger.info("no warm standbys: %s", wanted)
        return WarmStarts(None, ColdReason.OFF, logs, metrics)
    try:
        pool = StandbyPool(wanted, logs.run_dir, metrics.worker_started, metrics.standbys)
    except (OSError, RuntimeError) as error:  # out of descriptors or threads
        logger.warning("no warm standbys: they could not be started: %s", error)
        return WarmStarts(None, ColdReason.LACKING, logs, metrics)
    return WarmStarts(pool, ColdReason.LACKING, logs, metrics)
