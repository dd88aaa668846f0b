"""Worker processes that are driven by JSON lines, and what etcd says of itself. For rendezvous.py and steady_state.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
UP_S = 120.0  # to import torch and connect, several at once on few cores
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


class WorkerFailed(Exception):
    """A worker ended, was late, or says that one of its agents failed."""


class Crew:
    """Some processes of one script. Use it in a `with`: they are gone after it."""

    def __init__(self, script: str, jobs: Sequence[dict[str, Any]]) -> None:
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        if os.environ.get("PYTHONPATH"):
            paths.reverse()  # who names another copy of the package means it
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                command = [sys.executable, str(HERE / script), json.dumps(job)]
                self._processes.append(
                    subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                )
            self.up = self._answers(UP_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def ask(self, timeout_s: float, **command: Any) -> list[dict[str, Any]]:
        """Send all of them a command and return their answers. Raises WorkerFailed."""
        line = json.dumps(command).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; that it does not answer says so
                process.stdin.write(line)
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers = [json.loads(_line(process, deadline)) for process in self._processes]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise WorkerFailed(errors[0])
        return answers


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise WorkerFailed("a worker process did not answer in time")
    line = process.stdout.readline()
    if not line:
        raise WorkerFailed(f"a worker process ended, with exit code {process.wait()}")
    return line


@dataclass(frozen=True)
class Traffic:
    """What an etcd server has served since it started.

    Attributes:
        requests: messages from clients, by method: unary calls, and those on streams (a watch, a keep-alive).
        pushed: answers on watch streams; one may hold many events.
        bytes_in, bytes_out: of messages, without the HTTP/2 and TCP around them.
        cpu_s: of the process.
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
    """From etcd's /metrics, in Prometheus' text format."""
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
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
        return parse_traffic(answer.read().decode())


@contextlib.contextmanager
def etcd(folder: Path, fsync: bool) -> Iterator[str]:
    """A fresh server of one member; gives its endpoint."""
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    from tests.etcd_server import EtcdServer

    with EtcdServer(folder, args=() if not fsync else ("--unsafe-no-fsync=false",)) as server:
        yield server.endpoint


def shares(total: int, processes: int) -> list[tuple[int, int]]:
    """Numbers of the agents of each process: the first, and how many."""
    processes = min(total, processes)
    borders = [total * index // processes for index in range(processes + 1)]
    return [(borders[index], borders[index + 1] - borders[index]) for index in range(processes)]
