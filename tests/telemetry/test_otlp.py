"""The families of /metrics as OpenTelemetry sends them."""

from __future__ import annotations

import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.parser import text_string_to_metric_families

from elastic_ext.events.event_table import Source
from elastic_ext.telemetry import otlp
from elastic_ext.telemetry.agent_metrics import AgentMetrics
from elastic_ext.telemetry.otlp import Exports, Point, Shown

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def shown(family: Metric) -> Shown:
    (found,) = otlp.shown([family])
    return found


def test_a_counter_has_its_name_of_metrics():
    family = CounterMetricFamily("sent_bytes", "Sent.", labels=("to",), unit="bytes")
    family.add_metric(("a",), 3, created=1.0)
    assert shown(family) == Shown("sent_bytes_total", "counter", "Sent.", "By", (Point({"to": "a"}, 3.0),))


@pytest.mark.parametrize(("unit", "of_ucum"), [("seconds", "s"), ("ratio", "ratio"), ("", "")])
def test_a_gauge_has_its_unit(unit, of_ucum):
    name = f"x_{unit}" if unit else "x"
    assert shown(GaugeMetricFamily(name, "X.", value=2, unit=unit)) == Shown(name, "gauge", "X.", of_ucum, (Point({}, 2),))


def test_an_info_is_one():
    assert shown(InfoMetricFamily("built", "B.", {"version": "1"})).points == (Point({"version": "1"}, 1),)
    assert shown(InfoMetricFamily("built", "B.", {"version": "1"})).name == "built_info"


def test_a_histogram_counts_each_bucket():
    family = HistogramMetricFamily("took_seconds", "T.", labels=("phase",), unit="seconds")
    family.add_metric(("stop",), [("0.5", 1), ("1.0", 4), ("+Inf", 6)], 9.5)
    family.add_metric(("start",), [("0.5", 0), ("1.0", 0), ("+Inf", 0)], 0.0)
    assert shown(family).points == (
        Point({"phase": "stop"}, 9.5, 6, (0.5, 1.0), (1, 3, 2)),
        Point({"phase": "start"}, 0.0, 0, (0.5, 1.0), (0, 0, 0)),
    )


def test_a_summary_is_a_count_and_a_sum():
    assert shown(SummaryMetricFamily("step", "S.", 7, 3.5)).points == (Point({}, 3.5, 7),)


def test_another_kind_is_a_gauge():
    family = StateSetMetricFamily("state", "S.", {"on": True, "off": False})
    assert shown(family).kind == "gauge"
    assert {point.labels["state"]: point.value for point in shown(family).points} == {"on": 1, "off": 0}


def test_a_family_without_series_is_left_out():
    assert not list(otlp.shown([GaugeMetricFamily("x", "X."), HistogramMetricFamily("y", "Y.")]))


def sent(registry: CollectorRegistry) -> Series:
    """The series of /metrics, made of what is sent."""
    found: Series = {}
    for family in otlp.shown(registry.collect()):
        for point in family.points:
            labels = tuple(sorted(point.labels.items()))
            if family.kind not in ("histogram", "summary"):
                found[family.name, labels] = point.value
                continue
            found[f"{family.name}_count", labels], found[f"{family.name}_sum", labels] = point.count, point.value
            below = 0
            for bound, count in zip((*point.bounds, float("inf")), point.counts, strict=False):
                below += count
                le = "+Inf" if bound == float("inf") else str(bound)
                found[f"{family.name}_bucket", tuple(sorted({**point.labels, "le": le}.items()))] = below
    return found


def test_every_series_of_metrics_is_sent():
    metrics = AgentMetrics(version="1", torch="2", run_id="job", node="n1")
    metrics.failed("crash")
    metrics.phase("stop", 0.3)
    page = generate_latest(metrics.registry).decode()
    scraped = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    pushed = sent(metrics.registry)
    assert pushed.keys() == scraped.keys()
    changing = ("process_", "elastic_ext_goodput", "elastic_ext_effective")
    assert {key: value for key, value in pushed.items() if not key[0].startswith(changing)} == {
        key: value for key, value in scraped.items() if not key[0].startswith(changing)
    }


def test_what_the_encoder_makes_of_them():
    """By the exporter's own encoder: kinds, and that neither a start nor a smallest value is made up."""
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.metrics_encoder", reason="needs the exporter")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    counter, gauge = CounterMetricFamily("c", "C.", value=3), GaugeMetricFamily("g", "G.", value=2)
    made, took = InfoMetricFamily("i", "I.", {"v": "1"}), HistogramMetricFamily("h", "H.", [("1.0", 4), ("+Inf", 6)], 9.5)
    families = otlp.shown([counter, gauge, made, took, SummaryMetricFamily("s", "S.", 7, 3.5)])
    data = otlp.converted(families, 5, InstrumentationScope("elastic_ext", "1"), Resource({"a": "b"}))
    (of_resource,) = encoder.encode_metrics(data).resource_metrics
    (of_scope,) = of_resource.scope_metrics
    found = {each.name: each for each in of_scope.metrics}
    assert [each.WhichOneof("data") for each in found.values()] == ["sum", "gauge", "sum", "histogram", "histogram"]
    assert [(found[name].sum.is_monotonic, found[name].sum.aggregation_temporality) for name in ("c_total", "i_info")] == [
        (True, 2),
        (False, 2),
    ]
    assert found["c_total"].sum.data_points[0].as_double == 3
    histogram, summary = found["h"].histogram.data_points[0], found["s"].histogram.data_points[0]
    assert (list(histogram.bucket_counts), list(histogram.explicit_bounds), histogram.sum) == ([4, 2], [1.0], 9.5)
    assert (summary.count, summary.sum, list(summary.bucket_counts)) == (7, 3.5, [])
    assert {point.time_unix_nano for point in (histogram, summary)} == {5}
    assert not any(point.start_time_unix_nano or point.HasField("min") for point in (histogram, summary))


@pytest.mark.parametrize(("value", "seconds"), [("", 60.0), ("250", 0.25), ("x", 60.0), ("0", 60.0), ("-1", 60.0), ("inf", 60.0)])
def test_how_often_they_are_sent(value, seconds):
    assert otlp.every_s({otlp.INTERVAL: value}, otlp.INTERVAL, otlp.INTERVAL_MS) == seconds


class Kept:
    """A sender that fails as often as it is told, in different ways."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.closed, self.done, self.quietly = fails, False, threading.Event(), list[bool]()

    def send(self, quietly: bool) -> bool:
        self.quietly.append(quietly)
        if len(self.quietly) == 1 <= self.fails:
            raise OSError("refused")
        if len(self.quietly) > self.fails + 1:
            self.done.set()
        return len(self.quietly) > self.fails

    def close(self) -> None:
        self.closed = True


def test_they_are_sent_again_after_errors(caplog):
    """The log has the first error and its end, however many there are."""
    kept = Kept(fails=3)
    exports = Exports(lambda: kept, 0.001)  # type: ignore[arg-type,return-value]
    assert kept.done.wait(60)
    exports.close(60)
    assert kept.closed
    assert kept.quietly[:5] == [False, True, True, True, False]
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        f"OpenTelemetry: {what}"
        for what in (
            "the exporter failed",
            "metrics were not sent; they are tried again in silence",
            "metrics are sent again",
        )
    ]


def test_the_last_values_are_sent():
    kept = Kept()
    exports = Exports(lambda: kept, 3600.0)  # type: ignore[arg-type,return-value]
    exports.close(60)
    assert (len(kept.quietly), kept.closed) == (1, True)


def test_a_sender_that_hangs_is_left_alone(caplog):
    hangs = threading.Event()

    class Hangs(Kept):
        def send(self, quietly: bool) -> bool:
            return hangs.wait()

    exports = Exports(Hangs, 3600.0)  # type: ignore[arg-type]
    exports.close(0.01)
    assert "the last metrics could not be sent within 0.0 s" in caplog.text
    hangs.set()


@pytest.mark.seam
def test_a_refusing_collector_is_named_once(monkeypatch, caplog):
    """By the real exporter. What another thread's exporter logs meanwhile stays."""
    exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter", reason="needs the exporter")
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{refusing.getsockname()[1]}/v1/metrics"
        exporter = exporters.OTLPMetricExporter(url, timeout=0.2)
        sender = otlp.Sender(CollectorRegistry(), exporter, "1", Source("job", "n1", 7))
        assert not sender.send(False)
        assert caplog.records
        caplog.clear()
        assert not sender.send(True)
        assert not caplog.records
    other = threading.Thread(target=exporters._logger.warning, args=("of another",))
    other.start()
    other.join()
    assert caplog.messages == ["of another"]


def test_without_an_exporter_nothing_is_sent(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "of_nobody")
    exports = otlp.exports(CollectorRegistry(), "1", Source("job", "n1", 7))
    exports.close(60)
    assert "asks for metrics" in caplog.text
    assert "could not be sent" not in caplog.text
