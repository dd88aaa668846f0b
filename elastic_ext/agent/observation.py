"""What an agent shows of itself and its workers, from its start to the last scrape."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup

import elastic_ext
from elastic_ext.agent.job_view import JobView
from elastic_ext.agent.own_node import Place
from elastic_ext.base.settings import Settings
from elastic_ext.observe import discovery, families, gpus, pages, textfile
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress
from elastic_ext.observe.server import MetricsServer
from elastic_ext.rendezvous.handler import Rendezvous
from elastic_ext.rendezvous.run_id import host_name
from elastic_ext.workers.standby.rules import ColdReason


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


class Observation:
    """Serves the metrics from construction to `close`.

    Attributes:
        url: address of the metrics; None if they are not served.
    """

    def __init__(self, metrics: AgentMetrics, settings: Settings, handler: Rendezvous) -> None:
        self._metrics, self._settings = metrics, settings
        self._server: MetricsServer | None = None
        self._unannounce: Callable[[], None] = lambda: None
        self.url: str | None = None
        self._job = JobView(handler, metrics) if settings.metrics else None
        if self._job is None:
            return
        # The user must see a port that nobody chose, and torchrun shows only warnings.
        announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
        shown = pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, self._job.document)
        self._server = MetricsServer(shown, settings.metrics_host, settings.metrics_port, announce)
        self.url = self._server.url
        if settings.metrics_discovery_dir is not None and self._server.endpoint is not None:
            self._unannounce = discovery.announce(settings.metrics_discovery_dir, self._server.endpoint, metrics.labels)

    def joined(self, group: WorkerGroup, round_: int, resumed_at: int | None) -> None:
        """Show this node's place in the round that it has joined. resumed_at: step that it starts from; None if unknown."""
        self._metrics.round_started(round_, group.workers[0].world_size)
        if self._job is not None:
            first, workers = group.workers[0].global_rank, group.spec.local_world_size
            self._job.joined(Place(group.group_rank, first, workers, resumed_at))

    def round_ended(self, why: str) -> None:
        """Show why a round is over."""
        if self._job is not None:
            self._job.round_ended(why)

    def workers_ended(self) -> None:
        """Keep the last progress of the workers, which can still be read."""
        if self._job is not None:
            self._job.workers_ended()

    def show_last(self) -> None:
        """Leave what the agent has counted last."""
        self._metrics.enter(families.ENDED)
        if self._job is not None:
            self._job.close()
        if self._settings.metrics_file is not None:
            textfile.write(self._settings.metrics_file, self._metrics.registry, {**self._metrics.labels, "pid": str(os.getpid())})

    def close(self) -> None:
        """Serve no more."""
        self._unannounce()
        if self._job is not None:
            self._job.close()
        if self._server is not None:
            self._server.close()
