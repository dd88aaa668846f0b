"""`elastic-ext status`, and the document that it shows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from elastic_ext.base import records
from elastic_ext.base.kinds import Response
from elastic_ext.cli import main, status
from elastic_ext.etcd import EtcdClient
from elastic_ext.failures.ledger import JobVerdict, Ledger, encode_ledger
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.observe import job_status, node_report
from elastic_ext.observe.job_status import Document, Own
from elastic_ext.observe.node_report import NodeReport, Pace, RoundSpan
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.job_state import JobStatus, NodeText
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State, encode
from tests.jobs import ROOT
from tests.observe.pages_in_chromium import document, served

REPORT = NodeReport("n1", "running", 5.0, 1, 4, 4, 2, step=70, steps_per_s=2.0, last_step_s=0.5, saved_step=60, saved_s=3.0)
STOP = Decision(Action.STOP, "code", "a bug\x1b[2J", 65, "repeated", response=Response.STOP)
HEADER = Header(2, State.RUNNING, 2, 8, seal="s")
NODE = Node(1, 4, "w", "10.0.0.2", 1)


def job(header: Header = HEADER, **changes: object) -> JobStatus:
    base = JobStatus("j", header, {"a": NODE, "b": NODE}, {"a": Assignment(2, 0, 0, 0, 8, "s")}, Ledger(), {})
    return dataclasses.replace(base, **changes)


def built(found: JobStatus, own: Own | None = None, seen_s: float | None = None) -> Document:
    return job_status.build(found, "ext_etcd", own, lambda _: seen_s)


def test_nodes_by_rank_with_ages_of_the_reader():
    spans = (RoundSpan(1, 9.0, 6.0), RoundSpan(2, 5.0))
    first = dataclasses.replace(REPORT, name="n0", node_rank=0, rounds=spans, pace=(Pace(3, 1.5), Pace(2, 1.0)))
    reports = {"b": NodeText(node_report.encode(REPORT), 7), "a": NodeText(node_report.encode(first), 8)}
    shown = built(job(reports=reports), seen_s=2.0)
    assert [(each.id, each.name, each.node_rank, each.saved_s, each.seen_s) for each in shown.nodes] == [
        ("a", "n0", 0, 5.0, 2.0),
        ("b", "n1", 1, 5.0, 2.0),
    ]
    assert [(each.began_s, each.ended_s) for each in shown.rounds] == [(11.0, 8.0), (7.0, None)]
    assert [(each.node, each.rank) for each in shown.stragglers] == [("n0", 3)]
    assert shown.job.state == "running"


def test_a_node_that_tells_nothing_and_one_that_tells_rubbish_are_said_to():
    shown = built(job(reports={"b": NodeText('{"schema":99}', 1)}))
    assert [(each.id, each.state) for each in shown.nodes] == [("a", "silent"), ("b", "waits")]
    assert any(each.what == "node b" and "schema 99" in each.why for each in shown.unknown)


@pytest.mark.parametrize(
    ("header", "stopped", "state"),
    [
        (HEADER, False, "running"),
        (dataclasses.replace(HEADER, state=State.BROKEN), False, "recovering"),
        (dataclasses.replace(HEADER, state=State.BROKEN), True, "failed"),
        (dataclasses.replace(HEADER, state=State.CLOSED), False, "failed"),
        (dataclasses.replace(HEADER, state=State.DONE), False, "succeeded"),
        (Header(), False, "forming"),
    ],
)
def test_the_state_of_the_job(header, stopped, state):
    ledger = Ledger((), 0, (JobVerdict(STOP, 2, "a", "n0", 0, 1, 3),) if stopped else ())
    shown = built(job(header, ledger=ledger))
    assert shown.job.state == state
    assert state in status.EXIT_CODES


def test_the_document_survives_its_json():
    shown = document(3)
    assert records.read(Document, job_status.encode(shown), "it", job_status.SCHEMA) == shown


def run(capsys, *arguments):
    code = main.main(["status", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(("state", "code"), [("running", 0), ("succeeded", 0), ("failed", 1), ("recovering", 2), ("ended", 3)])
def test_exit_codes_by_an_agents_page(capsys, state, code):
    with served(document(2, state)) as url:
        assert run(capsys, f"--url={url}/")[0] == code
        _, out, _ = run(capsys, f"--url={url}", "--json")
        assert json.loads(out)["job"]["state"] == state
        assert "--watch" not in out
    assert run(capsys, f"--url={url}")[::2][0] == status.EX_UNAVAILABLE


def test_wrong_usage(capsys):
    for arguments in ([], ["--rdzv-id=x"], ["--url=x"], ["--url=http://x", "--rdzv-id=x", "--rdzv-endpoint=y"]):
        code, out, err = run(capsys, *arguments)
        assert (code, out, len(err.splitlines())) == (78, "", 1)


def test_an_ended_job_in_etcd(capsys, server):
    keys = JobKeys("j")
    ledger = Ledger((), 0, (JobVerdict(STOP, 2, "a", "n0", 0, 1, 3),))
    with EtcdClient(server.endpoint) as client:
        from elastic_ext.etcd import Put

        client.txn(
            [],
            [Put(keys.header, encode(dataclasses.replace(HEADER, state=State.CLOSED))), Put(keys.ledger, encode_ledger(ledger))],
        )
        client.txn([], [Put(keys.report("a"), node_report.encode(dataclasses.replace(REPORT, state="ended")))])
    code, out, _ = run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=j")
    assert code == 1
    assert "job j (ext_etcd): failed, round 2" in out
    assert "exit code 65: a bug\\x1b[2J" in out
    assert "ended" in out
    assert run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=none")[0] == status.EX_UNAVAILABLE


def test_the_reference_names_every_exit_code():
    page = (ROOT / "elastic_ext" / "REFERENCE.md").read_text()
    assert all(f"| {code} | {meaning} |" in page for code, meaning in status.MEANINGS.items())
