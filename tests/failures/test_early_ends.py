"""A rank that ends with 0 while others wait for it: what agents have seen weighs more than what the others say. Pure."""

import dataclasses

import pytest

from elastic_ext.base.diagnosis import Response
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.joint_evidence import Ended, Reach, Silent, awaited
from elastic_ext.failures.judgement import Circumstances, Lost, judge
from elastic_ext.failures.ledger import Ledger, Report, decode_report, encode_report
from elastic_ext.failures.policy import Action

RULES = Circumstances(max_restarts=3, nodes=2, members=2, min_nodes=2)
CLOSED = RaisedException("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:43", ("a.py:3",))
PEER = {"exit_code": 1, "exception": CLOSED}
HANG = {"hang": True, "hang_reason": "rank 0 made no progress for 15 s"}
WAITS = {**HANG, "hang_blame": (2, 12, 0, 2)}
ABORT = {
    "signal": "SIGABRT",
    "stderr_tail": "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL",
}


def told(host, rank, ended=(), step=12, counts_from=0, resumed_at=0, **evidence):
    """The report of a node: of a worker that failed so, or was stopped; and the workers of it that had ended with 0."""
    stopped = {} if evidence else {"exit_code": 0, "stopped_by_agent": True}
    found = classify(Evidence(rank, step=step, first_step_done=step > 0, node=host, **{**stopped, **evidence}))
    report = Report(host, found, resumed_at, counts_from=counts_from, ended=tuple(ended))
    return decode_report(encode_report(report))


def decided(*reports, ledger=None, rules=RULES):
    return judge({each.host: each for each in reports}, ledger or Ledger(), rules, 1)


def early(step=12, rank=1):
    return told("n2", rank, [Ended(rank, step)], step=step)


@pytest.mark.parametrize("victim", [PEER, WAITS, ABORT])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_rank_that_ended_is_named(victim, nodes):
    """On one node or another: one restart, then it is a bug."""
    both = [told("n1", 0, [Ended(1, 12)], **victim)] if nodes == 1 else [told("n1", 0, **victim), early()]
    rules = dataclasses.replace(RULES, nodes=nodes, members=nodes)
    ledger, verdict = decided(*both, rules=rules)
    decision = verdict.decision
    assert decision.reason.startswith("rank 1 ended with 0 at step 12, the others wait for it, as with a bug or uneven data; ")
    assert (decision.kind, decision.rule, decision.response, decision.charged) == ("code", "ended-early", Response.CONFIRM, True)
    assert (verdict.rank, verdict.host, verdict.shown_by) == (1, f"n{nodes}", "n1")
    decision = decided(*both, ledger=ledger, rules=rules)[1].decision
    assert (decision.action, decision.exit_code, decision.rule, decision.kind) == (Action.STOP, 65, "repeated", "code")


@pytest.mark.parametrize(
    ("own", "kind", "rule"),
    [
        ({"signal": "SIGKILL"}, "unknown", "killed"),
        ({"signal": "SIGKILL", "oom_kills": 1}, "host_memory", "oom-killed"),
        ({"exit_code": 1, "exception": RaisedException("KeyError", "'x'", ("a.py:9",))}, "code", "arguments"),
        ({"exit_code": 3}, "unknown", "no-evidence"),
        ({**HANG, "hang_blame": (0, 12, 0, 0)}, "hang", "hang"),  # stopped by a signal
        ({**HANG, "hang_blame": (1, 12, 0, 1)}, "hang", "hang"),  # in code of its own
    ],
)
@pytest.mark.parametrize("steps", [11, 12, 13])
def test_an_own_cause_of_another_rank_decides(own, kind, rule, steps):
    """At the natural end, where the last step may be uneven by one; whoever else says that a peer is gone."""
    decision = decided(told("n1", 0, step=steps, **own), early(), told("n3", 2, **PEER))[1].decision
    assert (decision.kind, decision.rule) == (kind, rule)


@pytest.mark.parametrize("steps", [12, 13])
def test_a_last_uneven_step_waits_for_it(steps):
    assert decided(told("n1", 0, step=steps, **PEER), early())[1].decision.rule == "ended-early"


def test_a_lost_node_decides_before_it():
    rules = dataclasses.replace(RULES, lost=(Lost("n3", id="n3"),))
    decision = decided(told("n1", 0, **PEER), early(), rules=rules)[1].decision
    assert (decision.response, decision.kind) == (Response.RESTART_FREE, "node_lost")
    assert decision.reason.startswith("node n3 was lost; ")


@pytest.mark.parametrize(("victim", "rule"), [(PEER, "ended-early"), ({"signal": "SIGKILL"}, "killed")])
def test_a_crash_after_the_end_explains_nothing(victim, rule):
    """As of an interpreter that ends beside gloo's threads. Of the only one, it is the failure."""
    crash = told("n2", 1, [Ended(1, 12)], signal="SIGABRT")
    assert decided(told("n1", 0, **victim), crash)[1].decision.rule == rule
    assert decided(crash, told("n3", 2, [Ended(2, 12)]))[1].decision.rule == "abort"


def test_ends_without_a_victim_explain_nothing():
    """The node whose workers failed is lost, say, before it can report."""
    assert decided(early(), told("n3", 2, [Ended(2, 12)]))[1].decision.rule == "stopped-by-agent"


def test_a_host_without_an_answer_may_have_ended():
    """NCCL over InfiniBand misses what a rank that has ended had; a host that hangs without an answer is cut off."""
    cut = Reach(("10.0.0.1",), (Silent(0, "10.0.0.2", 0.0),))
    there = dataclasses.replace(early(), reach=Reach(("10.0.0.2",)))
    for victim, rule in ((PEER, "ended-early"), (WAITS, "network-cut")):
        decision = decided(dataclasses.replace(told("n1", 0, **victim), reach=cut), there)[1].decision
        assert decision.rule == rule


def test_an_end_explains_no_cut_elsewhere():
    nodes = [
        dataclasses.replace(told("n1", 0, **PEER), reach=Reach(("10.0.0.1",), (Silent(0, "10.0.0.3", 0.0),))),
        dataclasses.replace(early(), reach=Reach(("10.0.0.2",))),
        dataclasses.replace(told("n3", 2, **PEER), reach=Reach(("10.0.0.3",), (Silent(2, "10.0.0.1", 0.0),))),
    ]
    assert decided(*nodes)[1].decision.rule == "network-cut"


@pytest.mark.parametrize(
    ("counts_from", "step", "said"),
    [
        (10, 2, "rank 1 ended with 0 at step 12, the others"),
        (None, 2, "rank 1 ended with 0 at step 2 since it started, the others"),
        (0, 0, "rank 1 ended with 0, the others"),
        (None, None, "rank 1 ended with 0, the others"),
    ],
)
def test_the_step_is_said_where_known(counts_from, step, said):
    node = told("n2", 1, [Ended(1, step)], step=step or 0, counts_from=counts_from)
    decision = decided(told("n1", 0, step=step or 0, **PEER), node)[1].decision
    assert decision.reason.startswith(said)


def test_several_that_ended_are_named():
    nodes = told("n2", 1, [Ended(1, 12), Ended(2, 12)]), told("n3", 3, [Ended(3, 13)])
    verdict = decided(told("n1", 0, **PEER), *nodes)[1]
    assert verdict.decision.reason.startswith("ranks 1, 2 ended with 0 at step 12, the others wait for them")
    assert (verdict.rank, verdict.host) == (1, "n2")


@pytest.mark.parametrize(
    ("ended", "step", "waits"),
    [(12, 12, True), (12, 13, True), (12, 11, True), (12, None, True), (None, 500, True), (0, 0, True),
     (0, 1, False), (12, 24, True), (12, 25, False), (1000, 1100, True), (1000, 1101, False)],
)  # fmt: skip
def test_who_goes_on_does_not_wait(ended, step, waits):
    """As for a rank that was not needed, and left at once."""
    assert bool(awaited([Ended(1, ended)], step)) == waits


@pytest.mark.parametrize(
    ("ended", "step", "ago_s", "waits"),
    [(0, 0, 3600, True), (0, 0, 3601, False), (None, 500, 3601, False), (12, None, 3601, False), (12, 12, 3601, True),
     (12, 11, 3601, True)],
)  # fmt: skip
def test_time_tells_where_no_steps_do(ended, step, ago_s, waits):
    """As for a rank that was not needed, in a job whose steps are not counted."""
    assert bool(awaited([Ended(1, ended, ago_s)], step)) == waits


def test_a_rank_of_long_ago_explains_nothing():
    """The network has failed, hours later, and is tried again as often as without such a rank."""
    nodes = told("n1", 0, step=0, **PEER), told("n2", 1, [Ended(1, 0, 7200.0)], step=0)
    ledger, verdict = decided(*nodes)
    assert verdict.decision.rule == "peer-connection"
    assert decided(*nodes, ledger=ledger)[1].decision.action is Action.RESTART
