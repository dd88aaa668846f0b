"""Files of copies that come from other nodes: written beside, checked, and then in their place whole, or not there at all."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from elastic_ext.checkpoints.directory import MARKERS, tiers
from elastic_ext.checkpoints.directory.tiers import memory_file, rank_of
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.memory.peers.wire import PeerError
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
