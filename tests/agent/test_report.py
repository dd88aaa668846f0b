"""What the log says of a failure, on each node."""

from __future__ import annotations

from elastic_ext.agent import report
from elastic_ext.base import kinds
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action, Decision

SPENT = Decision(Action.STOP, kinds.UNKNOWN, "rank 3 was killed by SIGKILL; all 3 restarts of the budget are spent", 1, "budget")


def test_where_the_cause_was_comes_before_what_is_decided():
    text = report.remote_failure_text(JobVerdict(SPENT, 4, "n2-17", "n2", 3))
    assert text.startswith(f"elastic_ext: stop: on n2: {SPENT.reason} (")
