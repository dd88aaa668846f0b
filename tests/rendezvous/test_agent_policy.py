"""What the leader's agent answers: a node that is bad leaves, unless the job's store would go with it."""

from __future__ import annotations

import pytest

from elastic_ext.base.kinds import Response
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.ledger import Report, decode_verdict, encode_report
from elastic_ext.rendezvous.judging import AgentPolicy, Judgement, RoundReports


def judged(**more: frozenset[str]) -> Judgement:
    """Of the second of two crashes on one of three nodes, which shows that it is bad. more: of the reports."""
    policy = AgentPolicy(Settings(), 2, lambda: None)
    policy.max_restarts = 5
    crash = encode_report(Report("c", classify(Evidence(rank=2, signal="SIGSEGV", step=0, node="c"))))
    first = policy.judge(RoundReports(1, {"c-1": crash}, {"c-1": 1}, {}, 3, {}, **more), "")
    return policy.judge(RoundReports(2, {"c-1": crash}, {"c-1": 2}, {}, 3, {}, **more), first.ledger)


@pytest.mark.parametrize(
    ("needed", "response"), [((), Response.REPLACE_NODE), (("c-1",), Response.CONFIRM), (("a-1",), Response.REPLACE_NODE)]
)
def test_the_node_of_the_store_stays(needed: tuple[str, ...], response: Response) -> None:
    assert decode_verdict(judged(needed=frozenset(needed)).verdict).decision.response is response


@pytest.mark.parametrize(("ambiguous", "refused"), [((), "c"), (("c",), ""), (("a",), "c")])
def test_a_name_that_several_machines_have_is_not_refused(ambiguous: tuple[str, ...], refused: str) -> None:
    """A healthy one would be locked out with the bad one, which leaves all the same."""
    found = judged(ambiguous=frozenset(ambiguous))
    assert decode_verdict(found.verdict).decision.response is Response.REPLACE_NODE
    assert found.refused == refused
