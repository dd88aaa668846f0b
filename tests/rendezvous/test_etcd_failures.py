"""Real jobs of several nodes: one verdict for all, whoever failed, and the exit codes that schedulers read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.etcd import Delete, Put
from elastic_ext.failures import ledger as job_records
from elastic_ext.rendezvous.keys import JobKeys
from tests.etcd_client import EtcdClient
from tests.jobs import AGENT, TORCHRUN, Gate, Job, wait_gone
from tests.rendezvous.test_etcd_jobs import GLOO, Nodes, Store, reports, seen, wait_for_nodes
from tests.telemetry.test_families import URL, scrape

pytestmark = pytest.mark.full

KEYS = JobKeys("job")
CLI = [sys.executable, "-m", "elastic_ext.cli"]


@pytest.fixture
def start(nodes: Nodes, tmp_path: Path) -> Callable[..., Job]:
    """Starts an agent on a host of this name, of which tmp_path gets the verdict."""

    def start(name: str, server: Store, nnodes: str, *more: str, **options: Any) -> Job:
        own = {"ELASTIC_EXT_NODE_NAME": name, "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / f"verdict-{name}")}
        return nodes.start(name, server.endpoint, nnodes, *more, **{**own, **options})

    return start


def verdicts(tmp_path: Path, names: str) -> list[dict]:
    return [json.loads((tmp_path / f"verdict-{name}").read_text()) for name in names]


def test_a_bug_that_others_feel_first(store, start, tmp_path):
    """The process that raised is still about to end when the other node reports its lost connection; it need not even be the
    last: a worker beside it may use up the grace, which is longer than the verdict settles. The bug is the cause all the same.
    """
    faults, once = ["late:0", "ignore:1", "receive:2"], {"ELASTIC_EXT_MAX_RESTARTS": "0"}
    bug = start("a", store, "2", *faults, script=GLOO, launcher=[*TORCHRUN, "--nproc-per-node=2"], **once)
    wait_for_nodes(store, 1)
    other = start("b", store, "2", *faults, script=GLOO, **once)
    done = [job.finish() for job in (bug, other)]
    assert [each.returncode for each in done] == [1, 1], [each.err for each in done]
    assert "KeyError" in done[0].err
    verdict, others = verdicts(tmp_path, "ab")
    assert verdict == others
    assert (verdict["rank"], verdict["round"], verdict["decision"]["kind"]) == (0, 1, "code")
    assert "rank 1 did not end on SIGTERM" in verdict["stacks"]
    assert "in ignore_term" in verdict["stacks"]
    assert "rank 0 was to end with exit code 1, but did not" in verdict["stacks"]


@pytest.mark.seam("embedded")
@pytest.mark.full
def test_a_node_of_two_crashes_leaves_with_69(store, nodes, start):
    """The two crashes are on one node only; the third node is a spare that the job may use. The bad one may not come back."""
    good = [start(name, store, "2:3") for name in "ab"]
    nodes.wait_for('"attempt"')
    bad = start("c", store, "2:3", "segv:1", "segv:2")
    assert bad.finish().returncode == 69, bad.err
    nodes.wait_for(seen(2, 3), "ab")
    for job in good:  # nothing has failed there, and yet they count it
        values = scrape(job.wait_for(URL)[0][1])
        assert (values["elastic_ext_refused_nodes"], values["elastic_ext_node_strikes"]) == (1, 0)
        assert values["elastic_ext_max_restarts"] > values["elastic_ext_restarts_charged"] >= 1
        assert sum(value for series, value in values.items() if 'total{decision="replace_node"' in series) == 1
    refused = start("c", store, "2:3")
    assert refused.finish().returncode == 69, refused.err
    assert "may not come back yet" in refused.err
    nodes.finish("ab")


@pytest.mark.full
def test_an_indispensable_bad_node_alone_leaves_with_69(server, start, tmp_path):
    good, bad = start("a", server, "2"), start("b", server, "2", *(f"exit14:{attempt}" for attempt in range(3)))
    assert [each.finish().returncode for each in (good, bad)] == [75, 69], good.err
    again, ill = verdicts(tmp_path, "ab")
    assert again["bad"] == ill["bad"] == [ill["node"]]
    assert (again["decision"]["exit_code"], ill["decision"]["exit_code"]) == (75, 69)


@pytest.mark.seam("etcd")
@pytest.mark.full
def test_the_budget_of_a_job_outlives_its_agents(store, nodes, start):
    """Two restarts of three are spent; then the agent is killed and started again: one is left."""
    first = start("a", store, "1:2", "exit3:0", "exit4:1")
    first.wait_for(seen(1, 2))
    first.process.kill()
    first.process.wait()
    second = start("a", store, "1:2", "exit5:3", "exit6:4")
    assert second.finish().returncode == 1
    assert "the budget of 3 restarts" in second.err
    assert {line["attempt"] for line in reports(second)} == {3, 4}
    where = [f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job"]
    told = subprocess.run([*CLI, "explain", *where], capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.startswith("job job: closed, round 5\n")
    assert len(re.findall(r"^2\d{3}-.*, round \d: (restart|confirm|stop)", told, re.MULTILINE)) == 4
    assert "rank 0 on a: rank 0 ended with exit code 3" in told
    assert "stop, exit code 1\n" in told
    with EtcdClient(store.endpoint) as client:
        kv = client.get(KEYS.ledger).kv
        assert kv is not None
        assert kv.lease_id != 0  # it expires
        assert len(job_records.decode_ledger(kv.value.decode()).failures) == 4
    # A user has looked at it and starts the job again: with a new budget.
    third = start("a", store, "1:2", "exit8:0")
    third.wait_for(seen(1, 1))
    nodes.finish()


def test_the_budget_is_the_jobs_whoever_fails(store, start, tmp_path):
    """Two restarts, spent by two nodes; the third failure, on a third node, stops all, with one verdict."""
    faults = {"a": "exit3:0", "b": "exit4:1", "c": "exit5:2"}
    gates, prefix = [Gate(tmp_path / f"faults{attempt}") for attempt in range(3)], str(tmp_path / "faults")
    jobs = [start(name, store, "3", each, ELASTIC_EXT_MAX_RESTARTS="2", FAULTS=prefix) for name, each in faults.items()]
    for attempt, gate in enumerate(gates):
        for job in jobs:  # a node that has started nothing in a round hears of no failure in it
            job.wait_for(seen(3, attempt))
        gate.open()
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [1, 1, 1], [each.err for each in done]
    verdict, *others = verdicts(tmp_path, "abc")
    assert others == [verdict] * 2
    assert (verdict["host"], verdict["restarts"], verdict["decision"]["rule"]) == ("c", 2, "budget")
    assert {line["attempt"] for line in reports(*jobs)} == {0, 1, 2}
    for each, own in zip(done, ("restart", "restart", "stop"), strict=True):  # all of its own failure, a line on each other one
        log, _, last = each.err.rstrip().rpartition("\n")
        told = re.findall(r" elastic_ext: (restart|stop): .*?(?:; more in the log of (\w))?$", log, re.MULTILINE)
        assert re.search(" elastic_ext: stop: .*; exit code 1$", last), each.err  # again
        assert [action for action, _ in told] == ["restart", "restart", "stop"], each.err
        assert sum(not of for _, of in told) == 1, each.err
        assert (own, "") in told, each.err


@pytest.mark.seam("embedded")
@pytest.mark.full
def test_an_agent_asked_to_stop_costs_no_charge(store, nodes, start, tmp_path):
    """Under our own command; under torchrun, see the next one, and test_etcd_jobs."""
    stays = start("a", store, "1:2")
    stays.wait_for(seen(1, 0))
    verdict = tmp_path / "verdict"
    goes = nodes.start("b", store.endpoint, "1:2", launcher=AGENT, ELASTIC_EXT_VERDICT_FILE=str(verdict))
    goes.wait_for(seen(2, 1))
    goes.process.terminate()
    assert goes.finish().returncode == 75, goes.err
    decision = json.loads(verdict.read_text())["decision"]
    assert decision["exit_code"] == 75
    assert decision["reason"].startswith("the agent received SIGTERM: ")
    stays.wait_for(seen(1, 2))
    with EtcdClient(store.endpoint) as client:
        assert client.get(KEYS.ledger).kv is None
    nodes.finish("a")


@pytest.mark.parametrize(
    ("waits", "sig", "code"),
    [("for etcd", signal.SIGINT, 130), ("before a restart", signal.SIGTERM, 75)],
)
def test_a_waiting_agent_leaves_when_asked(server, start, tmp_path, waits, sig, code):
    """The signal is why it ends, and not the failure, and the waits of a minute and more are not waited out."""
    faults = ["exit3:0"] if waits == "before a restart" else []
    job = start("a", server, "1", *faults, ELASTIC_EXT_BACKOFF="1000")
    if waits == "for etcd":
        job.wait_for(seen(1, 0))
        server.kill()
        pid = reports(job)[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert wait_gone([pid]) == []
    else:
        job.wait_for(r"restart 1 of 3.*; in \d{3}")
    job.process.send_signal(sig)
    assert job.finish(60).returncode == code, job.err
    (verdict,) = verdicts(tmp_path, "a")
    assert (verdict["decision"]["exit_code"], sig.name in verdict["decision"]["reason"]) == (code, True)


def test_a_node_that_cannot_continue_does_not_wait(store, nodes, start):
    """Whether its workers have just finished or are stopped: that they have could neither be told nor be learnt of others."""
    job = start("a", store, "1:2")
    job.wait_for(seen(1, 0))
    with EtcdClient(store.endpoint) as client:
        others = Put(KEYS.job, '{"schema": 99, "min_nodes": 1, "max_nodes": 2}')  # of another version of elastic_ext
        client.txn([], [Delete(KEYS.header), others])
    job.wait_for("another job with other settings")
    nodes.open_gate()
    assert job.finish(60).returncode == 78


def test_a_restart_counts_within_the_window(store, nodes, start):
    """Three restarts with a budget of two: etcd has taken the first two away before the third."""
    env = {"ELASTIC_EXT_BUDGET_WINDOW": "2", "ELASTIC_EXT_MAX_RESTARTS": "2"}
    job = start("a", store, "1:2", "exit3:0", "exit4:1", **env)
    job.wait_for(seen(1, 2))
    with EtcdClient(store.endpoint) as client:
        with client.watch_with_snapshot(KEYS.charges) as watch:
            while client.get_prefix(KEYS.charges).kvs:
                assert watch.get(60) is not None
        job.process.kill()
        job.process.wait()
        again = start("a", store, "1:2", "exit5:3", **env)
        again.wait_for(seen(1, 4))
        assert len(client.get_prefix(KEYS.charges).kvs) <= 1
    nodes.finish()
