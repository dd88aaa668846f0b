"""The storage of anything that fsspec opens, except local filesystems: object stores, sftp, SMB, memory."""

from __future__ import annotations

import errno
import inspect
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from io import BufferedReader
from typing import IO, Any, Protocol

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.storage.contract import Entry, Storage

READ_BLOCK = 8 << 20  # bytes per request to an object store

# The keys of the modification time in fsspec: local mtime, s3fs LastModified, abfs last_modified, gcsfs updated, sftp mtime,
# memory only created.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

# Errors of these top-level modules pass unchanged, as whoever reads a file may raise them. Those of other libraries become
# OSError, and so do those that a client lets through, such as http.client.IncompleteRead.
_OF_CLIENTS = {"http", "asyncio", "concurrent"}
_OWN_ERRORS = sys.stdlib_module_names | {"builtins", "elastic_ext", "torch"}  # torch: the handlers of its agents' signals raise


class Filesystem(Protocol):
    """The part of fsspec.AbstractFileSystem used here. fsspec has no type hints."""

    async_impl: bool

    def invalidate_cache(self) -> None: ...
    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]: ...
    def info(self, path: str) -> dict[str, Any]: ...
    def open(self, path: str, mode: str, **options: object) -> Any: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def pipe_file(self, path: str, value: bytes, **options: object) -> object: ...
    def mv(self, path1: str, path2: str) -> object: ...
    def rm_file(self, path: str) -> object: ...
    def rm(self, path: str, recursive: bool) -> object: ...


class RemoteStorage(Storage):
    """A directory of an fsspec filesystem."""

    def __init__(self, address: str, filesystem: Filesystem, root: str) -> None:
        """address: URL of the directory. root: its path as `filesystem` knows it."""
        super().__init__(address.rstrip("/"))
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        # Object stores, which fsspec implements as asynchronous classes, show a file only after its upload. The other
        # filesystems (memory, sftp, SMB) show a file while it grows.
        self._uploads_whole = bool(filesystem.async_impl)

    def path(self, name: str) -> str:
        return f"{self.address}/{name}" if name else self.address

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
                yield _entry_of(info, name, f"{address}/{name}")
            elif info["type"] == "file" and info.get("size"):  # an object store may list an empty marker of the directory
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def stat(self, name: str) -> Entry | None:
        with self._os_errors():
            self._filesystem.invalidate_cache()
            try:
                info = self._filesystem.info(self._remote_path(name))
            except FileNotFoundError:
                return None
        return _entry_of(info, name, self.path(name))

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
            try:
                self.remove(f"{name}/{each}")
            except FileNotFoundError:
                continue
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


def _entry_of(info: Mapping[str, Any], name: str, path: str) -> Entry:
    return Entry(name, path, info["type"] == "directory", info.get("size") or 0, _mtime(info))


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
