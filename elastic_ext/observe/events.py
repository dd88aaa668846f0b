"""Structured events: one JSON object per line, in a file that several agents of a host may share, or on stdout."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable

from elastic_ext.observe import event_table
from elastic_ext.observe.event_table import Moment, Source, Value
from elastic_ext.observe.outbox import MOST, Outbox

logger = logging.getLogger(__name__)

STDOUT = "stdout"
DROPPED = "events_dropped"


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
            _await_room(descriptor)
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
        if self._descriptor is not None and not self._is_named(self._descriptor):
            self.close()
        if self._descriptor is None:
            # Not blocking, because a pipe may have no reader. In a directory where others may write, a link may be theirs.
            links = 0 if self._path.startswith(("/dev/", "/proc/")) else os.O_NOFOLLOW
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | links
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor

    def _is_named(self, descriptor: int) -> bool:
        """Return whether the path still leads to what is open."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def _await_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


class Events:
    """Writes the events of one agent. Any thread may emit; nothing here delays the caller or raises because of the file.

    A line is out as soon as the thread has written it: nothing is buffered. Events that cannot be written, or that come while
    `MOST` others wait, are counted, and the next line that can be written says how many are missing.
    """

    def __init__(self, path: str | None, source: Source, round_: Callable[[], int], most: int = MOST) -> None:
        """path: a file, a pipe, STDOUT, or None for no events. round_: returns the number of the current round."""
        self._source, self._round, self._path = source, round_, path
        self._file = EventFile(path) if path is not None else None
        self._lost = 0  # by the thread
        self._told = 0  # of those lost and dropped, how many an event has told of
        self._failing = False
        self._outbox: Outbox[dict[str, Value]] | None = None
        if path is not None:
            self._outbox = Outbox(self._write, "elastic_ext-events", most, self._end)

    def emit(self, name: str, **fields: Value) -> None:
        """Write an event with its own fields; see `event_table.EVENTS`. Returns at once."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(event_table.record(name, self._source, self._now(), fields))
        except ValueError as error:  # a mistake in this package, which tests find; the job matters more
            logger.error("events: %s; it is not written", error)

    def close(self, limit_s: float) -> None:
        """Write what waits, for limit_s seconds at most; later events are not written."""
        if self._outbox is not None and not self._outbox.close(limit_s):
            logger.warning("events: %s does not take the last events within %.1f s", self._path, limit_s)

    def _end(self) -> None:
        assert self._file is not None
        self._tell_missing()
        self._file.close()

    def _now(self) -> Moment:
        return Moment(time.time(), time.monotonic(), self._round())

    def _write(self, record: dict[str, Value]) -> None:
        self._tell_missing()
        if not self._append(record):
            self._lost += 1

    def _tell_missing(self) -> None:
        assert self._outbox is not None
        missing = self._lost + self._outbox.dropped
        if missing == self._told:
            return
        own: dict[str, Value] = {"count": missing - self._told}
        if self._append(event_table.record(DROPPED, self._source, self._now(), own)):
            self._told = missing

    def _append(self, record: dict[str, Value]) -> bool:
        assert self._file is not None
        try:
            self._file.write(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: a number that JSON does not have, or not a file name
            if not self._failing:
                logger.warning("events: cannot write to %s: %s; events are dropped until it works", self._path, error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("events: writing to %s works again", self._path)
        self._failing = False
        return True
