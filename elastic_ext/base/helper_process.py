"""A helper process that the agents of a host share: the first one starts it, the others find it on its Unix socket.

It outlives an agent that is killed, and is started again if it is killed itself. The wire, version 1: JSON objects, one a line.

agent    {"say": "hello", "version": 1, "job": ...}     "job": which one it is for; a helper of another one ends, or fails
helper   {"say": "info" | "warning", "text": ...}       for the agent's log, any number
helper   {"say": "taken"}                               it is for that job
helper   {"say": "failed", "text": ...}                 and ends
agent    {"say": "leaves"}                              its last word
helper   {"say": "stays", "text": ...}                  it goes on without the agent; else it closes the socket when all is gone
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import errors, isolated, wakeup

logger = logging.getLogger(__name__)

VERSION = 1
UP, BUSY = b"up\n", b"another one is up\n"  # what a helper writes to its standard output as it starts
MAX_LINE = 1 << 16
# With these errors of accept() the connection stays in the backlog, and poll keeps reporting it.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_AGAIN_S = 1.0  # pause then
BACKLOG = 64  # agents that connect while the helper starts
SEND_S = 1.0  # an agent that is stopped does not read; it misses what it could have read
TRIES = 8  # of one entry, each a start or a connection: others may start and end helpers meanwhile
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # before each start after an end; the last one then stays
STEADY_S = 60.0  # a helper that has run for so long has ended for once
START_S = 120.0  # until it listens: it may wait for the end of an earlier one, and its disk may hang
END_S = 12.0  # for the helper to leave nothing behind: milliseconds, or the lease of a host that was lost just before the end
ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LANG", "PYTHONHOME")  # nothing by which a reaper would find it
QUIET_GRPC = {"GRPC_VERBOSITY": "NONE"}  # what it prints on stderr of a port that is taken is said better

Message = dict[str, str | int]


class HelperFailed(errors.ElasticExtError):
    """The helper cannot be started, or what it serves does not come up."""


def send(connection: socket.socket, message: Message) -> bool:
    """Send; return False if the other side is gone."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class SocketPeer:
    """The process on the other side of a Unix socket. pid: 0 if it is in another container. user: its id."""

    pid: int
    user: int


def peer_of(connection: socket.socket) -> SocketPeer:
    """Return who has connected, or listens, as the kernel knows it (unix(7), SO_PEERCRED)."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return SocketPeer(pid, user)


class MessageReader:
    """The messages that arrive on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.ended = False

    def read(self) -> list[Message]:
        """Read once, and return the complete messages. Set `ended` if the stream has ended, or does not follow this protocol."""
        try:
            data = self._connection.recv(MAX_LINE)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.ended = not data or len(self._rest) > MAX_LINE
        return list(self._parsed(lines))

    def _parsed(self, lines: list[bytes]) -> Iterator[Message]:
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.ended = True
                return
            yield message


def text_of(message: Message, key: str) -> str:
    """Return a text of a message; "" if it has none."""
    found = message.get(key, "")
    return found if isinstance(found, str) else ""


@dataclass(frozen=True)
class Helper:
    """A kind of helper."""

    name: str  # for the log
    module: str  # that its process runs
    address: str  # of its socket: a path, or an abstract name, which begins with a null character
    given: bytes = b""  # what it gets on its standard input, so that no secret is in a command line or environment
    log: str = ""  # where it logs; "": nowhere
    job: str = ""  # which one it is for, where one address may serve several; "": any

    @property
    def where(self) -> str | bytes:
        return os.fsencode(self.address) if self.address.startswith("\0") else self.address


@dataclass(frozen=True)
class Restart:
    """When to start a helper that has ended. row: the number of ends, and of failed starts, with less than STEADY_S between."""

    row: int
    pause_s: float
    reason: str


def restart(row: int, since: float, now: float) -> Restart:
    """Return when to start a helper that has just ended: always, while an agent needs it.

    row: the one before. since: when the agent entered, or failed to, for the last time. Times are monotonic.
    """
    row = row + 1 if now - since < STEADY_S else 1
    pause_s = PAUSES_S[min(row, len(PAUSES_S)) - 1]
    reason = f" in {pause_s:g} s: its end number {row}, each within {STEADY_S:g} s of the start" if pause_s else ""
    return Restart(row, pause_s, f"starting another{reason}")


class HelperConnection:
    """One agent's connection to a helper, until `close`. It starts the helper again for as long as it is open."""

    def __init__(
        self, helper: Helper, on_message: Callable[[Message], None], on_enter: Callable[[], None] = lambda: None
    ) -> None:
        """Connect, and start a helper if none runs. Raises HelperFailed.

        on_message: called with each message, on a thread of its own. on_enter: after each entering, before anything is received.
        """
        self._helper, self._on_message, self._on_enter = helper, on_message, on_enter
        self._leaving, self._failed = threading.Event(), False
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._connection = self._enter()
        self._thread = threading.Thread(target=self._run, name=f"elastic_ext {helper.name}"[:60], daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Leave. Return when the helper has left nothing behind, or goes on without this agent; a second call, at once.

        Where the helper's host or container ends with its last agent, so would the helper: this is why the last one waits.
        """
        with self._lock:
            if self._leaving.is_set():
                return
            self._leaving.set()
        atexit.unregister(self.close)
        send(self._connection, {"say": "leaves"})
        try:
            self._thread.join(END_S)
        except Exception as error:  # noqa: BLE001 - of a signal handler: the job's result is decided, only the wait ends
            logger.info("no wait for the end of %s: %s", self._helper.name, error)
        finally:
            self._connection.close()
            self._reap()

    # Entering: on the thread of the constructor, then on our own.

    def _enter(self) -> socket.socket:
        """Raises HelperFailed, OSError."""
        for _ in range(TRIES):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._helper.where)
            except OSError:
                connection.close()
                self._start()
            else:
                if (user := peer_of(connection).user) != os.geteuid():
                    connection.close()
                    raise HelperFailed(
                        f"{self._helper.name} on this host is that of user {user}: use another port, or wait for its end"
                    )
                send(connection, {"say": "hello", "version": VERSION, "job": self._helper.job})
                self._on_enter()
                return connection
        raise HelperFailed(f"{self._helper.name} on this host keeps ending: {TRIES} tries")

    def _start(self) -> None:
        """Start a helper, and return when it, or another one, listens. Raises HelperFailed."""
        name = self._helper.name
        if not self._helper.address.startswith("\0"):
            Path(self._helper.address).parent.mkdir(mode=0o700, exist_ok=True)
        process = subprocess.Popen(
            isolated.command(self._helper.module),
            cwd="/",
            env={**{name: os.environ[name] for name in ENVIRONMENT if name in os.environ}, **QUIET_GRPC},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the agent's process group does not end it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            with suppress(BrokenPipeError):
                stdin.write(self._helper.given)
                stdin.close()
            if late := not wakeup.readable(stdout.fileno(), START_S):
                process.kill()
            word = stdout.readline()
        self._started.append(process)
        if word == BUSY:
            process.wait()
        elif word != UP:
            log = f"; its log was {self._helper.log}" if self._helper.log else ""
            said = f"it has said nothing for {START_S:g} s" if late else word.decode(errors="replace").strip()
            raise HelperFailed(f"{name} cannot be started: {said or f'exit code {process.wait()}'}{log}")

    def _run(self) -> None:
        """Take what the helper says; enter again if it is gone."""
        row, since = 0, time.monotonic()
        while True:
            self._listen()
            with self._lock:
                if self._leaving.is_set() or self._failed:
                    return
            self._connection.close()
            now, said, logged = time.monotonic(), "is gone", ("", 0.0)
            while said:
                again = restart(row, since, now)
                if (said, again.pause_s) != logged:
                    logger.warning("%s on this host %s; %s", self._helper.name, said, again.reason)
                    logged = said, again.pause_s
                if self._leaving.wait(again.pause_s):
                    return
                said = self._enter_again()
                row, now = again.row, time.monotonic()
                since = now
            self._reap()

    def _listen(self) -> None:
        """Take what the helper says until its end."""
        lines = MessageReader(self._connection)
        while not lines.ended:
            for message in lines.read():
                self._failed = self._failed or text_of(message, "say") == "failed"
                self._on_message(message)

    def _enter_again(self) -> str:
        """Return what went wrong; "": nothing."""
        try:
            self._connection = self._enter()
        except (errors.ElasticExtError, OSError) as error:
            return f"does not come back ({error})"
        with self._lock:
            if self._leaving.is_set():  # it began while there was no connection
                send(self._connection, {"say": "leaves"})
        return ""

    def _reap(self) -> None:
        """Let no helper that has ended stay as a zombie for as long as this agent runs."""
        self._started = [process for process in self._started if process.poll() is None]


def listen_on_path(path: Path) -> socket.socket:
    """Return a socket that listens at this path. The path is there only once it does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    part = path.with_name("socket.part")
    part.unlink(missing_ok=True)
    listener.bind(str(part))
    listener.listen(BACKLOG)
    os.rename(part, path)
    return listener


class Agents:
    """A helper's side: the connected agents of this host. For one thread; no call waits for an agent longer than SEND_S."""

    def __init__(self, listener: socket.socket, name: str, job: str = "") -> None:
        """listener: listens at the helper's address. name: of the helper, for messages. job: see `Helper`."""
        self.had_agents = False  # there has been one
        self.orderly = False  # the last one has left on its own accord, and was not killed
        self.rivals: list[socket.socket] = []  # connections of agents of another job, which want this helper's address
        self._listener, self._name, self._job = listener, name, job
        self._listener.setblocking(False)
        self._connected: dict[int, tuple[socket.socket, MessageReader]] = {}  # by descriptor
        self._known: set[int] = set()  # descriptors of those that have said hello
        self.leaving: list[socket.socket] = []  # connections of agents that leave: they wait for the helper's end, or for `stay`
        self._accept_again_at = 0.0  # monotonic
        self._kept: list[Message] = []  # messages for all agents, also for those that connect later

    @property
    def number(self) -> int:
        return len(self._connected)

    @property
    def introduced(self) -> bool:
        """Return whether one of them has said hello, and is of this helper's job."""
        return bool(self._known)

    @property
    def descriptors(self) -> list[int]:
        """Return what to poll, and to pass to `serve` when it is readable."""
        return [*self._connected] if self.resting else [self._listener.fileno(), *self._connected]

    @property
    def resting(self) -> bool:
        """Return whether no connection is taken in for now: the last one found no descriptor or memory."""
        return time.monotonic() < self._accept_again_at

    def serve(self, descriptor: int) -> None:
        """Take in what has arrived on one of `descriptors`."""
        if descriptor == self._listener.fileno():
            self.accept()
        elif descriptor in self._connected:
            self._read(descriptor)

    def accept(self) -> None:
        """Take in all that wait to be connected."""
        try:
            while True:
                self._take_in(self._listener.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:  # otherwise the client is gone
            if error.errno in OUT_OF_RESOURCES:
                self._accept_again_at = time.monotonic() + ACCEPT_AGAIN_S

    def _take_in(self, connection: socket.socket) -> None:
        if peer_of(connection).user not in (os.geteuid(), 0):  # anybody on this host can try an abstract name
            connection.close()
            return
        connection.settimeout(SEND_S)
        self._connected[connection.fileno()] = connection, MessageReader(connection)
        for message in self._kept:
            send(connection, message)

    def _read(self, descriptor: int) -> None:
        connection, lines = self._connected[descriptor]
        received = lines.read()
        said = {text_of(message, "say") for message in received}
        if any(message.get("version", VERSION) != VERSION for message in received):
            text = f"{self._name} on this host is of another version of elastic_ext: use the same one on a host"
            send(connection, {"say": "failed", "text": text})
            lines.ended = True
        elif self._job and any(message.get("job", self._job) != self._job for message in received):
            self.rivals.append(connection)
            del self._connected[descriptor]
            return
        elif "hello" in said:
            self.had_agents = True
            self._known.add(descriptor)
            send(connection, {"say": "taken"})
        if "leaves" not in said and not lines.ended:
            return
        del self._connected[descriptor]
        if descriptor in self._known:  # not one that only looked whether somebody listens
            self._known.remove(descriptor)
            self.orderly = "leaves" in said
        if lines.ended:
            connection.close()
        else:
            self.leaving.append(connection)

    def say(self, message: Message) -> None:
        """Send a message to all agents; and to those that connect later, unless it is a warning. A repeated one is kept once."""
        if message["say"] != "warning":
            kept = [each for each in self._kept if each["say"] == "info" or each["say"] != message["say"]]
            self._kept = [*(each for each in kept if each != message), message]
        for connection, _ in self._connected.values():
            send(connection, message)

    def stay(self, why: str) -> None:
        """Let the agents that leave go: the helper goes on."""
        for connection in self.leaving:
            send(connection, {"say": "stays", "text": why})
            connection.close()
        self.leaving.clear()

    def refuse_rivals(self, why: str) -> None:
        for connection in self.rivals:
            send(connection, {"say": "failed", "text": why})
            connection.close()
        self.rivals.clear()

    def close(self) -> None:
        """Accept no more agents. Agents that have left wait for the end of this process."""
        self._listener.close()
        for connection, _ in self._connected.values():
            connection.close()
        self._connected.clear()
