"""One protocol, three stores: real jobs do the same on etcd's servers, on the etcd that a job brings, and on the embedded one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import TIMEOUT_S, TORCHRUN, Gate, Job, wait_gone
from tests.own_etcd.hosts import CONF, OwnEtcdJob
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import ELASTIC, Nodes, reports, seen
from tests.until import until

pytestmark = pytest.mark.full


class Grid(Nodes):
    """Agents of one job on one of the stores."""

    def __init__(self, folder: Path, stack: ExitStack, where: list[str], run_id: str, gate: Gate | None = None) -> None:
        super().__init__(folder, stack, gate)
        self.where = [*where, f"--rdzv-id={run_id}"]

    def enter(self, name: str, nnodes: str, *script: str) -> Job:
        """script: what follows its name."""
        options = [*self.where, f"--nnodes={nnodes}", f"--rdzv-conf={CONF}", "--max-restarts=3"]
        variables = {"NODE": name, "ELASTIC_EXT_NODE_NAME": name, "GATE": str(self.gate.path)}
        job = Job([*TORCHRUN, *options, ELASTIC, *script], self.tmp_path, forks=False, **variables)
        self.jobs[name] = self.stack.enter_context(job)
        return job

    def asked(self, *verb: str) -> subprocess.CompletedProcess:
        """The answer of `elastic-ext`, which finds the job as its agents do."""
        where = [each for each in self.where if each.startswith(("--rdzv-endpoint", "--rdzv-id"))]
        command = [sys.executable, "-m", "elastic_ext.cli", *verb, *where]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def on_etcd(request: pytest.FixtureRequest, folder: Path, stack: ExitStack) -> Grid:
    server = request.getfixturevalue("server")
    return Grid(folder, stack, ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}"], "job")


def on_its_own(request: pytest.FixtureRequest, folder: Path, stack: ExitStack) -> Grid:
    job = OwnEtcdJob(folder, stack, ["localhost"], Path())

    def end() -> None:
        for pid in job.keepers():
            os.kill(pid, signal.SIGKILL)

    stack.callback(end)
    return Grid(folder, stack, ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={job.endpoint}"], job.run_id, job.gate)


def on_embedded(request: pytest.FixtureRequest, folder: Path, stack: ExitStack) -> Grid:
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    return Grid(folder, stack, ["--rdzv-backend=ext_c10d", *where], "job")


@pytest.fixture(params=[on_etcd, on_its_own, on_embedded], ids=["etcd", "job", "embedded"])
def grid(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Grid:
    return request.param(request, tmp_path, stack)


def test_a_crash_restarts_all_nodes_once(grid, tmp_path):
    jobs = [grid.enter("a", "2", "exit3:0"), grid.enter("b", "2")]
    grid.wait_for(seen(2, 1))
    status = json.loads(grid.asked("status", "--json").stdout)
    assert len(status["nodes"]) == 2
    picture = tmp_path / "timeline.svg"
    drawn = grid.asked("timeline", f"--output={picture}")
    assert drawn.returncode == 0, drawn.stderr
    assert "ended with exit code 3" in picture.read_text()
    grid.finish()
    assert {line["attempt"] for line in reports(*jobs)} == {0, 1}


def test_a_killed_agent_costs_one_round_and_no_charge(grid):
    first = grid.enter("a", "1:3")
    first.wait_for(seen(1, 0))
    lost, _ = (grid.enter(name, "1:3") for name in "bc")
    grid.wait_for(seen(3, r"\d"))
    last = max(line["attempt"] for line in reports(first))
    workers = [line["pid"] for line in reports(lost) if line["attempt"] == last]
    lost.process.kill()
    assert wait_gone(workers) == []
    grid.wait_for(seen(2, last + 1), "ac")
    assert "no failures recorded" in grid.asked("explain").stdout
    grid.finish("ac")


def test_a_spare_takes_the_place_of_a_leaving_node(grid):
    _, leaves = (grid.enter(name, "2:2") for name in "ab")
    grid.wait_for(seen(2, 0))
    grid.enter("c", "2:2")
    until(lambda: len(json.loads(grid.asked("status", "--json").stdout)["nodes"]) == 3)
    leaves.process.send_signal(signal.SIGTERM)
    assert leaves.finish().returncode == 75
    grid.wait_for(seen(2, 1), "ac")
    grid.finish("ac")
