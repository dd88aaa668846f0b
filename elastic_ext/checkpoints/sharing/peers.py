"""Asks another node's server (`part_server`) for its catalogue, and for bytes of its files.

Each request has a connection of its own, so any number of threads may ask. All errors are OSError: ConnectionError or
TimeoutError where the node does not answer as it should, and else what it has met itself.
"""

from __future__ import annotations

import errno
import io
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from io import BufferedReader
from typing import IO, TYPE_CHECKING, TypeVar

from elastic_ext.base import records
from elastic_ext.base.printable import printable
from elastic_ext.checkpoints.sharing import catalogue
from elastic_ext.checkpoints.sharing.catalogue import Catalogue
from elastic_ext.checkpoints.sharing.part_requests import (
    MAX_LINE,
    SCHEMA,
    Asked,
    PartAnswer,
    PartGreeting,
    PartPlace,
    PartRequest,
    counting_key,
    is_same,
    line,
    new_key,
    proof_of_client,
    proof_of_server,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Said = TypeVar("Said", PartGreeting, PartAnswer)

CONNECT_S = 10.0
STALLED_S = 30.0  # without a byte that comes
ANSWER_S = 120.0  # until the answer begins: all connections of the server may be taken
BLOCK = 1 << 20  # bytes that a small read gets
KEPT_BLOCKS = 4  # of a file: its begin, its end, and what is read between them
CHUNK = 1 << 20  # bytes that are received at once


class NodePeer:
    """Another node of the round. secret: of the job; "": it has none. node: its group rank, for messages."""

    def __init__(self, place: PartPlace, secret: str = "", node: int = -1) -> None:
        self._place, self._key = place, counting_key(place.key, secret)
        self.name = f"node {node} at {place.host}" if node >= 0 else place.host

    def catalogue(self, deadline: float) -> Catalogue:
        """Return what the node has. deadline: in seconds of time.monotonic(). Raises OSError."""
        with self._asked(PartRequest(new_key(), Asked.CATALOGUE), deadline) as (connection, answer):
            if answer.size > catalogue.MAX_BYTES:
                raise ConnectionError(f"{self.name} sends a catalogue of {answer.size} bytes")
            data = bytearray(answer.size)
            connection.fill(memoryview(data))
        try:
            return catalogue.decode(bytes(data), f"what {self.name} has in its local_dir")
        except records.RecordError as error:
            raise ConnectionError(str(error)) from error

    def open(self, name: str, size: int) -> AbstractContextManager[BufferedReader]:
        """Return a reader of a file. size: as catalogued. Raises OSError, also while it is read."""
        return BufferedReader(_RemoteFile(self, name, size))

    def read_into(self, name: str, offset: int, data: memoryview, whole: int) -> None:
        """Fill `data` with the bytes of a file from an offset. whole: the size of the file. Raises OSError."""
        request = PartRequest(new_key(), Asked.FILE, name, offset, len(data))
        with self._asked(request) as (connection, answer):
            self._refuse_other_size(name, answer, whole, len(data))
            connection.fill(data)

    def copy(self, name: str, size: int, file: IO[bytes], throttle: Callable[[int], None] = lambda size: None) -> None:
        """Write all of a file of this size. throttle: called with the bytes of each chunk before they are taken; may wait.

        Raises OSError, and what `throttle` raises.
        """
        with self._asked(PartRequest(new_key(), Asked.FILE, name)) as (connection, answer):
            self._refuse_other_size(name, answer, size, size)
            left, chunk = size, memoryview(bytearray(min(CHUNK, size)))
            while left:
                part = chunk[: min(left, CHUNK)]
                throttle(len(part))
                connection.fill(part)
                file.write(part)
                left -= len(part)

    def _refuse_other_size(self, name: str, answer: PartAnswer, whole: int, size: int) -> None:
        if (answer.whole, answer.size) != (whole, size):
            text = f"{self.name}: {printable(name)} has {answer.whole} bytes, and had {whole} when it was listed"
            raise ConnectionError(text)

    @contextmanager
    def _asked(self, request: PartRequest, deadline: float = math.inf) -> Iterator[tuple[_Connection, PartAnswer]]:
        """Yield the connection, once the server has proved itself, and its answer. Raises OSError."""
        with _Connection(self.name, self._place, deadline) as connection:
            greeting = connection.read(PartGreeting)
            request = replace(request, proof=proof_of_client(self._key, self._place, greeting, request))
            connection.send(line(request))
            answer = connection.read(PartAnswer)
            if not is_same(answer.proof, proof_of_server(self._key, self._place, greeting, request, answer)):
                raise ConnectionError(f"{self.name}: what answers at port {self._place.port} does not know the key")
            if answer.number:
                raise OSError(answer.number, f"{self.name}: {printable(answer.text)}", request.name)
            yield connection, answer


class _Connection:
    """A connection to a server. Its errors name the node. deadline: in seconds of time.monotonic()."""

    def __init__(self, name: str, place: PartPlace, deadline: float) -> None:
        self._name, self._deadline, self._rest = name, deadline, b""
        with self._naming():
            self._socket = socket.create_connection((place.host, place.port), self._left(CONNECT_S))

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        with self._naming():
            self._socket.settimeout(self._left(STALLED_S))
            self._socket.sendall(data)

    def read(self, kind: type[Said]) -> Said:
        """Read a line."""
        data = self._rest
        while b"\n" not in data:
            if len(data) > MAX_LINE:
                raise ConnectionError(f"{self._name} sends a line of more than {MAX_LINE} bytes")
            data += self._receive(ANSWER_S)
        said, _, self._rest = data.partition(b"\n")
        try:
            return records.read(kind, said, f"a line of {self._name}", SCHEMA)
        except records.RecordError as error:
            raise ConnectionError(str(error)) from error

    def fill(self, data: memoryview) -> None:
        """Fill `data` with what comes."""
        done = min(len(self._rest), len(data))
        data[:done], self._rest = self._rest[:done], self._rest[done:]
        while done < len(data):
            with self._naming():
                self._socket.settimeout(self._left(STALLED_S))
                got = self._socket.recv_into(data[done:])
            if not got:
                raise ConnectionError(f"{self._name} has broken off: {len(data) - done} bytes are missing")
            done += got

    def _receive(self, limit_s: float) -> bytes:
        with self._naming():
            self._socket.settimeout(self._left(limit_s))
            data = self._socket.recv(MAX_LINE)
        if not data:
            raise ConnectionError(f"{self._name} has closed the connection: it has ended, or has another key or job_secret")
        return data

    def _left(self, limit_s: float) -> float:
        left = min(limit_s, self._deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("its time is over")
        return left

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(f"{self._name} does not answer in time: {error}") from error
        except OSError as error:
            raise ConnectionError(f"{self._name} cannot be reached: {error.strerror or error}") from error


class _RemoteFile(io.RawIOBase):
    """A file of another node. A small read gets a whole block, which later ones find here."""

    def __init__(self, peer: NodePeer, name: str, size: int) -> None:
        self._peer, self._name, self._size, self._at = peer, name, size, 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()  # by number, the one that was read last at the end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._name)
        self._at = at
        return at

    def readinto(self, buffer: Buffer) -> int:
        data = memoryview(buffer).cast("B")
        count = max(0, min(len(data), self._size - self._at))
        if count >= BLOCK:
            self._peer.read_into(self._name, self._at, data[:count], self._size)
        elif count:
            number, begin = divmod(self._at, BLOCK)
            found = self._block(number)[begin : begin + count]
            count = len(found)
            data[:count] = found
        self._at += count
        return count

    def readall(self) -> bytes:
        data = memoryview(bytearray(max(0, self._size - self._at)))
        done = 0
        while done < len(data):
            done += self.readinto(data[done:])
        return bytes(data)

    def _block(self, number: int) -> memoryview:
        if number not in self._blocks:
            data = memoryview(bytearray(min(BLOCK, self._size - number * BLOCK)))
            self._peer.read_into(self._name, number * BLOCK, data, self._size)
            self._blocks[number] = data
        self._blocks.move_to_end(number)
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[number]
