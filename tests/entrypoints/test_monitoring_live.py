"""A real Prometheus looks on while a real job loses a worker, goes on, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack
from itertools import chain

import pytest
import yaml

from elastic_ext.features.table import FEATURES
from elastic_ext.telemetry import families
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, Job
from tests.programs import needs
from tests.prometheus_server import MONITORING, PrometheusServer, file_sd

ENDS = "|_total|_sum|_count|_bucket|_info"
ENDED = "elastic_ext_ended_timestamp_seconds"
HUNG = "run:elastic_ext_last_hang_timestamp_seconds:max"
RECORDED = re.compile(r"\b(?:agent|worker|run|run_state):\w+:\w+")


def groups(name: str) -> list[dict]:
    return yaml.safe_load((MONITORING / name).read_text())["groups"]


def rules(name: str) -> list[dict]:
    return [rule for group in groups(name) for rule in group["rules"]]


def sources(expr: str, made_of: dict[str, str]) -> set[str]:
    """The agent's metrics that an expression needs in the end."""
    found = {each for each in RECORDED.findall(expr) if each in made_of}
    deeper = {name: made for name, made in made_of.items() if name not in found}
    plain = set(re.findall(r"(?<![:\w])elastic_ext_\w+", expr))
    return plain.union(*(sources(made_of[each], deeper) for each in found))


def recordings() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules("recording_rules.yml")}


LATE = re.compile("elastic_ext_(straggler|lateness)_")  # here no rank waits for another, so none is late


def queries() -> dict[str, list[str]]:
    """Of each panel, by its title."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return {panel["title"]: [each["expr"] for each in panel["targets"]] for panel in panels if "targets" in panel}


def is_of(metric: str, family: str) -> bool:
    return re.fullmatch(f"{family}(?:{ENDS})", metric) is not None


def test_rules_and_dashboard_use_existing_metrics():
    tables = [table for table in vars(families).values() if isinstance(table, dict)] + [row.metrics for row in FEATURES]
    built = {name for table in tables for name, family in table.items() if isinstance(family, families.Family)}
    made_of = recordings()
    exprs = [*made_of.values(), *(rule["expr"] for rule in rules("alert_rules.yml")), *chain(*queries().values())]
    assert {each for expr in exprs for each in RECORDED.findall(expr)} <= made_of.keys()
    used = {metric for expr in exprs for metric in sources(expr, made_of)}
    assert len(used) > 30
    assert not {metric for metric in used if not any(is_of(metric, family) for family in built)}


# The budget is whole again after each checkpoint: of 3 restarts 2 are left after a failure.
SHORTER = {
    **{"> 3600": "> 3", "left:min <= 1": "left:min <= 2"},
    **{"for: 1m": "for: 1s", "for: 5m": "for: 1s", "interval: 1m": "interval: 1s"},
}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_crash_and_the_end_are_seen(tmp_path):
    needs("prometheus")
    saving, finish, sd = tmp_path / "saving", tmp_path / "finish", tmp_path / "sd"
    saving.touch()
    sd.mkdir()
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path / "etcd"))
        seen = stack.enter_context(PrometheusServer(tmp_path / "prometheus", file_sd(sd), change=SHORTER))
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=night", "--nnodes=2"]
        conf = f"checkpoint_dir={tmp_path / 'checkpoints'},backoff=0,lease_ttl=60,metrics_linger=240"
        command = [*AGENT, *where, "--max-restarts=3", f"--rdzv-conf={conf}", str(SCRIPTS / "monitored_job.py")]

        def start(name: str) -> Job:
            own = {"NODE_NAME": name, "LOCAL_DIR": str(tmp_path / f"disk-{name}"), "METRICS_DISCOVERY_DIR": str(sd)}
            of_script = {"NODE": name, "SAVING": str(saving), "FINISH": str(finish), "IN_MEMORY": "1"}
            settings = {f"ELASTIC_EXT_{key}": value for key, value in own.items()}
            return stack.enter_context(Job(command, tmp_path, **of_script, **settings))

        jobs = [start("n0"), start("n1")]
        crashes = int(jobs[0].wait_for(r"trains: n0 0 \d+ (\d+)")[0][1])
        seen.wait_for("run:elastic_ext_agents_running:count == 2")
        seen.wait_for("run:elastic_ext_last_save_timestamp_seconds:max")
        saving.unlink()
        fires(seen, "CheckpointStale")
        os.kill(crashes, signal.SIGKILL)
        fires(seen, "RestartBudgetLow")
        look(seen)
        saving.touch()
        seen.wait_for('ALERTS{alertname="CheckpointStale", alertstate="firing"}', lambda found: not found)
        finish.touch()
        assert [job.finish().returncode for job in jobs] == [0, 0]
        seen.wait_for(f"last_over_time({ENDED}[1h])", lambda found: len(found) == 2)  # both have lingered
        seen.wait_for("run:elastic_ext_agents:count", lambda found: not found)
        assert [line for line in seen.log.splitlines() if re.search("level=(warn|error)", line)] == []


def fires(seen: PrometheusServer, alert: str) -> None:
    found = seen.wait_for(f'ALERTS{{alertname="{alert}", alertstate="firing"}}')
    assert {dict(labels)["run_id"] for labels in found} == {"night"}


def look(seen: PrometheusServer) -> None:
    """Every query of every panel, and what every alert looks at, has data; so do the panels' variables."""
    wanted = {}
    for title, exprs in queries().items():
        for expr in exprs:
            asked = expr.replace("$run_id", "night").replace("$window", "1h").replace("$__rate_interval", "20s")
            assert "$" not in asked
            seen.query(asked)
            if not LATE.search(asked):
                wanted[f"{title}: {asked}"] = asked
    for rule in rules("alert_rules.yml"):
        seen.query(rule["expr"])
        for record in RECORDED.findall(rule["expr"]):
            if record not in (ENDED, HUNG) and not LATE.search(record):  # nobody has ended yet, or hung
                wanted[f"{rule['alert']}: {record}"] = f"last_over_time({record}[1h])"
    for what, expr in wanted.items():
        assert seen.wait_for(expr), what  # the newest workers have made only a few steps
    runs = seen.query("count by (run_id) (agent:elastic_ext_agent_state:labelled)")
    assert runs.keys() == {(("run_id", "night"),)}
