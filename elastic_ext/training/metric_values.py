"""Where this process keeps the values of the script's metrics: in its own file, as `base.metric_files` describes it.

Why not the values of prometheus_client (`MultiProcessValue`, `MmapedDict`): importing it settles for the whole process whether
the user's own metrics are kept in files, before the script may have set PROMETHEUS_MULTIPROC_DIR. Each of its increments makes a
system call (getpid). A child that is forked while a thread increments waits for ever, since its lock is never made anew. And its
files are sparse, so that a full /dev/shm would end the worker with SIGBUS.

Without an agent the values are plain memory: the same code runs, and nothing is opened.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from array import array

from elastic_ext.base import metric_files as layout
from elastic_ext.workers import worker_env

logger = logging.getLogger(__name__)


class _File:
    """The file of this process; see `base.metric_files`. It keeps no descriptor open but those of its maps."""

    def __init__(self, prefix: str) -> None:
        pid = os.getpid()
        self._path = f"{prefix}.{pid}.{layout.running_since(pid)}.{os.urandom(6).hex()}"
        self._chunks = 0
        self._add_chunk()

    def _add_chunk(self) -> None:
        begin = self._chunks * layout.CHUNK
        if begin + layout.CHUNK > layout.MAX_BYTES:
            raise OSError("too many metrics")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self._chunks else os.O_CREAT | os.O_EXCL)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, begin, layout.CHUNK)  # as in workers.progress: no hole, no SIGBUS
            self._map = mmap.mmap(descriptor, layout.CHUNK, offset=begin)
        finally:
            os.close(descriptor)
        self._chunks += 1
        self._used = layout.CHUNK_HEAD
        self._map[:8] = layout.MAGIC

    def add(self, key: bytes, count: int) -> memoryview[float]:
        """Add a series; return its values."""
        size = layout.record_bytes(key, count)
        if self._used + size > layout.CHUNK:
            self._add_chunk()
        # No signal is handled between these: a handler that adds a series gets the place behind this one.
        chunk, at = self._map, self._used
        self._used = at + size
        layout.RECORD_HEAD.pack_into(chunk, at, len(key), count)
        at += layout.RECORD_HEAD.size
        chunk[at + 8 * count : at + 8 * count + len(key)] = key
        words = memoryview(chunk).cast("Q")
        words[1] = max(words[1], at - layout.RECORD_HEAD.size + size)
        return memoryview(chunk)[at : at + 8 * count].cast("d")


class Series:
    """One series of this process. Read and write `values` under `process.lock`; None: call `process.open` first."""

    __slots__ = ("definition", "dropped", "label_values", "values")

    def __init__(self, definition: layout.Definition, label_values: tuple[str, ...], dropped: bool = False) -> None:
        """dropped: it is beyond the limits, so nobody sees its values."""
        self.definition, self.label_values, self.dropped = definition, label_values, dropped
        self.values: memoryview[float] | None = None


class Process:
    """The series of this process. A forked child has the same ones, begins at 0, and makes a file of its own when it needs one.

    Attributes:
        lock: held for each change; only by threads of this process. Re-entrant, since a signal handler may count, too.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._file: _File | None = None
        self._alone = False  # no agent, or no room
        self._series: list[Series] = []

    def add(self, series: Series) -> None:
        """Add a series; if there is an agent, it sees it from now on. Hold the lock."""
        self._series.append(series)

    def open(self, series: Series) -> memoryview[float]:
        """Return a place for the values of a series, all 0. Hold the lock."""
        count = series.definition.values
        series.values = memoryview(array("d", bytes(8 * count)))
        if series.dropped or self._alone:
            return series.values
        try:
            if self._file is None:
                prefix = _prefix()
                if prefix is None:
                    self._alone = True
                    return series.values
                self._file = _File(prefix)
            series.values = self._file.add(layout.encoded(series.definition, series.label_values), count)
        except (OSError, ValueError) as error:
            self._alone = True
            logger.warning("metrics: the agent does not see further ones of process %s: %s", os.getpid(), error)
        return series.values

    def after_fork(self) -> None:
        """Begin anew in a child. A thread that is not in the child may have held the lock, or have half-opened a file."""
        self.lock = threading.RLock()
        self._file, self._alone = None, False
        for series in self._series:
            series.values = None


def _prefix() -> str | None:
    """Return the beginning of the file's path; None without an agent that shows metrics."""
    text = os.environ.get(worker_env.WORKER_ENV)
    if not text:
        return None
    prefix = worker_env.loads(text).get("metrics")
    return prefix if isinstance(prefix, str) else None


process = Process()
os.register_at_fork(after_in_child=process.after_fork)
