"""The files of a checkpoint, and their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from typing import IO, cast

from elastic_ext.checkpoints.storage import Entry, Storage

BLOCK = 512 << 10  # bytes that each thread reads at once: they are still in the cache of its core when they are hashed
MOST_THREADS = 16


def files_of(storage: Storage, name: str) -> Iterator[tuple[str, Entry]]:
    """Yield all files below a directory, by their names relative to it. Each directory is listed once. Raises OSError.

    A link to a file counts as the file. A link to a directory is not followed: it may lead in a circle, or to all files there
    are. A link to an empty file is left out, too: the file may be one of the kernel's. So are pipes and dangling links.
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
    """Return the xxh3_64 of a file that was just opened, as a manifest has it. Other threads run while it reads and hashes.

    progress: called with the bytes of each block.
    """
    from xxhash import xxh3_64

    digest = xxh3_64()
    view = memoryview(bytearray(BLOCK))
    unbuffered = cast(RawIOBase, getattr(file, "raw", file))  # a second buffer would only cost a copy
    while count := unbuffered.readinto(view):
        digest.update(view[:count])
        if progress is not None:
            progress(count)
    return str(digest.hexdigest())


def thread_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool for reading files. threads: by default one for each core, MOST_THREADS at most."""
    return ThreadPoolExecutor(threads or min(MOST_THREADS, len(os.sched_getaffinity(0))))
