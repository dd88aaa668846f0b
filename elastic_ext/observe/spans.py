"""OpenTelemetry spans of recoveries, where the user has OpenTelemetry. Nothing here needs it to be installed.

The agent uses OpenTelemetry's API. Spans go to the tracer provider of the process: a program that calls `elastic_launch` has its
own, and `opentelemetry-instrument torchrun ...` makes one. Plain torchrun has none, and no code of the user runs in it. There the
agent makes one for itself, by the variables of the OpenTelemetry specification, if one of ASKED_BY says that traces are wanted.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from elastic_ext.base.printable import cut, shown
from elastic_ext.observe.event_table import MAX_TEXT, Source
from elastic_ext.observe.outbox import Outbox
from elastic_ext.observe.recovery_trace import Course

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

logger = logging.getLogger(__name__)

NAME = "elastic_ext"
EXPORTER = "OTEL_TRACES_EXPORTER"
ASKED_BY = (EXPORTER, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # names of the entry points


def exporters(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entry points to try, first one first; empty: no traces are wanted. Only one exporter at a time is supported."""
    if not any(environ.get(name) for name in ASKED_BY) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ()
    name = environ.get(EXPORTER) or "otlp"
    if name == "none":
        return ()
    if name != "otlp":
        return (name,)
    protocol = next((environ[each] for each in _PROTOCOLS if environ.get(each)), "")
    return (_OTLP[protocol],) if protocol in _OTLP else tuple(_OTLP.values())


class Spans:
    """Turns recoveries into spans, in a thread of its own; does nothing without OpenTelemetry."""

    def __init__(self, version: str, source: Source) -> None:
        self._version, self._source = version, source
        self._tracer: Tracer | None = None
        self._flush: Callable[[], object] = lambda: None  # of a provider that is ours
        self._outbox: Outbox[tuple[Course, float]] | None = None
        asked = bool(exporters(os.environ))
        if not asked and "opentelemetry.trace" not in sys.modules:
            return  # whoever has made a provider has imported it
        try:
            from opentelemetry import trace
        except ImportError:
            return
        if asked or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._outbox = Outbox(self._send, "elastic_ext-spans")

    def recovered(self, course: Course) -> None:
        """Send a recovery. Returns at once."""
        if self._outbox is not None:
            self._outbox.put((course, time.time() - time.monotonic()))

    def close(self, limit_s: float) -> None:
        """Send what waits, for limit_s seconds at most."""
        if self._outbox is not None and not self._outbox.close(limit_s):
            logger.warning("OpenTelemetry: the last spans could not be sent within %.1f s", limit_s)

    def _send(self, item: tuple[Course, float]) -> None:
        course, ahead_s = item
        if self._tracer is None:
            self._tracer = self._make_tracer()
        emit(self._tracer, course, self._source, ahead_s)
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


def emit(tracer: Tracer, course: Course, source: Source, ahead_s: float) -> None:
    """Make the spans of a recovery. ahead_s: what monotonic time lacks to Unix time."""
    from opentelemetry import trace

    def at(monotonic_s: float) -> int:
        return int((monotonic_s + ahead_s) * 1e9)

    attributes = {
        "elastic_ext.run_id": source.run_id,
        "elastic_ext.node": source.node,
        "elastic_ext.round": course.round,
        "elastic_ext.kind": course.cause.kind,
        "elastic_ext.decision": course.cause.decision,
        "elastic_ext.reason": cut(shown(course.cause.reason), MAX_TEXT),
    }
    whole = tracer.start_span("recovery", context=trace.Context(), start_time=at(course.begin), attributes=attributes)
    within = trace.set_span_in_context(whole, trace.Context())
    for phase in course.phases:
        tracer.start_span(phase.name, context=within, start_time=at(phase.begin)).end(at(phase.end))
    if course.recovered is False:
        whole.set_status(trace.Status(trace.StatusCode.ERROR, "the agent ended before its workers trained again"))
    whole.end(at(course.end))
