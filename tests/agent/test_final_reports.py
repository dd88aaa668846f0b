"""The final reports of an agent: all share one deadline, and no copy of a checkpoint comes before them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from elastic_ext.agent.companion import END_S, LEAST_S, EndLimit
from tests.jobs import AGENT, Gate, Job, children, command_of
from tests.until import until


def test_they_share_one_deadline():
    words = EndLimit()
    assert words.left_s() == END_S
    words.begin(600.0)
    assert END_S < words.left_s() <= 600.0
    words.begin(-1.0)
    assert words.left_s() == LEAST_S


TRAINS = """
import os, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
"""
CRASHES_ONCE = (
    TRAINS
    + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
"""
)

# Exporters of OpenTelemetry, as pip would install them.
EXPORTERS = """
import os, urllib.request
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter
class Spans(SpanExporter):
    def export(self, spans):
        urllib.request.urlopen(os.environ["SENT_TO"], data=b"x")
class Metrics(MetricExporter):
    def export(self, metrics_data, timeout_millis=10_000, **kwargs):
        urllib.request.urlopen(os.environ["SENT_TO"], data=b"x")
    def force_flush(self, timeout_millis=10_000):
        return True
    def shutdown(self, timeout_millis=30_000, **kwargs):
        pass
"""
ENTRY_POINTS = """
[opentelemetry_traces_exporter]
hangs = hangs:Spans
[opentelemetry_metrics_exporter]
hangs = hangs:Metrics
"""


def full_pipe(path: Path) -> int:
    """A named pipe that takes nothing more; return its reader."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.close(writer)
    return reader


@pytest.mark.full
def test_who_hangs_delays_the_end_once(tmp_path):
    """A pipe that nobody reads, and a server of spans and metrics that never answers: the first uses up the time."""
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    site = tmp_path / "site"
    (site / "hangs-1.dist-info").mkdir(parents=True)
    (site / "hangs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1\n")
    (site / "hangs-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "hangs.py").write_text(EXPORTERS)
    (tmp_path / "job.py").write_text(CRASHES_ONCE)
    reader = full_pipe(tmp_path / "events")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {
            "ELASTIC_EXT_BACKOFF": "0",
            "ELASTIC_EXT_EVENTS_FILE": str(tmp_path / "events"),
            "OTEL_TRACES_EXPORTER": "hangs",
            "OTEL_METRICS_EXPORTER": "hangs",
            "SENT_TO": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "PYTHONPATH": str(site),
            "LOGLEVEL": "INFO",
            "TORCHELASTIC_LOG_LEVEL": "INFO",
        }
        with Job([*AGENT, "--nproc-per-node=1", "--max-restarts=1", str(tmp_path / "job.py")], tmp_path, **environ) as job:
            done = job.finish()
    os.close(reader)
    assert done.returncode == 0, done.all
    waits = re.findall(r"(last spans|last events|last metrics).* within ([0-9.]+) s", done.err)
    assert {what for what, _ in waits} == {"last spans", "last events", "last metrics"}, done.err
    assert sum(float(seconds) for _, seconds in waits) <= END_S + 2 * LEAST_S + 0.01


SAVES = """
import fcntl, signal, sys, torch
from elastic_ext import Checkpointer
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
model(torch.ones(2)).sum().backward()
print("ready", flush=True)
with open(sys.argv[1]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
optimizer.step()
checkpointer.save(1, wait=True)
print("saved", flush=True)
signal.pause()
"""


def copier_of(agent: int) -> int:
    (found,) = [pid for pid in children(agent) if "copying" in command_of(pid)]
    return found


@pytest.mark.full
def test_a_hanging_copy_does_not_come_before_them(tmp_path):
    (tmp_path / "job.py").write_text(SAVES)
    paths = {"local_dir": "local", "checkpoint_dir": "remote", "events_file": "events"}
    environ = {f"ELASTIC_EXT_{name.upper()}": str(tmp_path / file) for name, file in paths.items()}
    environ |= {"ELASTIC_EXT_PLATFORM_GRACE": "120"}
    gate = Gate(tmp_path / "gate")
    with Job([*AGENT, "--nproc-per-node=1", str(tmp_path / "job.py"), str(gate.path)], tmp_path, **environ) as job:
        job.wait_for("ready")
        copier = copier_of(job.process.pid)
        os.kill(copier, signal.SIGSTOP)
        gate.open()
        job.wait_for("saved")
        job.process.send_signal(signal.SIGTERM)
        until(lambda: '"event":"agent_ended"' in (tmp_path / "events").read_text())
        assert Path(f"/proc/{copier}/stat").read_text().split()[2] == "T"
        job.process.kill()  # the platform's patience is over
        os.kill(copier, signal.SIGCONT)
    events = [each["event"] for each in read(tmp_path / "events")]
    assert "preemption_noticed" in events
    assert events[-2:] == ["workers_stopped", "agent_ended"]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
