"""A server of an agent's pages, whose workers are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from elastic_ext.http import pages
from elastic_ext.http.gate import Gate
from elastic_ext.http.server import MetricsServer
from elastic_ext.telemetry.agent_metrics import AgentMetrics, WorkerProgress
from elastic_ext.workers.progress import Progress


@contextmanager
def serving(host: str = "127.0.0.1", gate: Gate | None = None) -> Iterator[MetricsServer]:
    told = [WorkerProgress(rank, rank, Progress(7, 1, 0, 10**9, True, saved_step=1, saved_ns=1)) for rank in range(2)]
    metrics = AgentMetrics(version="1", torch="2", run_id="job", progress=lambda: told)
    with closing(
        MetricsServer(pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, lambda: b"{}"), host, gate=gate)
    ) as server:
        yield server
