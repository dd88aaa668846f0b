"""The agent's HTTP server: GET /metrics, and a page at / that links to it.

Nothing here may stop a training job: a port that is taken costs a warning, a client that hangs costs one thread for a while.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CLIENT_TIMEOUT_S = 10.0  # the default scrape_timeout of Prometheus: who has not sent a request by then has given up
INDEX = b'<!DOCTYPE html><title>elastic_ext</title><a href="/metrics">metrics</a>\n'

# The host is fine, this port of it is not: try another port there. For anything else the host is the trouble.
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


class MetricsServer:
    """Serves ``registry`` from daemon threads until `close`. Never raises because of the network.

    If ``port`` of ``host`` cannot be had, any free one is taken; if ``host`` cannot be bound at all, a free port of 127.0.0.1:
    with one warning. If that fails too, a warning, and nothing is served.

    Args:
        host: address or name to bind, IPv4 or IPv6.
        port: 0 takes any free one.
        announce: level of the log line that says where it listens.

    Attributes:
        port: the port it listens on, None if nothing is served.
        url: of the server as seen from this machine, None if nothing is served.
    """

    def __init__(self, registry: CollectorRegistry, host: str = LOOPBACK, port: int = 0, announce: int = logging.INFO) -> None:
        self.port: int | None = None
        self.url: str | None = None
        self._server = _bind(registry, host, port)
        if self._server is None:
            return
        # Nothing but a request or close(), which closes the listening socket, has to wake it up.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(3600.0,), name="elastic_ext-metrics", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had: a limit of the container
            logger.warning("metrics: nothing is served: %s", error)
            self._server.server_close()
            self._server = None
            return
        bound, self.port = self._server.server_address[:2]
        self.url = _url(str(bound), self.port)
        logger.log(announce, "metrics: serving %s/metrics (bound to %s)", self.url, bound)

    def close(self) -> None:
        """Stop listening and release the port. Requests under way may end on their own; calling it again does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            server.socket.shutdown(socket.SHUT_RDWR)  # Linux: wakes the select() of serve_forever at once
        except OSError as error:
            logger.debug("metrics: %s", error)
        server.shutdown()
        self._thread.join()
        server.server_close()


def _bind(registry: CollectorRegistry, host: str, port: int) -> _Server | None:
    try:
        return _Server(registry, host, port)
    except (OSError, OverflowError) as error:
        problem = error
    port_is_the_problem = isinstance(problem, OverflowError) or problem.errno in _PORT_ERRORS
    other = host if port_is_the_problem else LOOPBACK
    wanted = f"cannot listen on {host} port {port} ({problem})"
    try:
        server = _Server(registry, other, 0)
    except OSError as error:
        logger.warning("metrics: %s, nor on any port of %s (%s): nothing is served", wanted, other, error)
        return None
    logger.warning("metrics: %s: listening on %s port %s instead", wanted, other, server.server_address[1])
    return server


def _url(address: str, port: int) -> str:
    """The address as a client on this machine would use it: a wildcard is none."""
    address = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


@dataclass(frozen=True)
class _Page:
    status: HTTPStatus
    content_type: str
    body: bytes


class _Server(ThreadingMixIn, TCPServer):
    """Not http.server.HTTPServer, which asks the DNS for its own name when it binds: seconds where that is slow."""

    daemon_threads = True
    allow_reuse_address = True  # bind again beside connections of the last one; a listening socket is still in the way
    request_queue_size = 64

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises OSError (also for a name that does not resolve), OverflowError for a port out of range."""
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4][0]
        self._registry = registry
        self._failure_shown = False
        super().__init__((str(address), port), _Handler)

    def page(self, path: str, accept: str) -> _Page:
        if path == "/":
            return _Page(HTTPStatus.OK, "text/html; charset=utf-8", INDEX)
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return _Page(HTTPStatus.OK, content_type, encode(self._registry))
        return _Page(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found: see /metrics\n")

    def page_or_error(self, path: str, accept: str) -> _Page:
        try:
            return self.page(path, accept)
        except Exception as error:  # the top of a thread
            # With its trace once: a scrape comes every few seconds, for weeks.
            level = logging.DEBUG if self._failure_shown else logging.WARNING
            logger.log(level, "metrics: a scrape failed: %r; later failures are shown at DEBUG only", error, exc_info=True)
            self._failure_shown = True
            body = b"the scrape failed, the agent's log says why\n"
            return _Page(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", body)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; the base class prints a trace to the job's stderr."""
        error = sys.exc_info()[1]
        level = logging.DEBUG if isinstance(error, OSError) else logging.WARNING
        logger.log(level, "metrics: a request from %s failed: %r", client_address, error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        page = self.server.page_or_error(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics: %s: %s", self.client_address[0], format % args)
