"""What an agent has counted last, the failure itself, reaches Prometheus though the agent ends at once."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.jobs import AGENT, Gate, Job

SCRIPT = """
import fcntl, sys
with open(sys.argv[1]) as gate:
    print("waits", flush=True)
    fcntl.flock(gate, fcntl.LOCK_SH)
misspelled
"""
CODE = 'elastic_ext_failures_total{kind="code"} 1.0'


def scrape(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
        return answer.read().decode()


def start(tmp_path: Path, **settings: object) -> tuple[Gate, Job]:
    (tmp_path / "job.py").write_text(SCRIPT)
    gate = Gate(tmp_path / "gate")
    env = {f"ELASTIC_EXT_METRICS_{name.upper()}": str(value) for name, value in {"port": 0, **settings}.items()}
    return gate, Job([*AGENT, "--nproc-per-node=1", str(tmp_path / "job.py"), str(tmp_path / "gate")], tmp_path, **env)


def test_an_agent_waits_for_one_last_scrape_and_leaves_a_file(tmp_path):
    file, found = tmp_path / "job.prom", tmp_path / "sd"
    gate, started = start(tmp_path, linger=100, file=file, discovery_dir=found)
    with started as job:
        job.wait_for("waits")
        (named,) = [json.loads(each.read_text()) for each in found.iterdir()]
        (target,) = named[0]["targets"]
        assert 'elastic_ext_agent_state{state="running"} 1.0' in scrape(target)
        gate.open()
        job.wait_for("NameError")
        while 'elastic_ext_agent_state{state="ended"} 1.0' not in (last := scrape(target)):
            pass
        assert CODE in last
        assert job.finish().returncode == 65
    labels = named[0]["labels"]
    assert f'elastic_ext_failures_total{{kind="code",node="{labels["node"]}",pid="{job.process.pid}",run_id=' in file.read_text()
    assert list(found.iterdir()) == []


def test_nobody_scrapes(tmp_path):
    gate, started = start(tmp_path, linger=1)
    with started as job:
        job.wait_for("waits")
        gate.open()
        done = job.finish()
    assert done.returncode == 65
    assert "nobody has scraped the last metrics within 1.0 s (metrics_linger)" in done.err
