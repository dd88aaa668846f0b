"""Who asks for spans and metrics, and the resource that they come from."""

from __future__ import annotations

import sys

import pytest

from elastic_ext.events import otel, receivers, spans
from elastic_ext.events.event_table import Source

SOURCE = Source("job", "n1", 7)
HTTP, GRPC = "otlp_proto_http", "otlp_proto_grpc"
ANY = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, (), ()),
        ({"OTEL_SERVICE_NAME": "x"}, (), ()),
        ({"OTEL_TRACES_EXPORTER": "none", ANY: "http://x"}, (), (HTTP, GRPC)),
        ({"OTEL_METRICS_EXPORTER": "none", ANY: "http://x"}, (HTTP, GRPC), ()),
        ({"OTEL_METRICS_EXPORTER": "prometheus", ANY: "http://x"}, (HTTP, GRPC), ()),
        ({"OTEL_METRICS_EXPORTER": "prometheus, otlp"}, (), (HTTP, GRPC)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, (), ()),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, (), ()),
        ({"OTEL_TRACES_EXPORTER": "console"}, ("console",), ()),
        ({"OTEL_METRICS_EXPORTER": "console"}, (), ("console",)),
        ({ANY: "http://x"}, (HTTP, GRPC), (HTTP, GRPC)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, (), (HTTP, GRPC)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, (GRPC,), ()),
        ({ANY: "http://x", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}, (HTTP, GRPC), (HTTP,)),
    ],
)
def test_who_asks_for_them(environ, traces, metrics):
    assert otel.exporters(environ, otel.TRACES) == traces
    assert otel.exporters(environ, otel.METRICS) == metrics


@pytest.mark.parametrize(("exporter", "sends"), [("otlp", True), ("none", False)])
def test_spans_are_made_only_where_wanted(monkeypatch, exporter, sends):
    """The endpoint alone may ask for metrics."""
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    monkeypatch.setattr(spans, "Outbox", lambda send, name: None)  # a thread
    monkeypatch.setenv(ANY, "http://x")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    assert isinstance(receivers.of_recoveries("1", SOURCE), receivers.NoReceiver) is not sends


def test_an_exporter_that_is_not_installed(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "of_nobody")
    assert otel.exporter(otel.METRICS) is None
    assert "OTEL_METRICS_EXPORTER asks for metrics" in caplog.text
    assert "(of_nobody) is not installed" in caplog.text


POD = {
    "POD_NAME": "train-0",
    "POD_UID": "5ed1",
    "POD_NAMESPACE": "ml",
    "ELASTIC_EXT_NODE_NAME": "gpu-7",
    "ELASTIC_EXT_JOB_SECRET": "hunter22",
}


def test_an_agent_says_what_it_is():
    found = otel.attributes(POD, "1.2", SOURCE, "h")
    assert len(found.pop("service.instance.id")) == 36
    assert found == {
        "service.name": "elastic_ext",
        "service.version": "1.2",
        "host.name": "h",
        "elastic_ext.run_id": "job",
        "elastic_ext.node": "n1",
    }, "no variable of a pod counts outside of one"


def test_a_pod_names_itself():
    found = otel.attributes({**POD, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "1.2", SOURCE, "h")
    assert {name: value for name, value in found.items() if name.startswith("k8s")} == {
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": "5ed1",
        "k8s.namespace.name": "ml",
        "k8s.node.name": "gpu-7",
    }
    assert "hunter22" not in found.values()
    alone = otel.attributes({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": ""}, "1.2", SOURCE, "h")
    assert not [name for name in alone if name.startswith("k8s")]


def test_each_agent_has_its_own_id():
    def id_of(run_id: str, node: str) -> str:
        return otel.attributes({}, "1.2", Source(run_id, node, 7), "h")["service.instance.id"]

    assert id_of("job", "n1") == id_of("job", "n1"), "spans and metrics of one agent"
    assert len({id_of("job", "n1"), id_of("job", "n2"), id_of("other", "n1")}) == 3


def resource(monkeypatch, **environ: str) -> dict[str, object]:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return dict(otel.resource("1.2", SOURCE).attributes)


def test_what_is_not_named_is_ours(monkeypatch):
    found = resource(monkeypatch)
    assert (found["service.name"], found["service.version"]) == ("elastic_ext", "1.2")
    assert found["service.instance.id"] == otel.attributes({}, "1.2", SOURCE, "h")["service.instance.id"]
    assert found["telemetry.sdk.language"] == "python"


def test_what_is_named_wins(monkeypatch):
    named = "service.instance.id=mine,host.name=other,elastic_ext.node=n9,team=a"
    found = resource(monkeypatch, OTEL_RESOURCE_ATTRIBUTES=named, OTEL_SERVICE_NAME="train")
    assert "service.version" not in found, "that of the user's service is not ours"
    assert {name: found[name] for name in ("service.name", "service.instance.id", "host.name", "elastic_ext.node", "team")} == {
        "service.name": "train",
        "service.instance.id": "mine",
        "host.name": "other",
        "elastic_ext.node": "n9",
        "team": "a",
    }
    assert found["elastic_ext.run_id"] == "job"
