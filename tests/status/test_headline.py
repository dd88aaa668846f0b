"""The headline of a job, case by case."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from elastic_ext.base.diagnosis import KINDS, Response
from elastic_ext.failures import rules
from elastic_ext.failures.judgement import TOO_FEW
from elastic_ext.failures.ledger import JobVerdict, Ledger
from elastic_ext.failures.policy import ACTIONS, Decision
from elastic_ext.rendezvous.job_status import JobStatus, NodeText
from elastic_ext.rendezvous.round_records import Assignment, Drain, EndKind, Header, Node, State
from elastic_ext.status import headline, job_status
from elastic_ext.status.headline import JobNow
from elastic_ext.status.job_status import NodeReport, Sources

GLOO = "node n1 was lost; then rank 0 raised RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer, on n0"
RUNS = Header(2, State.RUNNING, 2, 2, min_nodes=2, max_nodes=2)
BROKEN = dataclasses.replace(RUNS, state=State.BROKEN)
FEWER = dataclasses.replace(BROKEN, min_nodes=1)
LOST, CUT = "was lost", "was cut off from the job's store"


def verdict(
    kind: str, response: Response = Response.RESTART, rule: str = "", host: str = "n1", rank: int = 1, **more: object
) -> JobVerdict:
    code = None if ACTIONS[response].value == "restart" else 65
    decision = Decision(ACTIONS[response], kind, GLOO, code, rule, response=response)
    return JobVerdict(decision, 2, f"{host}-7-abcdef", host, rank, **more)


def recovers(header: Header, judged: JobVerdict | None = None, *here: str, saved_step: int | None = None) -> JobNow:
    return JobNow("recovering", header, judged, here or ("n0",), saved_step=saved_step)


def with_drain(header: Header, released: bool) -> Header:
    return dataclasses.replace(header, drains=(Drain("n1-7-abcdef", "n1", 1, "fan broken", released=released),))


FREE = Response.RESTART_FREE
GONE = verdict("node_lost", FREE, "peer-connection", rank=-1, gone=LOST)
CASES = (
    # all train
    (JobNow("running", RUNS, here=("n0", "n1"), members=2, training=2), "both nodes train"),
    (JobNow("running", RUNS, here=("n0", "n1", "n2"), members=3, training=3), "all 3 nodes train"),
    (JobNow("running", RUNS, here=("n0",), members=1, training=1), "n0 trains"),
    (JobNow("running", RUNS, here=("n0", "n1"), members=2, training=1, silent=1), "1 of 2 nodes train; 1 silent"),
    (JobNow("running", RUNS, here=("n0", "n1"), members=2, silent=2), "round 2 runs; no node has reported yet"),
    # a node was lost
    (recovers(dataclasses.replace(BROKEN, lost="n1-7-abcdef")), "node n1 was lost; n0 waits for it"),
    (recovers(dataclasses.replace(FEWER, lost="n1-7-abcdef")), "node n1 was lost; the others regroup"),
    (recovers(BROKEN, GONE), "node n1 was lost; n0 waits for it"),
    (recovers(dataclasses.replace(BROKEN, min_nodes=4), GONE, "n0", "n2", "n3"), "node n1 was lost; 3 nodes wait for it"),
    (recovers(FEWER, GONE), "node n1 was lost; the job restarts"),
    (recovers(BROKEN, verdict("node_lost", FREE, rank=-1, gone=CUT)), "node n1 was cut off; n0 waits for it"),
    (
        JobNow("failed", BROKEN, verdict("node_lost", Response.REQUEUE, TOO_FEW, rank=-1, gone=LOST)),
        "node n1 was lost; too few remain",
    ),
    (JobNow("ended", BROKEN, GONE), "node n1 was lost; no agent is left"),
    (JobNow("ended", dataclasses.replace(BROKEN, signal="SIGTERM")), "SIGTERM stopped the job; no agent is left"),
    (JobNow("ended", BROKEN), "no agent is left; how the job ended is unknown"),
    # a worker failed
    (recovers(dataclasses.replace(BROKEN, end=EndKind.FAILED), None, "n0", "n1"), "a worker failed; the cause is being found"),
    (recovers(BROKEN, verdict("host_memory"), "n0", "n1"), "rank 1 on n1 ran out of memory; the job restarts"),
    (recovers(BROKEN, verdict("unknown", rule="killed"), "n0", "n1"), "rank 1 on n1 was killed; the job restarts"),
    (recovers(BROKEN, verdict("hardware", Response.REPLACE_NODE), "n0", "n1"), "rank 1 on n1 met bad hardware; n1 leaves"),
    (recovers(BROKEN, verdict("hardware", Response.REPLACE_NODE)), "rank 1 on n1 met bad hardware; n0 waits for another"),
    # only victims are known
    (
        recovers(BROKEN, verdict("network", rule="peer-connection"), "n0", "n1"),
        "cause unknown: rank 1 lost a peer; the job restarts",
    ),
    # two hosts without a network between them
    (
        recovers(BROKEN, verdict("network", rule="network-cut", cut=("n0", "n1")), "n0", "n1"),
        "n0 and n1 cannot reach each other; the job restarts",
    ),
    # a bug
    (JobNow("failed", BROKEN, verdict("code", Response.STOP)), "rank 1 on n1 failed in its code; the job stopped"),
    (JobNow("failed", dataclasses.replace(BROKEN, state=State.CLOSED)), "the job was closed"),
    # at the start
    (JobNow("forming", Header()), "no node has come yet"),
    (JobNow("forming", Header(), here=("n0",)), "n0 waits for more nodes"),
    (JobNow("forming", Header(), here=("n0", "n1")), "2 nodes wait for more nodes"),
    (
        JobNow("forming", Header(differs="n1 has another --max-restarts"), here=("n0", "n1")),
        "the nodes differ in what must be alike; none starts",
    ),
    (JobNow("starting", RUNS, here=("n0", "n1"), members=2), "both nodes are there; the workers start"),
    # the end
    (JobNow("succeeded", dataclasses.replace(RUNS, state=State.DONE)), "the job finished"),
    (JobNow("ended", Header()), headline.NONE_LEFT),
    # a hang
    (
        recovers(dataclasses.replace(BROKEN, end=EndKind.STALLED), None, "n0", "n1"),
        "no worker makes progress; the cause is being found",
    ),
    (recovers(BROKEN, verdict("hang"), "n0", "n1"), "rank 1 on n1 hung; the job restarts"),
    # replicas
    (
        recovers(dataclasses.replace(BROKEN, end=EndKind.DIFFERS), None, "n0", "n1"),
        "the replicas differ; the cause is being found",
    ),
    # drained, preempted
    (
        JobNow("running", with_drain(RUNS, False), here=("n0", "n1"), members=2, training=2),
        "both nodes train; n1 will leave",
    ),
    (JobNow("running", with_drain(RUNS, True), here=("n0",), members=1, training=1), "n0 trains"),
    (recovers(with_drain(BROKEN, True)), "node n1 was drained; n0 waits for another"),
    (recovers(with_drain(FEWER, True)), "node n1 was drained; the others regroup"),
    (
        JobNow("failed", BROKEN, verdict("preemption", Response.REQUEUE)),
        "rank 1 on n1 was preempted; a requeue follows",
    ),
    # the next round
    (recovers(RUNS, None, "n0", "n1", saved_step=75), "the workers start again; the last checkpoint is of step 75"),
    (recovers(RUNS, None, "n0", "n1"), "the workers start again"),
    (JobNow("recovering", RUNS), "no node is there; the job waits for nodes"),
    (recovers(FEWER), "round 2 ended; the nodes regroup"),
    (recovers(BROKEN), "round 2 ended; n0 waits for more nodes"),
)


@pytest.mark.parametrize(("now", "said"), CASES, ids=[said for _, said in CASES])
def test_each_case_has_its_headline(now, said):
    assert headline.of_job(now) == said


@pytest.mark.parametrize("response", [each for each in Response if each in ACTIONS])
def test_no_headline_is_long_or_a_victims(response):
    ruled = ("", "killed", "peer-connection", rules.ENDED_EARLY, TOO_FEW)
    named = ("n1", "a name\tof several words", "x" * 200)
    for kind, rule, rank, host, gone in itertools.product(KINDS, ruled, (-1, 7), named, ("", LOST, CUT)):
        judged = verdict(kind, response, rule, host, rank, gone=gone)
        for now in (recovers(BROKEN, judged), JobNow("failed", BROKEN, judged), JobNow("ended", BROKEN, judged)):
            said = headline.of_job(now)
            assert len(said.split()) <= headline.WORDS, said
            assert "gloo" not in said
            assert said.isprintable()


def test_the_long_reason_stands_with_the_failure():
    """Two more times it would stand: as the reason of the job, and as what ended the round."""
    judged = dataclasses.replace(GONE, node="b-7-abcdef")
    spans = (job_status.RoundSpan(2, 9.0, 3.0, GLOO),)
    report = NodeReport("n0", "rendezvous", 3.0, 0, 0, 1, 2, rounds=spans)
    found = JobStatus(
        "j",
        dataclasses.replace(BROKEN, reason=GLOO),
        {"a": Node(1, 1, "w", "10.0.0.1", 1)},
        {"a": Assignment(2, 0, 0, 0, 1, "")},
        Ledger((), 0, (judged,)),
        {},
        reports={"a": NodeText(job_status.encode_report(report), 1)},
    )
    document = job_status.build(Sources(found, "ext_etcd"))
    assert document.job.headline == "node n1 was lost; n0 waits for it"
    assert (document.job.reason, [each.why for each in document.rounds]) == ("", ["node n1 was lost; the job restarts"])
    assert [each.reason for each in document.failures] == [GLOO]
    told = job_status.encode(dataclasses.replace(document, job=dataclasses.replace(document.job, last_verdict=None)))
    assert told.count("gloo") == 1
