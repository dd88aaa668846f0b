"""The threads of an agent that send its workers' parts to the node's peer, and keep those of another node."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from elastic_ext.base.records import RecordError
from elastic_ext.checkpoints.memory.peers import fetch, keep, request, wire
from elastic_ext.checkpoints.memory.peers.callers import Callers
from elastic_ext.checkpoints.memory.peers.keep import Kept, Part
from elastic_ext.checkpoints.memory.peers.request import Sent
from elastic_ext.checkpoints.memory.peers.send import ADOPT_S, Circle, Outbox, Paced, PeerMetrics
from elastic_ext.checkpoints.memory.peers.wire import GET, PUT, Answer, Connection, PeerError, Request
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

CONNECTIONS = 64  # of other nodes at once; more than a node has workers
UNPROVEN = 64  # callers that may be anybody; they do not count among the above
RETRY_S = 1.0
SERVE_S = 600.0  # limit for a request of another node, which has its own, too

Sign = Callable[[Answer], Answer]


@dataclass(frozen=True)
class _Round:
    circle: Circle
    kept: Kept
    outbox: Outbox


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
            keep.clear_incoming(self._storage)
        except OSError as error:
            logger.warning("what was left of parts of other nodes could not be removed: %s", error)
        found = None
        if circle is not None:
            kept = Kept(self._storage, circle.limit, circle.own)
            found = _Round(circle, kept, Outbox(self._storage, circle, self._pace, self._metrics))
        with self._adopted:
            self._round = found
            self._adopted.notify_all()

    def fetch(
        self, name: str, digest: str, sources: Mapping[int, tuple[str, int]], over: Callable[[], bool] = lambda: False
    ) -> None:
        """Get what this node lacks of a copy; see `fetch`. Only after `adopt`."""
        assert self._round is not None, "fetch before adopt"
        fetch.fetch(self._storage, self._round.circle.key, name, digest, sources, over)

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
                    logger.warning("others cannot reach the copies in memory of this node for now: %s", error)
                fails = True
                self._closing.wait(RETRY_S)  # nothing tells when there are descriptors or threads again

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
            wanted = request.read_send(reader.readline(wire.MAX_LINE))
        now = self._round
        sock.sendall(request.encode(Sent(now.outbox.send(wanted) if now is not None else "this node is in no round")))

    def _serve_agent(self, sock: socket.socket) -> None:
        with Connection(sock, time.monotonic() + SERVE_S) as connection:
            try:
                with self._callers.entered(sock):
                    asked, sign = wire.greet(connection, lambda key_id: self._of(key_id, sock).circle.key)
                serve = {PUT: self._take, GET: self._give}.get(asked.do)
                if serve is None:
                    raise PeerError(f"unknown request {asked.do}")
                with self._slot():
                    serve(connection, asked, sign)
            except (PeerError, RecordError, FileNotFoundError) as error:
                connection.say(Answer(str(error)[: wire.MAX_REASON]))
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

    def _take(self, connection: Connection, asked: Request, sign: Sign) -> None:
        """Keep a part of another node."""

        def fill(memory: memoryview) -> str:
            connection.say(sign(Answer()))
            return connection.receive(memory)

        self._of(asked.key_id).kept.receive(Part(asked.name, asked.file, asked.size, asked.checksum), asked.kept, fill)
        connection.say(Answer())

    def _give(self, connection: Connection, asked: Request, sign: Sign) -> None:
        """Send a file of a copy to a node that lacks it, as fast as it goes: its workers wait, and so do all others."""
        keep.check_readable(asked.name, asked.file)
        with open(self._storage.path(f"{asked.name}/{asked.file}"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            connection.say(sign(Answer(size=size)))
            connection.send_file(file, size)
