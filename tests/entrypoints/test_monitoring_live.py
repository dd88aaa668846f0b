"""A real Prometheus looks on while a real job loses a worker, hangs, loses a node and is preempted."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
import yaml

from elastic_ext.observe import families
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, Job
from tests.programs import needs
from tests.prometheus_server import MONITORING, PrometheusServer, file_sd

ENDS = "|_total|_sum|_count|_bucket|_info"
ENDED = "agent:elastic_ext_ended_timestamp_seconds:labelled"
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


def queries() -> dict[str, list[str]]:
    """Of each panel, by its title."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return {panel["title"]: [each["expr"] for each in panel["targets"]] for panel in panels if "targets" in panel}


def is_of(metric: str, family: str) -> bool:
    return re.fullmatch(f"{family}(?:{ENDS})", metric) is not None


def test_the_rules_and_the_dashboard_use_metrics_that_exist():
    tables = [table for table in vars(families).values() if isinstance(table, dict)]
    built = {name for table in tables for name, family in table.items() if isinstance(family, families.Family)}
    made_of = recordings()
    exprs = [*made_of.values(), *(rule["expr"] for rule in rules("alert_rules.yml")), *chain(*queries().values())]
    assert {each for expr in exprs for each in RECORDED.findall(expr)} <= made_of.keys()
    used = {metric for expr in exprs for metric in sources(expr, made_of)}
    assert len(used) > 30
    assert not {metric for metric in used if not any(is_of(metric, family) for family in built)}


class Nodes:
    """The agents of one job."""

    def __init__(self, folder: Path, etcd: str, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.saving, self.finish, self.sd = folder / "saving", folder / "finish", folder / "sd"
        self.saving.touch()
        self.sd.mkdir()
        conf = f"checkpoint_dir={folder / 'checkpoints'},backoff=0,lease_ttl=60,hang_timeout=10,last_call=240,stop_grace=2"
        conf += ",metrics_linger=240"
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={etcd}", "--rdzv-id=night", "--nnodes=2:3", "--nproc-per-node=1"]
        self.command = [*AGENT, *where, "--max-restarts=3", f"--rdzv-conf={conf}", str(SCRIPTS / "monitored_job.py")]
        self.jobs: dict[str, Job] = {}
        self._rounds = 0

    def start(self, name: str) -> None:
        self.jobs[name] = self.stack.enter_context(
            Job(
                self.command,
                self.folder,
                NODE=name,
                SAVING=str(self.saving),
                FINISH=str(self.finish),
                ELASTIC_EXT_NODE_NAME=name,
                ELASTIC_EXT_LOCAL_DIR=str(self.folder / f"disk-{name}"),
                ELASTIC_EXT_METRICS_DISCOVERY_DIR=str(self.sd),
            )
        )

    def trains(self, name: str, rounds: int) -> int:
        """Wait until a node has trained in so many rounds; the pid of its worker."""
        return int(self.jobs[name].wait_for(rf"trains: {name} \d+ \d+ (\d+)", rounds)[-1][1])


# The budget is whole again after each checkpoint: of 3 restarts 2 are left after a failure.
SHORTER = {
    **{"> 3600": "> 3", "> 900": "> 2", "left:min <= 1": "left:min <= 2"},
    **{"for: 1m": "for: 1s", "for: 5m": "for: 1s", "interval: 1m": "interval: 1s"},
}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_night_of_a_job_is_seen(tmp_path):
    needs("prometheus")
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path / "etcd"))
        nodes = Nodes(tmp_path, etcd.endpoint, stack)
        seen = stack.enter_context(PrometheusServer(tmp_path / "prometheus", file_sd(nodes.sd), change=SHORTER))
        for name in ("n0", "n1", "n2"):
            nodes.start(name)
        for name in nodes.jobs:
            nodes.trains(name, 1)
        seen.wait_for("run:elastic_ext_agents_running:count == 3")
        seen.wait_for("run:elastic_ext_last_save_timestamp_seconds:max")

        def recovered(kind: str, count: int) -> None:
            """Until Prometheus has seen so many restarts of a kind, and the workers' steps after the last one."""
            seen.wait_for(f'max(agent:elastic_ext_restarts_total:labelled{{kind="{kind}"}}) >= {count}')
            seen.wait_for("count(agent:elastic_ext_worker_steps_total:labelled > 3) >= 2")

        for crash in (1, 2):
            os.kill(nodes.trains("n1", crash), signal.SIGKILL)
            nodes.trains("n0", crash + 1)
            recovered("unknown", crash)
        os.kill(nodes.trains("n1", 3), signal.SIGSTOP)
        fires(seen, "JobHung")
        nodes.trains("n0", 4)
        recovered("hang", 1)
        fires(seen, "RestartLoop")
        fires(seen, "RestartBudgetLow")
        nodes.jobs["n2"].process.kill()
        nodes.trains("n0", 5)
        seen.wait_for("run:elastic_ext_agents_running:count == 2")
        nodes.start("n3")
        nodes.trains("n3", 1)
        nodes.jobs["n1"].process.terminate()
        nodes.jobs["n1"].finish()
        nodes.trains("n0", 7)
        nodes.saving.unlink()
        fires(seen, "CheckpointStale")
        look(seen)
        nodes.saving.touch()
        seen.wait_for('ALERTS{alertname="CheckpointStale", alertstate="firing"}', lambda found: not found)
        nodes.finish.touch()
        assert [nodes.jobs[name].finish().returncode for name in ("n0", "n3")] == [0, 0]
        seen.wait_for(f"last_over_time({ENDED}[1h])", lambda found: len(found) >= 2)  # both have lingered
        seen.wait_for("run:elastic_ext_agents:count", lambda found: not found)
        complaints = [line for line in seen.log.splitlines() if re.search("level=(warn|error)", line)]
        assert complaints == []


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
            wanted[f"{title}: {asked}"] = asked
    for rule in rules("alert_rules.yml"):
        seen.query(rule["expr"])
        for record in RECORDED.findall(rule["expr"]):
            if record != ENDED:  # an agent that is told to leave does not linger
                wanted[f"{rule['alert']}: {record}"] = f"last_over_time({record}[1h])"
    for what, expr in wanted.items():
        assert seen.wait_for(expr), what  # the newest workers have made only a few steps
    runs = seen.query("count by (run_id) (agent:elastic_ext_agent_state:labelled)")
    assert runs.keys() == {(("run_id", "night"),)}
