"""What an agent shows of itself and its workers: builds the metrics and serves them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

import elastic_ext
from elastic_ext.base.settings import Settings
from elastic_ext.observe import gpus
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress
from elastic_ext.observe.server import MetricsServer
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
        gpus=gpus.by_local_rank(workers, gpus.uuids(), os.environ) if settings.metrics else (),
        progress=progress,
    )


def serve(metrics: AgentMetrics, settings: Settings, stack: ExitStack) -> str | None:
    """Serve them until `stack` is closed. Return their address; None if they are not served."""
    if not settings.metrics:
        return None
    # The user must see a port that nobody chose, and torchrun shows only warnings.
    announce = logging.WARNING if settings.metrics_port == 0 else logging.INFO
    server = MetricsServer(metrics.registry, settings.metrics_host, settings.metrics_port, announce)
    stack.callback(server.close)
    return server.url
