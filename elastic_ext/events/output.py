"""Where an agent's events go: to a file, by a thread of its own. `spans` sends recoveries to OpenTelemetry in the same way.

The file has one JSON object per line; several agents of a host may share it, or it is stdout.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from elastic_ext.base import threads
from elastic_ext.events.event_table import EventTime, Source, Value, record

logger = logging.getLogger(__name__)

T = TypeVar("T")

STDOUT = "stdout"
DROPPED = "events_dropped"
MOST = 1000  # items that wait; a job has a few in a second at worst


class Outbox(Generic[T]):
    """A bounded queue and a daemon thread that sends its items in order, so that no disk, pipe or server can hold up the job.

    Any thread may put, also within a signal handler.
    """

    def __init__(self, send: Callable[[T], None], name: str, most: int = MOST, at_end: Callable[[], None] = lambda: None) -> None:
        """send: may block for ever, and should not raise. name: of the thread. at_end: called there after the last item."""
        self._send, self._name, self._most, self._at_end = send, name, most, at_end
        self.dropped = 0  # items that did not fit into the queue
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()  # its put() is re-entrant
        self._lock = threading.RLock()
        self._thread = threads.started(self._run, name, logger.warning, "%s does nothing: no thread can be started: %s", name)
        self._closed = self._thread is None

    def put(self, item: T) -> None:
        """Queue an item, or drop it. Returns at once; never raises."""
        with self._lock:
            if self._closed:
                return
            if self._waiting.qsize() >= self._most:
                self.dropped += 1
            else:
                self._waiting.put(item)

    def close(self, wait_s: float) -> bool:
        """Send what waits, for at most wait_s seconds; return whether all was sent. The thread is left alone if it hangs."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._send(item)
            except Exception:  # a thread that ends would take all later items with it
                logger.exception("%s: an item was lost", self._name)
        self._at_end()


class EventFile:
    """A file to append lines to. Only one thread uses it; it may block in any call.

    Invariants: a line is one write with O_APPEND, so lines of several agents do not mix on a local file system. A line that was
    written in part, because the disk became full, is ended before the next one. A file that was renamed away (logrotate) is left.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._torn = False

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, and then the line does not count as written."""
        descriptor = self._opened()
        whole = b"\n" + line if self._torn else line
        try:
            written = os.write(descriptor, whole)
        except BlockingIOError:  # a pipe whose reader is slow
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
            written = os.write(descriptor, whole)
        except OSError:
            self.close()
            raise
        self._torn = written < len(whole)
        if self._torn:
            raise OSError(f"only {written} of {len(whole)} bytes were written")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        if self._path == STDOUT:
            if sys.__stdout__ is None:
                raise OSError("stdout is closed")
            return sys.__stdout__.fileno()
        if self._descriptor is not None:
            try:
                named = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
            except FileNotFoundError:
                named = False
            if not named:  # the path leads elsewhere by now
                self.close()
        if self._descriptor is None:
            # Not blocking, because a pipe may have no reader. In a directory where others may write, a link may be theirs.
            links = 0 if self._path.startswith(("/dev/", "/proc/")) else os.O_NOFOLLOW
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | links
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor


class Events:
    """Writes the events of one agent. Any thread may emit; nothing here delays the caller or raises because of the file.

    A line is out as soon as the thread has written it: nothing is buffered. Events that cannot be written, or that come while
    `MOST` others wait, are counted, and the next line that can be written says how many are missing.
    """

    def __init__(self, path: str, source: Source, round_: Callable[[], int], most: int = MOST) -> None:
        """path: a file, a pipe, or STDOUT. round_: returns the number of the current round."""
        self._source, self._round, self._path = source, round_, path
        self._file = EventFile(path)
        self._lost = 0  # by the thread
        self._reported = 0  # of those lost and dropped, how many an event has reported
        self._failing = False
        self._outbox: Outbox[dict[str, Value]] = Outbox(self._write, "elastic_ext-events", most, self._end)

    def emit(self, name: str, **fields: Value) -> None:
        """Write an event with its own fields; see `events.schema.json`. Returns at once."""
        try:
            self._outbox.put(record(name, self._source, self._now(), fields))
        except ValueError as error:  # a mistake in this package, which tests find; the job matters more
            logger.error("events: %s; it is not written", error)

    def close(self, limit_s: float) -> None:
        """Write what waits, for limit_s seconds at most; later events are not written."""
        if not self._outbox.close(limit_s):
            logger.warning("events: %s does not take the last events within %.1f s", self._path, limit_s)

    def _end(self) -> None:
        self._report_missing()
        self._file.close()

    def _now(self) -> EventTime:
        return EventTime(time.time(), time.monotonic(), self._round())

    def _write(self, event: dict[str, Value]) -> None:
        self._report_missing()
        if not self._append(event):
            self._lost += 1

    def _report_missing(self) -> None:
        missing = self._lost + self._outbox.dropped
        if missing == self._reported:
            return
        own: dict[str, Value] = {"count": missing - self._reported}
        if self._append(record(DROPPED, self._source, self._now(), own)):
            self._reported = missing

    def _append(self, event: dict[str, Value]) -> bool:
        try:
            self._file.write(json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have, or not a file name
            if not self._failing:
                logger.warning("events: cannot write to %s: %s; events are dropped until it works", self._path, error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("events: writing to %s works again", self._path)
        self._failing = False
        return True
