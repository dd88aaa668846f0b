"""What a kubelet's probes see of a pod that trains, and of a spare."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest

from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Gate, Job
from tests.rendezvous.test_etcd_jobs import seen, wait_for_nodes
from tests.until import LIMIT_S, until


def probe(agent: Job, path: str) -> int:
    (served,) = agent.wait_for(r"metrics: serving (http://[\d.:]+)/metrics")
    try:
        with urllib.request.urlopen(served[1] + path, timeout=LIMIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.full
def test_a_spare_is_alive_though_not_ready(tmp_path, server: EtcdServer):
    """And it ends well with the job, so that the Job completes."""
    gate = Gate(tmp_path / "gate")
    options = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=1"]
    command = [*TORCHRUN, *options, "--rdzv-conf=last_call_timeout=0.1", SCRIPTS / "elastic_job.py"]
    environ = {"GATE": str(gate.path), "NODE": "a"}
    with Job(command, tmp_path, **environ) as trains:
        trains.wait_for(seen(1, 0))
        with Job(command, tmp_path, **environ) as spare:
            wait_for_nodes(server, 2)
            assert probe(trains, "/healthz") == 200
            until(lambda: probe(trains, "/readyz") == 200)  # a worker may be ready before its agent
            assert (probe(spare, "/healthz"), probe(spare, "/readyz")) == (200, 503)
            gate.open()
            assert [trains.finish().returncode, spare.finish().returncode] == [0, 0], spare.err
            assert not re.search('"rank"', spare.out)
