"""Recoveries and failures as spans of OpenTelemetry, by a thread of its own.

Nothing here needs OpenTelemetry to be installed. Spans go to the tracer provider of the process: a program that calls
`elastic_launch` has its own, and `opentelemetry-instrument torchrun ...` makes one. Plain torchrun has none, and no code of the
user runs in it. There the agent makes one for itself, by the variables of the OpenTelemetry specification, if one of them asks
for traces (`otel.exporters`).

Each recovery is a trace of its own, with a link to the span that has started the job, as TRACEPARENT names it. That span is no
parent: a job may run for weeks after it has ended, and where it was not sampled, no recovery would be. The specification (Links
between spans) has the link for long processing that a short request has begun.

A recovery that succeeds is no error. So each failure of a worker here is a span of its own in the recovery, without a duration:
by the conventions it has `error.type`, and the event `exception` where the worker's exception is known.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic_ext.base import printable
from elastic_ext.events import otel
from elastic_ext.events.event_table import MAX_TEXT, PastRecovery, SeenFailure, Source
from elastic_ext.events.output import Outbox

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Tracer, TracerProvider

logger = logging.getLogger(__name__)

# Variables, and the names that a propagator knows them by: see "Environment Variables as Context Propagation Carriers".
CARRIER = {"TRACEPARENT": "traceparent", "TRACESTATE": "tracestate"}


class Spans:
    """Turns recoveries into spans, in a thread of its own; does nothing without OpenTelemetry."""

    def __init__(self, version: str, source: Source, asked: bool) -> None:
        """asked: whether the variables ask for spans; else the process may have a provider of its own."""
        self._version, self._source = version, source
        self._tracer: Tracer | None = None
        self._links: list[Link] = []
        self._flush: Callable[[], object] = lambda: None  # of a provider that is ours
        self._outbox: Outbox[tuple[PastRecovery, float]] | None = None
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
            self._tracer, self._links = self._make_tracer(), launched_by(os.environ)
        emit(self._tracer, recovery, self._source, ahead_s, self._links)
        self._flush()

    def _make_tracer(self) -> Tracer:
        from opentelemetry import trace

        provider: TracerProvider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider = self._make_provider() or provider
        return provider.get_tracer(otel.NAME, self._version)

    def _make_provider(self) -> TracerProvider | None:
        """Return a provider for this agent alone; None if a part of OpenTelemetry is missing."""
        exporter = otel.exporter(otel.TRACES)
        if exporter is None:
            return None
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Flushed after each recovery; a server that does not answer must not hold up the end of the process.
        provider = SdkProvider(resource=otel.resource(self._version, self._source), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._flush = provider.force_flush
        return provider


def launched_by(environ: Mapping[str, str]) -> list[Link]:
    """Return a link to the span that has started this job, if the environment names one."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: environ[variable] for variable, name in CARRIER.items() if variable in environ}
    context = TraceContextTextMapPropagator().extract(carrier, trace.Context())
    found = trace.get_current_span(context).get_span_context()
    return [trace.Link(found)] if found.is_valid else []


def emit(tracer: Tracer, recovery: PastRecovery, source: Source, ahead_s: float, links: list[Link]) -> None:
    """Make the spans of a recovery. ahead_s: what monotonic time lacks to Unix time. links: of the whole."""
    from opentelemetry import trace

    def at(monotonic_s: float) -> int:
        return int((monotonic_s + ahead_s) * 1e9)

    attributes = {
        "elastic_ext.run_id": source.run_id,
        "elastic_ext.node": source.node,
        "elastic_ext.round": recovery.round,
        "elastic_ext.kind": recovery.cause.kind,
        "elastic_ext.decision": recovery.cause.decision,
        "elastic_ext.reason": _text(recovery.cause.reason),
    }
    root = trace.Context()
    whole = tracer.start_span("recovery", context=root, start_time=at(recovery.begin), attributes=attributes, links=links)
    within = trace.set_span_in_context(whole, root)
    for failure in recovery.failures:
        span = tracer.start_span("failure", context=within, start_time=at(failure.at), attributes=_of_failure(failure))
        if failure.exception_type:
            span.add_event("exception", _of_exception(failure), at(failure.at))
        span.set_status(trace.Status(trace.StatusCode.ERROR, _text(failure.reason)))
        span.end(at(failure.at))
    for phase in recovery.phases:
        tracer.start_span(phase.name, context=within, start_time=at(phase.begin)).end(at(phase.end))
    if recovery.recovered is False:
        whole.set_attribute("error.type", recovery.cause.kind)
        whole.set_status(trace.Status(trace.StatusCode.ERROR, "the agent ended before its workers trained again"))
    whole.end(at(recovery.end))


def _of_failure(failure: SeenFailure) -> dict[str, str | int]:
    exit_code = {"process.exit.code": failure.exit_code} if failure.exit_code is not None else {}
    return {
        "error.type": failure.kind,
        "elastic_ext.rule": failure.rule,
        "elastic_ext.rank": failure.rank,
        "process.pid": failure.pid,
        **exit_code,
    }


def _of_exception(failure: SeenFailure) -> dict[str, str]:
    found = {
        "exception.type": failure.exception_type,
        "exception.message": _text(failure.message),
        "exception.stacktrace": printable.shown_lines(printable.masked(failure.traceback, os.environ)),
    }
    return {name: value for name, value in found.items() if value}


def _text(text: str) -> str:
    return printable.cut(printable.shown(printable.masked(text, os.environ)), MAX_TEXT)
