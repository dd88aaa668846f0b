"""Too few nodes come before a node's join_timeout ends: it leaves alone, with 75 and one line; the others go on waiting."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.embedded_server import EmbeddedServer
from tests.jobs import TORCHRUN, Job
from tests.rendezvous.test_etcd_jobs import Nodes, Store, assert_one_line, wait_for_nodes

SCRIPT = "import os; print('world', os.environ['WORLD_SIZE'], flush=True)"


LONG_S = 300  # join_timeout of those that do not give up


def start(nodes: Nodes, name: str, store: Store, join_timeout: int, conf: str = "") -> Job:
    (nodes.tmp_path / "script.py").write_text(SCRIPT)
    own = f"lease_ttl={min(join_timeout, 30)},last_call_timeout=0.5"  # not longer than it waits
    return nodes.start(name, store.endpoint, "3:4", script="script.py", conf=f"join_timeout={join_timeout},{own}{conf}")


def assert_trains_with_two_more(nodes: Nodes, store: Store, patient: Job, conf: str = "") -> None:
    """Some have given up; the job is open."""
    assert patient.process.poll() is None, patient.err
    for job in (patient, *(start(nodes, name, store, join_timeout=LONG_S, conf=conf) for name in "de")):
        done = job.finish()
        assert (done.returncode, done.out) == (0, "world 3\n"), done.err


@pytest.mark.seam
@pytest.mark.full("embedded")
def test_each_node_gives_up_alone(store: Store, nodes: Nodes) -> None:
    patient = start(nodes, "a", store, join_timeout=LONG_S)
    wait_for_nodes(store, 1)
    hasty = start(nodes, "b", store, join_timeout=5)
    assert_one_line(hasty.finish(), 75, "no round was formed in 5 s (join_timeout), --nnodes=3:4")
    assert_trains_with_two_more(nodes, store, patient)


@pytest.mark.seam
@pytest.mark.full("embedded")
def test_too_few_in_a_slurm_step_are_requeued(store: Store, nodes: Nodes, tmp_path: Path) -> None:
    """Nobody can come; elsewhere the node that is left would wait for join_timeout."""
    (tmp_path / "script.py").write_text("import signal; print('trains', flush=True); signal.pause()")
    own = {"script": "script.py", "conf": f"join_timeout={LONG_S},lease_ttl=2,last_call_timeout=0.5"}
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PATH": f"{Path(sys.executable).parent}"}
    left, lost = (nodes.start(name, store.endpoint, "2", **own, ELASTIC_EXT_NODE_NAME=name, **step) for name in ("n1", "n2"))
    nodes.wait_for("trains")
    lost.process.kill()
    began = time.monotonic()
    done = left.finish()
    assert done.returncode == 75, done.err
    assert time.monotonic() - began < LONG_S / 2
    assert "elastic_ext: stop: node n2 was lost; 1 of at least 2 nodes are left" in done.err


@pytest.mark.full
def test_the_stores_node_gives_up_the_store_stays(nodes: Nodes) -> None:
    place = EmbeddedServer()  # where it will be: an agent starts it
    nodes.options = place.options
    clients = ",is_host=0,read_timeout=300"
    patient = start(nodes, "a", place, join_timeout=LONG_S, conf=clients)
    patient.wait_for("does not answer; trying for 300 s")
    host = start(nodes, "b", place, join_timeout=15)
    host.wait_for("metrics: serving")
    wait_for_nodes(place, 2)
    assert_one_line(host.finish(), 75, "no round was formed in 15 s (join_timeout), --nnodes=3:4")
    assert_trains_with_two_more(nodes, place, patient, clients)


@pytest.mark.full
def test_a_failing_agent_closes_the_job_for_all(store: Store, nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)\n")
    ill = nodes.start("a", store.endpoint, "2", launcher=[*TORCHRUN, "--redirects=3", "--log-dir=logs"], script="script.py")
    wait_for_nodes(store, 1)
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").touch()
    well = nodes.start("b", store.endpoint, "2", script="script.py", conf="verdict_file=verdict")
    done, closed = well.finish(), ill.finish()
    assert (done.returncode, closed.returncode) == (1, 1), done.err
    assert re.search(r"stop: the agent on \S+ failed: FileExistsError: \[Errno 17\] File exists: 'logs' \(", done.err)
    assert "RendezvousClosedError" not in done.err
    assert json.loads((tmp_path / "verdict").read_text())["decision"]["exit_code"] == 1
