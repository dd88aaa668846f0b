"""What an agent counts in a real job. The last of it, the failure itself, reaches Prometheus though the agent ends at once."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from tests.jobs import AGENT, Gate, Job
from tests.until import LIMIT_S, until

SCRIPT = """
import fcntl, sys
with open(sys.argv[1]) as gate:
    print("waits", flush=True)
    fcntl.flock(gate, fcntl.LOCK_SH)
misspelled
"""


def scrape(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=LIMIT_S) as answer:
        return answer.read().decode()


def start(tmp_path: Path, **settings: object) -> tuple[Gate, Job]:
    (tmp_path / "job.py").write_text(SCRIPT)
    gate = Gate(tmp_path / "gate")
    env = {f"ELASTIC_EXT_METRICS_{name.upper()}": str(value) for name, value in {"port": 0, **settings}.items()}
    return gate, Job([*AGENT, "--nproc-per-node=1", str(tmp_path / "job.py"), str(tmp_path / "gate")], tmp_path, **env)


@pytest.mark.full
def test_the_last_scrape_shows_the_failure(tmp_path):
    found, began = tmp_path / "sd", time.time()
    gate, started = start(tmp_path, discovery_dir=found, linger=300)
    with started as job:
        job.wait_for("waits")
        (named,) = [json.loads(each.read_text()) for each in found.iterdir()]
        (target,) = named[0]["targets"]
        running = 'elastic_ext_agent_state{state="running"} 1.0'  # a worker may be ready before its agent
        seen = until(lambda: page if running in (page := scrape(target)) else "")
        assert "\nelastic_ext_ended_timestamp_seconds " not in seen
        gate.open()
        job.wait_for("serves its last metrics")
        last = scrape(target)
        assert job.finish().returncode == 65
    assert 'elastic_ext_failures_total{kind="code"} 1.0' in last
    assert 'elastic_ext_agent_state{state="ended"} 1.0' in last
    (ended,) = [float(line.split()[1]) for line in last.splitlines() if line.startswith("elastic_ext_ended_timestamp_seconds ")]
    assert began < ended <= time.time()
    assert list(found.iterdir()) == []


STEPS = """
import os, signal, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
print("trains", flush=True)
signal.pause()
"""


@pytest.mark.full
def test_a_recovery_lasts_until_the_first_step(tmp_path):
    (tmp_path / "job.py").write_text(STEPS)
    # No check is due: only the step itself wakes the agent.
    environ = {"ELASTIC_EXT_BACKOFF": "0", "ELASTIC_EXT_HANG_TIMEOUT": "off"}
    with Job([*AGENT, "--nproc-per-node=1", "--max-restarts=3", str(tmp_path / "job.py")], tmp_path, **environ) as job:
        (url,) = job.wait_for(r"http://(127\.0\.0\.1:\d+)/metrics")
        job.wait_for("trains")
        whole = "elastic_ext_recovery_whole_seconds_count 1.0"
        seen = until(lambda: page if whole in (page := scrape(url[1])) else "")
    assert 'elastic_ext_recovery_seconds_count{phase="first_step"} 1.0' in seen
    assert "elastic_ext_restarts_charged 1.0" in seen, [line for line in seen.splitlines() if "restarts" in line]
    assert "elastic_ext_max_restarts 3.0" in seen
    assert "\nelastic_ext_last_recovery_seconds " in seen
