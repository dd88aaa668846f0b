"""The contract of a storage: one directory of checkpoints that can be listed, read, written and pruned.

Every implementation keeps these promises:

- Names are relative to the directory and may contain slashes. A write creates the parent directories.
- A write is atomic: the file appears whole, or replaces the old content at once, or nothing changes. A temporary name is hidden
  (it begins with a dot) and never looks like a checkpoint.
- If several processes `create` the same name, exactly one succeeds.
- Each call asks the storage again. No listing or attribute comes from a cache of an earlier call.
- Errors are OSError, whatever library does the work. A missing name is FileNotFoundError.
- Only regular files are ever opened. Opening a pipe would block, and a device can do anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from typing import IO


@dataclass(frozen=True)
class Entry:
    """One name in a listed directory.

    Attributes:
        name: relative to the listed directory.
        path: absolute local path or URL that a worker can open.
        is_dir: whether it is a directory, or a link to one.
        size: bytes, of the target if this is a link; meaningless for a directory.
        mtime: time of the last change in seconds since the epoch, by the clock of the filesystem; None if it keeps no time.
        unusable: why this can be neither a checkpoint nor part of one (a dangling link, a pipe); "" if it can.
        sibling: the name that this link points to, if it is in the same directory; else "".
        is_link: whether it is a symbolic link; the other attributes then describe its target.
        parts: the files of all ranks, if each rank wrote its own; `name` then has a "*" for the rank. Empty: it is one entry.
        torn: why its save did not finish, judging by the names beside it and by what else lies there; "" if nothing says so.
    """

    name: str
    path: str
    is_dir: bool
    size: int
    mtime: float | None
    unusable: str = ""
    sibling: str = ""
    is_link: bool = False
    parts: tuple[Entry, ...] = ()
    torn: str = ""


class Storage:
    """One directory. `address` is the absolute local path or the URL of the directory.

    Constructing a storage does not touch the directory. Every method raises OSError if the storage refuses or does not answer. A
    read-only storage may omit the methods that list and write.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def path(self, name: str) -> str:
        """Return the absolute local path or URL of a name, for a worker to open. "" names the directory itself."""
        raise NotImplementedError

    def means_damage(self, error: OSError) -> bool:
        """Return whether this error of a read shows that what is stored is damaged; else the storage may give it later."""
        return False

    def entries(self, child: str = "") -> Iterator[Entry]:
        """List the entries directly in the directory, or in its subdirectory `child`.

        Raises FileNotFoundError if the directory does not exist (object stores have no empty directories), NotADirectoryError.
        """
        raise NotImplementedError

    def stat(self, name: str) -> Entry | None:
        """Return the current entry of a name, or None if it does not exist."""
        raise NotImplementedError

    def open(self, name: str) -> AbstractContextManager[BufferedReader]:
        """Return a context manager for reading the file. fsspec's files have the same methods as a BufferedReader.

        Raises FileNotFoundError.
        """
        raise NotImplementedError

    def write(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Return a context manager for a binary file to write to.

        The file appears, or replaces the old one, when the context ends without an error. Otherwise nothing changes.
        """
        raise NotImplementedError

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet. If several processes create the same name, one succeeds.

        If an object store's reply is lost, even the process that succeeded may get FileExistsError.

        Raises:
            FileExistsError: the name exists.
            UsageError: the installed fsspec does not support exclusive creation.
        """
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        raise NotImplementedError

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        """Remove a file, or a directory with everything in it. Remove a link, never its target.

        Args:
            first: names in the directory to remove first, in this order, if they exist: the files that make it count as
                complete.

        Raises FileNotFoundError if the name does not exist.
        """
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a file. A reader sees either the old content or the new."""
        with self.write(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError."""
        with self.open(name) as file:
            return file.read()
