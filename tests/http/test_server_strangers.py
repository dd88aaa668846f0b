"""Strangers at the metrics port: they cost a bounded number of descriptors, keep nobody out, and end no job."""

from __future__ import annotations

import http.client
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from prometheus_client.exposition import choose_encoder

from elastic_ext.http import pages
from elastic_ext.http import server as server_module
from elastic_ext.http.pages import LastScrape
from elastic_ext.http.server import CLIENT_TIMEOUT_S, MAX_CLIENTS, MAX_REQUEST, MetricsServer
from elastic_ext.telemetry.agent_metrics import AgentMetrics
from tests.http.serving import is_cut, serving
from tests.jobs import EXT, Gate, Job
from tests.ports import free_port
from tests.until import LIMIT_S, until

# Each connection sends a byte of a request now and then; who is cut off comes again. Ends with its standard input.
DRIPS = """
import resource, select, socket, sys

port, count = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

def connect():
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client

clients = [connect() for _ in range(count)]
rounds = 0
while not select.select([sys.stdin], [], [], 0.2)[0]:
    for number, client in enumerate(clients):
        try:
            client.send(b"GET /metrics HTTP/1.0"[rounds % 20 :][:1])
        except BlockingIOError:
            pass  # it is in the queue
        except OSError:
            client.close()
            clients[number] = connect()
    rounds += 1
    if rounds == 5:
        print("dripping", flush=True)
"""


FORMATS = [
    "application/openmetrics-text; version=1.0.0, text/plain",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3",
    "application/openmetrics-text",
    "text/plain;version=0.0.4",
    "*/*",
    "",
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """That of the server: it stands still until a test sets `now`. What the server does takes no time of a processor."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: made.now, thread_time=lambda: 0.0))
    return made


@pytest.mark.parametrize("accept", FORMATS)
def test_a_scraper_gets_the_format_it_requests(accept):
    registry = AgentMetrics(version="1", torch="2", run_id="r").registry
    page = pages.of_metrics(registry)[pages.METRICS](accept)
    wanted = choose_encoder(accept)[1]
    assert page.content_type.split(";")[:2] == wanted.split(";")[:2]


@pytest.mark.seam
def test_a_strangers_accept_header_ends_nothing(clock):
    """A page is kept for each format, so there must be few of these."""
    registry = AgentMetrics(version="1", torch="2", run_id="r").registry
    server = MetricsServer(pages.of_metrics(registry))
    assert server.endpoint is not None
    types = set()
    with closing(server):
        for version in ("1.\x851", *(f"1.0.{number}" for number in range(1, 300))):
            request = f"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text; version={version}\r\n\r\n"
            with socket.create_connection(server.endpoint, timeout=LIMIT_S) as client:
                client.sendall(request.encode("latin-1"))
                answer = b""
                while data := client.recv(65536):
                    answer += data
            assert answer.startswith(b"HTTP/1.0 200 OK")
            types.add(answer.split(b"\r\n")[1])
    assert len(types) == 1


def test_an_early_page_is_not_the_last_scrape():
    last = LastScrape()
    at = time.monotonic()
    page = pages.Page(HTTPStatus.OK, pages.TEXT, b"", made_at=at)
    scrape = last.noting({pages.METRICS: lambda accept: page})[pages.METRICS]
    scrape("").sent()
    last.ended_at = at + 1
    assert scrape("") is page
    last.ended_at = at - 1
    assert scrape("") is not page


@contextmanager
def drips(port: int, count: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIPS, str(port), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "dripping\n"
        yield
        assert process.poll() is None
        process.stdin.close()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with serving() as started:
        yield started


@pytest.fixture
def server_of_a_long_page() -> Iterator[MetricsServer]:
    """Longer than the buffers of a connection, whatever the kernel's are. It costs nothing to make, so it keeps nobody out."""
    page = pages.Page(HTTPStatus.OK, pages.TEXT, b"elastic_ext_round 1\n" * 100_000)
    with closing(MetricsServer({pages.METRICS: lambda _: page})) as started:
        assert started._server is not None
        started._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        yield started


def connect(server: MetricsServer) -> socket.socket:
    assert server.port is not None
    client = socket.socket()
    client.settimeout(LIMIT_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    client.connect(("127.0.0.1", server.port))
    return client


def scrape(url: str | None) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def scrape_again(url: str | None) -> str:
    """Come again when cut off, as a scraper does at its next interval.

    On a busy machine one may lose its slot between its connect and its request, or the kernel may have no room for it.
    """

    def attempt() -> str:
        with suppress(OSError, http.client.HTTPException):
            return scrape(url)
        return ""

    return until(attempt)


@pytest.mark.full
def test_a_thousand_dripping_clients_exclude_no_other(server):
    before = len(os.listdir("/proc/self/fd"))
    with drips(server.port, 1000):
        for _ in range(5):
            assert "elastic_ext_round" in scrape_again(server.url)
            assert len(os.listdir("/proc/self/fd")) <= before + MAX_CLIENTS + 5  # of drips() and of a scrape
    assert "elastic_ext_round" in scrape_again(server.url)


@pytest.mark.seam
def test_silent_clients_make_room_for_asking_ones(server_of_a_long_page, clock):
    """More than there are places: the one whose answer is under way keeps its place."""
    server = server_of_a_long_page
    with connect(server) as asking:
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asking.recv(1)
        idle = [connect(server) for _ in range(3 * MAX_CLIENTS)]
        assert "elastic_ext_round" in scrape(server.url)
        assert read_all(asking).endswith(b"\n")
    for client in idle:
        client.close()


@pytest.mark.full
@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.0\r\n"])
def test_the_whole_request_has_one_deadline(server, clock, sent):
    """A byte now and then buys no time."""
    with connect(server) as client:
        client.sendall(sent)
        for clock.now in (0.0, 0.5 * CLIENT_TIMEOUT_S, 0.9 * CLIENT_TIMEOUT_S):
            client.sendall(b"x")
            scrape(server.url)  # so the server has had it
        assert not select.select([client], [], [], 0)[0]
        clock.now = CLIENT_TIMEOUT_S
        scrape(server.url)
        assert is_cut(client)


@pytest.mark.full
def test_a_client_that_never_reads_is_cut_off(server_of_a_long_page, clock):
    with connect(server_of_a_long_page) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(1)
        clock.now = CLIENT_TIMEOUT_S
        scrape(server_of_a_long_page.url)
        cut = select.poll()
        cut.register(client, 0)  # the reset is told of without being asked for
        assert cut.poll(LIMIT_S * 1000)
        with pytest.raises(ConnectionResetError):
            read_all(client)


def read_all(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(1 << 20):
        data += more
    return data


@pytest.mark.seam
def test_a_request_without_end_is_refused(server):
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nx: " + b"y" * MAX_REQUEST)
        assert client.recv(100).startswith(b"HTTP/1.0 431 ")


JOB = """
import fcntl, os, sys

with open(sys.argv[1]) as gate:
    print("waits", flush=True)
    fcntl.flock(gate, fcntl.LOCK_SH)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
print("done", flush=True)
"""


@pytest.mark.full
def test_a_worker_dying_meanwhile_costs_one_restart(tmp_path):
    """The agent may open 256 files, hard limit and all, and needs some for each restart."""
    (tmp_path / "job.py").write_text(JOB)
    gate = Gate(tmp_path / "gate")
    port = free_port()
    torchrun = [*EXT, "--nproc-per-node=2", "--max-restarts=1", "job.py", "gate"]
    command = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *torchrun]
    with Job(command, tmp_path, ELASTIC_EXT_METRICS_PORT=str(port)) as job:
        job.wait_for("waits", 2)
        with drips(port, 1000):
            assert "elastic_ext_round" in scrape_again(f"http://127.0.0.1:{port}")
            gate.open()
            done = job.finish()
    assert done.returncode == 0, done.all
    assert done.out.count("done") >= 2
    assert "restart: rank 0 was killed by SIGKILL" in done.err
