"""Recoveries and failures as spans, by OpenTelemetry's own SDK in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elastic_ext.events import spans
from elastic_ext.events.event_table import Cause, PastRecovery, RecoveryPhase, SeenFailure, Source

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
PHASES = (RecoveryPhase("stop", 1.0, 2.0), RecoveryPhase("start", 2.0, 4.0))
CRASH = SeenFailure(0.5, "crash", "signal", "it got SIGSEGV", 3, 77)


def made(recovery: PastRecovery, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The spans of a recovery, by name; each name comes once."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    source, links = Source("job", "n1", 7), spans.launched_by(environ or {})
    spans.emit(provider.get_tracer("test"), recovery, source, 1000.0, links)
    return {each.name: each for each in kept.get_finished_spans()}


def recovery(recovered: bool | None, *failures: SeenFailure, cause: Cause | None = None) -> PastRecovery:
    return PastRecovery(cause or Cause("crash", "restart", "it crashed"), 4, PHASES, recovered, failures)


def test_a_recovery_holds_its_phases():
    found = made(recovery(False, cause=Cause("crash", "restart", "in https://me:hunter22@host")))
    stop, start, whole = found["stop"], found["start"], found["recovery"]
    assert (whole.start_time, whole.end_time) == (1001 * 10**9, 1004 * 10**9)
    assert (start.start_time, start.end_time) == (1002 * 10**9, 1004 * 10**9)
    assert {each.parent.span_id for each in (stop, start)} == {whole.context.span_id}
    assert not whole.status.is_ok
    assert dict(whole.attributes) == {
        "elastic_ext.run_id": "job",
        "elastic_ext.node": "n1",
        "elastic_ext.round": 4,
        "elastic_ext.kind": "crash",
        "elastic_ext.decision": "restart",
        "elastic_ext.reason": "in https://***@host",
        "error.type": "crash",
    }


def test_a_recovery_that_succeeds_is_no_error():
    found = made(recovery(True, CRASH))
    assert found["recovery"].status.is_unset
    assert "error.type" not in found["recovery"].attributes
    assert not found["failure"].status.is_ok
    assert dict(found["failure"].attributes) == {
        "error.type": "crash",
        "elastic_ext.rule": "signal",
        "elastic_ext.rank": 3,
        "process.pid": 77,
    }
    assert found["failure"].parent.span_id == found["recovery"].context.span_id
    assert found["failure"].start_time == found["failure"].end_time == 1000_500_000_000
    assert not found["failure"].events, "of a signal no exception is known"


def test_an_exception_is_an_event(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    raised = SeenFailure(
        *(0.5, "code", "uncaught", "it raised", 3, 77, 1, "pkg.Bad", "key 0123456789"),
        traceback="Traceback:\n\tpkg.Bad: key 0123456789 of s3://me:hunter22@host\n",
    )
    (event,) = made(recovery(True, raised))["failure"].events
    assert (event.name, event.timestamp) == ("exception", 1000_500_000_000)
    assert dict(event.attributes) == {
        "exception.type": "pkg.Bad",
        "exception.message": "key ***",
        "exception.stacktrace": "Traceback:\n        pkg.Bad: key *** of s3://***@host",
    }


def test_no_stacktrace_where_none_is_known():
    (event,) = made(recovery(True, SeenFailure(0.5, "code", "r", "it raised", 3, 77, 1, "Bad")))["failure"].events
    assert dict(event.attributes) == {"exception.type": "Bad"}


def test_a_recovery_links_to_what_launched_it():
    """It is no child: the launcher's span was not sampled, and this trace is there all the same."""
    whole = made(recovery(True), {"TRACEPARENT": PARENT, "TRACESTATE": "vendor=1"})["recovery"]
    (link,) = whole.links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == PARENT[3:-3]
    assert link.context.trace_state.get("vendor") == "1"
    assert whole.parent is None
    assert whole.context.trace_id != link.context.trace_id


@pytest.mark.parametrize("value", ["", "x", PARENT.replace("7", "g"), PARENT.upper().replace("00-", "ff-", 1), "00-0-0-01"])
def test_a_broken_traceparent_is_no_link(value: str):
    found: Sequence[object] = spans.launched_by({"TRACEPARENT": value})
    assert not found
