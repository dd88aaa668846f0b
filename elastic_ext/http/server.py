"""The agent's HTTP server: GET of some pages, such as /metrics. It is the standard library's, with a thread for each client.

Nothing here may stop a training job: a port in use causes a warning, and clients, which may be untrusted, get a bounded number of
threads and descriptors, a bounded time, and a bounded share of a core.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import re
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from elastic_ext.base import files, helper_process, threads
from elastic_ext.http.pages import MAX_REQUEST, CpuBudget, Page, Pages, Request, parse, text
from elastic_ext.http.tls import ServerTls

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CLIENTS = 16  # connections at once, each with a thread; each scraper needs one
CLIENT_TIMEOUT_S = 10.0  # from connect to the last byte; the default scrape_timeout of Prometheus
CPU_SHARE = 0.15  # of a core, for all connections; new ones wait in the backlog meanwhile
CPU_BURST_S = 0.5
BACKLOG = 128  # connections that the kernel keeps until they are accepted
CLOSE_S = 1.0  # that `close` waits for the threads of clients that it has cut

WILDCARDS = ("0.0.0.0", "::")
_DISCOVERY_NAME = re.compile(r"elastic_ext_.*_(?P<where>[^_]*)_(?P<pid>\d+)\.json")

# With these errors only the port is the problem: try another port of the host. With any other error the host is the problem.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
_Connection = Any  # a socket; socketserver's type has datagrams, too
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger of socket(7): the kernel drops unsent data


class MetricsServer:
    """Serves pages from daemon threads until `close`. Network errors never raise.

    If `port` of `host` is not available, the server takes any free port. If it cannot bind `host` at all, it takes a free port of
    127.0.0.1. Both cause one warning. If that also fails, it warns and serves nothing.

    pages: by path. Called on threads of the server, one at a time. host: address or name to bind, IPv4 or IPv6. port: the port; 0
    takes any free one. announce: log level of the line with the address. tls: None: plain HTTP.
    """

    def __init__(
        self, pages: Pages, host: str = LOOPBACK, port: int = 0, announce: int = logging.INFO, tls: ServerTls | None = None
    ) -> None:
        self.port: int | None = None  # the port that the server listens on; None if it serves nothing
        self.url: str | None = None  # URL of the server on this machine; None if it serves nothing
        self.endpoint: tuple[str, int] | None = None  # address and port that it is bound to; None if it serves nothing
        self._server = _bind(pages, host, port, tls)
        if self._server is None:
            return
        text = "metrics: cannot start the server: %s"
        thread = threads.started(self._server.serve, "elastic_ext-metrics", logger.warning, text)
        if thread is None:
            self._server.server_close()
            self._server = None
            return
        self._thread = thread
        self.endpoint = bound, self.port = self._server.address
        scheme = "https" if tls is not None else "http"
        self.url = f"{scheme}://{target(bound, self.port, '::1' if ':' in bound else LOOPBACK)}"
        logger.log(announce, "metrics: serving %s/metrics (bound to %s)", self.url, bound)
        alone = ipaddress.ip_address(bound.partition("%")[0]).is_loopback
        if not alone and (tls is None or not tls.demands_certificates):
            logger.warning(
                "metrics: anyone who reaches %s port %s can read the metrics and status of this job: set metrics_client_cafile "
                "(client certificates), or metrics_host=127.0.0.1",
                *self.endpoint,
            )

    def close(self) -> None:
        """Stop listening, release the port and drop open requests; a second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.stop()
        self._thread.join()
        server.server_close()


def _bind(pages: Pages, host: str, port: int, tls: ServerTls | None) -> _Server | None:
    try:
        return _Server(pages, host, port, tls)
    except (OSError, OverflowError) as error:
        problem = error
    port_is_the_problem = isinstance(problem, OverflowError) or problem.errno in _PORT_ERRORS
    other = host if port_is_the_problem else LOOPBACK
    wanted = f"cannot listen on {host} port {port} ({problem})"
    try:
        server = _Server(pages, other, 0, tls)
    except OSError as error:
        logger.warning("metrics: %s, nor on any port of %s (%s): nothing is served", wanted, other, error)
        return None
    logger.warning("metrics: %s: listening on %s port %s instead", wanted, other, server.address[1])
    return server


@dataclass(eq=False)
class _Client:
    """A connection, cut at `deadline` (time.monotonic()). asked: whether its request is whole."""

    deadline: float
    asked: bool = False


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections on the thread of `serve`, and answers each on a thread of its own.

    Invariants: at most MAX_CLIENTS connections are open, and none for longer than CLIENT_TIMEOUT_S. When all places are taken, a
    new client gets that of the oldest one without a whole request. So silent clients cannot lock out others.

    Handshakes, requests and answers together take at most CPU_SHARE of a core for long.
    """

    allow_reuse_address = True  # connections of an earlier agent do not block the port; a listening socket still does
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, pages: Pages, host: str, port: int, tls: ServerTls | None) -> None:
        """Listen. Raises OSError (also if the name does not resolve), or OverflowError if the port is out of range."""
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._pages, self._tls = pages, tls
        self._failure_shown = self._stopping = False
        self._making = threading.Lock()  # held while a page is made
        self._changed = threading.Condition()  # held for what follows
        self._budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
        self._clients: dict[socket.socket, _Client] = {}  # oldest first
        self.address_family = family
        super().__init__((str(address), port), socketserver.BaseRequestHandler)
        bound = self.socket.getsockname()
        self.address: tuple[str, int] = (str(bound[0]), int(bound[1]))

    def serve(self) -> None:
        try:
            while not self._stopping:
                began = time.thread_time()
                self.timeout = self._cut_late()
                self.handle_request()
                self._spent(began)
        except Exception:  # the top of a thread
            logger.exception("metrics: the server has failed, and metrics are no longer served")

    def stop(self) -> None:
        """Make `serve` return. Any thread may call this."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # Linux: wakes poll at once
        except OSError as error:
            logger.debug("metrics: %s", error)

    def server_close(self) -> None:
        """Close all sockets, after `serve` has returned or if it was never called."""
        super().server_close()
        with self._changed:
            for connection in self._clients:
                _cut(connection)
            self._changed.wait_for(lambda: not self._clients, CLOSE_S)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a client once there is a place for it, and a share of a core. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, self._budget.wait_s(time.monotonic()))
            if len(self._clients) >= MAX_CLIENTS:  # before accept(), which must not take another descriptor
                _cut(min(self._clients, key=lambda each: (self._clients[each].asked, self._clients[each].deadline)))
                self._changed.wait_for(lambda: self._stopping or len(self._clients) < MAX_CLIENTS)
            try:
                connection, address = self.socket.accept()
            except OSError as error:
                if error.errno in helper_process.OUT_OF_RESOURCES:
                    logger.debug("metrics: accepting no connections for %g s: %s", helper_process.ACCEPT_AGAIN_S, error)
                    self._changed.wait_for(lambda: self._stopping, helper_process.ACCEPT_AGAIN_S)
                raise
            try:
                if self._tls is not None:  # the handshake is part of the first reads, on the client's thread
                    connection = self._tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except OSError:
                connection.close()
                raise
            self._clients[connection] = _Client(time.monotonic() + CLIENT_TIMEOUT_S)
            return connection, address

    def process_request_thread(self, request: _Connection, client_address: object) -> None:
        super().process_request_thread(request, client_address)
        self._spent(0.0)  # all that this thread has done

    def finish_request(self, request: _Connection, client_address: object) -> None:
        """Answer one client. Raises OSError."""
        page = self._answer_to(request)
        request.sendall(page.encoded())
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(0)
            with suppress(OSError):  # it has sent the end, and would wait for the client's
                request.unwrap()
        page.sent()

    def shutdown_request(self, request: _Connection) -> None:
        with self._changed:  # or the descriptor could be another's when `_cut` uses it
            super().shutdown_request(request)
            self._clients.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: _Connection, client_address: object) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # the client went away, or was cut
            logger.debug("metrics: a connection ended: %s", error)
        else:
            self._show("a request failed", error)

    def _answer_to(self, connection: socket.socket) -> Page:
        received = b""
        while (request := parse(received)) is None:
            data = connection.recv(MAX_REQUEST)
            if not data:
                raise ConnectionError("closed before the request was whole")
            received += data
        if isinstance(request, Page):
            return request
        logger.debug("metrics: %s", request.line)
        self._clients[connection].asked = True
        return self._page_or_error(request)

    def _page_or_error(self, request: Request) -> Page:
        make = self._pages.get(request.path)
        if make is None:
            return text(HTTPStatus.NOT_FOUND, f"not found: expected one of {' '.join(self._pages)}")
        try:
            with self._making:
                return make(request.accept)
        except Exception as error:  # noqa: BLE001 - a collector may raise anything
            self._show("a scrape failed", error)
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "the scrape failed: see the agent's log")

    def _cut_late(self) -> float | None:
        """Cut the clients whose time is up; return the seconds until that of the next one is, None without one."""
        now = time.monotonic()
        with self._changed:
            left = {connection: client.deadline - now for connection, client in self._clients.items()}
            for connection in left:
                if left[connection] <= 0:
                    _cut(connection)
        return min((each for each in left.values() if each > 0), default=None)

    def _spent(self, began: float) -> None:
        """Pay for what this thread has done since `began` (time.thread_time())."""
        with self._changed:
            self._budget.spend(time.thread_time() - began, time.monotonic())

    def _show(self, what: str, error: BaseException | None) -> None:
        """Show it only once, because scrapes come every few seconds for weeks."""
        level = logging.DEBUG if self._failure_shown else logging.WARNING
        logger.log(level, "metrics: %s: %r; later failures are shown at DEBUG only", what, error, exc_info=error)
        self._failure_shown = True


def _cut(connection: socket.socket) -> None:
    """Make the reads and writes of a client's thread fail. SSLSocket's own `shutdown` would let it go on without TLS."""
    with suppress(OSError):  # the client is gone
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


# The file by which Prometheus finds this agent: file-based service discovery (file_sd_configs), one file per agent. It names the
# port that was really taken, so several agents on a host need no agreement on ports.


def target(address: str, port: int, host: str) -> str:
    """Return the endpoint as Prometheus writes it. address: what the server is bound to. host: this host's name to others."""
    reachable = host if address in WILDCARDS else address
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def announce(directory: str, endpoint: tuple[str, int], labels: dict[str, str]) -> Callable[[], None]:
    """Write the file of this agent; return what removes it. Also removes those that killed agents of this host have left.

    directory: made if it is absent; Prometheus reads `*.json` in it, at once after a change. endpoint: address and port of the
    server. labels: of the target; they name the job and the node. Without them two jobs would mix.
    """
    folder = Path(directory)
    run_id = re.sub(r"[^A-Za-z0-9.-]", "-", labels.get("run_id", ""))[:100]
    path = folder / f"elastic_ext_{run_id}_{_where()}_{os.getpid()}.json"
    try:
        host = socket.getfqdn() if endpoint[0] in WILDCARDS else ""  # may ask a name server
        text = json.dumps([{"targets": [target(*endpoint, host)], "labels": labels}])
        folder.mkdir(parents=True, exist_ok=True)
        _remove_dead(folder)
        files.write_whole(path, text)  # Prometheus must never read half a file
    except (OSError, UnicodeError) as error:
        logger.warning("metrics: Prometheus will not find this agent in %s: %s", directory, error)
        return lambda: None
    return lambda: _remove(path)


def _where() -> str:
    """Return where a pid has its meaning: this host and its pid namespace."""
    return f"{socket.gethostname().replace('_', '-')}.{os.stat('/proc/self/ns/pid').st_ino}"


def _remove_dead(folder: Path) -> None:
    for path in folder.iterdir():
        found = _DISCOVERY_NAME.fullmatch(path.name)
        if found is not None and found["where"] == _where() and not os.path.exists(f"/proc/{found['pid']}"):
            _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("metrics: cannot remove %s: %s", path, error)
