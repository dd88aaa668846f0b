"""Who may read the agent's pages: TLS, client certificates and passwords, by a file that may change while the agent runs."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastic_ext.base.errors import UsageError
from elastic_ext.observe import web_config
from elastic_ext.observe.pages import HEALTH, READY, CpuBudget, Request, basic_login
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


CPU_SHARE = 0.1  # of a core, for all checks together
CPU_BURST_S = 1.0  # so that the first scrapes after a start need not wait
MAX_WAITING = 4  # logins; with the slowest hashes the last of them still gets its answer in time, mostly
MAX_ADDRESSES = 1024  # whose wrong passwords are counted


@dataclass(eq=False, frozen=True)
class Login:
    """A user and password to be checked.

    Attributes:
        client: whose login it is.
        hashed: of this user; of another one if this user does not exist, so that nobody can tell by the time that a check takes.
        exists: whether the user does.
    """

    client: object
    address: str
    user: str
    password: bytes
    hashed: bytes
    exists: bool


def first(waiting: Sequence[Login], wrong: Mapping[str, int]) -> Login:
    """Return which login to check next: of the address with the fewest wrong passwords, the oldest. waiting: oldest first."""
    return min(waiting, key=lambda login: wrong.get(login.address, 0))


def superfluous(waiting: Sequence[Login], wrong: Mapping[str, int]) -> Login | None:
    """Return the login that must go since too many wait: of the address with the most, the newest."""
    if len(waiting) <= MAX_WAITING:
        return None

    def blame(at: int) -> tuple[int, int]:
        address = waiting[at].address
        return wrong.get(address, 0) + sum(login.address == address for login in waiting), at

    return waiting[max(range(len(waiting)), key=blame)]


class Verified:
    """The passwords that were right, as keyed digests; one per user. Comparing takes the same time whatever differs."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._digests: dict[str, bytes] = {}

    def add(self, user: str, hashed: bytes, password: bytes) -> None:
        self._digests[user] = self._digest(hashed, password)

    def knows(self, user: str, hashed: bytes, password: bytes) -> bool:
        return hmac.compare_digest(self._digests.get(user, b""), self._digest(hashed, password))

    def _digest(self, hashed: bytes, password: bytes) -> bytes:
        return hmac.digest(self._key, hashed + password, "sha256")  # all hashes have one length


class Checks:
    """The thread and its queue. Its results wake whoever polls `fileno()`. The thread starts with the first login.

    Args:
        check: whether a password has a hash: bcrypt.checkpw, which does not hold the GIL meanwhile.
    """

    def __init__(self, check: Callable[[bytes, bytes], bool]) -> None:
        self._check = check
        self._budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
        self._changed = threading.Condition()
        self._closing = False
        self._waiting: list[Login] = []
        self._wrong: OrderedDict[str, int] = OrderedDict()
        self._results: deque[tuple[Login, bool | None]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._wakeup

    def ask(self, login: Login) -> None:
        """Queue a login; its result, or that of another one which had to go, comes from `results`.

        Raises:
            RuntimeError: there can be no more threads.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elastic_ext-metrics-logins", daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._waiting.append(login)
            gone = superfluous(self._waiting, self._wrong)
            if gone is not None:
                self._waiting.remove(gone)
                self._tell(gone, None)
            self._changed.notify()

    def forget(self, client: object) -> None:
        """Check nothing more for this client, who is gone."""
        with self._changed:
            self._waiting = [login for login in self._waiting if login.client is not client]

    def results(self) -> list[tuple[Login, bool | None]]:
        """Return what is decided since the last call: whether the password was right; None: too many were waiting."""
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return []
        with self._changed:
            found = list(self._results)
            self._results.clear()
        return found

    def close(self) -> None:
        """End the thread, after the check that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wakeup)

    def _run(self) -> None:
        while (login := self._next()) is not None:
            began = time.thread_time()
            right = self._is_right(login)
            with self._changed:
                self._budget.spend(time.thread_time() - began, time.monotonic())
                self._count(login.address, right)
                self._tell(login, right)

    def _next(self) -> Login | None:
        """Wait until a check may begin; return None at the end."""
        with self._changed:
            while not self._closing:
                wait_s = self._budget.wait_s(time.monotonic())
                if self._waiting and wait_s == 0:
                    login = first(self._waiting, self._wrong)
                    self._waiting.remove(login)
                    return login
                self._changed.wait(wait_s if self._waiting else None)
        return None

    def _is_right(self, login: Login) -> bool:
        try:
            right = self._check(login.password, login.hashed)
        except ValueError as error:  # bcrypt takes no password of more than 72 bytes
            logger.debug("metrics: a password of %s cannot be checked: %s", login.address, error)
            return False
        return right and login.exists

    def _count(self, address: str, right: bool) -> None:
        if right:
            self._wrong.pop(address, None)
            return
        self._wrong[address] = self._wrong.pop(address, 0) + 1
        while len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def _tell(self, login: Login, right: bool | None) -> None:
        self._results.append((login, right))
        os.eventfd_write(self._wakeup, 1)
