"""The files of a checkpoint, and their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from typing import IO, cast

from elastic_ext.checkpoints.storage import Entry, Storage

BLOCK = 512 << 10  # bytes per read of each thread; small enough to be still in the core's cache when hashed
MAX_THREADS = 16


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


def checksum(file: IO[bytes], progress: Callable[[int], None] | None = None) -> str:
    """Return the xxh3_64 of a newly opened file, in the form that manifests use. Releases the GIL to read and hash.

    progress: called with the size of each block in bytes.
    """
    from xxhash import xxh3_64

    digest = xxh3_64()
    view = memoryview(bytearray(BLOCK))
    unbuffered = cast(RawIOBase, getattr(file, "raw", file))  # a buffered read would only add a copy
    while count := unbuffered.readinto(view):
        digest.update(view[:count])
        if progress is not None:
            progress(count)
    return str(digest.hexdigest())


def checksum_of(data: bytes | memoryview) -> str:
    """Return the xxh3_64 of bytes in memory, in the form that manifests use.

    Releases the GIL, as xxh3_64_hexdigest does not before xxhash 4: other threads would stand still, a tenth of a second for each
    gigabyte.
    """
    from xxhash import xxh3_64

    return str(xxh3_64(data).hexdigest())


def thread_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool for reading files. threads: by default one per core, up to MAX_THREADS."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))
