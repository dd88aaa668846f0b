"""The agent's HTTP server: GET of some pages, such as /metrics.

Nothing here may stop a training job: a port in use causes a warning, and clients, which may be untrusted, cost a bounded number
of descriptors and no threads. One thread serves them all with poll.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from http import HTTPStatus
from pathlib import Path

from elastic_ext.base import files, helper_process, threads
from elastic_ext.http.gate import Gate, Verdict, warning
from elastic_ext.http.pages import MAX_REQUEST, CpuBudget, Page, Pages, Request, parse, text

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CLIENTS = 16  # connections at once; each scraper needs one
CLIENT_TIMEOUT_S = 10.0  # from connect to the last byte; the default scrape_timeout of Prometheus
CPU_SHARE = 0.15  # of a core, for all connections; new ones wait in the backlog meanwhile
CPU_BURST_S = 0.5
BACKLOG = 128  # connections that the kernel keeps until they are accepted

WILDCARDS = ("0.0.0.0", "::")
_DISCOVERY_NAME = re.compile(r"elastic_ext_.*_(?P<where>[^_]*)_(?P<pid>\d+)\.json")

# With these errors only the port is the problem: try another port of the host. With any other error the host is the problem.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger of socket(7)
_REFUSALS = {
    Verdict.REFUSED: text(HTTPStatus.UNAUTHORIZED, "expected a user and password", 'WWW-Authenticate: Basic realm="elastic_ext"'),
    Verdict.LATER: text(HTTPStatus.TOO_MANY_REQUESTS, "too many passwords are being checked: try again", "Retry-After: 10"),
}


class MetricsServer:
    """Serves pages from a daemon thread until `close`. Network errors never raise.

    If `port` of `host` is not available, the server takes any free port. If it cannot bind `host` at all, it takes a free port of
    127.0.0.1. Both cause one warning. If that also fails, it warns and serves nothing.

    pages: by path. Called on the server's thread. host: address or name to bind, IPv4 or IPv6. port: the port; 0 takes any free
    one. announce: log level of the line with the address. gate: TLS and passwords; None: anyone may read. Belongs to the server
    from now on.
    """

    def __init__(
        self, pages: Pages, host: str = LOOPBACK, port: int = 0, announce: int = logging.INFO, gate: Gate | None = None
    ) -> None:
        self.port: int | None = None  # the port that the server listens on; None if it serves nothing
        self.url: str | None = None  # URL of the server on this machine; None if it serves nothing
        self.endpoint: tuple[str, int] | None = None  # address and port that it is bound to; None if it serves nothing
        self._server = _bind(pages, host, port, gate)
        if self._server is None:
            if gate is not None:
                gate.checks.close()
            return
        text = "metrics: cannot start the server: %s"
        thread = threads.started(self._server.serve, "elastic_ext-metrics", logger.warning, text)
        if thread is None:
            self._server.close()
            self._server = None
            return
        self._thread = thread
        self.endpoint = bound, self.port = self._server.address
        self.url = _url("https" if gate is not None and gate.tls else "http", bound, self.port)
        logger.log(announce, "metrics: serving %s/metrics (bound to %s)", self.url, bound)
        if open_to := warning(gate, bound, self.port):
            logger.warning("metrics: %s", open_to)

    def close(self) -> None:
        """Stop listening, release the port and drop open requests; a second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.stop()
        self._thread.join()
        server.close()


def _bind(pages: Pages, host: str, port: int, gate: Gate | None) -> _Server | None:
    try:
        return _Server(pages, host, port, gate)
    except (OSError, OverflowError) as error:
        problem = error
    port_is_the_problem = isinstance(problem, OverflowError) or problem.errno in _PORT_ERRORS
    other = host if port_is_the_problem else LOOPBACK
    wanted = f"cannot listen on {host} port {port} ({problem})"
    try:
        server = _Server(pages, other, 0, gate)
    except OSError as error:
        logger.warning("metrics: %s, nor on any port of %s (%s): nothing is served", wanted, other, error)
        return None
    logger.warning("metrics: %s: listening on %s port %s instead", wanted, other, server.address[1])
    return server


def _url(scheme: str, address: str, port: int) -> str:
    """Return the URL for clients on this machine; a wildcard address becomes the loopback."""
    return f"{scheme}://{target(address, port, '::1' if ':' in address else LOOPBACK)}"


class _Stage(IntEnum):
    """How far a client has come. One that has come less far makes room for others first."""

    SILENT = 0
    ASKS = 1  # its request, and with TLS the handshake before, is not whole
    WAITS = 2  # for its password to be checked; the selector does not know it
    ANSWERED = 3


@dataclass(eq=False)
class _Client:
    """One connection, dropped at `deadline` (time.monotonic())."""

    connection: socket.socket
    address: str  # of the peer
    deadline: float
    heard: bool = False  # whether it has sent anything
    received: bytearray = field(default_factory=bytearray)
    asked: Request | None = None  # its request, once that is whole
    unsent: memoryview | None = None  # the rest of the answer; None before there is one
    sent: Callable[[], None] = lambda: None  # see Page

    @property
    def stage(self) -> _Stage:
        if self.unsent is not None:
            return _Stage.ANSWERED
        if self.asked is not None:
            return _Stage.WAITS
        return _Stage.ASKS if self.heard else _Stage.SILENT


class _Server:
    """The listening socket and its accepted connections.

    Invariants: at most MAX_CLIENTS connections are open, and none for longer than CLIENT_TIMEOUT_S. When all slots are taken, a
    new client gets the slot of one without a whole request: of one that has sent nothing, if there is any, and of those the one
    that has been connected longest. So silent clients cannot lock out others.

    Handshakes, requests and answers together take at most CPU_SHARE of a core for long.
    """

    def __init__(self, pages: Pages, host: str, port: int, gate: Gate | None) -> None:
        """Listen. Raises OSError (also if the name does not resolve), or OverflowError if the port is out of range."""
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._pages, self._gate = pages, gate
        self._budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
        self._failure_shown = self._stopping = False
        self._clients: list[_Client] = []  # oldest first
        self._accept_at: float | None = None  # when to listen again; None while listening
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # With this option, connections of an earlier agent do not block the port; a listening socket still does.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((str(address), port))
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
        except (OSError, OverflowError):
            self._listener.close()
            raise
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (str(bound[0]), int(bound[1]))
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        if gate is not None:
            self._selector.register(gate.checks, selectors.EVENT_READ, gate)

    def serve(self) -> None:
        try:
            while not self._stopping:
                self._serve_events()
        except Exception:  # the top of a thread
            logger.exception("metrics: the server has failed, and metrics are no longer served")

    def stop(self) -> None:
        """Make `serve` return. Any thread may call this."""
        self._stopping = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # Linux: wakes poll at once
        except OSError as error:
            logger.debug("metrics: %s", error)

    def close(self) -> None:
        """Close all sockets, after `serve` has returned or if it was never called."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        if self._gate is not None:
            self._gate.checks.close()

    def _serve_events(self) -> None:
        """Wait for events and handle them. Answer whole requests before any client loses its slot."""
        due = [client.deadline for client in self._clients] + ([self._accept_at] if self._accept_at is not None else [])
        left_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready = [key.data for key, _ in self._selector.select(left_s)]
        began = time.thread_time()
        for client in ready:
            if isinstance(client, _Client):
                client.heard = True
                self._advance(client)
        if self._gate is not None and self._gate in ready:
            self._take_verdicts(self._gate)
        now = time.monotonic()
        for client in [client for client in self._clients if client.deadline <= now]:
            self._drop(client)
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if None in ready and not self._stopping:
            self._accept(now)
        self._budget.spend(time.thread_time() - began, now)

    def _accept(self, now: float) -> None:
        if (wait_s := self._budget.wait_s(now)) > 0:
            self._pause(now + wait_s)
            return
        if len(self._clients) >= MAX_CLIENTS:  # before accept(), which must not take another descriptor
            self._drop(min(self._clients, key=lambda client: (client.stage, client.deadline)))
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in helper_process.OUT_OF_RESOURCES:
                logger.debug("metrics: accepting no connections for %g s: %s", helper_process.ACCEPT_AGAIN_S, error)
                self._pause(now + helper_process.ACCEPT_AGAIN_S)
            return  # with any other error the client is gone
        try:
            connection.setblocking(False)
            entered = connection if self._gate is None else self._gate.entered(connection)
        except OSError as error:
            logger.debug("metrics: a connection ended: %s", error)
            connection.close()
            return
        client = _Client(entered, address[0], now + CLIENT_TIMEOUT_S)
        self._clients.append(client)
        self._selector.register(entered, selectors.EVENT_READ, client)
        if not isinstance(entered, ssl.SSLSocket):  # whose handshake takes several turns anyway
            self._advance(client)  # often its request has already arrived

    def _pause(self, until: float) -> None:
        """Accept no connection before this time (time.monotonic())."""
        self._selector.unregister(self._listener)
        self._accept_at = until

    def _advance(self, client: _Client) -> None:
        """Read or write as much as possible without blocking. With TLS either may need the other."""
        try:
            if client.stage <= _Stage.ASKS:
                self._read(client)
            if client.unsent is not None:
                self._write(client)
        except ssl.SSLWantReadError:
            self._await(client, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._await(client, selectors.EVENT_WRITE)
        except BlockingIOError:
            self._await(client, selectors.EVENT_READ if client.unsent is None else selectors.EVENT_WRITE)
        except OSError as error:  # the client went away
            logger.debug("metrics: a connection ended: %s", error)
            self._drop(client)
        except Exception as error:  # noqa: BLE001 - one client must not end the server
            self._show("a request failed", error)
            self._drop(client)

    def _await(self, client: _Client, events: int) -> None:
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)

    def _read(self, client: _Client) -> None:
        data = client.connection.recv(MAX_REQUEST)
        client.received += data
        request = parse(bytes(client.received))
        if request is None and not data:
            raise ConnectionError("closed before the request was whole")
        if isinstance(request, Page):
            client.unsent = memoryview(request.encoded())
        elif request is not None:
            logger.debug("metrics: %s", request.line)
            client.asked = request
            verdict = Verdict.ALLOWED if self._gate is None else self._gate.judge(request, client.address, client)
            self._answer(client, request, verdict)

    def _answer(self, client: _Client, request: Request, verdict: Verdict) -> None:
        if verdict is Verdict.WAITING:
            self._selector.unregister(client.connection)  # what it sends meanwhile is of no interest
            return
        page = self._page_or_error(request.path, request.accept) if verdict is Verdict.ALLOWED else _REFUSALS[verdict]
        client.unsent, client.sent = memoryview(page.encoded()), page.sent
        client.received.clear()

    def _take_verdicts(self, gate: Gate) -> None:
        """Answer the clients whose passwords have been checked."""
        for client, verdict in gate.verdicts():
            if isinstance(client, _Client) and client in self._clients and client.asked is not None:
                self._selector.register(client.connection, selectors.EVENT_WRITE, client)
                self._answer(client, client.asked, verdict)
                self._advance(client)

    def _write(self, client: _Client) -> None:
        assert client.unsent is not None
        while client.unsent:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
        self._forget(client)
        if isinstance(client.connection, ssl.SSLSocket):
            with contextlib.suppress(OSError):  # it has sent the end, and would wait for the client's
                client.connection.unwrap()
        client.connection.close()
        client.sent()

    def _drop(self, client: _Client) -> None:
        """Close a connection; the kernel drops unsent data."""
        self._forget(client)
        client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        client.connection.close()

    def _forget(self, client: _Client) -> None:
        self._clients.remove(client)
        if client.stage is _Stage.WAITS and self._gate is not None:
            self._gate.checks.forget(client)
        else:
            self._selector.unregister(client.connection)

    def _page_or_error(self, path: str, accept: str) -> Page:
        make = self._pages.get(path)
        if make is None:
            return text(HTTPStatus.NOT_FOUND, f"not found: expected one of {' '.join(self._pages)}")
        try:
            return make(accept)
        except Exception as error:  # noqa: BLE001 - a collector may raise anything
            self._show("a scrape failed", error)
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "the scrape failed: see the agent's log")

    def _show(self, what: str, error: Exception) -> None:
        """Show it only once, because scrapes come every few seconds for weeks."""
        level = logging.DEBUG if self._failure_shown else logging.WARNING
        logger.log(level, "metrics: %s: %r; later failures are shown at DEBUG only", what, error, exc_info=error)
        self._failure_shown = True


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
