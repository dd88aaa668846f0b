"""What an etcd server has served, from its own metrics."""

from __future__ import annotations

import contextlib
import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


@dataclass(frozen=True)
class Traffic:
    """What a server has served since its start, or between two moments.

    Attributes:
        requests: messages from clients by method, both unary calls and those on streams (a watch, a keep-alive).
        pushed: answers on watch streams; one can hold many events.
        bytes_in, bytes_out: size of the messages, without the HTTP/2 and TCP around them.
        cpu_s: CPU seconds of the server's process.
    """

    requests: dict[str, float]
    pushed: float
    bytes_in: float
    bytes_out: float
    cpu_s: float

    def __sub__(self, before: Traffic) -> Traffic:
        requests = {method: count - before.requests.get(method, 0.0) for method, count in self.requests.items()}
        return Traffic(
            {method: count for method, count in requests.items() if count},
            self.pushed - before.pushed,
            self.bytes_in - before.bytes_in,
            self.bytes_out - before.bytes_out,
            self.cpu_s - before.cpu_s,
        )


def parse_traffic(metrics: str) -> Traffic:
    """metrics: the text of etcd's /metrics, in Prometheus' format."""
    requests: dict[str, float] = {}
    single: dict[str, float] = {}
    pushed = 0.0
    for line in metrics.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", float(match[3])
        method = re.search(r'grpc_method="(\w+)"', labels)
        if name == "grpc_server_msg_received_total" and method and value:
            requests[method[1]] = value
        elif name == "grpc_server_msg_sent_total" and 'service="etcdserverpb.Watch"' in labels:
            pushed = value
        elif not labels:
            single[name] = value
    return Traffic(
        requests,
        pushed,
        single["etcd_network_client_grpc_received_bytes_total"],
        single["etcd_network_client_grpc_sent_bytes_total"],
        single["process_cpu_seconds_total"],
    )


def traffic(endpoint: str) -> Traffic:
    """What the server at HOST:PORT has served so far."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
        return parse_traffic(answer.read().decode())


@contextlib.contextmanager
def etcd(folder: Path, fsync: bool) -> Iterator[str]:
    """Run a fresh server of one member in this folder; yields its HOST:PORT."""
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    from tests.etcd_server import EtcdServer

    with EtcdServer(folder, args=() if not fsync else ("--unsafe-no-fsync=false",)) as server:
        yield server.endpoint
