"""A receiver of OpenTelemetry's protocol over HTTP, for tests: it keeps what agents send, decoded by the published messages."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

Attributes = dict[str, Any]


def attributes(pairs: Any) -> Attributes:
    """Those of a decoded message, by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


class OtlpReceiver:
    def __init__(self) -> None:
        of_trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the exporter")
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as of_metrics

        kinds = {"/v1/traces": of_trace.ExportTraceServiceRequest, "/v1/metrics": of_metrics.ExportMetricsServiceRequest}
        self.traces: list[Any] = []  # of one resource each, as are those of metrics
        self.metrics: list[Any] = []
        keep = {"/v1/traces": self.traces, "/v1/metrics": self.metrics}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = kinds[self.path]()
                message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                keep[self.path] += message.resource_spans if self.path == "/v1/traces" else message.resource_metrics
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self, name: str) -> list[Any]:
        scopes = [scope for each in list(self.traces) for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans if span.name == name]

    def values(self) -> Iterator[dict[str, dict[tuple[tuple[str, str], ...], Any]]]:
        """Of each push, the newest first: the points of each metric, by its labels."""
        for of_resource in reversed(list(self.metrics)):
            yield {
                metric.name: {
                    tuple(sorted(attributes(point.attributes).items())): point
                    for point in getattr(metric, metric.WhichOneof("data")).data_points
                }
                for scope in of_resource.scope_metrics
                for metric in scope.metrics
            }
