"""What a real job sends by OpenTelemetry's protocol, and what it costs where nobody receives it."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest

from tests.jobs import AGENT, Job
from tests.otlp_receiver import OtlpReceiver, attributes
from tests.telemetry.test_families import URL, Scraped, scrape
from tests.until import until

SCRIPT = """
import os, signal, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("wrong batch for " + os.environ["DATA_TOKEN"])
print("trains", flush=True)
signal.pause()
"""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LABELS = {
    "elastic_ext_restarts_total": (("kind", "code"),),
    "elastic_ext_failures_total": (("kind", "code"),),
    "elastic_ext_agent_state": (("state", "running"),),
    "elastic_ext_world_size": (),
    "elastic_ext_worker_steps_total": (("local_rank", "1"),),
}


def of_page(seen: Scraped, name: str, labels: tuple[tuple[str, str], ...] = ()) -> float:
    inside = ",".join(f'{key}="{value}"' for key, value in labels)
    return seen[f"{name}{{{inside}}}" if inside else name]


def of_push(values: dict[str, Any], name: str, labels: tuple[tuple[str, str], ...] = ()) -> float | None:
    point = values.get(name, {}).get(labels)
    return None if point is None else point.as_double


@pytest.mark.full
def test_a_failed_worker_and_the_metrics(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    with OtlpReceiver() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "OTEL_RESOURCE_ATTRIBUTES": "team=a",
            "TRACEPARENT": PARENT,
            "KUBERNETES_SERVICE_HOST": "",
            "DATA_TOKEN": "hunter2222",
        }
        command = [*AGENT, "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=job1", str(tmp_path / "job.py")]
        with Job(command, tmp_path, **environ) as job:
            ((target,),) = [each.groups() for each in job.wait_for(URL)]
            (recovery,) = until(lambda: receiver.spans("recovery"))
            seen = scrape(target)
            wanted = {name: of_page(seen, name, labels) for name, labels in LABELS.items()}

            def pushed() -> bool:
                newest = next(receiver.values(), {})
                return wanted == {name: of_push(newest, name, labels) for name, labels in LABELS.items()}

            until(pushed, f"{wanted}")
            assert wanted["elastic_ext_restarts_total"] == wanted["elastic_ext_agent_state"] == 1
            recoveries = next(receiver.values())["elastic_ext_recovery_whole_seconds"][()]
            assert recoveries.count == sum(recoveries.bucket_counts) == of_page(seen, "elastic_ext_recovery_whole_seconds_count")
            assert recoveries.sum == of_page(seen, "elastic_ext_recovery_whole_seconds_sum") > 0
            job.process.send_signal(signal.SIGTERM)
            job.finish()
        assert_spans(receiver, recovery)
        assert of_push(next(receiver.values()), "elastic_ext_agent_state", (("state", "ended"),)) == 1, "the last values"
        resources = [attributes(each.resource.attributes) for each in (receiver.traces[0], receiver.metrics[-1])]
    assert resources[0] == resources[1], "one agent is one resource"
    assert resources[0].items() >= {"service.name": "elastic_ext", "elastic_ext.run_id": "job1", "team": "a"}.items()
    assert resources[0]["host.name"] == socket.gethostname()
    assert resources[0]["service.instance.id"]


def assert_spans(receiver: OtlpReceiver, recovery: Any) -> None:
    (link,) = recovery.links
    assert f"{link.trace_id.hex()}-{link.span_id.hex()}" == PARENT[3:-3]
    assert not recovery.parent_span_id
    (failure,) = receiver.spans("failure")
    assert failure.parent_span_id == recovery.span_id
    found = attributes(failure.attributes)
    assert (found["error.type"], found["elastic_ext.rank"], found["process.exit.code"]) == ("code", 1, 1)
    (event,) = failure.events
    raised = attributes(event.attributes)
    assert (event.name, raised["exception.type"]) == ("exception", "ValueError")
    assert raised["exception.message"] == "wrong batch for ***"
    assert raised["exception.stacktrace"].startswith("Traceback (most recent call last)")
    assert "hunter2222" not in "".join(map(str, receiver.traces + receiver.metrics))


@pytest.mark.full
def test_a_collector_that_never_answers(tmp_path):
    """The job trains and ends as it would without it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the exporter")
    (tmp_path / "job.py").write_text(SCRIPT.replace("signal.pause()", "").replace('"RANK"] == "1"', '"RANK"] == "none"'))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_METRIC_EXPORT_INTERVAL": "1",
        }
        with Job([*AGENT, "--nproc-per-node=1", str(tmp_path / "job.py")], tmp_path, **environ) as job:
            done = job.finish()
    assert done.returncode == 0, done.all
    assert "the last metrics could not be sent within" in done.err
