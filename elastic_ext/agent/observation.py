"""What an agent shows of itself and its workers, from its start to the last scrape."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

import elastic_ext
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base.settings import Settings
from elastic_ext.observe import discovery, families, gate, gpus, pages, textfile
from elastic_ext.observe.gate import Gate
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress
from elastic_ext.observe.script_metrics import ScriptMetrics
from elastic_ext.observe.server import MetricsServer
from elastic_ext.rendezvous.run_id import host_name
from elastic_ext.workers.standby.rules import ColdReason

logger = logging.getLogger(__name__)


def make_metrics(settings: Settings, run_id: str, workers: int, progress: Callable[[], Sequence[WorkerProgress]]) -> AgentMetrics:
    """Return this agent's metrics. workers: on this node. progress: see AgentMetrics."""
    return AgentMetrics(
        version=elastic_ext.__version__,
        torch=torch.__version__,
        run_id=run_id,
        node=host_name(settings),
        cold_reasons=[each.value for each in ColdReason],
        gpus=gpus.Asked(lambda: gpus.by_local_rank(workers, gpus.uuids(), os.environ)).answer,
        progress=progress,
    )


def check(settings: Settings) -> None:
    """Raise UsageError if the server could not do what the settings demand."""
    if settings.metrics and settings.metrics_web_config is not None:
        gate.load(settings.metrics_web_config)


class Observation(Companion):
    """Serves the metrics from construction to `close`.

    Attributes:
        url: address of the metrics; None if they are not served.
    """

    def __init__(self, metrics: AgentMetrics, settings: Settings) -> None:
        self._metrics, self._settings = metrics, settings
        self._server: MetricsServer | None = None
        self._unannounce: Callable[[], None] = lambda: None
        self._scripts: ScriptMetrics | None = None
        self.url: str | None = None
        if not settings.metrics:
            return
        # The user must see a port that nobody chose, and torchrun shows only warnings.
        announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
        shown = pages.of_agent(metrics.registry, metrics.not_ready, metrics.status)
        guard = Gate(settings.metrics_web_config) if settings.metrics_web_config is not None else None
        self._server = MetricsServer(shown, settings.metrics_host, settings.metrics_port, announce, guard)
        self.url = self._server.url
        if settings.metrics_discovery_dir is not None and self._server.endpoint is not None:
            labels = {**metrics.labels, **({"__scheme__": "https"} if guard is not None and guard.tls else {})}
            self._unannounce = discovery.announce(settings.metrics_discovery_dir, self._server.endpoint, labels)

    def read_scripts(self, run_dir: str) -> None:
        """Show the metrics that the scripts define, too, from files in the agent's private directory. Call this once."""
        if not self._settings.metrics and self._settings.metrics_file is None:
            return
        try:
            self._scripts = ScriptMetrics(os.path.join(run_dir, "metrics"))
            self._metrics.registry.register(self._scripts)
        except OSError as error:
            logger.warning("metrics of scripts are not shown: %s", error)

    def message(self, round: int, local_rank: int, rank: int) -> dict[str, object]:
        """Return what a worker of the round that begins has to know; see workers.worker_env."""
        return self._scripts.message(round, local_rank, rank) if self._scripts is not None else {}

    def check(self, workers: LocalWorkers) -> None:
        if self._scripts is not None:
            self._scripts.look()

    def workers_ended(self, workers: LocalWorkers) -> None:
        if self._scripts is not None:
            self._scripts.round_ended()

    def show_last(self) -> None:
        """Leave what the agent has counted last."""
        self._metrics.enter(families.ENDED)
        if self._settings.metrics_file is not None:
            textfile.write(self._settings.metrics_file, self._metrics.registry, {**self._metrics.labels, "pid": str(os.getpid())})

    def close(self) -> None:
        """Serve no more."""
        self._unannounce()
        if self._server is not None:
            self._server.close()
