"""Open the storage of a path or URL as the user writes it."""

from __future__ import annotations

import os

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.storage.contract import Storage
from elastic_ext.checkpoints.storage.local import LocalStorage
from elastic_ext.checkpoints.storage.remote import RemoteStorage


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


def split_path(path: str) -> tuple[str, str]:
    """Split a path or URL into its directory and the name in it, ignoring trailing slashes."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or ("/" if path.startswith("/") else "."), name
