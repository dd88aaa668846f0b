"""One protocol, three stores: real jobs do the same on etcd's servers, on the etcd that a job brings, and on the embedded one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import TIMEOUT_S, TORCHRUN, Gate, Job, wait_gone
from tests.own_etcd.hosts import CONF, OwnEtcdJob
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import ELASTIC, reports, seen
from tests.until import until

pytestmark = pytest.mark.full

STORES = ("etcd", "job", "embedded")


class Grid:
    """Agents of one job on one of the stores."""

    def __init__(self, folder: Path, stack: ExitStack, options: list[str], run_id: str, gate: Gate | None = None) -> None:
        self._folder, self._stack = folder, stack
        self.options = [*options, f"--rdzv-id={run_id}"]
        self.gate = gate or Gate(folder / "gate")

    def start(self, name: str, nnodes: str, *script: str, max_restarts: int = 3) -> Job:
        """script: what follows its name."""
        options = [*self.options, f"--nnodes={nnodes}", f"--rdzv-conf={CONF}", f"--max-restarts={max_restarts}"]
        variables = {"NODE": name, "ELASTIC_EXT_NODE_NAME": name, "GATE": str(self.gate.path)}
        verdict = {"ELASTIC_EXT_VERDICT_FILE": str(self._folder / f"verdict-{name}")}
        return self._stack.enter_context(
            Job([*TORCHRUN, *options, ELASTIC, *script], self._folder, forks=False, **variables, **verdict)
        )

    def verdict(self, name: str) -> dict:
        return json.loads((self._folder / f"verdict-{name}").read_text())

    def asked(self, *verb: str) -> subprocess.CompletedProcess:
        """The answer of `elastic-ext`, which finds the job as its agents do."""
        where = [each for each in self.options if each.startswith(("--rdzv-endpoint", "--rdzv-id"))]
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


MAKE: dict[str, Callable[[pytest.FixtureRequest, Path, ExitStack], Grid]] = {
    "etcd": on_etcd,
    "job": on_its_own,
    "embedded": on_embedded,
}


@pytest.fixture(params=STORES)
def grid(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Grid]:
    with ExitStack() as stack:
        yield MAKE[request.param](request, tmp_path, stack)


def test_a_crash_restarts_all_nodes_once(grid, tmp_path):
    jobs = [grid.start(name, "2", "exit3:0") if name == "a" else grid.start(name, "2") for name in "ab"]
    for job in jobs:
        job.wait_for(seen(2, 1))
    status = json.loads(grid.asked("status", "--json").stdout)
    assert len(status["nodes"]) == 2
    picture = tmp_path / "timeline.svg"
    drawn = grid.asked("timeline", f"--output={picture}")
    assert drawn.returncode == 0, drawn.stderr
    assert "ended with exit code 3" in picture.read_text()
    grid.gate.open()
    assert [job.finish().returncode for job in jobs] == [0, 0], [job.err for job in jobs]
    assert {line["attempt"] for line in reports(*jobs)} == {0, 1}


def test_a_bug_ends_all_nodes_with_one_verdict(grid):
    jobs = [grid.start("a", "2", "bug:0"), grid.start("b", "2")]
    assert [job.finish().returncode for job in jobs] == [65, 65], [job.err for job in jobs]
    assert grid.verdict("a") == grid.verdict("b")
    assert grid.verdict("a")["decision"]["kind"] == "code"


def test_a_spent_budget_ends_all_nodes(grid):
    jobs = [grid.start("a", "2", "exit3:0", max_restarts=1), grid.start("b", "2", "exit4:1", max_restarts=1)]
    assert [job.finish().returncode for job in jobs] == [1, 1], [job.err for job in jobs]
    assert grid.verdict("a") == grid.verdict("b")
    assert grid.verdict("a")["decision"]["rule"] == "budget"


def test_a_killed_agent_costs_one_round_and_no_charge(grid):
    first = grid.start("a", "1:3")
    first.wait_for(seen(1, 0))
    others = [grid.start(name, "1:3") for name in "bc"]
    for job in (first, *others):
        job.wait_for(seen(3, r"\d"))
    last = max(line["attempt"] for line in reports(first))
    workers = [line["pid"] for line in reports(others[0]) if line["attempt"] == last]
    others[0].process.kill()
    assert wait_gone(workers) == []
    for job in (first, others[1]):
        job.wait_for(seen(2, last + 1))
    assert "no failures recorded" in grid.asked("explain").stdout
    grid.gate.open()
    assert [job.finish().returncode for job in (first, others[1])] == [0, 0]


def test_a_spare_takes_the_place_of_a_leaving_node(grid):
    jobs = {name: grid.start(name, "2:2") for name in "ab"}
    for job in jobs.values():
        job.wait_for(seen(2, 0))
    spare = grid.start("c", "2:2")
    until(lambda: len(json.loads(grid.asked("status", "--json").stdout)["nodes"]) == 3)
    jobs["b"].process.send_signal(signal.SIGTERM)
    assert jobs["b"].finish().returncode == 75
    for job in (jobs["a"], spare):
        job.wait_for(seen(2, 1))
    grid.gate.open()
    assert [jobs["a"].finish().returncode, spare.finish().returncode] == [0, 0]


def test_a_drained_node_leaves_and_may_not_return(grid):
    jobs = {name: grid.start(name, "1:2") for name in "ab"}
    for job in jobs.values():
        job.wait_for(seen(2, r"\d"))
    done = grid.asked("drain", "b", "--now", "--reason=its fan")
    assert done.returncode == 0, done.stderr
    assert jobs["b"].finish().returncode == 69
    assert grid.start("b", "1:2").finish().returncode == 69
    grid.gate.open()
    assert jobs["a"].finish().returncode == 0, jobs["a"].err
    assert re.search(r"its fan", jobs["b"].err)
