"""A server of an agent's pages, whose workers are made up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from elastic_ext.http import pages
from elastic_ext.http.server import MetricsServer
from elastic_ext.http.tls import ServerTls
from elastic_ext.telemetry.agent_metrics import AgentMetrics, WorkerProgress
from elastic_ext.workers.progress import Progress


@contextmanager
def serving(host: str = "127.0.0.1", tls: ServerTls | None = None) -> Iterator[MetricsServer]:
    told = [WorkerProgress(rank, rank, Progress(7, 1, 0, 10**9, True, saved_step=1, saved_ns=1)) for rank in range(2)]
    metrics = AgentMetrics(version="1", torch="2", run_id="job", progress=lambda: told)
    with closing(
        MetricsServer(pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, lambda: b"{}"), host, tls=tls)
    ) as server:
        yield server


def is_cut(client: socket.socket) -> bool:
    """Wait for the server's next word; return whether that is the end. Its reset may overtake its goodbye."""
    with suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True
