"""What entrypoints/monitoring has, with real Prometheus tools, and a real Prometheus that finds real agents."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from elastic_ext.telemetry import families
from tests.jobs import AGENT, Gate, Job
from tests.ports import free_port
from tests.programs import REQUIRE, needs
from tests.prometheus_server import MONITORING, RULES, AsText, PrometheusServer, file_sd, static

ALERTS = (
    *("RestartLoop", "JobStoppedOnCodeBug", "CheckpointStale", "CheckpointSavesFailing"),
    *("MemoryCopiesFailing", "MemoryCopyLost", "RestartBudgetLow", "NodeRefused"),
    *("Straggler", "JobHung", "GoodputLow", "EtcdUnhealthy"),
)


def promtool(*args: object, given: str | None = None) -> str:
    needs("promtool")
    done = subprocess.run(
        ["promtool", *map(str, args)], cwd=MONITORING, input=given, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.seam
def test_the_configuration_holds():
    promtool("check", "config", "prometheus.yml")
    said = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    assert f"{len(ALERTS)} rules found" in said


@pytest.mark.seam
def test_each_alert_fires_and_resolves():
    promtool("test", "rules", "alerts_test.yml")
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    steps = [each for test in tests for each in test["promql_expr_test"]]
    fired = {
        name for step in steps for sample in step["exp_samples"] for name in re.findall('alertname="(.*?)"', sample["labels"])
    }
    assert fired == set(ALERTS)
    assert all(test["promql_expr_test"][-1]["exp_samples"] == [] for test in tests), "each ends with no alert"


def test_each_alert_says_what_to_do():
    (group,) = yaml.safe_load((MONITORING / "alert_rules.yml").read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set(ALERTS)
    for rule in group["rules"]:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert len(rule["annotations"]["runbook"].splitlines()) == 1


@pytest.mark.seam
@pytest.mark.parametrize(("script", "made"), [("dashboard.py", "dashboard.json"), ("recording_rules.py", "recording_rules.yml")])
def test_the_files_are_what_the_scripts_make(script, made, tmp_path):
    subprocess.run([sys.executable, MONITORING / script, tmp_path / made], check=True, timeout=240)
    assert (tmp_path / made).read_text() == (MONITORING / made).read_text()


@pytest.mark.seam
def test_the_pod_monitors_relabelling_is_prometheus_own(tmp_path):
    """The operator copies it into a scrape configuration, in snake case. Debian's Prometheus cannot discover pods."""
    (endpoint,) = yaml.safe_load((MONITORING / "podmonitor.yml").read_text())["spec"]["podMetricsEndpoints"]
    snake = [
        {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): each[key] for key in each}
        for each in endpoint["relabelings"]
    ]
    job = {"job_name": "pods", "static_configs": [{"targets": ["pod:9401"]}], "relabel_configs": snake}
    (tmp_path / "config.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    promtool("check", "config", tmp_path / "config.yml")


def test_the_page_names_the_alerts():
    page = (MONITORING / "README.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == ALERTS


def test_a_missing_program_skips_or_fails(monkeypatch):
    monkeypatch.setenv(REQUIRE, "0")
    with pytest.raises(pytest.skip.Exception, match="make system"):
        needs("sh", "no-such-program")
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        needs("sh", "no-such-program")
    needs("sh")


@pytest.mark.seam
def test_a_machine_without_the_programs_gets_instructions(tmp_path):
    for name in ("sh", "id", "sort", "tr"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    script = Path(__file__).parents[1] / "system.sh"
    done = subprocess.run(
        [tmp_path / "sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert re.search(r"apt-get install --no-install-recommends .*\bprometheus\b", done.stderr)


STAND_IN = """#!/bin/sh
case "$*" in *install*) "$POLICY" prometheus start && echo started || echo "answer $?" ;; esac
case "$*" in *install*$KILL*) kill -9 $PPID ;; esac
"""  # for apt-get: asks as a package would, and may have the run killed


@pytest.mark.seam
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_service_starts_and_the_policy_stays(tmp_path):
    for name in ("sh", "id", "sort", "tr", "rm", "mv", "chmod", "grep"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    (tmp_path / "apt-get").write_text(STAND_IN)
    (tmp_path / "apt-get").chmod(0o755)
    policy = tmp_path / "policy-rc.d"

    def run(kill: str = "never") -> str:
        env = {"PATH": str(tmp_path), "POLICY": str(policy), "KILL": kill}
        script = Path(__file__).parents[1] / "system.sh"
        return subprocess.run(
            [tmp_path / "sh", script], env=env, stdout=subprocess.PIPE, text=True, timeout=240, check=False
        ).stdout

    assert run() == "answer 101\n"
    assert not policy.exists()
    policy.symlink_to("own")  # which says yes
    (tmp_path / "own").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "own").chmod(0o755)
    for kill in ("never", "", "never"):  # a run that is killed leaves it to the next one
        assert run(kill) == "answer 101\n"
        assert (policy.is_symlink() and policy.resolve() == tmp_path / "own") == (kill == "never")
    assert sorted(each.name for each in tmp_path.glob("policy*")) == ["policy-rc.d"]


WAITS = """
import fcntl, sys, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
print("waits", flush=True)
with open(sys.argv[1]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


@pytest.mark.seam
def test_prometheus_finds_two_jobs_and_keeps_them_apart(tmp_path):
    """a by its file and as OpenMetrics; b by its address and as text, with run_id and node only in elastic_ext_info."""
    needs("prometheus", "promtool")
    (tmp_path / "job.py").write_text(WAITS)
    gate = Gate(tmp_path / "gate")

    def start(run_id: str, **settings: str) -> Job:
        command = [*AGENT, "--nproc-per-node=1", f"--rdzv-id={run_id}", str(tmp_path / "job.py"), str(gate.path)]
        return Job(command, tmp_path, ELASTIC_EXT_NODE_NAME=f"node-{run_id}", **settings)

    port, sd = free_port(), tmp_path / "sd"
    sd.mkdir()  # Prometheus watches a directory that is there when it starts
    with (
        AsText(f"127.0.0.1:{port}") as text,
        # Before the jobs: it takes up changes of its targets every 5 s.
        PrometheusServer(tmp_path / "prometheus", file_sd(sd) + static(text.target), every="2s") as prometheus,
        start("a", ELASTIC_EXT_METRICS_DISCOVERY_DIR=str(sd)) as a,
        start("b", ELASTIC_EXT_METRICS_PORT=str(port)) as b,
    ):
        found = prometheus.wait_for(
            'count by (run_id, node, job) (agent:elastic_ext_agent_state:labelled{state="running"} == 1)',
            lambda found: len(found) == 2,
        )
        assert {tuple(value for _, value in labels) for labels in found} == {
            ("training", "node-a", "a"),
            ("static", "node-b", "b"),
        }
        both = {(("run_id", "a"),): 1.0, (("run_id", "b"),): 1.0}
        prometheus.wait_for("run:elastic_ext_agents:count", lambda found: found == both)
        # One format shows as many families as the other. Some have no series at first, and one job is ahead of the other.
        shown = prometheus.wait_for(
            'count by (job) (group by (job, __name__) ({__name__=~"elastic_ext_.+"}))',
            lambda shown: len(shown) == 2 and len(set(shown.values())) == 1,
        )
        assert sum(shown.values()) > 2 * len(families.JOB)
        kept = prometheus.get("metadata", metric="elastic_ext_worker_step_seconds")
        assert json.dumps(kept).count('"unit": "seconds"') == 1, "OpenMetrics tells units, text does not"
        promtool("check", "metrics", given=scraped(f"127.0.0.1:{port}"))
        gate.open()
        assert (a.finish().returncode, b.finish().returncode) == (0, 0)
    assert list(sd.iterdir()) == []


def scraped(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=240) as answer:
        return answer.read().decode()
