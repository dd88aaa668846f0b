"""`metrics_linger`: an agent that has left its job serves its metrics until their end is scraped."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from elastic_ext.cli import main
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, EXT, TORCHRUN, Job
from tests.ports import free_port
from tests.until import LIMIT_S

pytestmark = pytest.mark.full

LINGERS = r"serves its last metrics until they are scraped"
URL = r"http://(127\.0\.0\.1:\d+)/metrics"
FAILS, ENDS_WELL = "misspelled\n", "pass\n"
CODE = 'elastic_ext_failures_total{kind="code"} 1.0'
ENDED = 'elastic_ext_agent_state{state="ended"} 1.0'


def get(target: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{target}{path}", timeout=LIMIT_S) as answer:
        return answer.read().decode()


def status_of(target: str) -> dict[str, object]:
    return json.loads(get(target, "/job.json"))["job"]


def start(tmp_path: Path, script: str, launcher: list[str], linger: float = 300, **settings: str) -> Job:
    (tmp_path / "job.py").write_text(script)
    environ = {f"ELASTIC_EXT_{name}": value for name, value in {"METRICS_LINGER": str(linger), **settings}.items()}
    return Job([*launcher, str(tmp_path / "job.py")], tmp_path, **environ)


@pytest.mark.seam
def test_it_ends_once_its_end_was_scraped(tmp_path):
    found, began = tmp_path / "sd", time.time()
    with start(tmp_path, FAILS, [*AGENT, "--nproc-per-node=1"], METRICS_DISCOVERY_DIR=str(found)) as job:
        job.wait_for(LINGERS)
        (named,) = [json.loads(each.read_text()) for each in found.iterdir()]
        (target,) = named[0]["targets"]
        assert json.loads(get(target, "/status.json"))["state"] == "ended"  # that is no scrape
        assert job.process.poll() is None
        last = get(target)
        done = job.finish()
    assert done.returncode == 65
    assert ENDED in last
    assert CODE in last
    (ended,) = [float(line.split()[1]) for line in last.splitlines() if line.startswith("elastic_ext_ended_timestamp_seconds ")]
    assert began < ended <= time.time()
    assert list(found.iterdir()) == []
    assert "were not scraped" not in done.err


@pytest.mark.parametrize(
    ("script", "code", "number"), [(ENDS_WELL, 0, signal.SIGTERM), pytest.param(FAILS, 65, signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_ends_it_and_nothing_else(tmp_path, script, code, number):
    with start(tmp_path, script, [*AGENT, "--nproc-per-node=1"]) as job:
        ((target,),) = [each.groups() for each in job.wait_for(URL)]
        job.wait_for(LINGERS)
        state, told = ("failed", 1) if code else ("succeeded", 0)
        assert (status_of(target)["state"], main.main(["status", f"--url=http://{target}"])) == (state, told)
        job.process.send_signal(number)
        done = job.finish()
    assert done.returncode == code
    assert "were not scraped" not in done.err
    assert "SignalException" not in done.all


PROGRAM = """
import sys
import elastic_ext.agent.plugin
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_backend="ext_c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    try:
        elastic_launch(config, sys.executable)("-c", "pass")
        print("over", flush=True)
    except SignalException as error:
        print("told", error.sigval.name, flush=True)
    sys.exit(7)
"""


def test_a_program_starting_jobs_learns_of_the_signal(tmp_path):
    """Torch's handler would raise its exception; here it does so after the wait."""
    with start(tmp_path, PROGRAM, [sys.executable]) as job:
        job.wait_for(LINGERS)
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 7, done.all
    assert done.out.split("\n")[0] == "told SIGTERM", done.all


def test_nobody_scrapes(tmp_path):
    with start(tmp_path, FAILS, [*AGENT, "--nproc-per-node=1"], linger=1) as job:
        done = job.finish()
    assert done.returncode == 65
    assert "the final metrics were not scraped within 1 s (metrics_linger)" in done.err


def test_an_agent_ordered_to_end_does_not_linger(tmp_path):
    with start(tmp_path, "print('runs', flush=True)\nimport signal\nsignal.pause()\n", [*EXT, "--nproc-per-node=1"]) as job:
        job.wait_for("runs")
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 75
    assert "last metrics" not in done.err


def etcd_job(server: EtcdServer) -> list[str]:
    return [*TORCHRUN, "--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=lingers", "--nproc-per-node=1"]


def test_its_node_is_gone_from_etcd(tmp_path, server):
    with start(tmp_path, FAILS, [*etcd_job(server), "--nnodes=1"]) as job, EtcdClient(server.endpoint) as client:
        ((target,),) = [each.groups() for each in job.wait_for(URL)]
        job.wait_for(LINGERS)
        assert client.get_prefix("/elastic_ext/lingers/nodes/").kvs == ()
        last = get(target)
        assert job.finish().returncode == 65
    assert ENDED in last
    assert "\nelastic_ext_etcd_lease_expiry_timestamp_seconds " not in last
    assert "\nelastic_ext_etcd_reconnects_total 0.0" in last


@pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])
def test_another_node_does_not_wait_for_it(request, tmp_path, backend):
    """On ext_c10d it has started the job's store. That is gone all the same: the next start of the job needs its port."""
    port = free_port()
    endpoint = request.getfixturevalue("server").endpoint if backend == "ext_etcd" else f"127.0.0.1:{port}"
    where = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", "--rdzv-id=two", "--nnodes=2"]
    launcher = [*TORCHRUN, *where]
    with start(tmp_path, ENDS_WELL, launcher) as lingering:
        ((target,),) = [each.groups() for each in lingering.wait_for(URL)]
        with start(tmp_path, ENDS_WELL, launcher, linger=0) as other:
            assert other.finish().returncode == 0
        lingering.wait_for(LINGERS)
        socket.create_server(("127.0.0.1", port)).close()
        assert status_of(target)["state"] == "succeeded"
        assert ENDED in get(target)
        assert lingering.finish().returncode == 0
