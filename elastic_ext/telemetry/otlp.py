"""The agent's metrics through OpenTelemetry: the families that Prometheus scrapes, pushed by an exporter of the SDK.

There is no second model: `converted` turns what the registry collects into the SDK's data, by the specification's "Prometheus and
OpenMetrics Compatibility". So each name, label and value is the one of /metrics. Where it differs from that specification:

- The SDK has no Summary. One of ours has a count and a sum only, and so has a Histogram without buckets.
- The SDK has no `metadata`, where `prometheus.type` would be.

Start times stay unset, as the specification has it for values without one: a worker counts from its own start, and a receiver
sees the reset, as Prometheus does. Values are cumulative whatever the exporter would prefer.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric

from elastic_ext.base import threads
from elastic_ext.events import otel
from elastic_ext.events.event_table import Source

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

logger = logging.getLogger(__name__)

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
TIMEOUT = "OTEL_METRIC_EXPORT_TIMEOUT"
INTERVAL_MS, TIMEOUT_MS = 60_000.0, 30_000.0  # by the specification
CPU_SHARE = 0.03  # of a core, as for the page of the metrics
# Of the table in the specification; other words stay as they are.
UNITS = {"seconds": "s", "bytes": "By"}


@dataclass(frozen=True)
class Point:
    """One series of a family. bounds, counts: of a histogram, without the last bucket's bound; not cumulative."""

    labels: Mapping[str, str]
    value: float  # of a histogram and a summary: the sum
    count: int = 0
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


GAUGE, COUNTER, INFO, HISTOGRAM, SUMMARY = "gauge", "counter", "info", "histogram", "summary"
_SHOWN = {COUNTER: "_total", INFO: "_info"}  # what /metrics adds to the name of a family
_PARTS = {HISTOGRAM: ("_count", "_sum", "_bucket"), SUMMARY: ("_count", "_sum")}


@dataclass(frozen=True)
class Shown:
    """A family as it is sent. name: as on /metrics. kind: one of those above. unit: of UCUM where that is in UNITS."""

    name: str
    kind: str
    help: str
    unit: str
    points: tuple[Point, ...]


def shown(families: Iterable[Metric]) -> Iterator[Shown]:
    """Yield those families that have a series. A kind that is not known is sent as a gauge, as the specification says."""
    for family in families:
        kind = family.type if family.type in (COUNTER, INFO, *_PARTS) else GAUGE
        name = family.name + _SHOWN.get(kind, "")
        found = (
            _merged(family)
            if kind in _PARTS
            else [Point(each.labels, each.value) for each in family.samples if each.name == name]
        )
        if found:
            yield Shown(name, kind, family.documentation, UNITS.get(family.unit, family.unit), tuple(found))


def _merged(family: Metric) -> list[Point]:
    """Merge the samples of each histogram or summary."""
    parts: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    below: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for each in family.samples:
        labels, part = dict(each.labels), each.name.removeprefix(family.name)
        bound = labels.pop("le", "")
        key = tuple(labels.items())
        if part == "_bucket":
            below.setdefault(key, []).append((float(bound), each.value))
        elif part in ("_count", "_sum"):
            parts.setdefault(key, {})[part] = each.value
    return [_point(key, found, sorted(below.get(key, ()))) for key, found in parts.items() if "_count" in found]


def _point(key: tuple[tuple[str, str], ...], parts: Mapping[str, float], below: list[tuple[float, float]]) -> Point:
    """below: observations at or below each bound."""
    at_most = [int(count) for _, count in below]
    counts = tuple(count - before for before, count in zip([0, *at_most], at_most, strict=False))
    bounds = tuple(bound for bound, _ in below if bound < math.inf)
    return Point(dict(key), parts.get("_sum", 0.0), int(parts["_count"]), bounds, counts)


def every_s(environ: Mapping[str, str], name: str, usual_ms: float) -> float:
    """Return the seconds that a variable of OpenTelemetry sets in milliseconds."""
    try:
        value = float(environ.get(name) or usual_ms)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        logger.warning("OpenTelemetry: %s is %r, expected milliseconds; taken as %g", name, environ[name], usual_ms)
        value = usual_ms
    return value / 1e3


def converted(families: Iterable[Shown], at_ns: int, scope: InstrumentationScope, resource: Resource) -> MetricsData:
    """Return them as MetricsData of OpenTelemetry's SDK."""
    from opentelemetry.sdk.metrics import export

    cumulative = export.AggregationTemporality.CUMULATIVE

    def number(point: Point) -> export.NumberDataPoint:
        return export.NumberDataPoint(point.labels, 0, at_ns, float(point.value))

    def spread(point: Point) -> export.HistogramDataPoint:
        # None: the smallest and the largest are not known
        return export.HistogramDataPoint(
            point.labels, 0, at_ns, point.count, float(point.value), point.counts, point.bounds, None, None
        )

    def data(family: Shown) -> export.Sum | export.Gauge | export.Histogram:
        if family.kind in _PARTS:
            return export.Histogram([spread(each) for each in family.points], cumulative)
        numbers = [number(each) for each in family.points]
        if family.kind == GAUGE:
            return export.Gauge(numbers)
        return export.Sum(numbers, cumulative, is_monotonic=family.kind == COUNTER)

    metrics = [export.Metric(family.name, family.help, family.unit, data(family)) for family in families]
    return export.MetricsData([export.ResourceMetrics(resource, [export.ScopeMetrics(scope, metrics, "")], "")])


class Quiet(logging.Filter):
    """Drops what an exporter logs on the thread that made this, while `on`: it has several lines for each push that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self._thread = False, threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.on or threading.get_ident() != self._thread


class Sender:
    """Sends the families of a registry. Only the thread that made it uses it; it may block for as long as the exporter does."""

    def __init__(self, registry: CollectorRegistry, exporter: MetricExporter, version: str, source: Source) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._registry, self._exporter = registry, exporter
        self._scope, self._resource = InstrumentationScope(otel.NAME, version), otel.resource(version, source)
        self._timeout_ms = every_s(os.environ, TIMEOUT, TIMEOUT_MS) * 1e3
        self._quiet = Quiet()
        for each in type(exporter).__mro__:  # each module logs by its own name
            logging.getLogger(each.__module__).addFilter(self._quiet)

    def send(self, quietly: bool) -> bool:
        """Return whether they were sent. quietly: the exporter need not say again why not. Raises whatever an exporter raises."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        data = converted(shown(self._registry.collect()), time.time_ns(), self._scope, self._resource)
        self._quiet.on = quietly
        with _not_traced():
            result = self._exporter.export(data, timeout_millis=self._timeout_ms)
        return result is not MetricExportResult.FAILURE

    def close(self) -> None:
        self._exporter.shutdown()


def _not_traced() -> AbstractContextManager[object]:
    """Keep a program that traces its HTTP calls from tracing this one."""
    try:
        from opentelemetry.instrumentation.utils import suppress_instrumentation
    except ImportError:
        return nullcontext()
    found: AbstractContextManager[object] = suppress_instrumentation()
    return found


class Exports:
    """Sends metrics from time to time, and once more at the end, on a thread of its own.

    Nothing is queued: a receiver that is slow or dead gets newer values later, and holds up nothing but this thread.
    """

    def __init__(self, make: Callable[[], Sender | None], interval_s: float) -> None:
        """make: called on the thread, since its imports take a while; None: metrics cannot be sent."""
        self._make, self._interval_s = make, interval_s
        self._closing, self._failing = threading.Event(), False
        text = "OpenTelemetry: no metrics are sent: no thread can be started: %s"
        self._thread = threads.started(self._run, "elastic_ext-otlp", logger.warning, text)

    def close(self, limit_s: float) -> None:
        """Send what was counted last, for limit_s seconds at most. The thread is left alone if it hangs."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                logger.warning("OpenTelemetry: the last metrics could not be sent within %.1f s", limit_s)

    def _run(self) -> None:
        try:
            sender = self._make()
            if sender is None:
                return
            wait_s = self._interval_s
            while not self._closing.wait(wait_s):
                began_s = time.thread_time()
                self._send(sender)
                wait_s = max(self._interval_s, (time.thread_time() - began_s) / CPU_SHARE)
            self._send(sender)
            sender.close()
        except Exception:  # the top of a thread
            logger.exception("OpenTelemetry: metrics are not sent any more")

    def _send(self, sender: Sender) -> None:
        """Send, and log the first failure in a row and the end of them."""
        try:
            sent = sender.send(self._failing)
        except Exception:  # of the exporter; the next values may come through
            sent = False
            if not self._failing:
                logger.exception("OpenTelemetry: the exporter failed")
        if sent is self._failing:
            logger.warning(
                "OpenTelemetry: metrics %s", "are sent again" if sent else "were not sent; they are tried again in silence"
            )
        self._failing = not sent


def exports(registry: CollectorRegistry, version: str, source: Source) -> Exports:
    """Send the families of this registry as the variables of OpenTelemetry say, from now on."""

    def sender() -> Sender | None:
        exporter = otel.exporter(otel.METRICS)
        return Sender(registry, exporter, version, source) if exporter is not None else None

    return Exports(sender, every_s(os.environ, INTERVAL, INTERVAL_MS))
