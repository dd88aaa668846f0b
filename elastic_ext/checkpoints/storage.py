"""One directory of checkpoints that can be listed, read, written and pruned, on a local filesystem or behind any fsspec URL.

Every implementation keeps these promises:

- Names are relative to the directory and may contain slashes. A write creates the parent directories.
- A write is atomic: the file appears whole, or replaces the old content at once, or nothing changes. A temporary name is hidden
  (it begins with a dot) and never looks like a checkpoint.
- If several processes `create` the same name, exactly one succeeds.
- Each call asks the storage again. No listing or attribute comes from a cache of an earlier call.
- Errors are OSError, whichever library does the work. A missing name is FileNotFoundError.
- Only regular files are ever opened. Opening a pipe would block, and a device can do anything.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from typing import IO, TYPE_CHECKING, Any, TypeVar

from elastic_ext.base.errors import UsageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


@dataclass(frozen=True)
class Entry:
    """One name in a listed directory."""

    name: str  # relative to the listed directory
    path: str  # absolute local path or URL that a worker can open
    is_dir: bool  # whether it is a directory, or a link to one
    size: int  # bytes, of the target if this is a link; meaningless for a directory
    # time of the last change in seconds since the epoch, by the clock of the filesystem; None if it keeps no time
    mtime: float | None
    unusable: str = ""  # why this can be neither a checkpoint nor part of one (a dangling link, a pipe); "" if it can
    sibling: str = ""  # the name that this link points to, if it is in the same directory; else ""
    is_link: bool = False  # whether it is a symbolic link; the other attributes then describe its target
    # the files of all ranks, if each rank wrote its own; `name` then has a "*" for the rank. Empty: it is one entry
    parts: tuple[Entry, ...] = ()
    # why its save did not finish, judging by the names beside it and by what else lies there; "" if nothing says so
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
        return f"{self.address.rstrip('/')}/{name}" if name else self.address

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

        first: names in the directory to remove first, in this order, if they exist: the files that make it count as complete.

        Raises FileNotFoundError if the name does not exist.
        """
        raise NotImplementedError

    def listed(self, child: str = "") -> list[Entry]:
        """Return the same as `entries`; nothing if there is no such directory. Raises OSError."""
        try:
            return list(self.entries(child))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a file. A reader sees either the old content or the new."""
        with self.write(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError."""
        with self.open(name) as file:
            return file.read()

    def read_if_there(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist. Raises OSError."""
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None


def files_of(storage: Storage, name: str) -> Iterator[tuple[str, Entry]]:
    """Yield (relative name, entry) of every file below a directory. Lists each directory once. Raises OSError.

    A link to a file counts as the file. Links to directories are not followed: they may form a cycle or lead to the whole
    filesystem. Pipes, dangling links and links to empty files are skipped; an empty file may be one of the kernel's.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in sorted(storage.entries(f"{name}/{folder}".rstrip("/")), key=lambda each: each.name):
            if entry.unusable or (entry.is_link and (entry.is_dir or entry.size == 0)):
                continue
            if entry.is_dir:
                folders.append(f"{folder}{entry.name}/")
            else:
                yield folder + entry.name, entry


MAX_THREADS = 16  # that read files at once


def thread_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool for reading files. threads: by default one per core, up to MAX_THREADS."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))


def open_storage(checkpoint_dir: str) -> Storage:
    """Return the storage of a path or URL, without any request to it yet.

    Raises UsageError if the path is empty, or if the URL's protocol is unknown or not installed.
    """
    if not checkpoint_dir:
        raise UsageError("checkpoint_dir is empty, expected a directory or a URL: set it, or leave it out")
    if "://" not in checkpoint_dir:
        return LocalStorage(os.path.abspath(os.path.expanduser(checkpoint_dir)))
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = url_to_fs(checkpoint_dir)
    except (ImportError, ValueError) as error:  # fsspec names the missing package or the unknown protocol
        raise UsageError(f"checkpoint_dir {checkpoint_dir} cannot be opened: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(root)
    return RemoteStorage(checkpoint_dir, filesystem, root)


def open_parent(path: str) -> tuple[Storage, str]:
    """Return the storage of the parent directory of a path or URL, and the name in it. Raises UsageError."""
    folder, name = split_path(path)
    return open_storage(folder), name


def remove_if_there(storage: Storage, name: str) -> None:
    """Remove a file or directory with everything in it, if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        storage.remove_tree(name)


def split_path(path: str) -> tuple[str, str]:
    """Split a path or URL into its directory and the name in it, ignoring trailing slashes."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or ("/" if path.startswith("/") else "."), name


Seen = TypeVar("Seen")

# Errors of a storage that does not answer now. s3fs raises EBUSY for 503 SlowDown and EREMOTEIO for 500; we raise EIO where a
# client's error is not an OSError.
_IO = (errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two looks; each pause is twice the previous one


def poll(look: Callable[[], Seen], enough: Callable[[Seen], bool], deadline: float) -> Seen:
    """Call `look`, at least once, until `enough` accepts its result or the deadline passes. Return the last result.

    deadline: in seconds of time.monotonic().
    """
    pause = FIRST_PAUSE_S
    while True:
        seen = look()
        left = deadline - time.monotonic()
        if enough(seen) or left <= 0:
            return seen
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def is_away(error: OSError) -> bool:
    """Return whether the storage does not answer now, and may later. Else another try would end the same way."""
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in (*_IO, *_NETWORK)


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
                with open(path, "xb") as whole:  # without hard links: a reader may briefly see the name without the content
                    whole.write(data)
                    _flush(whole)
        _sync_dir(os.path.dirname(path))

    def remove(self, name: str) -> None:
        os.unlink(self.path(name))

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        path = self.path(name)
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        for each in first:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, each))
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
        with suppress(FileNotFoundError):
            os.unlink(part)


def _umask() -> int:
    """Return the umask. os.umask() must set it to read it, which would affect other threads."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), 0o022)


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


READ_BLOCK = 8 << 20  # bytes per request to an object store

# The keys of the modification time in fsspec: local mtime, s3fs LastModified, abfs last_modified, gcsfs updated, sftp mtime,
# memory only created.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

# Errors of these top-level modules pass unchanged, as any reader of a file may raise them. Those of other libraries become
# OSError, and so do those that a client lets through, such as http.client.IncompleteRead.
_OF_CLIENTS = {"http", "asyncio", "concurrent"}
_OWN_ERRORS = sys.stdlib_module_names | {"builtins", "elastic_ext", "torch"}  # torch: the handlers of its agents' signals raise


class RemoteStorage(Storage):
    """A directory of an fsspec filesystem."""

    def __init__(self, address: str, filesystem: AbstractFileSystem, root: str) -> None:
        """address: URL of the directory. root: its path as `filesystem` knows it."""
        super().__init__(address.rstrip("/"))
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        # Object stores, which fsspec implements as asynchronous classes, show a file only after its upload. The other
        # filesystems (memory, sftp, SMB) show a file while it grows.
        self._uploads_whole = bool(filesystem.async_impl)

    def _remote_path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def entries(self, child: str = "") -> Iterator[Entry]:
        root, address = self._remote_path(child), self.path(child)
        with self._os_errors():
            # fsspec shares filesystem objects and their cached listings across the process, so clear the cache first.
            self._filesystem.invalidate_cache()
            listed = self._filesystem.ls(root, detail=True)
        for info in listed:
            path = info["name"].rstrip("/")
            if path != root:
                name = path.rsplit("/", 1)[-1]
                yield _remote_entry(info, name, f"{address}/{name}")
            elif info["type"] == "file" and info.get("size"):  # an object store may list an empty marker of the directory
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def stat(self, name: str) -> Entry | None:
        with self._os_errors():
            self._filesystem.invalidate_cache()
            try:
                info = self._filesystem.info(self._remote_path(name))
            except FileNotFoundError:
                return None
        return _remote_entry(info, name, self.path(name))

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        with self._os_errors(), self._filesystem.open(self._remote_path(name), "rb", block_size=READ_BLOCK) as file:
            yield file

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        path = self._remote_path(name)
        with self._os_errors():
            with self._upload(path) if self._uploads_whole else self._write_and_move(path) as file:
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
            file.closed = True  # otherwise its finalizer would upload the rest of the buffer
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
        if not self._uploads_whole:
            super().put(name, data)
            return
        with self._os_errors():
            self._filesystem.pipe_file(self._remote_path(name), data)

    def create(self, name: str, data: bytes) -> None:
        if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
            library = type(self._filesystem).__module__.partition(".")[0]
            raise UsageError(
                f"{library} is too old: its pipe_file cannot refuse to overwrite {self.path(name)}; "
                "upgrade it and fsspec to 2024.12 or newer"
            )
        with self._os_errors():
            self._filesystem.pipe_file(self._remote_path(name), data, mode="create")

    def remove(self, name: str) -> None:
        if self.stat(name) is None:  # S3 succeeds silently if the name does not exist
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(name))
        with self._os_errors():
            self._filesystem.rm_file(self._remote_path(name))
            self._filesystem.invalidate_cache()

    def remove_tree(self, name: str, first: Sequence[str] = ()) -> None:
        for each in first:
            with suppress(FileNotFoundError):
                self.remove(f"{name}/{each}")
        with self._os_errors():
            self._filesystem.rm(self._remote_path(name), recursive=True)
            self._filesystem.invalidate_cache()

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Turn errors of underlying libraries into OSError. fsspec lets some through, such as botocore's connection errors."""
        try:
            yield
        except Exception as error:
            module = type(error).__module__.partition(".")[0]
            if module in _OWN_ERRORS and (isinstance(error, OSError) or module not in _OF_CLIENTS):
                raise
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.address) from error


def _remote_entry(info: Mapping[str, Any], name: str, path: str) -> Entry:
    return Entry(name, path, info["type"] == "directory", info.get("size") or 0, _mtime(info))


def _mtime(info: Mapping[str, object]) -> float | None:
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
