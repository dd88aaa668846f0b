"""What an agent counts of a recovery in a real job. For its last metrics see http/test_linger.py."""

from __future__ import annotations

import urllib.request

import pytest

from tests.jobs import AGENT, Job
from tests.until import LIMIT_S, until


def scrape(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=LIMIT_S) as answer:
        return answer.read().decode()


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
