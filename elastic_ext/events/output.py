"""Where an agent's events go: to a file, and recoveries also to OpenTelemetry, each by a thread of its own.

The file has one JSON object per line; several agents of a host may share it, or it is stdout.

Nothing here needs OpenTelemetry to be installed. Spans go to the tracer provider of the process: a program that calls
`elastic_launch` has its own, and `opentelemetry-instrument torchrun ...` makes one. Plain torchrun has none, and no code of the
user runs in it. There the agent makes one for itself, by the variables of the OpenTelemetry specification, if one of ASKED_BY
says that traces are wanted.
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
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from elastic_ext.base import printable, threads
from elastic_ext.events.event_table import ASKED_BY, EXPORTER, MAX_TEXT, EventTime, PastRecovery, Source, Value, record

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

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


NAME = "elastic_ext"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # names of the entry points


def exporters(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entry points to try, first one first; empty: no traces are wanted. Only one exporter at a time is supported."""
    if not any(environ.get(name) for name in ASKED_BY) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ()
    name = environ.get(EXPORTER) or "otlp"
    if name != "otlp":
        return () if name == "none" else (name,)
    protocol = next((environ[each] for each in _PROTOCOLS if environ.get(each)), "")
    return (_OTLP[protocol],) if protocol in _OTLP else tuple(_OTLP.values())


class Spans:
    """Turns recoveries into spans, in a thread of its own; does nothing without OpenTelemetry."""

    def __init__(self, version: str, source: Source) -> None:
        self._version, self._source = version, source
        self._tracer: Tracer | None = None
        self._flush: Callable[[], object] = lambda: None  # of a provider that is ours
        self._outbox: Outbox[tuple[PastRecovery, float]] | None = None
        asked = bool(exporters(os.environ))
        if not asked and "opentelemetry.trace" not in sys.modules:
            return  # a program that has made a provider has imported it
        try:
            from opentelemetry import trace
        except ImportError:
            return
        if asked or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._outbox = Outbox(self._send, "elastic_ext-spans")

    def recovered(self, recovery: PastRecovery) -> None:
        """Send a recovery. Returns at once."""
        if self._outbox is not None:
            self._outbox.put((recovery, time.time() - time.monotonic()))

    def close(self, limit_s: float) -> None:
        """Send what waits, for limit_s seconds at most."""
        if self._outbox is not None and not self._outbox.close(limit_s):
            logger.warning("OpenTelemetry: the last spans could not be sent within %.1f s", limit_s)

    def _send(self, item: tuple[PastRecovery, float]) -> None:
        recovery, ahead_s = item
        if self._tracer is None:
            self._tracer = self._make_tracer()
        emit(self._tracer, recovery, self._source, ahead_s)
        self._flush()

    def _make_tracer(self) -> Tracer:
        from opentelemetry import trace

        provider: TracerProvider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider = self._make_provider() or provider
        return provider.get_tracer(NAME, self._version)

    def _make_provider(self) -> TracerProvider | None:
        """Return a provider for this agent alone; None if a part of OpenTelemetry is missing."""
        names = exporters(os.environ)
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider as SdkProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            found = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter") if each.name in names}
            exporter = next(found[name] for name in names if name in found).load()()
        except (ImportError, StopIteration):
            logger.warning(
                "OpenTelemetry: %s asks for spans, but opentelemetry-sdk or its exporter (%s) is not installed",
                next(each for each in ASKED_BY if os.environ.get(each)),
                " or ".join(names),
            )
            return None
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": NAME})
        # Flushed after each recovery; a server that does not answer must not hold up the end of the process.
        provider = SdkProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._flush = provider.force_flush
        return provider


def emit(tracer: Tracer, recovery: PastRecovery, source: Source, ahead_s: float) -> None:
    """Make the spans of a recovery. ahead_s: what monotonic time lacks to Unix time."""
    from opentelemetry import trace

    def at(monotonic_s: float) -> int:
        return int((monotonic_s + ahead_s) * 1e9)

    attributes = {
        "elastic_ext.run_id": source.run_id,
        "elastic_ext.node": source.node,
        "elastic_ext.round": recovery.round,
        "elastic_ext.kind": recovery.cause.kind,
        "elastic_ext.decision": recovery.cause.decision,
        "elastic_ext.reason": printable.cut(printable.shown(recovery.cause.reason), MAX_TEXT),
    }
    whole = tracer.start_span("recovery", context=trace.Context(), start_time=at(recovery.begin), attributes=attributes)
    within = trace.set_span_in_context(whole, trace.Context())
    for phase in recovery.phases:
        tracer.start_span(phase.name, context=within, start_time=at(phase.begin)).end(at(phase.end))
    if recovery.recovered is False:
        whole.set_status(trace.Status(trace.StatusCode.ERROR, "the agent ended before its workers trained again"))
    whole.end(at(recovery.end))
