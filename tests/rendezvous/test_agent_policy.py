"""What the leader's agent answers: a node that is bad leaves, unless the job's store would go with it."""

from __future__ import annotations

import pytest

from elastic_ext.base.kinds import Response
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.ledger import Report, decode_verdict, encode_report
from elastic_ext.rendezvous.judging import AgentPolicy, RoundReports


@pytest.mark.parametrize(
    ("needed", "response"), [((), Response.REPLACE_NODE), (("c-1",), Response.CONFIRM), (("a-1",), Response.REPLACE_NODE)]
)
def test_the_node_of_the_store_stays(needed: tuple[str, ...], response: Response) -> None:
    policy = AgentPolicy(Settings(), 2, lambda: None)
    policy.max_restarts = 5
    crash = encode_report(Report("c", classify(Evidence(rank=2, signal="SIGSEGV", step=0, node="c"))))
    ledger = ""
    for round_ in (1, 2):
        reports = RoundReports(round_, {"c-1": crash}, {"c-1": round_}, {}, 3, {}, frozenset(needed))
        judged = policy.judge(reports, ledger)
        ledger = judged.ledger
    assert decode_verdict(judged.verdict).decision.response is response
