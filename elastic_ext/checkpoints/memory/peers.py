"""Each node's parts of the copies in memory, kept by one other node as well: so that a lost node costs a step or two, too.

A thread of each agent listens for the agents of other nodes, another for the agent's own workers. As soon as a worker has written
its part, it asks its agent to send it to the node's peer, and commits the copy once that is done, or has failed. So a committed
copy is as a rule on two nodes; if the peer cannot be reached, on its own node only, and the log says so once. If a worker's own
agent does not answer, nothing is committed: it has been killed, and the last copy is all that the node leaves. A node that starts
without parts that its ranks need (a replacement, or one whose ranks have changed) gets them before its workers start.

The bytes never go through etcd or the round's store; the key with which agents prove to each other that they are of this round
does. The bytes are not encrypted, no more than those of collectives.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.checkpoints.directory import MARKERS, tiers
from elastic_ext.checkpoints.directory.tiers import memory_file, rank_of
from elastic_ext.checkpoints.directory.transfer import TokenBucket
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, decode, order_of
from elastic_ext.checkpoints.memory import contract, wire
from elastic_ext.checkpoints.memory.contract import Send, Sent
from elastic_ext.checkpoints.memory.wire import GET, PUT, PartAnswer, PartRequest, PeerError, SendPace, TimedConnection
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)


INCOMING = f"{MARKERS}/incoming"


@dataclass(frozen=True)
class Part:
    """One rank's part of a copy: name of the copy, of the file in it, its bytes and their xxh3_64."""

    name: str
    file: str
    size: int
    checksum: str

    @property
    def path(self) -> str:
        return f"{self.name}/{self.file}"


def checked_rank(name: str, file: str) -> int:
    """Return the rank whose part this is. Raises PeerError unless these are the names of a copy and of a part."""
    rank = rank_of(file)
    if order_of(name) is None or rank is None or file != memory_file(rank):
        raise PeerError("that is no part of a copy in memory")
    return rank


def check_readable(name: str, file: str) -> None:
    """Raise PeerError unless another node may read this."""
    if order_of(name) is None or file != MANIFEST:
        checked_rank(name, file)


def clear_incoming(storage: Storage) -> None:
    """Remove what never became whole. Threads that still write to it may remove it at the same time. Raises OSError."""
    folder = storage.path(INCOMING)
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            _unlink(os.path.join(folder, name))


def receive(storage: Storage, part: Part, fill: Callable[[memoryview], str], beside: str = "") -> None:
    """Take a part in.

    Args:
        fill: fills the memory, and returns its checksum.
        beside: path of a file below INCOMING to write to, whose memory is used again; "": a new one.

    Raises OSError, PeerError, and what `fill` raises.
    """
    beside = beside or _beside(storage, part)
    try:
        with _mapped(beside, part.size) as memory:
            found = fill(memory)
        if found != part.checksum:
            raise PeerError(f"{part.file} came with checksum {found}, expected {part.checksum}")
        target = storage.path(part.path)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(beside, target)
    except BaseException:
        _unlink(beside)
        raise


def _beside(storage: Storage, part: Part) -> str:
    folder = storage.path(INCOMING)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.path.join(folder, f"{part.file}.{secrets.token_hex(8)}")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        logger.debug("%s is gone", path)


@contextmanager
def _mapped(path: str, size: int) -> Iterator[memoryview]:
    """Make a file and yield its memory. All of it is taken first: a hole that a full tmpfs cannot fill would kill the agent."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise PeerError(f"there is no memory for {size} bytes: {error.strerror}") from error
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
            yield view
    finally:
        os.close(descriptor)


class Kept:
    """The parts of other nodes in this node's directory, of the last copy and of the one that is being made. Threads share it."""

    def __init__(self, storage: Storage, limit: int, own: Sequence[int]) -> None:
        """Count what is there. limit: bytes for all of them. own: the ranks of this node. Raises OSError."""
        self._storage, self._limit, self._own = storage, limit, own
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], int] = {}  # (copy, file) -> bytes
        self._coming: dict[str, int] = {}  # path -> bytes; they have their memory until they end, wanted or not
        for name in tiers.own_checkpoints(storage):
            for entry in storage.entries(name):
                if (rank := rank_of(entry.name)) is not None and rank not in own:
                    self._parts[name, entry.name] = entry.size or 0

    def receive(self, part: Part, kept: str, fill: Callable[[memoryview], str]) -> None:
        """Take a part in; those of copies other than its own and `kept` go first.

        fill: fills the memory, and returns its checksum.

        Raises OSError, PeerError, and what `fill` raises.
        """
        if checked_rank(part.name, part.file) in self._own:
            raise PeerError("that is a part of this node")
        if not 0 < part.size <= self._limit:
            raise PeerError(f"a part of {part.size} bytes; memory_limit leaves {self._limit} for the parts of another node")
        beside = self._reserve(part, kept)
        whole = False
        try:
            receive(self._storage, part, fill, beside)
            whole = True
        finally:
            with self._lock:
                del self._coming[beside]
                if whole:
                    self._parts[part.name, part.file] = part.size

    def _reserve(self, part: Part, kept: str) -> str:
        """Make room; return the path of the file to write to. There may be one whose memory is used again."""
        beside = _beside(self._storage, part)
        with self._lock:
            for name, file in [each for each in self._parts if each[0] not in (part.name, kept)]:
                old = self._storage.path(f"{name}/{file}")
                if file == part.file:
                    _set_aside(old, beside)
                else:
                    _unlink(old)
                del self._parts[name, file]
            self._parts.pop((part.name, part.file), None)
            used = sum(self._parts.values()) + sum(self._coming.values())
            if used + part.size > self._limit:
                _unlink(beside)
                raise PeerError(f"memory_limit leaves {self._limit - used} bytes for a part of {part.size} of another node")
            self._coming[beside] = part.size
            return beside


def _set_aside(old: str, beside: str) -> None:
    try:
        os.rename(old, beside)  # one that is there already goes
    except FileNotFoundError:
        logger.debug("%s went with its copy", old)


ADOPT_S = 15.0  # how much later than the others an agent may learn of its round
BLOCK_S = 1 / 32  # of a block at the limit of the rate: short, as the receiver waits STALL_S, and all workers take turns
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # after a failure nothing is sent, ever longer


class PeerMetrics(Protocol):
    """What is counted of the parts that this node sends."""

    def part_sent(self, size: int | None) -> None:
        """Record that the peer has a part. size: in bytes; None: it does not have it."""


class Paced:
    """Limits the bytes sent per second. The threads of all workers share it."""

    def __init__(self, rate: float, ended: threading.Event) -> None:
        """rate: 0: no limit. ended: set when nothing is to wait any more."""
        self.block = min(wire.BLOCK, max(1, int(BLOCK_S * rate))) if rate else wire.BLOCK
        self._bucket, self._ended = TokenBucket(rate), ended
        self._lock = threading.Lock()

    def wait(self, size: int, most_s: float) -> None:
        """Wait until `size` bytes may be sent, or for `most_s` seconds."""
        with self._lock:
            pause = self._bucket.take(size, time.monotonic())
        if pause > 0:
            self._ended.wait(min(pause, max(0.0, most_s)))


@dataclass(frozen=True)
class Circle:
    """The nodes of one round, as one of them sees them.

    Attributes:
        key: known to these nodes only.
        peer: host and port of the one that keeps this node's parts.
        own: this node's ranks.
        limit: bytes for the parts of another node.
    """

    key: str
    peer: tuple[str, int]
    own: range
    limit: int


class PartOutbox:
    """Sends parts to the peer of one round. After a failure it sends none for a while, so that training is not held up again.

    The threads of all workers share it.
    """

    def __init__(self, storage: Storage, circle: Circle, pace: SendPace, metrics: PeerMetrics) -> None:
        self._storage, self._circle, self._pace, self._metrics = storage, circle, pace, metrics
        self._lock = threading.Lock()
        self._paused_until, self._pause_s = 0.0, 0.0
        self._failed = ""  # why the last part was not sent

    def send(self, wanted: Send) -> str:
        """Send a part; return why the peer does not have it, or ""."""
        with self._lock:
            reason = self._failed if time.monotonic() < self._paused_until else ""
        if not reason:
            reason = self._try(wanted)
            self._note(reason)
        self._metrics.part_sent(None if reason else wanted.size)
        return reason

    def _try(self, wanted: Send) -> str:
        try:
            self._put(wanted, time.monotonic() + wanted.limit_s)
        except (OSError, RecordError, PeerError) as error:
            return printable(str(error)) or type(error).__name__
        except Exception as error:  # the worker must have an answer, or it commits nothing at all
            logger.exception("a part could not be sent")
            return type(error).__name__
        return ""

    def _put(self, wanted: Send, deadline: float) -> None:
        checked_rank(wanted.name, wanted.file)
        asked = PartRequest(PUT, wanted.name, wanted.file, wanted.size, wanted.checksum, wanted.kept)
        path = self._storage.path(f"{wanted.name}/{wanted.file}")
        with open(path, "rb") as file, wire.connected(self._circle.peer, deadline) as connection:
            wire.ask(connection, self._circle.key, asked, ADOPT_S)
            connection.send_file(file, wanted.size, self._pace)
            wire.refuse(connection.hear(PartAnswer))

    def _note(self, reason: str) -> None:
        """Pause after a failure; log when failures begin, and when they are over."""
        with self._lock:
            before, self._failed = self._failed, reason
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S) if reason else 0.0
            self._paused_until = time.monotonic() + self._pause_s
        if reason and not before:
            logger.warning(
                "the copies in memory are on this node only, as the agent at %s:%s does not take them: %s; if this node is lost, "
                "the job resumes from an older checkpoint",
                *self._circle.peer,
                reason,
            )
        elif before and not reason:
            logger.warning("the agent at %s:%s takes the copies in memory again", *self._circle.peer)


class Callers:
    """Callers from other nodes who have not proved yet that they are of the round: anybody, so there are only a few. When one too
    many calls, the one that has been there longest goes.

    Attributes:
        changed: notified when one is made to go.
    """

    def __init__(self, most: int, changed: threading.Condition) -> None:
        self._most, self.changed = most, changed
        self._here: dict[socket.socket, None] = {}  # the oldest first

    @contextmanager
    def entered(self, sock: socket.socket) -> Iterator[None]:
        """While the caller proves itself."""
        with self.changed:
            self._here[sock] = None
            if len(self._here) > self._most:
                self._send_away(next(iter(self._here)))
        try:
            yield
        finally:
            with self.changed:
                self._here.pop(sock, None)

    def may_wait(self, sock: socket.socket) -> bool:
        """Return whether the caller is still to prove itself. Only with `changed` held."""
        return sock in self._here

    def _send_away(self, sock: socket.socket) -> None:
        del self._here[sock]
        with suppress(OSError):  # it has gone by itself
            sock.shutdown(socket.SHUT_RDWR)  # wakes its thread
        self.changed.notify_all()


LIMIT_S, LEAST_RATE = 30.0, 50e6  # seconds for all parts, more for large ones, at this many bytes a second
MAX_MANIFEST = 256 << 20  # bytes; a rank has about 150


def fetch(
    storage: Storage,
    key: str,
    name: str,
    digest: str,
    sources: Mapping[int, tuple[str, int]],
    over: Callable[[], bool],
) -> None:
    """Get the parts of these ranks, and the manifest. Returns when all are in their place.

    Args:
        storage: the directory of this node's copies.
        key: that of the round.
        name: of the copy.
        digest: of its manifest (`tiers.digest`).
        sources: by rank, host and port of the agent of a node that has its part.
        over: returns whether the round is over, so that nobody needs them any more.

    Raises:
        OSError, ElasticExtError: a part could not be had.
    """
    deadline = time.monotonic() + LIMIT_S
    manifest, data = _manifest(key, name, digest, next(iter(sources.values())), deadline, over)
    files = {file.name: file for file in manifest.files}
    if missing := sorted(rank for rank in sources if tiers.memory_file(rank) not in files):
        raise PeerError(f"the manifest of {name} has no part of rank {missing[0]}")
    for rank, source in sources.items():
        file = files[tiers.memory_file(rank)]
        deadline += file.size / LEAST_RATE
        part = Part(name, file.name, file.size, file.checksum)
        with wire.connected(source, deadline, over) as connection:
            size = wire.ask(connection, key, PartRequest(GET, name, file.name), ADOPT_S).size
            if size != part.size:
                raise PeerError(f"{file.name} has {size} bytes there, expected {part.size}")
            receive(storage, part, connection.receive)
    storage.put(f"{name}/{MANIFEST}", data)


def _manifest(
    key: str, name: str, digest: str, source: tuple[str, int], deadline: float, over: Callable[[], bool]
) -> tuple[Manifest, bytes]:
    with wire.connected(source, deadline, over) as connection:
        size = wire.ask(connection, key, PartRequest(GET, name, MANIFEST), ADOPT_S).size
        if not 0 < size <= MAX_MANIFEST:
            raise PeerError(f"the manifest of {name} has {size} bytes there")
        data = bytearray(size)
        connection.receive(memoryview(data))
    if tiers.digest(bytes(data)) != digest:
        raise PeerError(f"the manifest of {name} is not the one that was chosen")
    return decode(bytes(data)), bytes(data)


CONNECTIONS = 64  # of other nodes at once; more than a node has workers
UNPROVEN = 64  # callers that may be anybody; they do not count among the above
RETRY_S = 1.0
SERVE_S = 600.0  # limit for a request of another node, which has its own, too

Sign = Callable[[PartAnswer], PartAnswer]


@dataclass(frozen=True)
class _Round:
    circle: Circle
    kept: Kept
    outbox: PartOutbox


class PeerService:
    """Listens, from the first round with several nodes to the end of the agent.

    Attributes:
        port: where other nodes reach it.
        socket_path: where the workers of this node reach it.
    """

    def __init__(self, listening: socket.socket, socket_path: str, storage: Storage, rate: float, metrics: PeerMetrics) -> None:
        """
        Args:
            listening: for the agents of other nodes; closed at the end, or if this fails.
            storage: the directory of the copies.
            rate: bytes per second that the peer is sent at most; 0: no limit.

        Raises OSError.
        """
        self.port: int = listening.getsockname()[1]
        self.socket_path = socket_path
        self._storage, self._metrics = storage, metrics
        self._closing = threading.Event()
        self._pace = Paced(rate, self._closing)
        self._adopted = threading.Condition()
        self._round: _Round | None = None
        self._callers = Callers(UNPROVEN, self._adopted)
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        with ExitStack() as if_fails:
            if_fails.callback(listening.close)
            workers = if_fails.enter_context(socket.socket(socket.AF_UNIX))
            workers.bind(socket_path)
            workers.listen(CONNECTIONS)
            if_fails.pop_all()
        self._listening = {listening: self._serve_agent, workers: self._serve_worker}
        for sock in self._listening:
            threading.Thread(target=self._accept, args=(sock,), name="elastic_ext-peers", daemon=True).start()

    def adopt(self, circle: Circle | None) -> None:
        """Serve the nodes of this round, and no others; None: nobody. The workers of the last one have ended. Raises OSError."""
        try:
            clear_incoming(self._storage)
        except OSError as error:
            logger.warning("old parts of other nodes' copies in memory could not be removed: %s", error)
        found = None
        if circle is not None:
            kept = Kept(self._storage, circle.limit, circle.own)
            found = _Round(circle, kept, PartOutbox(self._storage, circle, self._pace, self._metrics))
        with self._adopted:
            self._round = found
            self._adopted.notify_all()

    def fetch(
        self, name: str, digest: str, sources: Mapping[int, tuple[str, int]], over: Callable[[], bool] = lambda: False
    ) -> None:
        """Get what this node lacks of a copy; see `fetch`. Only after `adopt`."""
        assert self._round is not None, "fetch before adopt"
        fetch(self._storage, self._round.circle.key, name, digest, sources, over)

    def close(self) -> None:
        """End the threads that listen. A second call does nothing."""
        self._closing.set()
        for each in self._listening:
            with suppress(OSError):  # a socket that listens is not connected, it says; and wakes the thread that accepts
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._adopted:
            self._round = None
            self._adopted.notify_all()

    # Everything below runs on the service's threads.

    def _accept(self, listening: socket.socket) -> None:
        """Serve who calls, until `close`. That this fails, for want of descriptors or threads, is logged when it begins."""
        fails = False
        while not self._closing.is_set():
            try:
                self._accept_one(listening)
                fails = False
            except (OSError, RuntimeError) as error:
                if not fails and not self._closing.is_set():
                    logger.warning("other nodes cannot reach the copies in memory of this node for now: %s", error)
                fails = True
                self._closing.wait(RETRY_S)  # no event shows when there are descriptors or threads again

    def _accept_one(self, listening: socket.socket) -> None:
        """Raises OSError; RuntimeError: there can be no more threads."""
        sock, _ = listening.accept()
        args = sock, self._listening[listening]
        try:
            threading.Thread(target=self._serve, args=args, name="elastic_ext-peer", daemon=True).start()
        except RuntimeError:
            sock.close()
            raise

    def _serve(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            with sock:
                serve(sock)
        except (OSError, RecordError, PeerError) as error:  # the other side says more of it
            logger.debug("a connection for copies in memory failed: %s", error)
        except Exception:  # the top of a thread
            logger.exception("a connection for copies in memory failed")

    def _serve_worker(self, sock: socket.socket) -> None:
        """Send the part that a worker of this node has written. Nobody else can call, and each worker does so once at a time."""
        sock.settimeout(wire.STALL_S)
        with sock.makefile("rb") as reader:
            wanted = contract.read_send(reader.readline(wire.MAX_LINE))
        now = self._round
        sock.sendall(contract.encode(Sent(now.outbox.send(wanted) if now is not None else "this node is in no round")))

    def _serve_agent(self, sock: socket.socket) -> None:
        with TimedConnection(sock, time.monotonic() + SERVE_S) as connection:
            try:
                with self._callers.entered(sock):
                    asked, sign = wire.greet(connection, lambda key_id: self._of(key_id, sock).circle.key)
                serve = {PUT: self._take, GET: self._give}.get(asked.do)
                if serve is None:
                    raise PeerError(f"unknown request {asked.do}")
                with self._slot():
                    serve(connection, asked, sign)
            except (PeerError, RecordError, FileNotFoundError) as error:
                connection.say(PartAnswer(str(error)[: wire.MAX_REASON]))
                raise

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._slots.acquire(blocking=False):
            raise PeerError("this node has too many connections")
        try:
            yield
        finally:
            self._slots.release()

    def _of(self, key_id: str, caller: socket.socket | None = None) -> _Round:
        """Return the round with this key. Raises PeerError.

        caller: it waits until this agent knows of the round; None: the agent does, or has forgotten it.
        """

        def found() -> _Round | None:
            now = self._round
            return now if now is not None and wire.key_id(now.circle.key) == key_id else None

        def waits() -> bool:
            return caller is not None and self._callers.may_wait(caller) and not self._closing.is_set()

        with self._adopted:
            self._adopted.wait_for(lambda: found() is not None or not waits(), ADOPT_S)
            now = found()
        if now is None:
            raise PeerError("this node is not in that round")
        return now

    def _take(self, connection: TimedConnection, asked: PartRequest, sign: Sign) -> None:
        """Keep a part of another node."""

        def fill(memory: memoryview) -> str:
            connection.say(sign(PartAnswer()))
            return connection.receive(memory)

        self._of(asked.key_id).kept.receive(Part(asked.name, asked.file, asked.size, asked.checksum), asked.kept, fill)
        connection.say(PartAnswer())

    def _give(self, connection: TimedConnection, asked: PartRequest, sign: Sign) -> None:
        """Send a file of a copy to a node that lacks it, as fast as it goes: its workers wait, and so do all others."""
        check_readable(asked.name, asked.file)
        with open(self._storage.path(f"{asked.name}/{asked.file}"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            connection.say(sign(PartAnswer(size=size)))
            connection.send_file(file, size)
