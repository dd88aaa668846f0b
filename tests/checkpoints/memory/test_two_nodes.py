"""Copies in memory of a job on two nodes: one is lost with all it has, another takes its place, and no step before is lost."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.processes import descendants
from tests.checkpoints.memory.test_under_the_agent import SCRIPT, check, loaded
from tests.checkpoints.memory.test_under_the_agent import unbroken as unbroken  # a fixture
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, Finished, Gate, Job


def start(server: EtcdServer, tmp_path: Path, script: list[str] | None = None, workers: int = 2, **variables: str) -> Job:
    """The reaper ends a lost agent's lease. Until then the round lasts, however long an agent of a busy machine is silent."""
    conf = "--rdzv-conf=lease_ttl=60,last_call=0.5,stop_grace=2"
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=2", conf]
    settings = {
        "ELASTIC_EXT_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "ELASTIC_EXT_MEMORY_EVERY": "1",
        "ELASTIC_EXT_BACKOFF": "0",
        "PYTHONPATH": str(SCRIPTS.parents[1]),
        "ACT": json.dumps({"at": "hold", "step": 8, "rank": 0}),
    }
    command = [*AGENT, *where, f"--nproc-per-node={workers}", "--max-restarts=3", *(script or SCRIPT)]
    return Job(command, tmp_path, **{**settings, **variables})


def together(done: list[Finished]) -> Finished:
    return Finished(max(each.returncode for each in done), "".join(each.out for each in done), "".join(each.err for each in done))


def has_rank_0(job: Job) -> bool:
    return re.search(r"^loaded 0 0 ", job.out, re.MULTILINE) is not None


@pytest.mark.seam
def test_a_lost_node_costs_a_step_at_most(server, tmp_path, unbroken):
    """The agent is killed, and its workers and its memory go with it. A new node gets its parts from the one that is left."""
    gate = Gate(tmp_path / "gate")
    with start(server, tmp_path) as one, start(server, tmp_path) as two:
        for job in (one, two):
            job.wait_for(r"step \d 8 ", 2)
        victim, left = (one, two) if has_rank_0(one) else (two, one)
        victim.process.kill()
        victim.process.wait()
        with start(server, tmp_path, ACT="{}") as new:
            for job in (left, new):
                job.wait_for(r"loaded \d [78] \w+ memory", 2)
            gate.open()
            done = [job.finish() for job in (left, new)]
    whole = together(done)
    check(whole, unbroken)
    assert loaded(whole)[-1][0] in (7, 8)  # the thread may not have committed step 8
    assert "2 parts of" in new.err


@pytest.mark.full
def test_nan_goes_back_by_one_on_both_nodes_whichever_has_the_verdict(server, tmp_path, unbroken):
    """Checkpoints of 3 and 6, NaN in 8, in the first two rounds: copies, those of the other node too, and then the one of 6."""
    act, often = json.dumps({"at": "nan", "step": 8, "times": 2}), [*SCRIPT[:2], "3"]
    with start(server, tmp_path, often, 1, ACT=act) as one, start(server, tmp_path, often, 1, ACT=act) as two:
        done = together([job.finish() for job in (one, two)])
    check(done, unbroken)
    assert [(step, where) for step, _, where in loaded(done)] == [(0, "none"), (6, "checkpoints"), (3, "checkpoints")]


@pytest.mark.full
def test_workers_that_outlive_their_agent_do_not_spoil_the_last_copy(server, tmp_path):
    """The reaper is late. The workers' copies count as long as they make them: the other node has the parts, too."""
    endless = [SCRIPT[0], "100000", "100000"]  # nothing is saved to disk

    def node() -> Job:
        return start(server, tmp_path, endless, 1, ACT="{}")  # the round lasts longer than the steps below

    with node() as victim, node() as left:
        for job in (victim, left):
            job.wait_for(r"step \d \d+ ", 30)
        (reaper,) = [each for each in descendants(victim.process.pid) if each.role == "reaper"]
        reaper.send(signal.SIGSTOP)
        known = last_step(left)  # before the kill: while we wait for its end there are more steps
        victim.process.kill()
        victim.process.wait()
        left.wait_for(rf"step \d {last_step(left) + 6} ")
        reaper.send(signal.SIGCONT)
        with node() as new:
            for job, loads in ((new, 1), (left, 2)):
                step, directory = job.wait_for(r"loaded \d (\d+) \w+ (\w+)", loads)[-1].groups()
                assert directory == "memory", left.err
                assert int(step) >= known - 2


def last_step(job: Job) -> int:
    return max(int(step) for step in re.findall(r"^step \d (\d+) ", job.out, re.MULTILINE))
