"""Who may read the agent's pages: TLS, client certificates and passwords, by a file that may change while the agent runs.

The file, `metrics_web_config`, has the format of Prometheus' exporter-toolkit:
https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md says what the keys mean. What this server
does not know is an error, never ignored: users rely on it.

Passwords are checked against bcrypt hashes on a thread of its own: each check takes 50 to 1,000 ms of CPU time. Strangers may
send wrong ones as fast as they like: the checks take a bounded share of a core, few wait, and the address that has sent the
fewest wrong ones comes first. A password that was right once never waits again.
"""

from __future__ import annotations

import hmac
import importlib
import ipaddress
import logging
import os
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

from elastic_ext.base.errors import UsageError
from elastic_ext.base.files import read_text
from elastic_ext.http.pages import HEALTH, READY, CpuBudget, Request, basic_login

logger = logging.getLogger(__name__)

# Without a password: a kubelet's probe has none to send. They say that the agent lives, and why its workers do not run.
OPEN_PATHS = (HEALTH, READY)
RETRY_S = 1.0  # between two attempts to read files that are wrong, e.g. a new certificate whose key has not come yet
CPU_SHARE = 0.1  # of a core, for all checks together
CPU_BURST_S = 1.0  # so that the first scrapes after a start need not wait
MAX_WAITING = 4  # logins; with the slowest hashes the last of them still gets its answer in time, mostly
MAX_ADDRESSES = 1024  # whose wrong passwords are counted

EXTRA = "elastic_ext[web]"
MAX_BYTES = 1 << 20
MAX_COST = 14  # of bcrypt: a second or so per check; each further one doubles it, and a client waits no longer than 10 s

# Python's ssl cannot ask for a certificate without verifying it; exporter-toolkit calls those types insecure.
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
KEYS = ("tls_server_config", "basic_auth_users")
CLIENT_CA = "client_ca_file"
FILE_KEYS = ("cert_file", "key_file", CLIENT_CA)
TLS_KEYS = (*FILE_KEYS, "client_auth_type", "min_version", "max_version")
_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")

_Stamps = tuple[tuple[int, int, int] | None, ...]


class Verdict(Enum):
    ALLOWED = "allowed"
    REFUSED = "refused"
    LATER = "later"  # too many passwords wait to be checked
    WAITING = "waiting"  # `verdicts` yields the answer later


class Gate:
    """Decides about connections and requests. All on the server's thread, but for the checks of passwords."""

    def __init__(self, path: str) -> None:
        """Raises UsageError if the files are wrong."""
        self._path = path
        self.config = load(path)  # as of the last time that it could be read
        self.tls = self.config.context is not None  # whether connections are encrypted; this does not change
        self._retry_at = 0.0  # time.monotonic()
        self._problem = ""  # the last one shown
        # The passwords that were right, as keyed digests; one per user.
        self._key, self._right = secrets.token_bytes(32), dict[str, bytes]()
        # readable when there are new `verdicts`; the server forgets clients there who are gone, and closes it
        self.checks = Checks(lambda password, hashed: library("bcrypt", "bcrypt", path).checkpw(password, hashed))

    def entered(self, connection: socket.socket) -> socket.socket:
        """Return the connection as the server reads and writes it. The handshake is part of the first reads. Raises OSError."""
        self._refresh()
        if self.config.context is None:
            return connection
        return self.config.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def judge(self, request: Request, address: str, client: object) -> Verdict:
        """Decide about a request. address: of the peer. client: by which `verdicts` names it."""
        users = self.config.users
        if not users or request.path in OPEN_PATHS:
            return Verdict.ALLOWED
        login = basic_login(request.authorization)
        if login is None:
            return Verdict.REFUSED
        user, password = login
        hashed = users.get(user)
        known = self._right.get(user, b"")
        if hashed is not None and hmac.compare_digest(known, self._digest(hashed, password)):  # always takes the same time
            return Verdict.ALLOWED
        try:
            stand_in = next(iter(users.values()))
            self.checks.ask(Login(client, address, user, password, hashed or stand_in, hashed is not None))
        except RuntimeError as error:
            logger.warning("metrics: cannot check a password: %s", error)
            return Verdict.LATER
        return Verdict.WAITING

    def verdicts(self) -> Iterator[tuple[object, Verdict]]:
        """Yield each client whose password has been checked since the last call, or will not be."""
        for login, right in self.checks.results():
            if right:
                self._right[login.user] = self._digest(login.hashed, login.password)
            yield login.client, {True: Verdict.ALLOWED, False: Verdict.REFUSED, None: Verdict.LATER}[right]

    def _digest(self, hashed: bytes, password: bytes) -> bytes:
        return hmac.digest(self._key, hashed + password, "sha256")  # all hashes have one length

    def _refresh(self) -> None:
        """Read the files again if one has changed. While they are wrong, what was read before stays in force."""
        loaded, now = self.config, time.monotonic()
        if _stamps(loaded.files) == loaded.stamps or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        try:
            changed = load(self._path)
            if self.config.asks and not changed.asks:  # half of a file that is being written looks like this
                raise UsageError(
                    f"metrics_web_config {self._path}: it no longer asks for a password; that takes a start of the agent"
                )
            if (changed.context is not None) != self.tls:
                raise UsageError(f"metrics_web_config {self._path}: TLS is turned on or off by the next start of the agent only")
        except UsageError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("metrics: the web configuration that was read before stays in force: %s", error)
            return
        self.config, self._problem, self._retry_at = changed, "", 0.0
        logger.info("metrics: read %s and its certificates again", self._path)


def warning(gate: Gate | None, address: str, port: int) -> str:
    """Return what strangers can do at this endpoint, and which setting ends it; "" if there is nothing to say."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    what = _OPEN[gate is not None and gate.tls, gate is not None and gate.config.asks]
    advice = "add it to the file of metrics_web_config" if gate is not None else "set metrics_web_config (TLS and passwords)"
    return what and f"{what.format(f'{address} port {port}')}: {advice}, or metrics_host=127.0.0.1"


_OPEN = {  # by TLS, and whether strangers are kept out
    (False, False): "anyone who reaches {} can read the metrics and status of this job",
    (False, True): "anyone on the way to {} can read the password, the metrics and the status of this job (no tls_server_config)",
    (True, False): "anyone who reaches {} can read the metrics and status of this job (no passwords, no client certificates)",
    (True, True): "",
}


@dataclass(frozen=True)
class WebConfig:
    users: Mapping[str, bytes]  # bcrypt hashes by name; empty: no password is asked for
    context: ssl.SSLContext | None  # what the server shows and demands; None: plain HTTP
    files: tuple[str, ...]  # the file itself and those that it names
    stamps: _Stamps  # of them when they were read

    @property
    def asks(self) -> bool:
        """Whether the pages are closed to strangers: they need a password, or a client certificate."""
        return bool(self.users) or (self.context is not None and self.context.verify_mode is ssl.CERT_REQUIRED)


def load(path: str) -> WebConfig:
    """Read the file, and the certificates that it names, relative to its folder.

    Raises UsageError: a file cannot be read, holds something that this server does not know, or a library for it is absent.
    """
    yaml = library("yaml", "PyYAML", path)
    stamps = _stamps((path,))  # first: a file that changes meanwhile is read again
    try:
        content = read_text(path, MAX_BYTES)
        _refuse_twice(yaml.compose(content, Loader=yaml.SafeLoader))
        document = yaml.safe_load(content)
        top = _section("the file", {} if document is None else document, KEYS)
        users, tls = top.get("basic_auth_users"), top.get("tls_server_config")
        hashes = {} if users is None else dict(_users(users))
        files: tuple[str, ...] = ()
        context: ssl.SSLContext | None = None
        if tls is not None:
            section = _section("tls_server_config", tls, TLS_KEYS)
            files = _files(section, os.path.dirname(path))
            stamps += _stamps(files)
            context = _context(section, files)
    except yaml.YAMLError as error:
        # Not its own text, which shows what stands there: it may be a hash.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark is not None else ""
        raise UsageError(f"metrics_web_config {path}: expected YAML{where}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"metrics_web_config {path}: {error}") from error
    if hashes:
        library("bcrypt", "bcrypt", path)
    return WebConfig(hashes, context, (path, *files), stamps)


def library(module: str, package: str, path: str) -> ModuleType:
    """Return a module of the extra. Raises UsageError, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{package} is not installed ({error}): pip install '{EXTRA}'"
        raise UsageError(f"metrics_web_config {path}: {what}") from error


def _stamps(files: tuple[str, ...]) -> _Stamps:
    def stamp(file: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(file)  # of the target: Kubernetes replaces a symbolic link
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    return tuple(map(stamp, files))


def _section(name: str, value: object, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__}, expected {', '.join(known)}")
    for key in value:
        if key not in known:
            raise ValueError(f"{name} has {key!r}, which this server does not support: expected {', '.join(known)}; remove it")
    return value


def _files(section: Mapping[str, object], folder: str) -> tuple[str, ...]:
    """Return the paths of certificate and key, and of the CA of clients if one is given."""
    found = []
    for key in FILE_KEYS:
        name = section.get(key)
        if name is None and key != CLIENT_CA:
            raise ValueError(f"tls_server_config has no {key}: expected cert_file and key_file")
        if name is not None and not (isinstance(name, str) and name):
            raise ValueError(f"tls_server_config.{key} is {name!r}, expected the name of a file")
        found += [os.path.join(folder, name)] if isinstance(name, str) else []
    return tuple(found)


def _context(section: Mapping[str, object], files: Sequence[str]) -> ssl.SSLContext:
    def choice(key: str, default: str, values: Iterable[str]) -> str:
        value = section.get(key, default)
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"tls_server_config.{key} is {value!r}, expected one of {', '.join(values)}")
        return value

    certificate, key, *authorities = files
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client_auth = CLIENT_AUTH[choice("client_auth_type", "NoClientCert", CLIENT_AUTH)]
    if bool(authorities) == (client_auth is ssl.CERT_NONE):
        wrong = "client_ca_file without client_auth_type" if authorities else "client_auth_type without client_ca_file"
        raise ValueError(
            f"tls_server_config has {wrong}: expected both (client_auth_type: RequireAndVerifyClientCert), or neither"
        )
    lowest, highest = VERSIONS[choice("min_version", "TLS12", VERSIONS)], VERSIONS[choice("max_version", "TLS13", VERSIONS)]
    if lowest > highest:
        raise ValueError("tls_server_config: min_version is above max_version")
    made.minimum_version, made.maximum_version = lowest, highest
    made.options |= ssl.OP_NO_RENEGOTIATION  # by which a client could make the server compute at will
    seen = certificate
    try:
        for seen in files:
            open(seen, "rb").close()  # the errors of ssl name no file
        seen = f"{certificate} with {key}"
        made.load_cert_chain(certificate, key, password="")  # without one, OpenSSL would ask on the terminal
        for seen in authorities:
            made.load_verify_locations(seen)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ValueError(f"{seen}: {why}: expected PEM files, the key without a password") from error
    made.verify_mode = client_auth
    return made


def _users(section: object) -> Iterator[tuple[str, bytes]]:
    """The messages hold no hash: the log has more readers than the file."""
    if not isinstance(section, dict):
        raise ValueError(f"basic_auth_users is {type(section).__name__}, expected names with bcrypt hashes")
    for user, hashed in section.items():
        if not isinstance(user, str) or ":" in user:
            raise ValueError(f"basic_auth_users has {user!r}, expected a name without a colon; quote it")
        found = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if found is None:
            raise ValueError(
                f"basic_auth_users.{user} is not a bcrypt hash ($2y$10$...): make one with `htpasswd -nBC 10 {user}`"
            )
        if not 4 <= int(found["cost"]) <= MAX_COST:
            raise ValueError(f"basic_auth_users.{user} has bcrypt's cost {found['cost']}, expected 4 to {MAX_COST}")
        yield user, hashed.encode()


def _refuse_twice(node: object) -> None:
    """PyYAML takes the last of two equal keys, and forgets the users of the first. node: of yaml.compose."""
    value = getattr(node, "value", None)
    if not isinstance(value, list):
        return
    pairs = [each for each in value if isinstance(each, tuple)]
    names = [str(key.value) for key, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice: keep one")
    for _, below in pairs:
        _refuse_twice(below)


@dataclass(eq=False, frozen=True)
class Login:
    client: object  # whose login it is
    address: str
    user: str
    password: bytes
    hashed: bytes  # of this user, or of another one: the time of a check must not reveal which users exist
    exists: bool  # whether the user does


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


class Checks:
    """The thread and its queue. Its results make `fileno()` readable. The thread starts with the first login.

    check: whether a password has a hash: bcrypt.checkpw, which does not hold the GIL meanwhile.
    """

    def __init__(self, check: Callable[[bytes, bytes], bool]) -> None:
        self._check = check
        self._budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
        self._changed = threading.Condition()
        self._closing = False
        self._waiting: list[Login] = []
        self._wrong: dict[str, int] = {}  # by address, the latest last
        self._results: list[tuple[Login, bool | None]] = []
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._wakeup

    def ask(self, login: Login) -> None:
        """Queue a login; its result, or that of another one which had to go, comes from `results`.

        Raises RuntimeError: no thread can be started.
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
                self._report(gone, None)
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
            found, self._results = self._results, []
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
                self._report(login, right)

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
            del self._wrong[next(iter(self._wrong))]

    def _report(self, login: Login, right: bool | None) -> None:
        self._results.append((login, right))
        os.eventfd_write(self._wakeup, 1)
