"""One rank's buffers: files of memory, mapped. One holds the last committed copy, the other is written next."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastic_ext.checkpoints.directory import MARKERS
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.storage import Storage

SPARE = f"{MARKERS}/spare"
BUFFERS = 2  # per rank
SLICE = 64 << 20  # bytes, see `populate`


@dataclass(frozen=True)
class Buffer:
    """A mapped file. name: in the tier's directory. tensor: all its bytes."""

    name: str
    tensor: Tensor

    @property
    def size(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.tensor.numpy())


def create(storage: Storage, name: str, size: int) -> Buffer:
    """Make a buffer. All its memory is taken now: a hole that a full tmpfs cannot fill would kill the writer. Raises OSError."""
    path = storage.path(name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        tensor = torch.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    populate(tensor)
    return Buffer(name, tensor)


def populate(memory: Tensor) -> None:
    """Touch each page, so that the first copy does not wait for page faults.

    With MAP_POPULATE the kernel would do it, but Python keeps its lock for as long, and training stands still; torch does not.
    For a slice, torch takes no more than one thread.
    """
    for slice_ in memory.split(SLICE):
        slice_[:: mmap.PAGESIZE].zero_()


def open_mapped(storage: Storage, name: str, private: bool = False) -> Buffer:
    """Map an existing buffer. private: what is written to the mapping does not reach the file. Raises OSError."""
    descriptor = os.open(storage.path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise OSError(errno.EIO, "it is empty", storage.path(name))
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    return Buffer(name, torch.frombuffer(memory, dtype=torch.uint8))


class Buffers:
    """The buffers of one rank.

    Attributes:
        kept: name of the last committed copy, the only one that must not be overwritten; "" before the first.
    """

    def __init__(self, storage: Storage, rank: int, limit: int) -> None:
        """limit: bytes that the buffers may have together."""
        self._storage, self._rank, self._limit = storage, rank, limit
        self._kept: Buffer | None = None
        self._spares: list[Buffer] = []
        self._made = 0
        self.kept = ""

    def tensors(self) -> list[Tensor]:
        """Return the bytes of each buffer."""
        return [each.tensor for each in (self._kept, *self._spares) if each is not None]

    def fit(self, size: int) -> bool:
        """Return whether a part of this size can be written now."""
        return bool(self._spares) and self._spares[0].size >= size

    def keep(self, name: str, reuse: bool = True) -> None:
        """Take the buffers as an earlier worker of this rank has left them. Only this copy still exists. Raises OSError.

        Args:
            name: of the copy that was loaded; "" for none.
            reuse: whether a buffer of this rank holds its part, and is to be written again.
        """
        self._spares = []
        self._kept = open_mapped(self._storage, f"{name}/{memory_file(self._rank)}") if name and reuse else None
        self.kept = name

    @property
    def keeps_others(self) -> bool:
        """Whether the copy that is kept was made by other ranks. It takes the memory of a buffer of each, but cannot be one."""
        return bool(self.kept) and self._kept is None

    def allocate(self, capacity: int) -> None:
        """Make the buffers that are missing, or too small. Raises OSError, with none of them left.

        A copy that is kept takes the place of one.
        """
        self.release()
        if capacity * BUFFERS > self._limit:
            raise OSError(
                errno.ENOMEM,
                f"two copies of its state need {capacity * BUFFERS} bytes, its share of memory_limit is {self._limit}",
            )
        try:
            for _ in range(BUFFERS - bool(self.kept)):
                self._made += 1
                name = f"{SPARE}/{os.getpid()}.{self._made}.{memory_file(self._rank)}"
                self._spares.append(create(self._storage, name, capacity))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give back the memory of the buffers that hold nothing."""
        for spare in self._spares:
            try:
                os.unlink(self._storage.path(spare.name))
            except FileNotFoundError:
                continue
        self._spares = []

    def begin(self, name: str) -> Buffer:
        """Return the buffer for a new copy, after moving it out of the older copy that it holds. Raises OSError."""
        spare, target = self._spares[0], f"{name}/{memory_file(self._rank)}"
        path = self._storage.path(target)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.rename(self._storage.path(spare.name), path)
        self._spares[0] = replace(spare, name=target)
        return self._spares[0]

    def committed(self, name: str) -> None:
        """Note that the copy of the last `begin` is committed. The buffer of the copy before it is next."""
        before, self._kept = self._kept, self._spares.pop(0)
        if before is not None:
            self._spares.append(before)
        self.kept = name
