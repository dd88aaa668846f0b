"""The agent's HTTP server: GET of some pages, such as /metrics.

Nothing here may stop a training job: a port in use causes a warning, and clients, which may be untrusted, cost a bounded number
of descriptors and no threads. One thread serves them all with poll.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from elastic_ext.observe.discovery import target
from elastic_ext.observe.pages import Page, Pages, text

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CLIENTS = 16  # connections at once; each scraper needs one
CLIENT_TIMEOUT_S = 10.0  # from connect to the last byte; the default scrape_timeout of Prometheus
MAX_REQUEST = 16 << 10  # bytes
BACKLOG = 128  # connections that the kernel keeps until they are accepted
RETRY_ACCEPT_S = 1.0  # pause when there is no descriptor or memory for another connection

# With these errors only the port is the problem: try another port of the host. With any other error the host is the problem.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
_OUT_OF_RESOURCES = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
)  # the connection stays in the backlog, and poll keeps reporting it
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger of socket(7)


class MetricsServer:
    """Serves pages from a daemon thread until `close`. Network errors never raise.

    If `port` of `host` is not available, the server takes any free port. If it cannot bind `host` at all, it takes a free port of
    127.0.0.1. Both cause one warning. If that also fails, it warns and serves nothing.

    Args:
        pages: by path. Called on the server's thread.
        host: address or name to bind, IPv4 or IPv6.
        port: the port; 0 takes any free one.
        announce: log level of the line with the address.

    Attributes:
        port: the port that the server listens on; None if it serves nothing.
        url: URL of the server on this machine; None if it serves nothing.
        endpoint: address and port that it is bound to; None if it serves nothing.
    """

    def __init__(self, pages: Pages, host: str = LOOPBACK, port: int = 0, announce: int = logging.INFO) -> None:
        self.port: int | None = None
        self.url: str | None = None
        self.endpoint: tuple[str, int] | None = None
        self._server = _bind(pages, host, port)
        if self._server is None:
            return
        self._thread = threading.Thread(target=self._server.serve, name="elastic_ext-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, e.g. a limit of the container
            logger.warning("metrics: cannot start the server: %s", error)
            self._server.close()
            self._server = None
            return
        self.endpoint = bound, self.port = self._server.address
        self.url = _url(bound, self.port)
        logger.log(announce, "metrics: serving %s/metrics (bound to %s)", self.url, bound)

    def close(self) -> None:
        """Stop listening, release the port and drop open requests; a second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.stop()
        self._thread.join()
        server.close()


def _bind(pages: Pages, host: str, port: int) -> _Server | None:
    try:
        return _Server(pages, host, port)
    except (OSError, OverflowError) as error:
        problem = error
    port_is_the_problem = isinstance(problem, OverflowError) or problem.errno in _PORT_ERRORS
    other = host if port_is_the_problem else LOOPBACK
    wanted = f"cannot listen on {host} port {port} ({problem})"
    try:
        server = _Server(pages, other, 0)
    except OSError as error:
        logger.warning("metrics: %s, nor on any port of %s (%s): nothing is served", wanted, other, error)
        return None
    logger.warning("metrics: %s: listening on %s port %s instead", wanted, other, server.address[1])
    return server


def _url(address: str, port: int) -> str:
    """Return the URL for clients on this machine; a wildcard address becomes the loopback."""
    return f"http://{target(address, port, '::1' if ':' in address else LOOPBACK)}"


@dataclass(eq=False)
class _Client:
    """One connection, dropped at `deadline` (time.monotonic()).

    unsent: the rest of the answer; None while reading. sent: see Page.
    """

    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None
    sent: Callable[[], None] = lambda: None


class _Server:
    """The listening socket and its accepted connections.

    Invariants: at most MAX_CLIENTS connections are open, and none for longer than CLIENT_TIMEOUT_S. When all slots are taken, a
    new client gets the slot of the client that has been connected longest without a whole request, so silent clients cannot lock
    out others.
    """

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        """Listen. Raises OSError (also if the name does not resolve), or OverflowError if the port is out of range."""
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._pages = pages
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

    def serve(self) -> None:
        """Serve until `stop`."""
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

    def _serve_events(self) -> None:
        """Wait for events and handle them. Answer whole requests before any client loses its slot."""
        ready = [key.data for key, _ in self._selector.select(self._next_deadline_s())]
        for client in filter(None, ready):
            self._advance(client)
        now = time.monotonic()
        for client in [client for client in self._clients if client.deadline <= now]:
            self._drop(client)
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if None in ready and not self._stopping:
            self._accept(now)

    def _next_deadline_s(self) -> float | None:
        due = [client.deadline for client in self._clients]
        due += [self._accept_at] if self._accept_at is not None else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self, now: float) -> None:
        if len(self._clients) >= MAX_CLIENTS:  # before accept(), which must not take another descriptor
            self._drop(min(self._clients, key=lambda client: (client.unsent is not None, client.deadline)))
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                logger.debug("metrics: accepting no connections for %g s: %s", RETRY_ACCEPT_S, error)
                self._selector.unregister(self._listener)
                self._accept_at = now + RETRY_ACCEPT_S
            return  # with any other error the client is gone
        connection.setblocking(False)
        client = _Client(connection, now + CLIENT_TIMEOUT_S)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._advance(client)  # often its request has already arrived

    def _advance(self, client: _Client) -> None:
        """Read or write as much as possible without blocking."""
        try:
            if client.unsent is None:
                self._read(client)
            if client.unsent is not None:
                self._write(client)
        except BlockingIOError:
            pass
        except OSError as error:  # the client went away
            logger.debug("metrics: a connection ended: %s", error)
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data = client.connection.recv(MAX_REQUEST)
        client.received += data
        page = self._answer(bytes(client.received))
        if page is None and not data:
            raise ConnectionError("closed before the request was whole")
        if page is not None:
            client.unsent, client.sent = memoryview(page.encoded()), page.sent
            client.received.clear()
            self._selector.modify(client.connection, selectors.EVENT_WRITE, client)

    def _write(self, client: _Client) -> None:
        assert client.unsent is not None
        while client.unsent:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
        self._forget(client)
        client.connection.close()
        client.sent()

    def _drop(self, client: _Client) -> None:
        """Close a connection; the kernel drops unsent data."""
        self._forget(client)
        client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        client.connection.close()

    def _forget(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        self._clients.remove(client)

    def _answer(self, received: bytes) -> Page | None:
        """Return the page for a request; None while the request is incomplete."""
        head, end, _ = received.replace(b"\r\n", b"\n").partition(b"\n\n")
        if not end:
            too_long = len(received) > MAX_REQUEST
            return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long") if too_long else None
        line, *fields = head.decode("latin-1").split("\n")
        logger.debug("metrics: %s", line)
        method, _, target = line.partition(" ")
        target, _, protocol = target.partition(" ")
        if not protocol.startswith("HTTP/"):
            return text(HTTPStatus.BAD_REQUEST, "this is not HTTP")
        if method != "GET":
            return text(HTTPStatus.NOT_IMPLEMENTED, "expected GET")
        named = (field.partition(":") for field in fields)
        accept = next((value.strip() for name, _, value in named if name.lower() == "accept"), "")
        return self._page_or_error(target.partition("?")[0], accept)

    def _page_or_error(self, path: str, accept: str) -> Page:
        make = self._pages.get(path)
        if make is None:
            return text(HTTPStatus.NOT_FOUND, f"not found: expected one of {' '.join(self._pages)}")
        try:
            return make(accept)
        except Exception as error:  # a collector may raise anything
            # Show it only once, because scrapes come every few seconds for weeks.
            level = logging.DEBUG if self._failure_shown else logging.WARNING
            logger.log(level, "metrics: a scrape failed: %r; later failures are shown at DEBUG only", error, exc_info=True)
            self._failure_shown = True
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "the scrape failed: see the agent's log")
