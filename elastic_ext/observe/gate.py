"""Who may read the agent's pages: TLS, client certificates and passwords, by a file that may change while the agent runs."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from elastic_ext.base.errors import UsageError
from elastic_ext.observe import web_config
from elastic_ext.observe.logins import Checks, Login, Verified
from elastic_ext.observe.pages import HEALTH, READY
from elastic_ext.observe.request import Request, basic_login
from elastic_ext.observe.web_config import WebConfig

logger = logging.getLogger(__name__)

# Without a password: a kubelet's probe has none to send. They tell that the agent lives, and why its workers do not run.
OPEN_PATHS = (HEALTH, READY)
RETRY_S = 1.0  # between two attempts to read files that are wrong, e.g. a new certificate whose key has not come yet

_Stamps = tuple[tuple[int, int, int] | None, ...]


class Verdict(Enum):
    """What becomes of a request."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    LATER = "later"  # too many passwords wait to be checked
    WAITING = "waiting"  # `verdicts` will tell


@dataclass(frozen=True)
class Loaded:
    """What the files held. stamps: of the files when they were read."""

    config: WebConfig
    context: ssl.SSLContext | None
    stamps: _Stamps


def _asks(config: web_config.WebConfig) -> bool:
    return bool(config.users) or (config.tls is not None and config.tls.client_auth is ssl.CERT_REQUIRED)


def load(path: str) -> Loaded:
    """Read the web config and the certificates that it names. Raises UsageError."""
    before = _stamps((path,))  # first: a file that changes meanwhile is read again
    config = web_config.read(path)
    if config.tls is None:
        return Loaded(config, None, before)
    stamps = (*before, *_stamps(config.tls.files))
    return Loaded(config, web_config.context(config.tls, path), stamps)


def _stamps(files: tuple[str, ...]) -> _Stamps:
    def stamp(file: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(file)  # of the target: Kubernetes replaces a symbolic link
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    return tuple(map(stamp, files))


class Gate:
    """Decides about connections and requests. All on the server's thread, but for the checks of passwords.

    Attributes:
        tls: whether connections are encrypted; this does not change.
    """

    def __init__(self, path: str) -> None:
        """Raises UsageError if the files are wrong."""
        self._path = path
        self._loaded = load(path)
        self.tls = self._loaded.context is not None
        self._retry_at = 0.0  # time.monotonic()
        self._problem = ""  # the last one shown
        self._verified = Verified()
        self._checks = Checks(lambda password, hashed: web_config.library("bcrypt", "bcrypt", path).checkpw(password, hashed))

    @property
    def asks(self) -> bool:
        """Whether the pages are closed to strangers: they need a password, or a client certificate."""
        return _asks(self._loaded.config)

    def fileno(self) -> int:
        """Return what becomes readable when there are new `verdicts`."""
        return self._checks.fileno()

    def entered(self, connection: socket.socket) -> socket.socket:
        """Return the connection as the server reads and writes it. The handshake is part of the first reads. Raises OSError."""
        self._refresh()
        if self._loaded.context is None:
            return connection
        return self._loaded.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def judge(self, request: Request, address: str, client: object) -> Verdict:
        """Decide about a request. address: of the peer. client: by which `verdicts` names it."""
        users = self._loaded.config.users
        if not users or request.path in OPEN_PATHS:
            return Verdict.ALLOWED
        login = basic_login(request.authorization)
        if login is None:
            return Verdict.REFUSED
        user, password = login
        hashed = users.get(user)
        if hashed is not None and self._verified.knows(user, hashed, password):
            return Verdict.ALLOWED
        try:
            stand_in = next(iter(users.values()))
            self._checks.ask(Login(client, address, user, password, hashed or stand_in, hashed is not None))
        except RuntimeError as error:
            logger.warning("metrics: cannot check a password: %s", error)
            return Verdict.LATER
        return Verdict.WAITING

    def verdicts(self) -> Iterator[tuple[object, Verdict]]:
        """Yield each client whose password has been checked since the last call, or will not be."""
        for login, right in self._checks.results():
            if right:
                self._verified.add(login.user, login.hashed, login.password)
            yield login.client, {True: Verdict.ALLOWED, False: Verdict.REFUSED, None: Verdict.LATER}[right]

    def forget(self, client: object) -> None:
        """Decide nothing more about a client who is gone."""
        self._checks.forget(client)

    def close(self) -> None:
        """End the thread, after the check that is under way."""
        self._checks.close()

    def _refresh(self) -> None:
        """Read the files again if one has changed. While they are wrong, what was read before stays in force."""
        loaded, now = self._loaded, time.monotonic()
        tls = loaded.config.tls
        if _stamps((self._path, *(tls.files if tls is not None else ()))) == loaded.stamps or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        try:
            changed = load(self._path)
            if self.asks and not _asks(changed.config):  # half of a file that is being written looks like this
                raise UsageError(
                    f"metrics_web_config {self._path}: it asks for no password any more; that takes a start of the agent"
                )
            if (changed.context is not None) != self.tls:
                raise UsageError(f"metrics_web_config {self._path}: TLS is turned on or off by the next start of the agent only")
        except UsageError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("metrics: what was read before stays in force: %s", error)
            return
        self._loaded, self._problem, self._retry_at = changed, "", 0.0
        logger.info("metrics: read %s and its certificates again", self._path)


def warning(gate: Gate | None, address: str, port: int) -> str:
    """Return what strangers can do at this endpoint, and which setting ends it; "" if there is nothing to say."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    what = _OPEN[gate is not None and gate.tls, gate is not None and gate.asks]
    advice = "add it to the file of metrics_web_config" if gate is not None else "set metrics_web_config (TLS and passwords)"
    return what and f"{what.format(f'{address} port {port}')}: {advice}, or metrics_host=127.0.0.1"


_OPEN = {  # by TLS, and whether strangers are kept out
    (False, False): "anyone who reaches {} can read the metrics and status of this job",
    (False, True): "anyone on the way to {} can read the password, the metrics and the status of this job (no tls_server_config)",
    (
        True,
        False,
    ): "anyone who reaches {} can read the metrics and status of this job (no passwords, no client certificates)",
    (True, True): "",
}
