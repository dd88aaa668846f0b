"""What an agent shows of itself and its workers, from its start to the last scrape."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

import elastic_ext
from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.base.goodput import Shared, Spent
from elastic_ext.base.settings import Settings
from elastic_ext.observe import discovery, families, gpus, pages, textfile
from elastic_ext.observe.goodput_collector import GoodputCollector
from elastic_ext.observe.metrics import WorkerProgress
from elastic_ext.observe.server import MetricsServer
from elastic_ext.rendezvous.run_id import host_name
from elastic_ext.workers.standby.rules import ColdReason


def make_metrics(
    settings: Settings, run_id: str, workers: int, progress: Callable[[], Sequence[WorkerProgress]]
) -> AccountedMetrics:
    """Return this agent's metrics. workers: on this node. progress: see AgentMetrics."""
    metrics = AccountedMetrics(
        version=elastic_ext.__version__,
        torch=torch.__version__,
        run_id=run_id,
        node=host_name(settings),
        cold_reasons=[each.value for each in ColdReason],
        gpus=gpus.Asked(lambda: gpus.by_local_rank(workers, gpus.uuids(), os.environ)).answer,
        progress=progress,
    )
    metrics.registry.register(GoodputCollector(metrics.goodput.look, metrics.goodput.job))
    return metrics


class Observation:
    """Serves the metrics from construction to `close`.

    Attributes:
        goodput: where the time goes.
        url: address of the metrics; None if they are not served.
    """

    def __init__(self, metrics: AccountedMetrics, settings: Settings, share_goodput: Callable[[Spent], Shared]) -> None:
        """share_goodput: see `Rendezvous`."""
        self._metrics, self._settings = metrics, settings
        self.goodput = metrics.goodput
        self.goodput.share_with(share_goodput)
        self._server: MetricsServer | None = None
        self._unannounce: Callable[[], None] = lambda: None
        self.url: str | None = None
        if not settings.metrics:
            return
        # The user must see a port that nobody chose, and torchrun shows only warnings.
        announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
        shown = pages.of_agent(metrics.registry, metrics.not_ready, metrics.status)
        self._server = MetricsServer(shown, settings.metrics_host, settings.metrics_port, announce)
        self.url = self._server.url
        if settings.metrics_discovery_dir is not None and self._server.endpoint is not None:
            self._unannounce = discovery.announce(settings.metrics_discovery_dir, self._server.endpoint, metrics.labels)

    def show_last(self) -> None:
        """Leave what the agent has counted last."""
        self._metrics.enter(families.ENDED)
        self.goodput.close()
        if self._settings.metrics_file is not None:
            textfile.write(self._settings.metrics_file, self._metrics.registry, {**self._metrics.labels, "pid": str(os.getpid())})

    def close(self) -> None:
        """Serve no more."""
        self._unannounce()
        if self._server is not None:
            self._server.close()
