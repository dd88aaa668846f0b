"""The agent's metrics: what a scraper gets over HTTP, and what torchelastic's own metrics become."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch.distributed.elastic.metrics as torchelastic
from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from elastic_ext.base.diagnosis import KINDS
from elastic_ext.events.event_table import Cause, PastRecovery, RecoveryPhase
from elastic_ext.http import pages
from elastic_ext.http import server as server_module
from elastic_ext.http.server import MetricsServer
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import AgentMetrics, WorkerProgress, bridge_torchelastic
from elastic_ext.workers.progress import Progress
from elastic_ext.workers.standby.rules import ColdReason
from tests.ports import free_port
from tests.until import LIMIT_S

CLOCK_S = families.CLOCK_STEP_S + 0.1  # what a Unix time that is shown may be off

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def agent(**changes: Any) -> AgentMetrics:
    return AgentMetrics(**{"version": "1.2", "torch": "2.13.0", "run_id": "job1", "node": "n0", **changes})


def samples(text: str, parse: Any = parse_text) -> Samples:
    """Every sample by (name, sorted labels); no sample may be there twice, as Prometheus would refuse the page."""
    found: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def read(metrics: AgentMetrics) -> Samples:
    return samples(generate_latest(metrics.registry).decode())


def get(url: str, accept: str = "*/*") -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=LIMIT_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 600.0)  # nobody is cut for being slow
    with contextlib.ExitStack() as stack:

        def start(metrics: AgentMetrics, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
            server = MetricsServer(pages.of_agent(metrics.registry, metrics.not_ready, metrics.status, lambda: b"{}"), host, port)
            stack.callback(server.close)
            return server

        yield start


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours: what another test of this process has left running may warn, too."""
    ours = [record for record in caplog.records if record.name.startswith(("elastic_ext.http", "elastic_ext.telemetry"))]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


# What is shown.


def ours(found: Samples) -> Samples:
    """Without the agent's process, and where the time goes."""
    goodput = tuple(families.GOODPUT)
    return {key: value for key, value in found.items() if not key[0].startswith(("process_", *goodput))}


def changed(metrics: AgentMetrics) -> Samples:
    """What is not 0, without the histogram."""
    return {key: value for key, value in ours(read(metrics)).items() if value and "recovery" not in key[0]}


def test_what_the_supervisor_tells_is_shown() -> None:
    metrics = agent()
    metrics.restarted("code")
    metrics.restarted("membership")
    metrics.restarted("membership")
    metrics.restarted("of a newer agent")
    metrics.failed("unknown")
    metrics.budget(2, 10)
    metrics.round_started(3, 16)
    metrics.worker_started("cold", "not_ready")
    metrics.standbys(2, 1 << 20)
    metrics.workers(running=2)
    metrics.workers(failed=1, stopped=1)
    metrics.put("torchelastic", "workers.default.run_total", 1)
    metrics.put("torchelastic", "workers.default.run_total", 7)
    name = (("group", "torchelastic"), ("name", "workers.default.run_total"))
    assert changed(metrics) == {
        ("elastic_ext_info", (("node", "n0"), ("run_id", "job1"), ("torch", "2.13.0"), ("version", "1.2"))): 1,
        ("elastic_ext_restarts_total", (("kind", "code"),)): 1,
        ("elastic_ext_restarts_total", (("kind", "membership"),)): 2,
        ("elastic_ext_restarts_total", (("kind", "other"),)): 1,
        ("elastic_ext_failures_total", (("kind", "unknown"),)): 1,
        ("elastic_ext_restarts_charged", ()): 2,
        ("elastic_ext_max_restarts", ()): 10,
        ("elastic_ext_round", ()): 3,
        ("elastic_ext_world_size", ()): 16,
        ("elastic_ext_worker_starts_total", (("how", "cold"), ("reason", "not_ready"))): 1,
        ("elastic_ext_standbys", ()): 2,
        ("elastic_ext_standby_memory_bytes", ()): 1 << 20,
        ("elastic_ext_workers", (("state", "stopped"),)): 1,
        ("elastic_ext_workers", (("state", "failed"),)): 1,
        ("elastic_ext_torchelastic_last_value", name): 7,
        ("elastic_ext_torchelastic_values_total", name): 2,
        ("elastic_ext_agent_state", (("state", "rendezvous"),)): 1,
    }


def test_the_last_recovery_is_shown() -> None:
    began, metrics, now = time.time(), agent(), time.monotonic()
    phases = (
        RecoveryPhase("stop", now - 1, now),
        RecoveryPhase("start", now, now + 1),
        RecoveryPhase("first_step", now + 1, now + 4),
    )
    metrics.recovered(PastRecovery(Cause(), 1, phases, True), load_s=0.5)
    found = read(metrics)
    assert found["elastic_ext_last_recovery_seconds", ()] == 5
    assert began - CLOCK_S < found["elastic_ext_last_recovery_timestamp_seconds", ()] - 4 < time.time() + CLOCK_S
    assert found["elastic_ext_recovery_whole_seconds_bucket", (("le", "10.0"),)] == 1
    of_phase = {phase: found["elastic_ext_recovery_seconds_sum", (("phase", phase),)] for phase in ("first_step", "load")}
    assert of_phase == {"first_step": 3, "load": 0.5}


def test_all_counters_are_there_from_the_start() -> None:
    """Else increase() would not see the first event."""
    found = read(agent())
    kinds = [*KINDS, "other"]
    assert {key for key in ours(found) if key[0].endswith("_total")} == {
        *(("elastic_ext_failures_total", (("kind", kind),)) for kind in kinds),
        *(("elastic_ext_restarts_total", (("kind", kind),)) for kind in [*kinds, "membership"]),
        *(("elastic_ext_checkpoint_copies_total", (("outcome", outcome),)) for outcome in ("copied", "failed")),
        ("elastic_ext_checkpoint_copied_bytes_total", ()),
        ("elastic_ext_memory_copies_lost_total", ()),
        ("elastic_ext_worker_starts_total", (("how", "warm"), ("reason", ""))),
        *(("elastic_ext_worker_starts_total", (("how", "cold"), ("reason", each.value))) for each in ColdReason),
    }
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_workers_are_shown() -> None:
    began, at = time.time(), time.monotonic_ns() - 2 * 10**9
    saves = {"saved_step": 8, "saved_ns": at - 98 * 10**9, "saves": 2, "failed_saves": 3, "saving_s": 0.7}
    rows = [
        WorkerProgress(0, 8, Progress(7, 12, at - 5_500_000_000, at, True, **saves)),
        WorkerProgress(1, 9, Progress(8, 0, 0, 0, True)),
    ]
    metrics = agent(progress=lambda: rows, gpus=lambda: ["GPU-1"])
    found = {key: value for key, value in changed(metrics).items() if key[0].startswith("elastic_ext_worker_")}
    first = (("local_rank", "0"),)
    step_at = found.pop(("elastic_ext_worker_last_step_timestamp_seconds", first))
    saved_at = found.pop(("elastic_ext_worker_last_save_timestamp_seconds", first))
    assert found == {
        ("elastic_ext_worker_info", (("gpu_uuid", "GPU-1"), *first, ("node", "n0"), ("rank", "8"))): 1,
        ("elastic_ext_worker_info", (("gpu_uuid", ""), ("local_rank", "1"), ("node", "n0"), ("rank", "9"))): 1,
        ("elastic_ext_worker_steps_total", first): 12,
        ("elastic_ext_worker_step_seconds_count", first): 11,
        ("elastic_ext_worker_step_seconds_sum", first): 5.5,
        ("elastic_ext_worker_saved_step", first): 8,
        ("elastic_ext_worker_checkpoint_saves_total", (*first, ("outcome", "saved"))): 2,
        ("elastic_ext_worker_checkpoint_saves_total", (*first, ("outcome", "failed"))): 3,
        ("elastic_ext_worker_checkpoint_save_seconds_count", first): 2,
        ("elastic_ext_worker_checkpoint_save_seconds_sum", first): 0.7,
    }
    assert began - CLOCK_S < step_at + 2 < time.time() + CLOCK_S
    assert step_at - saved_at == pytest.approx(98, abs=0.01)
    assert changed(metrics)["elastic_ext_worker_last_step_timestamp_seconds", first] == step_at  # changes() counts steps only


def test_a_set_clock_moves_times_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 10.0)
    monkeypatch.setattr(families, "time", clocks)
    clock = families.UnixClock()
    assert clock.at(5.0) == 995
    clocks.time = lambda: 1000.5  # slewed
    assert clock.at(5.0) == 995
    clocks.time = lambda: 4600.0
    assert clock.at(5.0) == 4595


def test_copies_are_counted_with_the_last_lag() -> None:
    began, metrics = time.time(), agent()
    metrics.copied(1000, None, 2.5, complete=False, failed=True)
    since = ("elastic_ext_checkpoint_uncopied_since_timestamp_seconds", ())
    last = ("elastic_ext_checkpoint_last_copy_timestamp_seconds", ())
    lag = ("elastic_ext_checkpoint_copy_lag_steps", ())
    found = read(metrics)
    assert lag not in found  # nothing is there yet: no number would be true
    assert last not in found
    assert began - CLOCK_S < found[since] + 2.5 < time.time() + CLOCK_S
    metrics.copied(500, 4, 0.0, complete=True, failed=False)
    found = read(metrics)
    assert found[lag] == 4
    assert since not in found
    assert began - CLOCK_S < found[last] < time.time() + CLOCK_S
    assert found["elastic_ext_checkpoint_copied_bytes_total", ()] == 1500
    assert [found["elastic_ext_checkpoint_copies_total", (("outcome", each),)] for each in ("copied", "failed")] == [1, 1]


def test_recovery_times_are_a_histogram_by_phase() -> None:
    metrics = agent()
    for seconds in (0.004, 0.005, 0.02, 599, 700):
        metrics.phase("rendezvous", seconds)
    found = read(metrics)

    def below(bound: str, phase: str = "rendezvous") -> float:
        return found["elastic_ext_recovery_seconds_bucket", (("le", bound), ("phase", phase))]

    assert [below(bound) for bound in ("0.005", "0.01", "0.025", "300.0", "600.0", "+Inf")] == [2, 2, 3, 3, 4, 5]
    assert found["elastic_ext_recovery_seconds_count", (("phase", "rendezvous"),)] == 5
    assert found["elastic_ext_recovery_seconds_sum", (("phase", "rendezvous"),)] == pytest.approx(1299.029)
    assert [below("+Inf", phase) for phase in ("stop", "start")] == [0, 0]  # there from the start, so that rates work
    with pytest.raises(KeyError):
        metrics.phase("nap", 1.0)


def test_progress_is_read_at_scrape_time() -> None:
    now = [WorkerProgress(0, 0, Progress(7, 1, 0, 0, True))]
    metrics = agent(progress=lambda: now)
    steps = ("elastic_ext_worker_steps_total", (("local_rank", "0"),))
    assert read(metrics)[steps] == 1
    now[0] = WorkerProgress(0, 0, Progress(7, 2, 0, 0, True))
    assert read(metrics)[steps] == 2
    now.clear()
    assert steps not in read(metrics)


def test_two_agents_and_the_global_registry_stay_apart() -> None:
    before = generate_latest(REGISTRY).count(b"elastic_ext")
    first, second = agent(), agent(run_id="job2")
    first.restarted("code")
    restarts = ("elastic_ext_restarts_total", (("kind", "code"),))
    assert read(first)[restarts] == 1
    assert read(second)[restarts] == 0
    assert generate_latest(REGISTRY).count(b"elastic_ext") == before == 0


@pytest.mark.seam
def test_the_users_multiprocess_mode_is_not_ours(tmp_path: Any) -> None:
    """prometheus-client's counters would need that directory, and share their values between agents through it."""
    code = (
        "from elastic_ext.telemetry.agent_metrics import AgentMetrics\n"
        "from prometheus_client import generate_latest\n"
        "for count in (1, 2):\n"
        "    agent = AgentMetrics(version='1', torch='2', run_id='job')\n"
        "    agent.restarted('code'); agent.phase('stop', 1.0)\n"
        "    assert 'elastic_ext_restarts_total{kind=\"code\"} 1.0' in generate_latest(agent.registry).decode()\n"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.seam
def test_importing_the_metrics_imports_no_torch() -> None:
    code = "import sys, elastic_ext.telemetry.agent_metrics, elastic_ext.http.server; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_odd_names_do_not_break_the_page() -> None:
    """Among them a run id and a node that were no UTF-8 in the environment."""
    metrics = agent(run_id=os.fsdecode(b"job\xff"), node='a "b"\\\n')
    for name in ('quo"te', "back\\slash", "two\nlines", "한글", os.fsdecode(b"\xfe"), ""):
        metrics.put("torchelastic", name, 1)
    found = read(metrics)
    (info,) = (dict(labels) for name, labels in found if name == "elastic_ext_info")
    assert (info["run_id"], info["node"]) == ("job\\udcff", 'a "b"\\\\n')
    names = [dict(labels)["name"] for name, labels in found if name == "elastic_ext_torchelastic_last_value"]
    assert names == ['quo"te', "back\\slash", "two\\nlines", "한글", "\\udcfe", ""]


# torchelastic's put_metric.


def last_value(metrics: AgentMetrics, name: str) -> float | None:
    return read(metrics).get(("elastic_ext_torchelastic_last_value", (("group", "torchelastic"), ("name", name))))


class Recorder(torchelastic.MetricHandler):
    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def emit(self, metric_data: Any) -> None:
        self.seen.append((metric_data.name, metric_data.value))


class Failing(torchelastic.MetricHandler):
    def emit(self, metric_data: Any) -> None:
        raise ZeroDivisionError(metric_data.name)


@pytest.fixture(autouse=True)
def leave_torchelastic_as_it_was() -> Iterator[None]:
    unconfigured = torchelastic.getStream("nobody's group").handler
    group = torchelastic.getStream("torchelastic").handler
    yield
    torchelastic.configure(unconfigured)
    torchelastic.configure(group, "torchelastic")


def test_put_metric_reaches_ours_then_only_the_users() -> None:
    user, metrics = Recorder(), agent()
    torchelastic.configure(user, "torchelastic")

    @torchelastic.prof
    def rendezvous() -> None:
        pass

    with bridge_torchelastic(metrics):
        torchelastic.put_metric("agent.x", 3)
        torchelastic.put_metric("other", 5, "my_group")
        rendezvous()
    assert torchelastic.getStream("torchelastic").handler is user
    torchelastic.put_metric("agent.x", 4)
    assert [user.seen[0], user.seen[-1]] == [("agent.x", 3), ("agent.x", 4)]
    names = {dict(labels)["name"] for key, labels in read(metrics) if key.endswith("last_value")}
    assert any(name.endswith("rendezvous.success") for name in names)
    assert (last_value(metrics, "agent.x"), last_value(metrics, "other")) == (3, None)


def test_without_a_group_handler_the_default_is_used() -> None:
    first, second, metrics = Recorder(), Recorder(), agent()
    torchelastic.configure(first)
    torchelastic.configure(first, "torchelastic")  # what getStream cannot tell from an unconfigured group
    with bridge_torchelastic(metrics):
        torchelastic.put_metric("a", 1)
        torchelastic.configure(second)
        torchelastic.put_metric("a", 2)
    torchelastic.put_metric("a", 3)
    torchelastic.configure(first)
    torchelastic.put_metric("a", 4)
    assert (first.seen, second.seen) == ([("a", 1), ("a", 4)], [("a", 2), ("a", 3)])
    assert last_value(metrics, "a") == 2


def test_a_handlers_error_is_the_callers_as_before() -> None:
    metrics = agent()
    torchelastic.configure(Failing(), "torchelastic")
    with bridge_torchelastic(metrics), pytest.raises(ZeroDivisionError, match="x"):
        torchelastic.put_metric("x", 1)
    assert last_value(metrics, "x") == 1


NUMBERS = {0.5: 0.5, True: 1.0, numpy.float32(0.25): 0.25}


@pytest.mark.parametrize("value", [*NUMBERS, "text", None, object(), (1,), 10**400, 1j])
def test_what_is_no_number_only_reaches_the_user(value: Any) -> None:
    user, metrics = Recorder(), agent()
    torchelastic.configure(user, "torchelastic")
    with bridge_torchelastic(metrics):
        torchelastic.put_metric("x", value)
    assert user.seen == [("x", value)]
    assert last_value(metrics, "x") == NUMBERS.get(value)


def test_the_bridge_ends_with_an_exception_too() -> None:
    user, later = Recorder(), Recorder()
    torchelastic.configure(user, "torchelastic")
    with pytest.raises(RuntimeError), bridge_torchelastic(agent()):
        raise RuntimeError
    assert torchelastic.getStream("torchelastic").handler is user
    with bridge_torchelastic(agent()):
        torchelastic.configure(later, "torchelastic")
    assert torchelastic.getStream("torchelastic").handler is later  # as it was configured meanwhile


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_bridges_of_two_agents_end_in_any_order(first_to_end: int) -> None:
    user, agents = Recorder(), (agent(), agent())
    torchelastic.configure(user, "torchelastic")
    bridges = [bridge_torchelastic(one) for one in agents]
    for bridge in bridges:
        bridge.__enter__()
    torchelastic.put_metric("x", 1)
    bridges[first_to_end].__exit__(None, None, None)
    torchelastic.put_metric("x", 2)
    bridges[1 - first_to_end].__exit__(None, None, None)
    torchelastic.put_metric("x", 3)
    assert torchelastic.getStream("torchelastic").handler is user
    assert (last_value(agents[first_to_end], "x"), last_value(agents[1 - first_to_end], "x")) == (1, 2)
    assert user.seen == [("x", 1), ("x", 2), ("x", 3)]


def test_endless_names_are_cut_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    metrics = agent()
    for step in range(families.MAX_TORCHELASTIC_NAMES + 50):
        metrics.put("torchelastic", f"step_{step}", step)
    metrics.put("torchelastic", "step_0", -1)
    assert sum(name == "elastic_ext_torchelastic_last_value" for name, _ in read(metrics)) == families.MAX_TORCHELASTIC_NAMES
    assert last_value(metrics, "step_0") == -1
    (said,) = warnings(caplog)
    assert f"torchelastic/step_{families.MAX_TORCHELASTIC_NAMES}" in said


# Over HTTP.


@pytest.mark.seam
def test_health_and_status(serve: Any) -> None:
    metrics = agent()
    server = serve(metrics)
    assert get(f"{server.url}/healthz")[::2] == (200, "ok\n")
    assert get(f"{server.url}/readyz")[::2] == (503, "not ready: rendezvous\n")
    metrics.round_started(3, 16)
    metrics.enter("running")
    assert get(f"{server.url}/readyz")[::2] == (200, "ready\n")
    status, content_type, text = get(f"{server.url}/status.json")
    assert (status, content_type) == (200, "application/json")
    told = {"schema": 1, "version": "1.2", "torch": "2.13.0", "run_id": "job1", "node": "n0"}
    found = json.loads(text)
    assert found.pop("goodput").keys() == {"seconds", "unsettled_seconds", "job"}
    assert found == {**told, "state": "running", "round": 3, "world_size": 16}
    assert get(f"{server.url}/nothing")[0] == 404


@pytest.mark.seam
def test_pages(serve: Any) -> None:
    metrics = agent()
    metrics.restarted("code")
    server = serve(metrics)
    status, content_type, text = get(f"{server.url}/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert ours(samples(text)) == ours(read(metrics))
    status, content_type, text = get(f"{server.url}/metrics?x=1", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text;")
    assert ours(samples(text, parse_openmetrics)) == ours(read(metrics))
    assert "# UNIT elastic_ext_worker_step_seconds seconds\n" in text
    status, content_type, text = get(server.url)
    assert (status, content_type) == (200, "text/html; charset=utf-8")
    assert 'href="/metrics"' in text
    assert get(f"{server.url}/metricsx")[0] == 404


@pytest.mark.seam
@pytest.mark.parametrize("by", ["another program", "another agent"])
def test_a_port_that_is_taken(serve: Any, caplog: pytest.LogCaptureFixture, by: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if by == "another program" else serve(agent()).port
        server = serve(agent(run_id="second"), port=port)
        assert server.port not in (None, port)
        assert 'run_id="second"' in get(f"{server.url}/metrics")[2]
    (said,) = warnings(caplog)
    assert f"cannot listen on 127.0.0.1 port {port}" in said
    assert f"listening on 127.0.0.1 port {server.port} instead" in said


@pytest.mark.seam
@pytest.mark.parametrize(
    "where",
    [{"host": "192.0.2.1"}, {"host": "no such host"}, {"host": ""}, {"port": 70000}],  # 192.0.2.0/24 is nobody's: RFC 5737
)
def test_where_it_cannot_listen(serve: Any, caplog: pytest.LogCaptureFixture, where: dict[str, Any]) -> None:
    server = serve(agent(), **where)
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert get(f"{server.url}/metrics")[0] == 200
    assert len(warnings(caplog)) == 1


@pytest.mark.seam
@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")],
)
def test_where_it_listens(serve: Any, caplog: pytest.LogCaptureFixture, host: str, shown: str) -> None:
    caplog.set_level(logging.INFO)
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
    server = serve(agent(), host)
    assert server.url == f"http://{shown}:{server.port}"
    assert get(f"{server.url}/metrics")[0] == 200
    logged = [each for each in caplog.records if each.name == server_module.__name__ and each.levelno == logging.INFO]
    assert [each.getMessage() for each in logged] == [f"metrics: serving {server.url}/metrics (bound to {host})"]


@pytest.mark.seam
def test_without_a_socket_nothing_is_served() -> None:
    code = (
        "import logging, os, resource\n"
        "from elastic_ext.http import pages\n"
        "from elastic_ext.telemetry.agent_metrics import AgentMetrics\n"
        "from elastic_ext.http.server import MetricsServer\n"
        "logging.basicConfig(format='%(levelname)s %(message)s', level=logging.INFO)\n"
        "metrics = AgentMetrics(version='1', torch='2', run_id='job')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
        "server = MetricsServer(pages.of_metrics(metrics.registry))\n"
        "print(server.url, server.port)\n"
        "server.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None None\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING metrics: cannot listen on 127.0.0.1 port 0")
    assert line.endswith("nothing is served")


@pytest.mark.seam
def test_close_frees_the_port_and_is_repeatable(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = serve(agent(), port=free_port())  # a port that the kernel gives to nobody meanwhile
    first.close()
    first.close()
    assert "elastic_ext-metrics" not in [each.name for each in threading.enumerate()]
    with pytest.raises(urllib.error.URLError):
        get(first.url)
    assert serve(agent(), port=first.port).port == first.port
    assert warnings(caplog) == []


@pytest.mark.seam
def test_clients_that_talk_nonsense_or_leave_print_nothing(serve: Any, capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Large(Collector):
        """More than socket buffers hold: leaving is an error for the server."""

        def collect(self) -> Iterator[Metric]:
            yield Metric("large", "x" * (16 << 20), "gauge")

    metrics = agent()
    metrics.registry.register(Large())
    server = serve(metrics)
    for sent in (b"\x16\x03\x01\x02\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
            assert client.recv(1)
    assert get(f"{server.url}/")[0] == 200
    server.close()
    assert capsys.readouterr() == ("", "")
    assert warnings(caplog) == []


@pytest.mark.seam
def test_a_failed_scrape_is_an_error_page(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[WorkerProgress]:
        raise OSError("the shared memory is gone")

    server = serve(agent(progress=broken))
    assert [get(f"{server.url}/metrics")[0] for _ in range(3)] == [500, 500, 500]
    assert get(server.url)[0] == 200
    (said,) = warnings(caplog)
    assert "the shared memory is gone" in said
