"""What the log says of a failure, on each node."""

from __future__ import annotations

from dataclasses import replace

from elastic_ext.agent import verdicts
from elastic_ext.base import diagnosis
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import ErrorFile, Evidence, RaisedException
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action, Decision

SPENT = Decision(Action.STOP, diagnosis.UNKNOWN, "rank 3 was killed by SIGKILL; the budget of 3 restarts is spent", 1, "budget")


def failed(**evidence) -> verdicts.FailedWorker:
    raised = RaisedException("RuntimeError", "Connection closed by peer", ("job.py:3",)) if not evidence else None
    diagnosis = classify(Evidence(rank=1, exit_code=1, exception=raised, step=7, **evidence))
    data = {"message": {"message": "it", "extraInfo": {"py_callstack": "Traceback: all of it", "timestamp": "1"}}}
    return verdicts.FailedWorker(0, 11, 1, ErrorFile("error.json", data), diagnosis)


def text_on(node: str, decision: Decision, **evidence) -> str:
    verdict = JobVerdict(decision, 4, "n2-17-a3b2c1", "n2", 3, shown_by="n2-17-a3b2c1")
    return verdicts.failure_text(failed(**evidence), [failed(hang=True, hang_reason="it waits")], verdict, decision, node)


def test_one_node_logs_all_others_one_line():
    decision = replace(SPENT, action=Action.RESTART, exit_code=None, rule="killed", delay_s=2.0)
    line, *more = text_on("n2-17-a3b2c1", decision).splitlines()
    assert line == f"elastic_ext: restart: {decision.reason} (kind unknown, rule killed); in 2.0 s"
    assert any("last step of rank 1" in each for each in more)
    assert any("also ended: " in each for each in more)
    assert any("Traceback: all of it" in each for each in more)
    line = f"elastic_ext: restart: on n2: {decision.reason} (kind unknown, rule killed); in 2.0 s"
    assert text_on("n3-18-d4e5f6", decision) == f"{line}; more in the log of n2"
    own = text_on("n3-18-d4e5f6", decision, hang=True, hang_reason="rank 1 made no progress")
    assert own == f"{line}; here: rank 1 made no progress; more in the log of n2"


def test_the_causes_place_comes_before_the_decision():
    verdict = JobVerdict(SPENT, 4, "n2-17-a3b2c1", "n2", 3, shown_by="n2-17-a3b2c1")
    text = verdicts.line_elsewhere(verdict, SPENT, "n3-18-d4e5f6")
    assert text == f"elastic_ext: stop: on n2: {SPENT.reason} (kind unknown, rule budget); exit code 1; more in the log of n2"


def test_without_a_culprit_each_node_logs_one_line():
    """As of a node that cannot go on itself: the reason says where, and no log has more."""
    text = verdicts.line_elsewhere(JobVerdict(SPENT, 4, "n3-18-d4e5f6", "n3"), SPENT, "n3-18-d4e5f6")
    assert text == f"elastic_ext: stop: {SPENT.reason} (kind unknown, rule budget); exit code 1"
