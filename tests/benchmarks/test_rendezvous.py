"""benchmarks/rendezvous.py and steady_state.py run with a few agents and report what they promise. No figure is tested."""

import os

import agent_processes
import growth
import pytest
import rendezvous

from tests.benchmarks.runs import result

AGENTS = 6
FEW = ("--repeat=1", "--loops=2", "--processes=2")


@pytest.mark.full
def test_rendezvous(tmp_path):
    record = result("rendezvous.py", tmp_path, f"--sizes={AGENTS}", *FEW)
    [row] = record["rows"]
    assert row["agents"] == AGENTS
    assert row["ours"]["why"] == row["embedded"]["why"] == ""
    for part in ("form", "rejoin"):
        assert row["embedded"][part]["seconds"] > 0
        assert row["ours"][part]["seconds"] > 0
        assert row["ours"][part]["operations_node"] > 0
        assert row["ours"][part]["bytes_node"] > 0
    for side, grants in (("sketch", 1.0), ("grouped sketch", 2 / AGENTS)):
        assert row[side]["why"] == ""
        assert row[side]["rejoin"] is None
        assert row[side]["form"]["seconds"] > 0
        # For each agent a watch; the leader has one more.
        assert row[side]["form"]["methods_node"]["Watch"] == pytest.approx(1 + 1 / AGENTS)
        assert row[side]["form"]["methods_node"]["LeaseGrant"] == pytest.approx(grants)
    assert record["reached"]["times_the_sketch"][str(AGENTS)] > 0
    form, rejoin = row["ours"]["form"]["methods_node"], row["ours"]["rejoin"]["methods_node"]
    assert form["LeaseGrant"] >= 1  # each its own
    assert form["Watch"] >= 2
    assert "LeaseGrant" not in rejoin  # whoever stays keeps its lease
    assert rejoin["LeaseRevoke"] == pytest.approx(1 / AGENTS)


@pytest.mark.full
def test_handlers(tmp_path):
    record = result("handlers.py", tmp_path, f"--sizes={AGENTS}", "--repeat=1", "--processes=2")
    [row] = record["rows"]
    assert row["agents"] == AGENTS
    for side in ("etcd", "embedded", "stock"):
        assert row[side]["why"] == ""
        assert min(row[side][name] for name in ("form", "rejoin", "cpu_ms")) > 0


@pytest.mark.full
def test_steady_state(tmp_path):
    record = result("steady_state.py", tmp_path, f"--agents={AGENTS}", "--seconds=6", "--lease-ttl=15", "--processes=1")
    # A third of the lease time is 5 s: each has kept its own alive at least once, and done nothing else.
    assert record["ours"]["requests_s"].keys() == {"LeaseKeepAlive"}
    assert record["reached"]["keep_alives_only"] is True
    assert record["stock"]["requests_s"]["gets"] > 0
    for side in ("ours", "stock"):
        assert record[side]["bytes_s"] > 0


@pytest.mark.full
def test_a_dead_worker_is_an_error_without_leftovers():
    with agent_processes.AgentProcesses("stock_agents.py", [{"host": True}]) as host:
        [process] = host._processes
        assert "cpu_s" in host.ask(60, do="cpu")[0]
        process.kill()
        process.wait()
        with pytest.raises(agent_processes.AgentsFailed, match="ended with exit code -9"):
            host.ask(60, do="cpu")
    assert not os.path.exists(f"/proc/{process.pid}")


def phase(seconds: float, operations: float = 5.0, bytes_node: float = 1000.0) -> rendezvous.Phase:
    return rendezvous.Phase(seconds, operations, bytes_node, 1.0, 1.0, 1.0, {})


def test_the_verdict_holds_what_was_aimed_at():
    floor = rendezvous.Outcome(phase(0.05), None)
    good = {"ours": rendezvous.Outcome(phase(0.1), phase(0.1)), "sketch": floor}
    reached = rendezvous.verdict({128: good})
    assert reached["within_3_times_the_sketch"] is True
    assert reached["operations_10_or_fewer"] is True
    slow = {"ours": rendezvous.Outcome(phase(0.2, 11.0), None, "late"), "sketch": floor}
    reached = rendezvous.verdict({128: slow, 256: good})
    assert rendezvous.verdict({256: good})["within_3_times_the_sketch"] is None  # not at a size of the sketch
    assert reached["times_the_sketch"] == {"128": 4.0, "256": 2.0}
    assert reached["times_the_figures_of_DESIGN"] == {"128": 4.0}
    assert reached["within_3_times_the_sketch"] is False
    assert reached["operations_10_or_fewer"] is False


def test_a_try_that_failed_counts_as_the_slowest():
    tries = [rendezvous.Outcome(phase(1.0), None, "late"), *(rendezvous.Outcome(phase(1.0), phase(s)) for s in (3.0, 2.0))]
    assert rendezvous.median_outcome(tries).rejoin == phase(3.0)
    assert rendezvous.median_outcome(tries[:1]).why == "late"
    formed = [rendezvous.Outcome(None, None, "late"), *(rendezvous.Outcome(phase(s), None) for s in (2.0, 1.0))]
    assert rendezvous.median_outcome(formed) == rendezvous.Outcome(phase(2.0), None, "late")


@pytest.mark.full
def test_growth(tmp_path):
    record = result("growth.py", tmp_path, "--sizes=70,80", "--repeat=1", "--minutes=0.05", "--processes=2")
    for row in record["rows"]:
        assert 0 < row["verdict"] < row["rejoin"]
        assert 0 < row["seen 1"] < row["lose 1"]
        assert 0 < row["seen 32"] < row["lose 32"]
        assert row["requests/min"] > 0
    assert set(record["fits"]) == set(growth.COSTS)
    assert all(each.keys() == {"a", "b", "4096", "16384"} for each in record["fits"].values())
