"""The addresses of etcd, one gRPC channel for each, and the choice of the one to use now."""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastic_ext.base.tls import ends_at, fits
from elastic_ext.etcd import vendor
from elastic_ext.etcd.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 2379
Stubs: TypeAlias = Any  # etcd3's client, which has no types; its stubs make the calls

# Measured on etcd 3.4 and 3.5. gRPC's own back-off grows to 120 s: the first good call came 36 s after a 75 s outage.
# Without the two http2 options a frozen server is noticed after 60 s or more; pings closer than 5 s draw a GOAWAY from etcd.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # limit of one connection attempt; the default of 20 s finds a host too late
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 0),  # etcd ends an idle connection that pings; the one in use has the watches' call
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # 30 s by default; a restarted pod comes back under a new address
    ("grpc.max_receive_message_length", -1),  # 4 MiB by default; etcd puts up to 1,000 revisions into one watch response
    ("grpc.use_local_subchannel_pool", 1),  # by default, two channels to one address share one connection
    ("grpc.enable_http_proxy", 0),  # an image's http_proxy is for outside traffic, not for the cluster's own etcd
)


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files."""

    ca: str | None = None  # CA of the server's certificate; by default the system's list
    # cert, key: the client's own, both or neither.
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None  # name in the server's certificate, if it is not the endpoint's host

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return values of which one changes with each file. A file that is not there counts as none."""
        found = []
        for path in filter(None, (self.ca, self.cert, self.key)):
            with suppress(OSError):
                seen = os.stat(path)
                found.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
        return tuple(found)

    def advice(self, now: float) -> str:
        """Return what to do about a connection that was refused for a certificate. now: seconds since the epoch."""
        try:
            self.check()
        except ConfigError as error:
            return f"{error}; renew it"
        until = ends_at(self.cert) if self.cert else None
        if until is not None and until < now:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(until))
            return f"the client certificate {self.cert} expired at {at}: renew it in place, the files are read again"
        ca, cert = self.ca or "of the system", self.cert or "(none is given)"
        return f"check the CA {ca}, the client certificate {cert} and http/https"

    def check(self) -> None:
        """Raise ConfigError if a file cannot be used."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("TLS client certificate: expected both the certificate and its key, got only one")
        for path, mark in ((self.ca, b"CERTIFICATE-----"), (self.cert, b"CERTIFICATE-----"), (self.key, b"PRIVATE KEY-----")):
            if path is not None:
                _check_pem(path, mark)
        if self.cert and self.key and not fits(self.cert, self.key):
            raise ConfigError(f"TLS file {self.key} is not the key of {self.cert}: expected the two of one certificate")


@dataclass(frozen=True)
class Endpoint:
    """One address. host: a name or an IP address, IPv6 without brackets. tls: None: use TLS if TLS settings were given."""

    host: str
    port: int
    tls: bool | None

    def __str__(self) -> str:
        return f"{self.grpc_host}:{self.port}"

    @property
    def grpc_host(self) -> str:
        """The host as gRPC expects it: IPv6 in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


_ENDPOINT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.]+)?)\]|(?P<host>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?/?",
    re.ASCII,
)


def parse_endpoint(text: str) -> Endpoint:
    """Parse `host`, `host:port` or `[v6]:port`, with or without http:// or https://. The default port is 2379.

    Raises ConfigError: the text is none of these. The message omits text that may hold a password (`user:secret@host`).
    """
    if "@" in text:
        raise ConfigError(
            "an etcd endpoint contains a user or password: expected host:port; give the user and password separately"
        )
    match = _ENDPOINT.fullmatch(text.strip())
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ConfigError(f"etcd endpoint {text!r}: expected host:port, [IPv6]:port or http(s)://host:port")
    return Endpoint(match["v6"] or match["host"], port, {"https": True, "http": False, None: None}[match["scheme"]])


def parse_endpoints(endpoints: str | Iterable[str]) -> tuple[Endpoint, ...]:
    """Parse a comma list or several strings; drop duplicates. Raises ConfigError."""
    texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    parsed = tuple(dict.fromkeys(parse_endpoint(text) for text in texts if text.strip()))
    if not parsed:
        raise ConfigError("no etcd endpoint given: expected host:port, several separated by commas")
    return parsed


class Connection:
    """One endpoint, with its etcd3 client, which holds the channel, the certificates and the stubs."""

    def __init__(self, endpoint: Endpoint, tls: Tls | None) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        # When the server last answered, monotonic; minus infinity if it has not since its last failure.
        self.answered_at = -math.inf
        self.authenticating = threading.Lock()  # held by the thread that asks for a token here
        self._tls = tls
        self.renewed_at = -math.inf  # monotonic, see `renew`: what was sent before may have met the certificates from before
        self._renewing = threading.Lock()
        self._closed = False
        self._client, self._stamps = self._connect()

    def _connect(self) -> tuple[Stubs, object]:
        """Return a client that has read the TLS files, and their stamps from before."""
        stamps = self._tls.stamps() if self._tls is not None else None
        given = {**_security(self.endpoint, self._tls), "grpc_options": _options(self._tls)}
        return vendor.etcd3().Etcd3Client(host=self.endpoint.grpc_host, port=self.endpoint.port, **given), stamps

    def renew(self) -> None:
        """Connect again if the TLS files have changed: gRPC reads them once. Any thread may call this.

        Calls that are on the earlier channel fail. Files that cannot be used, such as half of what is renewed, wait.
        """
        with self._renewing:
            if self._closed or self._tls is None or self._tls.stamps() == self._stamps:
                return
            before = self._client
            try:
                self._client, self._stamps = self._connect()  # the file system may hang: `close` does not wait for it
            except (ConfigError, OSError) as error:
                logger.debug("etcd at %s: its TLS files have changed, but cannot be used: %s", self.name, error)
                return
            self.renewed_at = time.monotonic()
            before.close()  # or it would go on trying to connect, with what the server refuses
            if self._closed:
                self._client.close()
        logger.info("etcd at %s: its TLS files have changed and were read again", self.name)

    @property
    def channel(self) -> Any:
        return self._client.channel

    def bound(self, timeout_s: float, metadata: Sequence[tuple[str, str]]) -> Stubs:
        """Return the etcd3 client for one call, with that call's deadline and metadata (token).

        It is a shallow copy: etcd3 keeps both in attributes, which threads with other deadlines must not see. Its call
        credentials stay empty: gRPC refuses them on a channel without TLS. Metadata travels on any channel.
        """
        client = copy.copy(self._client)
        client.timeout = timeout_s
        client.metadata = tuple(metadata)
        return client

    def close(self) -> None:
        self._closed = True
        self._client.close()


def _security(endpoint: Endpoint, tls: Tls | None) -> dict[str, str | None]:
    if endpoint.tls is False and tls is not None:
        raise ConfigError(
            f"etcd endpoint http://{endpoint} does not use TLS, but certificates were given: use https:// or remove them"
        )
    if tls is None and not endpoint.tls:
        return {}
    files = tls or Tls()
    files.check()
    return {"ca_cert": files.ca or _system_ca(), "cert_cert": files.cert, "cert_key": files.key}


def _check_pem(path: str, mark: bytes) -> None:
    """Raise ConfigError unless the file holds `mark`. gRPC takes any bytes; each call then fails without naming a file."""
    try:
        with open(path, "rb") as file:
            found = mark in file.read()
    except OSError as error:
        raise ConfigError(f"TLS file {path} cannot be read: {error.strerror}") from None
    if not found:
        raise ConfigError(f"TLS file {path} contains no PEM block that ends in {mark.decode()!r}")


def _system_ca() -> str:
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None:
        raise ConfigError(
            "etcd over TLS: no CA file given and the system has none: give the CA that signed the server's certificate"
        )
    return paths.cafile


def _options(tls: Tls | None) -> list[tuple[str, int | str]]:
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls is not None and tls.server_name else []
    return [*CHANNEL_OPTIONS, *name]


CONNECTIONS = 3  # at least: while one or two stand still because their link loses packets, another does not (see `race`)


class Endpoints:
    """All connections, of which one is in use. Any thread that sees it fail moves all threads to the next one.
    `replace` gives them other addresses.

    The first is chosen at random, so that the agents of a job spread over the members.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...], tls: Tls | None, first: int | None = None) -> None:
        self.endpoints = endpoints
        self.tls = tls
        self._connections = [Connection(endpoint, tls) for endpoint in _with_spares(endpoints)]
        self._retired: list[Connection] = []  # a call may still be on one: they are closed at the end
        self._lock = threading.Lock()
        self._index = random.randrange(len(endpoints)) if first is None else first
        self._observers: list[Callable[[Connection], None]] = []

    def __len__(self) -> int:
        return len(self._connections)

    def current(self) -> Connection:
        """The connection in use now."""
        with self._lock:
            return self._connections[self._index]

    def from_current(self) -> list[Connection]:
        """All connections in the order of their use, from the one in use now."""
        with self._lock:
            return [*self._connections[self._index :], *self._connections[: self._index]]

    def prefer(self, connection: Connection, instead_of: Connection, silent: bool) -> None:
        """Use this connection from now on. silent: the one in use has not answered at all."""
        with self._lock:
            changed = self._connections[self._index] is instead_of and connection in self._connections
            if changed:
                self._index = self._connections.index(connection)
        if changed and silent:
            self._note_silent(instead_of)

    def observe(self, on_silent: Callable[[Connection], None]) -> None:
        """Register on_silent: called with a connection on which a call got no answer, on the thread of that call."""
        self._observers.append(on_silent)

    def replace(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Use these addresses from now on; connections to those that stay are kept. Raises ConfigError: a TLS file is gone."""
        with self._lock:
            current, kept, before = self._connections[self._index], [], list(self._connections)
            for endpoint in _with_spares(endpoints):
                known = next((each for each in before if each.endpoint == endpoint), None)
                if known is not None:
                    before.remove(known)
                kept.append(known or Connection(endpoint, self.tls))
            self._retired += before
            self._connections, self.endpoints = kept, endpoints
            self._index = kept.index(current) if current in kept else random.randrange(len(kept))

    def failed(self, connection: Connection, silent: bool) -> None:
        """Use the next endpoint from now on. silent: there was no answer at all."""
        with self._lock:
            news = connection.answered_at > -math.inf  # not again and again through an outage of all
            connection.answered_at = -math.inf
            if self._connections[self._index] is connection:
                self._index = (self._index + 1) % len(self._connections)
                if len(self.endpoints) > 1:
                    level, follows = logging.INFO if news else logging.DEBUG, self._connections[self._index].name
                    logger.log(level, "etcd endpoint %s failed, %s is next", connection.name, follows)
        if silent:
            self._note_silent(connection)

    def _note_silent(self, connection: Connection) -> None:
        for observer in self._observers:
            observer(connection)

    def close(self) -> None:
        with self._lock:
            every = [*self._connections, *self._retired]
        for connection in every:
            connection.close()


def _with_spares(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    return endpoints * max(1, CONNECTIONS // len(endpoints))
