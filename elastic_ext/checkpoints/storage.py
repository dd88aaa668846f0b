"""One directory of checkpoints, on a local filesystem or on any fsspec URL: list, read, write whole, remove.

A name is relative to the directory; it may have slashes. What is written appears whole or not at all, under the name that it
was written to: a temporary name is hidden, and never that of a checkpoint. Errors are OSError, whatever library is below.
"""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, TypeVar

from elastic_ext.base.errors import UsageError

Seen = TypeVar("Seen")

READ_BLOCK = 8 << 20  # bytes that one request to an object store asks for
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two looks of `polled`

# Where the filesystems of fsspec keep the time of the last change: local mtime, s3fs LastModified, abfs last_modified,
# gcsfs updated, sftp mtime, memory only created.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

_NOT_FOREIGN = sys.stdlib_module_names | {"builtins", "elastic_ext"}  # by the module of an error's class

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # link(2) on filesystems without hard links
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # fsync(2) of a directory where the filesystem has no such thing


@dataclass(frozen=True)
class Entry:
    """One name in a listed directory. ``path`` is the address that a worker can open."""

    name: str
    path: str
    is_dir: bool
    size: int  # bytes; of a link's target; meaningless for a directory
    mtime: float | None  # seconds since the epoch by the clock of the filesystem, None where it keeps no time
    barred: str = ""  # why this cannot be a checkpoint of its own, known from the listing alone
    sibling: str = ""  # of a link to a name in the same directory: that name
    linked: bool = False  # it is a link; what else is told is of its target


class Storage:
    """One directory. ``address`` is what a worker would open. All methods raise OSError when the storage does not do it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def path(self, name: str) -> str:
        """What a worker can open: an absolute local path, or a URL."""
        raise NotImplementedError

    def entries(self, child: str = "") -> Iterator[Entry]:
        """List the directory, or the directory ``child`` in it: the names directly below, each relative to what is listed.

        Raises FileNotFoundError (on an object store: or nothing, there are no empty directories), NotADirectoryError.
        """
        raise NotImplementedError

    def stat(self, name: str) -> Entry | None:
        """What is there now under this name, asked anew; None: nothing."""
        raise NotImplementedError

    def open(self, name: str) -> Any:
        """A context with the file, binary and seekable, for reading."""
        raise NotImplementedError

    def write(self, name: str) -> Any:
        """A context with a file to write to. It appears, or replaces what is there, when the context ends without an error."""
        raise NotImplementedError

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet: of all who create the same name one succeeds, the others get FileExistsError.

        Where an object store's answer is lost on the way, the one who succeeded may be told FileExistsError too.
        Raises UsageError where the installed fsspec cannot do this.
        """
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        raise NotImplementedError

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        """Remove a file or a directory with all that is in it. first: names in it to remove before all others, in order, where
        they exist: what makes it count as complete. Raises FileNotFoundError where there is nothing."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it: a reader sees the old content or the new one."""
        with self.write(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return bytes(file.read())


def polled(look: Callable[[], Seen], enough: Callable[[Seen], bool], deadline: float) -> Seen:
    """Look until it is enough or the deadline (monotonic) is over; return what was seen last. No storage tells of a change."""
    pause = FIRST_PAUSE
    while True:
        seen = look()
        left = deadline - time.monotonic()
        if enough(seen) or left <= 0:
            return seen
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


def open_parent(path: str) -> tuple[Storage, str]:
    """The storage of the directory that a path or a URL is in, and its name there. Raises UsageError."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return open_storage(folder or ("/" if path.startswith("/") else ".")), name


def open_storage(checkpoint_dir: str) -> Storage:
    """The storage of a path or a URL; asks nothing of it yet. Raises UsageError for what names no storage."""
    if not checkpoint_dir:
        raise UsageError("checkpoint_dir is empty, expected a directory or a URL: set it, or leave it out")
    if "://" not in checkpoint_dir:
        return LocalStorage(os.path.abspath(os.path.expanduser(checkpoint_dir)))
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = url_to_fs(checkpoint_dir)
    except (ImportError, ValueError) as error:  # fsspec names the missing package, or the protocol that it does not know
        raise UsageError(f"checkpoint_dir {checkpoint_dir} cannot be opened: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(root)
    return RemoteStorage(checkpoint_dir, filesystem, root)


class LocalStorage(Storage):
    """Lists with os.scandir: fsspec's local listing tells nothing of a link's target, and its older versions fail as a whole
    when one file is deleted while they list, which is what retention does."""

    def path(self, name: str) -> str:
        return os.path.join(self.address, name) if name else self.address

    def entries(self, child: str = "") -> Iterator[Entry]:
        root = self.path(child)
        with os.scandir(root) as items:
            for item in items:
                entry = _local_entry(item, root)
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
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with open(self.path(name), "rb", opener=_open_file) as file:
            yield file

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        path = self.path(name)
        with _part(path) as (part, file):
            yield file
            _flush(file)
            os.replace(part, path)
        _sync_dir(os.path.dirname(path))

    def create(self, name: str, data: bytes) -> None:
        path = self.path(name)
        with _part(path) as (part, file):
            file.write(data)
            _flush(file)
            try:
                os.link(part, path)
            except FileExistsError:
                if os.stat(part).st_nlink != 2:  # else it was ours: NFS may tell of a second try; open(2), O_EXCL
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
    """Raises OSError for what is no file: opening a pipe would wait for a writer, and a device does what it likes."""
    _refuse_special(os.stat(path), path)
    number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse_special(os.fstat(number), path)  # it may have been replaced
    except OSError:
        os.close(number)
        raise
    return number


def _refuse_special(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a directory has an error of its own
        raise OSError(errno.EINVAL, "neither a file nor a directory", path)


@contextmanager
def _part(path: str) -> Iterator[tuple[str, IO[bytes]]]:
    """A temporary file beside `path`, its directory made where need be; gone afterwards unless it was renamed."""
    folder, name = os.path.split(path)
    _make_dirs(folder)
    number, part = tempfile.mkstemp(prefix=f".{name[:80]}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            os.fchmod(number, 0o666 & ~_umask())  # mkstemp makes it private; others may have to resume from it
            yield part, file
    finally:
        try:
            os.unlink(part)
        except FileNotFoundError:
            pass


def _umask() -> int:
    """Linux tells it without setting it, which would be seen by other threads."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), 0o022)


def _create_in_place(path: str, data: bytes) -> None:
    """For a filesystem without hard links; a reader may see the name a moment before the content."""
    with open(path, "xb") as file:
        file.write(data)
        _flush(file)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _make_dirs(folder: str) -> None:
    """Like os.makedirs, and a power cut does not undo it."""
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


def _local_entry(item: os.DirEntry[str], root: str) -> Entry | None:
    """None for what was deleted since. Raises PermissionError where names can be listed but not reached."""
    try:
        found = item.stat()
    except OSError as error:
        if item.is_symlink():
            return Entry(item.name, item.path, False, 0, None, f"a link that leads nowhere ({error.strerror})")
        if isinstance(error, FileNotFoundError):
            return None
        if isinstance(error, PermissionError):
            raise
        return Entry(item.name, item.path, False, 0, None, f"it cannot be read: {error.strerror}")
    is_dir = stat.S_ISDIR(found.st_mode)
    barred = "" if is_dir or stat.S_ISREG(found.st_mode) else "neither a file nor a directory"  # opening a pipe would hang
    sibling = ""
    if item.is_symlink():
        folder, target = os.path.split(os.path.realpath(item.path))
        sibling = target if folder == os.path.realpath(root) else ""
    return Entry(item.name, item.path, is_dir, found.st_size, found.st_mtime, barred, sibling, item.is_symlink())


class RemoteStorage(Storage):
    """Any filesystem of fsspec."""

    def __init__(self, address: str, filesystem: Any, root: str) -> None:
        super().__init__(address.rstrip("/"))
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        # Object stores, all of which fsspec serves by asynchronous classes, show a file when its upload ends. What it serves by
        # others (memory, sftp, SMB) shows it as it grows.
        self._uploads = bool(filesystem.async_impl)

    def path(self, name: str) -> str:
        return f"{self.address}/{name}" if name else self.address

    def _below(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def entries(self, child: str = "") -> Iterator[Entry]:
        root, address = self._below(child), self.path(child)
        with self._told():
            # fsspec shares filesystem objects, with their cached listings, across the process: the last one would come back.
            self._filesystem.invalidate_cache()
            listed = self._filesystem.ls(root, detail=True)
        for info in listed:
            path = info["name"].rstrip("/")
            if path != root:
                name = path.rsplit("/", 1)[-1]
                yield Entry(name, f"{address}/{name}", info["type"] == "directory", info.get("size") or 0, _mtime(info))
            elif info["type"] == "file" and info.get("size"):  # object stores may list an empty marker for the directory itself
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def stat(self, name: str) -> Entry | None:
        with self._told():
            self._filesystem.invalidate_cache()
            try:
                info = self._filesystem.info(self._below(name))
            except FileNotFoundError:
                return None
        return Entry(name, self.path(name), info["type"] == "directory", info.get("size") or 0, _mtime(info))

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._told(), self._filesystem.open(self._below(name), "rb", block_size=READ_BLOCK) as file:
            yield file

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        with self._told():
            with self._upload(self._below(name)) if self._uploads else self._write_and_move(self._below(name)) as file:
                yield file
            self._filesystem.invalidate_cache()

    @contextmanager
    def _upload(self, path: str) -> Iterator[IO[bytes]]:
        file = self._filesystem.open(path, "wb", autocommit=False)
        try:
            yield file
            file.close()
        except BaseException:
            file.discard()
            file.closed = True  # else its end as an object would upload what it still holds
            raise
        file.commit()

    @contextmanager
    def _write_and_move(self, path: str) -> Iterator[IO[bytes]]:
        folder, _, name = path.rpartition("/")
        part = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.part"
        self._filesystem.makedirs(folder, exist_ok=True)
        try:
            with self._filesystem.open(part, "wb") as file:
                yield file
        except BaseException:
            self._filesystem.rm_file(part)
            raise
        self._filesystem.mv(part, path)

    def put(self, name: str, data: bytes) -> None:
        if not self._uploads:
            super().put(name, data)
            return
        with self._told():
            self._filesystem.pipe_file(self._below(name), data)

    def create(self, name: str, data: bytes) -> None:
        if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
            kind = type(self._filesystem)
            raise UsageError(
                f"{kind.__module__.split('.')[0]} is too old: its pipe_file cannot refuse to overwrite {self.path(name)}; "
                "upgrade it and fsspec to 2024.12 or newer"
            )
        with self._told():
            self._filesystem.pipe_file(self._below(name), data, mode="create")

    def remove(self, name: str) -> None:
        if self.stat(name) is None:  # S3 removes what is not there without a word
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(name))
        with self._told():
            self._filesystem.rm_file(self._below(name))
            self._filesystem.invalidate_cache()

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        for each in first:
            try:
                self.remove(f"{name}/{each}")
            except FileNotFoundError:
                continue
        with self._told():
            self._filesystem.rm(self._below(name), recursive=True)
            self._filesystem.invalidate_cache()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the library below become OSError: fsspec lets some through as they are, botocore's of the connection say."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] in _NOT_FOREIGN:
                raise
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.address) from error


def _mtime(info: Mapping[str, Any]) -> float | None:
    for key in _TIME_KEYS:
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
