"""The storage of a directory on a local or mounted filesystem (NFS, Lustre)."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from typing import IO

from elastic_ext.checkpoints.storage.contract import Entry, Storage

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # from link(2) on filesystems without hard links
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # from fsync(2) on filesystems that cannot sync a directory

# What a read raises where a filesystem knows that the data are damaged, or what is there is no file: the same each time.
_DAMAGE = (errno.EBADMSG, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL)

_SPECIAL = "neither a file nor a directory"


class LocalStorage(Storage):
    """A local directory.

    Lists with os.scandir, because fsspec's local listing does not describe the target of a link. Its older versions even fail
    if a file is deleted during the listing, as retention does.
    """

    def path(self, name: str) -> str:
        return os.path.join(self.address, name) if name else self.address

    def means_damage(self, error: OSError) -> bool:
        return error.errno is None or error.errno in _DAMAGE  # None: not the system's, but a reader's, such as gzip.BadGzipFile

    def entries(self, child: str = "") -> Iterator[Entry]:
        root = self.path(child)
        with os.scandir(root) as items:
            for item in items:
                entry = _entry_of(item, root)
                if entry is not None:
                    yield entry

    def stat(self, name: str) -> Entry | None:
        path = self.path(name)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(name, path, stat.S_ISDIR(found.st_mode), found.st_size, found.st_mtime)

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        with open(self.path(name), "rb", opener=_open_file) as file:
            yield file

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        path = self.path(name)
        with _temporary_file(path) as (part, file):
            yield file
            _flush(file)
            os.replace(part, path)
        _sync_dir(os.path.dirname(path))

    def create(self, name: str, data: bytes) -> None:
        path = self.path(name)
        with _temporary_file(path) as (part, file):
            file.write(data)
            _flush(file)
            try:
                os.link(part, path)
            except FileExistsError:
                if os.stat(part).st_nlink != 2:  # 2 links mean that ours succeeded: NFS may repeat a request; see open(2), O_EXCL
                    raise
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _create_in_place(path, data)
        _sync_dir(os.path.dirname(path))

    def remove(self, name: str) -> None:
        os.unlink(self.path(name))

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        path = self.path(name)
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        for each in first:
            try:
                os.unlink(os.path.join(path, each))
            except FileNotFoundError:
                continue
        _sync_dir(path)
        shutil.rmtree(path)


def _open_file(path: str, flags: int) -> int:
    """Open a regular file without blocking. Raises OSError for anything else: opening a pipe would wait for a writer."""
    _refuse_special(os.stat(path), path)
    number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse_special(os.fstat(number), path)  # it may have been replaced since the stat
    except OSError:
        os.close(number)
        raise
    return number


def _refuse_special(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # open(2) itself refuses directories
        raise OSError(errno.EINVAL, _SPECIAL, path)


@contextmanager
def _temporary_file(path: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (path, file) of a temporary file beside `path`. Remove the file afterwards unless it was renamed."""
    folder, name = os.path.split(path)
    _make_dirs(folder)
    number, part = tempfile.mkstemp(prefix=f".{name[:80]}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            os.fchmod(number, 0o666 & ~_umask())  # mkstemp makes it private, but other users may have to resume from it
            yield part, file
    finally:
        try:
            os.unlink(part)
        except FileNotFoundError:
            pass


def _umask() -> int:
    """Return the umask. os.umask() must set it to read it, which would affect other threads."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), 0o022)


def _create_in_place(path: str, data: bytes) -> None:
    """Create a file exclusively without hard links. A reader may briefly see the name without the content."""
    with open(path, "xb") as file:
        file.write(data)
        _flush(file)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _make_dirs(folder: str) -> None:
    """Make directories like os.makedirs, but durably: they survive a power cut."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_dirs(above)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    _sync_dir(above)


def _sync_dir(folder: str) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(number)


def _entry_of(item: os.DirEntry[str], root: str) -> Entry | None:
    """Return the entry of a listed name; None if it was deleted meanwhile. Raises PermissionError without search permission."""
    try:
        found = item.stat()
    except OSError as error:
        if item.is_symlink():
            return Entry(item.name, item.path, False, 0, None, f"a dangling link ({error.strerror})")
        if isinstance(error, FileNotFoundError):
            return None
        if isinstance(error, PermissionError):
            raise
        return Entry(item.name, item.path, False, 0, None, f"it cannot be read: {error.strerror}")
    is_dir = stat.S_ISDIR(found.st_mode)
    unusable = "" if is_dir or stat.S_ISREG(found.st_mode) else _SPECIAL
    sibling = ""
    if item.is_symlink():
        folder, target = os.path.split(os.path.realpath(item.path))
        sibling = target if folder == os.path.realpath(root) else ""
    return Entry(item.name, item.path, is_dir, found.st_size, found.st_mtime, unusable, sibling, item.is_symlink())
