"""What the leader's agent answers: a node that is bad leaves, unless the job's store would go with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.base.waits import Lasting
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.ledger import Ledger, Report, decode_ledger, decode_verdict, encode_ledger, encode_report
from elastic_ext.failures.policy import Decision
from elastic_ext.rendezvous.judging import AgentPolicy, Judgement, RoundReports
from elastic_ext.rendezvous.patience import limits_of, rejoin_s, silent_s
from elastic_ext.rendezvous.round_records import State
from elastic_ext.rendezvous.rounds import Limits


def agent_policy() -> AgentPolicy:
    policy = AgentPolicy(Settings(), lambda: None)
    policy.max_restarts = 5
    return policy


def judged(**more: frozenset[str]) -> Judgement:
    """Of the second of two crashes on one of three nodes, which shows that it is bad. more: of the reports."""
    policy = agent_policy()
    crash, moved = (
        encode_report(Report("c", classify(Evidence(rank=rank, signal="SIGSEGV", step=0, node="c")))) for rank in (2, 1)
    )
    first = policy.judge(RoundReports(1, {"c-1": crash}, {"c-1": 1}, {}, 3, {}, min_nodes=2, **more), "")
    return policy.judge(RoundReports(2, {"c-1": moved}, {"c-1": 2}, {}, 3, {}, min_nodes=2, **more), first.ledger)


def with_progress(policy: AgentPolicy, times: int, signal: str, nodes: int, **more: Any) -> Decision:
    """On the last of so many failures of one of so many nodes, with progress in between."""
    ledger = ""
    for number in range(1, times + 1):
        failed = classify(Evidence(rank=2 * number, signal=signal, step=5, first_step_done=True, node="c"))
        told = encode_report(Report("c", failed, resumed_at=10 * number))
        found = policy.judge(RoundReports(number, {"c-1": told}, {"c-1": number}, {}, nodes, {}, **more), ledger)
        ledger = found.ledger
    return decode_verdict(found.verdict).decision


@pytest.mark.parametrize(
    ("needed", "response"), [((), Response.REPLACE_NODE), (("c-1",), Response.CONFIRM), (("a-1",), Response.REPLACE_NODE)]
)
def test_the_node_of_the_store_stays(needed: tuple[str, ...], response: Response) -> None:
    assert decode_verdict(judged(needed=frozenset(needed)).verdict).decision.response is response


@pytest.mark.parametrize(("ambiguous", "refused"), [((), "c"), (("c",), ""), (("a",), "c")])
def test_a_name_of_several_machines_is_not_refused(ambiguous: tuple[str, ...], refused: str) -> None:
    """A healthy one would be locked out with the bad one, which leaves all the same."""
    found = judged(ambiguous=frozenset(ambiguous))
    assert decode_verdict(found.verdict).decision.response is Response.REPLACE_NODE
    assert found.refused == refused


@pytest.mark.parametrize(("ambiguous", "response"), [((), Response.REPLACE_NODE), (("c",), Response.CONFIRM)])
def test_failures_of_namesakes_are_counted_apart(ambiguous: tuple[str, ...], response: Response) -> None:
    decision = with_progress(agent_policy(), 3, "SIGSEGV", 2048, min_nodes=2000, ambiguous=frozenset(ambiguous))
    assert decision.response is response


def test_too_few_without_a_report_are_requeued() -> None:
    policy = AgentPolicy(Settings(exit_codes="kubeflow"), lambda: None)
    before = encode_ledger(Ledger(charged=4))
    lost = {"n2-17-a3b2c1": "was lost", "n3-18-d4e5f6": "was asked to leave"}
    judged = policy.judge(RoundReports(7, {}, {}, lost, 1, {}, min_nodes=3), before)
    verdict, ledger = decode_verdict(judged.verdict), decode_ledger(judged.ledger)
    assert (judged.state, verdict.decision.response, verdict.decision.exit_code) == (State.CLOSED, Response.REQUEUE, 128 + 75)
    assert (verdict.ends_job, verdict.keeps_ledger, verdict.round, verdict.host) == (True, True, 7, "n2")
    assert verdict.decision.reason.startswith("node n2 was lost; node n3 was asked to leave; 1 of at least 3 nodes are left")
    assert verdict.decision.kind == "node_lost"
    assert (ledger.charged, ledger.failures, ledger.verdicts) == (4, (), (verdict,)), "nothing is charged"


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"SLURM_JOB_ID": "7"}, None),  # of a script of Slurm: it may start agents again
        (None, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, 15.0),
        (300.0, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, 300.0),
        (0.0, {}, 0.0),
    ],
)
def test_how_long_lost_nodes_are_waited_for(given: float | None, environ: dict[str, str], expected: float | None) -> None:
    assert rejoin_s(Settings(rejoin_timeout=given, lease_ttl=10), environ) == expected


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("given", "environ", "on_one_host", "expected"),
    [
        (None, STEP, True, 15.0),  # as long as the others wait for this node, which may only be cut off
        (None, STEP, False, math.inf),  # not the job's, and may be started again; or on three hosts
        (None, {}, True, math.inf),
        (300.0, {}, True, math.inf),  # its hosts come back
        (300.0, STEP, True, 300.0),
        (0.0, STEP, True, 0.0),
    ],
)
def test_how_long_a_lost_store_is_waited_for(
    given: float | None, environ: dict[str, str], on_one_host: bool, expected: float
) -> None:
    assert silent_s(Settings(rejoin_timeout=given, lease_ttl=10), environ, on_one_host) == expected


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([(None, 0.0), (None, 99.0)], False),  # it has not entered yet
        ([(10.0, 9.0), (10.0, 14.9)], False),  # first seen at 14.9, as by an agent that was paused
        ([(10.0, 10.0), (10.0, 14.9)], False),
        ([(10.0, 10.0), (10.0, 15.0)], True),
        ([(10.0, 10.0), (25.0, 15.0), (25.0, 26.0), (25.0, 30.9)], False),  # it has answered
        ([(10.0, 10.0), (25.0, 15.0), (25.0, 26.0), (25.0, 31.0)], True),
    ],
)
def test_only_silence_that_was_seen_counts(looks: list[tuple[float | None, float]], over: bool) -> None:
    silence = Lasting(5.0)
    assert [silence.is_over(alive_until is not None and alive_until <= now, now) for alive_until, now in looks][-1] is over


@pytest.mark.parametrize(
    ("conf", "last_call_s"),
    [
        ({}, 15.0),
        ({"join_timeout": "600"}, 15.0),
        ({"join_timeout": "4"}, 2.0),
        ({"last_call_timeout": "30"}, 30.0),
        ({"last_call_timeout": "0.5"}, 0.5),
        ({"last_call_timeout": "30", "join_timeout": "40"}, 20.0),
    ],
)
def test_the_last_call_ends_before_nodes_leave(conf: dict[str, str], last_call_s: float) -> None:
    params = RendezvousParameters("ext_etcd", "localhost:2379", "job", 1, 2, **conf)
    assert limits_of(params, Settings(), {}) == Limits(1, 2, last_call_s)


@pytest.mark.parametrize("value", ["", "x", "inf", "nan", "-1"])
def test_a_last_call_without_a_number_is_refused(value: str) -> None:
    params = RendezvousParameters("ext_etcd", "localhost:1", "job", 1, 2, last_call_timeout=value)
    with pytest.raises(UsageError, match=f"last_call_timeout={value}: expected a number, 0 or more"):
        limits_of(params, Settings(), {})
