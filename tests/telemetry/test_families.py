"""Every family shows what has happened in a real job."""

from __future__ import annotations

import json
import re
import time
import urllib.request

import pytest

from elastic_ext.telemetry.agent_metrics import OutageChange, OutageWatch, VerdictMetrics
from tests.etcd_server import EtcdServer
from tests.jobs import TORCHRUN, Job
from tests.until import LIMIT_S, until

URL = r"http://(127\.0\.0\.1:\d+)/metrics"

LEASE_S = 60
CALLS, RECONNECTS = "elastic_ext_etcd_calls_total", "elastic_ext_etcd_reconnects_total"


class Scraped(dict[str, float]):
    """Values by series. A series that is absent has no value, which equals nothing."""

    def __missing__(self, series: str) -> float:
        return float("nan")


def scrape(target: str) -> Scraped:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=LIMIT_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return Scraped({series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)})


# Attempt 0 saves and is killed, attempt 1 has no more to do.
SCRIPT = """
import os, signal, torch
from elastic_ext import Checkpointer
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
position = checkpointer.load()
model(torch.ones(2)).sum().backward()
for step in range(position.step + 1, position.step + 4):
    optimizer.step()
    if attempt == 0:
        checkpointer.save(step, wait=True)
if attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
print("attempt", attempt, flush=True)
signal.pause()
"""


def recovery(phase: str) -> str:
    return f'elastic_ext_recovery_seconds_count{{phase="{phase}"}}'


def start(tmp_path, server: EtcdServer, **settings: str) -> Job:
    (tmp_path / "job.py").write_text(SCRIPT)
    environ = {f"ELASTIC_EXT_{name.upper()}": value for name, value in {"backoff": "0", "node_name": "here", **settings}.items()}
    rendezvous = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=families"]
    command = [*TORCHRUN, *rendezvous, "--nnodes=1", "--nproc-per-node=1", "--max-restarts=9", str(tmp_path / "job.py")]
    return Job(command, tmp_path, **environ)


@pytest.mark.full
def test_a_job_that_is_killed(tmp_path, server):
    """For one that hangs see test_events.py, for a node that is replaced test_etcd_failures.py."""
    began = time.time()
    local, remote = str(tmp_path / "local"), str(tmp_path / "remote")
    with start(tmp_path, server, local_dir=local, checkpoint_dir=remote, lease_ttl=str(LEASE_S)) as job:
        ((target,),) = [each.groups() for each in job.wait_for(URL)]
        first = scrape(target)
        job.wait_for("attempt 1")

        def recovered_and_copied() -> Scraped | None:
            seen = scrape(target)
            done = seen[recovery("load")] == 1 and seen["elastic_ext_checkpoint_copy_seconds_count"] >= 1
            return seen if done else None

        seen = until(recovered_and_copied)
    assert seen[recovery("detect")] == seen[recovery("stop")] == 1
    assert (
        0 < seen['elastic_ext_recovery_seconds_sum{phase="load"}'] < seen['elastic_ext_recovery_seconds_sum{phase="first_step"}']
    )
    assert seen["elastic_ext_hangs_total"] == 0
    decisions = {series: value for series, value in seen.items() if series.startswith("elastic_ext_decisions_total") and value}
    assert sum(decisions.values()) == 1, decisions
    assert seen["elastic_ext_node_strikes"] == 1
    assert seen["elastic_ext_refused_nodes"] == 0
    for name in ("load", "verify"):
        assert seen[f'elastic_ext_worker_checkpoint_{name}_seconds_count{{local_rank="0"}}'] == 1
        assert seen[f'elastic_ext_worker_checkpoint_{name}_seconds_sum{{local_rank="0"}}'] > 0
    assert seen["elastic_ext_checkpoint_copy_seconds_sum"] > 0
    assert seen[f'{CALLS}{{outcome="ok"}}'] > first[f'{CALLS}{{outcome="ok"}}']
    assert seen[f'{CALLS}{{outcome="failed"}}'] == 0
    calls = sum(seen[f'{CALLS}{{outcome="{outcome}"}}'] for outcome in ("ok", "failed"))
    assert seen["elastic_ext_etcd_call_seconds_count"] == calls
    assert seen[RECONNECTS] == 0
    assert began < seen["elastic_ext_etcd_lease_expiry_timestamp_seconds"] < time.time() + LEASE_S
    assert first["elastic_ext_hangs_total"] == first["elastic_ext_node_strikes"] == 0
    assert first['elastic_ext_decisions_total{decision="stop",kind="code"}'] == 0


@pytest.mark.full
def test_an_outage_of_etcd(tmp_path, server):
    settings = {
        "checkpoint_dir": str(tmp_path / "remote"),
        "hang_timeout": "off",
        "lease_ttl": "8",  # half of it without an answer is an outage
        "events_file": str(tmp_path / "events"),
    }

    def told() -> list[dict]:
        events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
        return [each for each in events if each["event"].startswith("etcd_")]

    with start(tmp_path, server, **settings) as job:
        ((target,),) = [each.groups() for each in job.wait_for(URL)]
        job.wait_for("attempt 1")
        server.kill()
        until(lambda: scrape(target)[f'{CALLS}{{outcome="failed"}}'] >= 1)
        until(told)
        server.start()
        until(lambda: scrape(target)[RECONNECTS] >= 1)
        lease = "elastic_ext_etcd_lease_expiry_timestamp_seconds"
        until(lambda: scrape(target)[lease] > time.time())
        until(lambda: len(told()) == 2)
        assert job.process.poll() is None
    assert [(each["event"], each["endpoint"]) for each in told()] == [
        ("etcd_unavailable", server.endpoint),
        ("etcd_available", server.endpoint),
    ]
    assert 4 <= told()[0]["seconds"] <= told()[1]["seconds"]


def test_a_lasting_outage_is_reported_with_its_end():
    watch = OutageWatch(5.0)
    assert watch.called(0.0, 1.0, True, "a") is None
    assert watch.called(0.5, 5.9, False, "a") is None  # late: 4.9 s without an answer
    assert watch.called(5.9, 6.0, True, "b") is None
    assert watch.called(12.0, 12.5, False, "a") is None
    assert watch.called(12.5, 16.9, False, "b") is None
    assert watch.called(17.0, 17.5, False, "a") == OutageChange(False, "a", 5.5)
    assert watch.called(18.0, 30.0, False, "b") is None
    assert watch.called(30.0, 32.0, True, "b") == OutageChange(True, "b", 20.0)
    assert watch.called(29.0, 34.0, False, "a") is None  # late
    assert watch.called(34.0, 35.0, True, "b") is None


def values_of(collector: VerdictMetrics) -> Scraped:
    """By series as the text format has them."""

    def series(name: str, labels: dict[str, str]) -> str:
        return name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")

    samples = [each for family in collector.collect() for each in family.samples]
    return Scraped({series(each.name, each.labels): each.value for each in samples})


def test_a_verdict_counts_once_and_a_refusal_ends():
    now = 100.0
    incidents = VerdictMetrics("here", refuse_s=60, now=lambda: now)
    for _ in range(2):  # a verdict may be told twice
        incidents.decided(1, "replace_node", "hardware", "there")
    incidents.decided(2, "restart", "crash", "here")
    incidents.decided(3, "restart", "of a newer agent", "here")
    seen = values_of(incidents)
    assert seen['elastic_ext_decisions_total{decision="replace_node",kind="hardware"}'] == 1
    assert seen['elastic_ext_decisions_total{decision="restart",kind="crash"}'] == 1
    assert seen['elastic_ext_decisions_total{decision="restart",kind="other"}'] == 1
    assert seen["elastic_ext_node_strikes"] == 2
    assert seen["elastic_ext_refused_nodes"] == 1
    now = 161.0
    assert values_of(incidents)["elastic_ext_refused_nodes"] == 0


def test_no_series_is_added_by_what_happens():
    incidents = VerdictMetrics("here", refuse_s=60)
    before = values_of(incidents).keys()
    incidents.decided(1, "a decision of a newer agent", "and a kind", "x")
    incidents.hung()
    assert values_of(incidents).keys() == before
    assert not [series for series in before if not re.fullmatch(r'elastic_ext_\w+(\{decision="\w+",kind="\w+"\})?', series)]
