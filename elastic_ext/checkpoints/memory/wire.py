"""One connection between two agents: both prove that they are of this round, then one request, and the bytes of one file.

    server -> client   Hello
    client -> server   Request    with a proof of the key
    server -> client   Answer     with a proof of the key; if it gives a reason, nothing follows
    put: client -> server   the bytes;  server -> client   Answer
    get: server -> client   the bytes

Each message is one JSON line with `schema` (SCHEMA). The proofs cover both nonces and all fields (HMAC-SHA256), so that nobody
without the key can send, get or repeat anything. The receiver knows their checksum
from the request, or from the copy's manifest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, Annotated, Protocol, TypeVar

import xxhash

from elastic_ext.base import records
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Name, NameOrEmpty, Within

SCHEMA = 1
PUT, GET = "put", "get"
CONNECT_S = 3.0
STALL_S = 5.0  # without a byte; then the peer counts as gone
BLOCK = 4 << 20  # bytes that are sent, or whose checksum is computed, at once
LOOK_S = 0.2  # between two looks whether it still matters
MAX_LINE = 16 << 10  # bytes of a message
MAX_REASON = 500  # characters

Size = Annotated[int, Within(0, 2**62)]

T = TypeVar("T", bound="ServerHello | PartRequest | PartAnswer")


class PeerError(ElasticExtError):
    """The other node refuses, or is not who it should be."""


class SendPace(Protocol):
    """How fast a file may be sent. block: bytes sent at once."""

    block: int

    def wait(self, size: int, most_s: float) -> None:
        """Wait until `size` bytes may be sent, or for `most_s` seconds."""


@dataclass(frozen=True)
class ServerHello:
    """The server's first message."""

    nonce: Name


@dataclass(frozen=True)
class PartRequest:
    """What the client wants.

    Attributes:
        do: PUT or GET.
        name: of the copy.
        file: in the copy.
        size, checksum: of the file (PUT). The checksum is xxh3_64, as in the manifest.
        kept: name of the copy before it, which stays (PUT).
        key_id: which key the client has; see `key_id`.
    """

    do: Name
    name: Name
    file: Name
    size: Size = 0
    checksum: NameOrEmpty = ""
    kept: NameOrEmpty = ""
    key_id: NameOrEmpty = ""
    nonce: NameOrEmpty = ""
    proof: NameOrEmpty = ""


@dataclass(frozen=True)
class PartAnswer:
    """What the server says. reason: why not; "" for yes. size: of the file that follows (GET)."""

    reason: str = ""
    size: Size = 0
    proof: NameOrEmpty = ""


def key_id(key: str) -> str:
    """Return what distinguishes a key from others, and does not give it away."""
    return hashlib.sha256(b"id " + key.encode()).hexdigest()[:16]


def connected(address: tuple[str, int], deadline: float, over: Callable[[], bool] = lambda: False) -> TimedConnection:
    """Connect to another agent; see `Connection`. Raises OSError."""
    left = deadline - time.monotonic()
    sock = socket.create_connection(address, timeout=max(0.001, min(CONNECT_S, left)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TimedConnection(sock, deadline, over)


class TimedConnection:
    """A socket with a deadline for all that happens on it. Its methods raise OSError, RecordError or PeerError."""

    def __init__(self, sock: socket.socket, deadline: float, over: Callable[[], bool] = lambda: False) -> None:
        """deadline: time.monotonic(). over: returns whether there is no more use for what happens here; asked every LOOK_S."""
        self._sock, self._deadline, self._over = sock, deadline, over
        self._look_at = time.monotonic() + LOOK_S
        self._reader = sock.makefile("rb", buffering=MAX_LINE)  # more than that is read into its place at once

    def __enter__(self) -> TimedConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._sock.close()

    def say(self, message: ServerHello | PartRequest | PartAnswer) -> None:
        self._limit()
        self._sock.sendall(json.dumps({"schema": SCHEMA, **records.plain(message)}).encode() + b"\n")

    def hear(self, kind: type[T], wait_s: float = 0.0) -> T:
        """Return the next message. wait_s: how much longer than STALL_S all of it may take."""
        until = time.monotonic() + STALL_S + wait_s
        line = b""
        while not line.endswith(b"\n"):
            self._limit(until - time.monotonic())
            found = self._reader.peek()  # type: ignore[attr-defined]  # a BufferedReader
            if not found:
                raise ConnectionError("the connection ended")
            line += self._reader.read(found.find(b"\n") + 1 or len(found))
            if len(line) > MAX_LINE:
                raise ConnectionError("a message is too long")
        return records.read(kind, line, "a message of another agent", SCHEMA)

    def send_file(self, file: IO[bytes], size: int, pace: SendPace | None = None) -> None:
        """Send a file from its beginning. pace: None: as fast as it goes."""
        block = pace.block if pace is not None else BLOCK
        for offset in range(0, size, block):
            count = min(block, size - offset)
            if pace is not None:
                pace.wait(count, self._deadline - time.monotonic())
            self._send(file, offset, count)

    def _send(self, file: IO[bytes], offset: int, count: int) -> None:
        end = offset + count
        while offset < end:
            self._await_room()
            sent = os.sendfile(self._sock.fileno(), file.fileno(), offset, end - offset)
            if not sent:
                raise PeerError("the file has become shorter")
            offset += sent

    def _await_room(self) -> None:
        self._limit()
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(1000 * (self._sock.gettimeout() or 0.0)):
            raise TimeoutError("timed out")

    def receive(self, target: memoryview) -> str:
        """Fill the target with the bytes that follow; return their checksum."""
        checksum = xxhash.xxh3_64()
        for offset in range(0, len(target), BLOCK):
            # Released even if this raises: while there is a view of a mapped file, it cannot be closed.
            with target[offset : offset + BLOCK] as block:
                self._fill(block)
                checksum.update(block)
        return checksum.hexdigest()

    def _fill(self, block: memoryview) -> None:
        done = 0
        while done < len(block):
            self._limit()
            with block[done:] as rest:
                count = self._reader.readinto1(rest)  # type: ignore[attr-defined]  # a BufferedReader
            if not count:
                raise ConnectionError("the connection ended within a file")
            done += count

    def _limit(self, most_s: float | None = None) -> None:
        """Limit the socket's next system call. most_s: STALL_S by default."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            if self._over():
                raise PeerError("the round is over")
        left = min(STALL_S if most_s is None else most_s, self._deadline - now)
        if left <= 0:
            raise TimeoutError("it takes too long")
        self._sock.settimeout(left)


def ask(connection: TimedConnection, key: str, request: PartRequest, wait_s: float = 0.0) -> PartAnswer:
    """Make a request; return the answer once the server has proved itself. wait_s: see `hear`. Raises PeerError if it refuses."""
    hello = connection.hear(ServerHello)
    request = replace(request, key_id=key_id(key), nonce=secrets.token_hex(16), proof="")
    connection.say(replace(request, proof=_proof(key, hello.nonce, request)))
    answer = connection.hear(PartAnswer, wait_s)
    refuse(answer)  # first: a server that does not know the key cannot prove it
    if not _proves(answer, key, request.nonce):
        raise PeerError("the other node does not have the key of this round")
    return answer


def refuse(answer: PartAnswer) -> None:
    """Raise PeerError if the answer is no."""
    if answer.reason:
        raise PeerError(f"the other node refuses: {printable(answer.reason[:MAX_REASON])}")


def greet(connection: TimedConnection, key_of: Callable[[str], str]) -> tuple[PartRequest, Callable[[PartAnswer], PartAnswer]]:
    """Return what a client wants, once it has proved itself, and what signs the answer to it.

    key_of: the key with this id; raises PeerError if there is none.
    """
    hello = ServerHello(secrets.token_hex(16))
    connection.say(hello)
    request = connection.hear(PartRequest)
    key = key_of(request.key_id)
    if not _proves(request, key, hello.nonce):
        raise PeerError("wrong proof of the key")
    return request, lambda answer: replace(answer, proof=_proof(key, request.nonce, answer))


def _proves(message: PartRequest | PartAnswer, key: str, nonce: str) -> bool:
    """Return whether the proof in a message is right. Its sender may have written anything there."""
    right = _proof(key, nonce, replace(message, proof=""))
    return hmac.compare_digest(message.proof.encode(errors="replace"), right.encode())


def _proof(key: str, nonce: str, message: PartRequest | PartAnswer) -> str:
    """Return the proof of a message that has none yet. nonce: the other side's."""
    text = json.dumps([type(message).__name__, nonce, records.plain(message)], sort_keys=True)
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
