"""`elastic-ext status`, and the document that it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Callable

import jsonschema
import pytest

from elastic_ext.base import goodput, records
from elastic_ext.base.diagnosis import Response
from elastic_ext.base.goodput import HostRecord, Shared, Spent, StateSeconds
from elastic_ext.cli import job_source, main, status
from elastic_ext.cli.status import Terminal
from elastic_ext.etcd import Delete, EtcdClient, Put
from elastic_ext.failures.ledger import JobVerdict, Ledger, encode_ledger
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.http import server as agent_server
from elastic_ext.http.tls import PemFiles, ServerTls
from elastic_ext.rendezvous.job_status import JobStatus, NodeText, lines
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State, encode
from elastic_ext.status import job_status
from elastic_ext.status.job_status import Document, NodeReport, Own, ReportAges, RoundSpan, Sources, Straggler
from tests.etcd_server import Certificates
from tests.reference import DOCS, JOB_SCHEMA
from tests.status.pages_in_chromium import document, failure, of_nodes, served
from tests.until import LIMIT_S

PIPE = Terminal()
LONG_S = 600.0  # limits of the product that no busy machine may reach
REPORT = NodeReport("n1", "running", 5.0, 1, 4, 4, 2, step=70, steps_per_s=2.0, last_step_s=0.5, saved_step=60, saved_s=3.0)
STOP = Decision(Action.STOP, "code", "a bug\x1b[2J", 65, "repeated", response=Response.STOP)
HEADER = Header(2, State.RUNNING, 2, 8, seal="s")
NODE = Node(1, 4, "w", "10.0.0.2", 1)


def job(header: Header = HEADER, **changes: object) -> JobStatus:
    base = JobStatus("j", header, {"a": NODE, "b": NODE}, {"a": Assignment(2, 0, 0, 0, 8, "s")}, Ledger(), {})
    return dataclasses.replace(base, **changes)


def encoded(**reports: NodeReport) -> dict[str, NodeText]:
    return {id_: NodeText(job_status.encode_report(each), 1) for id_, each in reports.items()}


def built(found: JobStatus, own: Own | None = None, seen_s: float | None = None) -> Document:
    return job_status.build(Sources(found, "ext_etcd", own, lambda _: seen_s))


def test_nodes_by_rank_with_ages_of_the_reader():
    spans, late = (RoundSpan(1, 9.0, 6.0), RoundSpan(2, 5.0)), Straggler("n1", 5, 0.021, 0.03, 0.064, 0.328)
    first = dataclasses.replace(REPORT, name="n0", node_rank=0, rounds=spans, stragglers=(late,))
    shown = built(job(reports=encoded(b=REPORT, a=first)), seen_s=2.0)
    assert [(each.id, each.name, each.node_rank, each.saved_s, each.seen_s) for each in shown.nodes] == [
        ("a", "n0", 0, 5.0, 2.0),
        ("b", "n1", 1, 5.0, 2.0),
    ]
    assert [(each.began_s, each.ended_s) for each in shown.rounds] == [(11.0, 8.0), (7.0, None)]
    assert shown.stragglers == (late,)
    assert "straggler: rank 5 on n1 is late by 21 ms of a step of 64 ms: 33%" in "\n".join(printed(shown))
    assert shown.job.state == "running"


def test_why_replicas_are_not_compared_appears_once():
    """While they run: what a node that has ended has reported is over."""
    texts = {"a": (0, "no replicas", "running"), "b": (1, "no room", "running"), "c": (2, "no replicas", "running")}
    texts |= {"d": (3, "an end", "ended"), "e": (4, "", "running")}
    reports = {
        id_: dataclasses.replace(REPORT, name=f"n{id_}", node_rank=rank, uncompared=why, state=state)
        for id_, (rank, why, state) in texts.items()
    }
    shown = built(job(reports=encoded(**reports)))
    said = ["not compared on na and 1 more: no replicas", "not compared on nb: no room"]
    assert [each.why for each in shown.unknown if each.what == "replicas"] == said
    assert f"not known: replicas: {said[0]}" in "\n".join(printed(shown))


def test_a_replaced_node_does_not_count_in_rounds():
    first = dataclasses.replace(REPORT, name="n0", node_rank=0, step=500)
    spare = dataclasses.replace(REPORT, state="rendezvous", node_rank=0, round=1, step=3, steps_per_s=0.1)
    shown = built(job(reports=encoded(a=first, b=spare)))
    assert [(each.id, each.node_rank) for each in shown.nodes] == [("a", 0), ("b", -1)]
    assert (shown.job.step, shown.job.steps_per_s) == (500, 2.0)


def test_rank_0_tells_the_gauges_of_its_script():
    """Another node may have had rank 0 in an earlier round."""
    before = dataclasses.replace(REPORT, round=1, gauges=job_status.gauges_of({"loss": 3.0}))
    told = job_status.gauges_of({"loss": 0.5, "worst": float("nan")})
    now = dataclasses.replace(REPORT, name="n0", total_steps=90, gauges=told)
    shown = built(job(reports=encoded(a=before, b=now)))
    assert [(each.name, each.value) for each in shown.gauges] == [("loss", "0.5"), ("worst", "nan")]
    assert shown.job.total_steps == 90
    assert "step 70 of 90 at" in "\n".join(printed(shown))


@pytest.mark.parametrize(("own", "seen_s"), [(True, 0.0), (False, 0.0), (False, None)])
def test_an_old_report_is_no_news(own, seen_s):
    """They step together. What b told when its workers had run for 12 s less is as old, however late it was read."""
    told = {"a": (0, 47.0, 98), "b": (1, 35.0, 74)}
    reports = {
        id_: dataclasses.replace(REPORT, name=id_, node_rank=rank, state_s=ran_s, step=step, last_step_s=0.25)
        for id_, (rank, ran_s, step) in told.items()
    }
    found = job(reports=encoded(**reports))
    shown = built(found, Own("a", reports["a"], Shared(Spent())) if own else None, seen_s=seen_s)
    assert [(each.id, each.step, each.last_step_s) for each in shown.nodes] == [("a", 98, 0.25), ("b", 74, 12.25)]
    assert [each.seen_s for each in shown.nodes] == [seen_s, None if seen_s is None else 12.0]
    assert shown.job.step == 98


def test_a_node_with_later_workers_is_no_older():
    first, later = (dataclasses.replace(REPORT, name=id_, state_s=ran_s) for id_, ran_s in (("a", 9.0), ("b", 5.0)))
    shown = built(job(reports=encoded(a=first)), Own("b", later, Shared(Spent())), seen_s=0.0)
    assert [(each.id, each.seen_s, each.last_step_s) for each in shown.nodes] == [("a", 0.0, 0.5), ("b", 0.0, 0.5)]


def test_silent_nodes_and_rubbish_are_shown_as_such():
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
        (dataclasses.replace(HEADER, round=1), False, "running"),
    ],
)
def test_the_state_of_the_job(header, stopped, state):
    ledger = Ledger((), 0, (JobVerdict(STOP, 2, "a", "n0", 0, 1, 3),) if stopped else ())
    shown = built(job(header, ledger=ledger))
    assert shown.job.state == state
    assert state in status.EXIT_CODES


def test_a_job_without_leases_is_judged_by_verdicts():
    gone = {"nodes": {}, "assignments": {}}
    ledger = failed_ledger = Ledger((), 0, (JobVerdict(STOP, 2, "a", "n0", 0, 1, 3),))
    failed = built(job(Header(), ledger=ledger, **gone))
    assert (failed.job.state, failed.job.round) == ("failed", 2)
    assert (failed.job.headline, failed.job.reason) == ("rank 0 on n0 failed in its code; the job stopped", "")
    assert [each.reason for each in failed.failures] == ["a bug\\x1b[2J"]
    restarted = dataclasses.replace(STOP, action=Action.RESTART, exit_code=None, response=Response.RESTART)
    ledger = Ledger((), 0, (JobVerdict(restarted, 2, "a", "n0", 0, 1, 3),))
    ended = built(job(Header(), ledger=ledger, **gone)).job
    assert (ended.state, ended.round) == ("ended", 3), "the restart has led to another round"
    done = job(Header(), ledger=dataclasses.replace(ledger, done=4), **gone)
    assert (built(done).job.state, built(done).job.round) == ("succeeded", 4)
    assert next(lines(done)) == "job j: done, round 4"
    assert next(lines(job(Header(), ledger=Ledger(verdicts=failed_ledger.verdicts), **gone))) == "job j: closed"
    assert built(job(Header(), ledger=ledger)).job.state == "forming"  # its nodes are back
    assert built(job(HEADER, **gone)).job.state == "recovering"  # the header outlives the nodes for a while


def test_a_job_without_id_is_not_called_none():
    assert printed(built(dataclasses.replace(job(), run_id="none")))[0].startswith("job without --rdzv-id (")


def test_a_job_without_agents_does_not_recover():
    """With 75, say: the round is broken, and no agent is there any more, or only one that still shows its page."""
    left = job(dataclasses.replace(HEADER, state=State.BROKEN, reason="n0 leaves: SIGTERM"), nodes={}, assignments={})
    gone = dataclasses.replace(REPORT, state="ended")
    for shown in (built(left), built(left, Own("a", gone, Shared(Spent()), nodes=2, world=8))):
        assert (shown.job.state, shown.job.reason) == ("ended", "n0 leaves: SIGTERM")
        assert "  2 nodes, 8 workers in the last round, " in "\n".join(printed(shown))
    assert built(left, Own("a", REPORT, Shared(Spent()))).job.state == "recovering"


@pytest.mark.parametrize(("round_", "state"), [(1, "starting"), (2, "recovering")])
def test_a_round_whose_workers_do_not_run_yet(round_, state):
    header = dataclasses.replace(HEADER, round=round_)
    starts = dataclasses.replace(REPORT, state="start")
    assert built(job(header, reports=encoded(a=starts, b=starts))).job.state == state


def test_the_slowest_step_counts():
    paces = {"a": 2.0, "b": 2.0, "c": 1.0}
    reports = {id_: dataclasses.replace(REPORT, name=id_, steps_per_s=pace, step=int(70 * pace)) for id_, pace in paces.items()}
    shown = built(job(reports=encoded(**reports)))
    assert (shown.job.step, shown.job.steps_per_s, shown.job.saved_step, shown.job.saved_s) == (70, 1.0, 60, 3.0)


def test_an_isolated_agent_still_knows_the_node_count():
    alone = dataclasses.replace(job(Header(2, State.RUNNING)), nodes={}, assignments={})
    shown = built(alone, Own("a", REPORT, Shared(Spent()), nodes=2, world=8))
    assert (len(shown.nodes), shown.job.nodes, shown.job.world_size) == (1, 2, 8)


def test_goodput_is_that_of_the_job():
    records_ = {host: goodput.encode(HostRecord(Spent((StateSeconds("productive", 30.0),)))) for host in ("h0", "h1")}
    shown = built(job(goodput={**records_, "h2": "rubbish"}))
    assert shown.goodput == (StateSeconds("productive", 60.0),)
    assert any(each.what == "goodput of h2" for each in shown.unknown)
    own = Own("a", REPORT, Shared(Spent((StateSeconds("idle", 1.0),)), 1))  # an agent knows it already, with its own last seconds
    assert built(job(goodput=records_), own).goodput == (StateSeconds("idle", 1.0),)


def test_the_document_survives_its_json_and_the_schema():
    shown = document(3)
    text = job_status.encode(shown)
    assert records.read(Document, text, "it", job_status.SCHEMA) == shown
    validator = jsonschema.Draft202012Validator(json.loads(JOB_SCHEMA.read_text()))
    validator.check_schema(validator.schema)
    for each in (text, job_status.encode(built(job(), None)), job_status.encode(built(job(), seen_s=3.0))):
        validator.validate(json.loads(each))
    for wrong in ({"schema": 2}, {"nodes": [{}]}, {"read_s": "now"}):
        assert not validator.is_valid({**json.loads(text), **wrong})


def test_reports_age_until_a_node_tells_something_new():
    seen = ReportAges()
    seen.read(job(reports={"a": NodeText("x", 1), "b": NodeText("x", 1)}), 100.0)
    seen.read(job(reports={"a": NodeText("x", 1), "b": NodeText("x", 2)}), 130.0)
    assert [seen.age_s(each, 131.0) for each in ("a", "b", "c")] == [31.0, 1.0, None]


# The lines.


def printed(shown: Document, terminal: Terminal = PIPE) -> list[str]:
    return [status.as_text(line, terminal) for line in status.job_lines(shown, terminal)]


def test_text_of_others_cannot_steer_a_terminal():
    hostile = "\x1b[2J\x1b]0;owned\x07\r\n"
    shown = document(3, name=hostile + "{}", last=failure(2, hostile, 65))
    shown = dataclasses.replace(shown, job=dataclasses.replace(shown.job, run_id=hostile, reason=hostile), fault=hostile)
    for line in printed(shown):
        assert line.isprintable()
    for line in printed(shown, Terminal(colors=True, width=200)):
        assert re.sub(r"\x1b\[\d+m", "", line).isprintable()


def test_a_terminal_shows_urgent_nodes_pipes_show_all():
    shown = of_nodes(document(512), {300: {"state": "silent"}, 400: {"state": "start"}})
    few = printed(shown, Terminal(nodes=4, width=80))
    rows = [line.split()[0] for line in few if re.match(r"\d+ +n\d", line)]
    assert rows == ["0", "1", "300", "400"]
    assert any("508 more" in line for line in few)
    assert all(len(line) <= 80 for line in few if re.match(r"\d+ +n\d", line))
    assert sum(bool(re.match(r"\d+ +n\d", line)) for line in printed(shown)) == 512


def test_rounds_are_drawn_on_one_axis():
    rounds = (RoundSpan(1, 100.0, 60.0), RoundSpan(2, 50.0))
    (line,) = (each for each in printed(dataclasses.replace(document(1), rounds=rounds)) if each.startswith("  rounds"))
    assert "================....====================" in line


def test_old_news_is_said_to_be_old():
    assert not any("old" in line for line in printed(document(2)))
    assert any(
        "is 40 s old: etcd is away" in each
        for each in printed(dataclasses.replace(document(2), read_s=40.0, fault="etcd is away"))
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(job_source, "TIMEOUT_S", LONG_S)
    monkeypatch.setattr(agent_server, "CLIENT_TIMEOUT_S", LONG_S)


def run(capsys, *arguments):
    code = main.main(["status", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.seam
@pytest.mark.parametrize(("state", "code"), [("running", 0), ("failed", 1)])
def test_exit_codes_by_an_agents_page(capsys, state, code):
    with served(document(2, state)) as url:
        assert run(capsys, f"--url={url}/")[0] == code
        _, out, _ = run(capsys, f"--url={url}", "--json")
        assert json.loads(out)["job"]["state"] == state
    code, out, err = run(capsys, f"--url={url}")
    assert (code, out, len(err.splitlines())) == (status.EX_UNAVAILABLE, "", 1)


def test_every_state_has_its_exit_code():
    assert {state for state, code in status.EXIT_CODES.items() if code == 0} == {"running", "succeeded"}
    assert {state for state, code in status.EXIT_CODES.items() if code == 2} == {"forming", "starting", "recovering"}
    assert set(status.EXIT_CODES.values()) <= set(status.MEANINGS)


def test_wrong_usage(capsys):
    of_etcd = ["--rdzv-id=x", "--rdzv-endpoint=y"]
    wrong = [[], ["--rdzv-id=x"], ["--url=x"], ["--url=http://x", *of_etcd], [*of_etcd, "--cert=x"]]
    wrong += [["--url=https://x", "--ca=absent"], ["--url=https://x", "--cert=absent"]]
    for arguments in wrong:
        code, out, err = run(capsys, *arguments)
        assert (code, out, len(err.splitlines())) == (78, "", 1)


def write(server, header, **records_):
    keys = JobKeys("j")
    with EtcdClient(server.endpoint) as client:
        lease = client.lease_grant(int(LONG_S)).lease_id
        texts = {keys.header: encode(header), **{keys.prefix + name: text for name, text in records_.items()}}
        client.txn([], [Put(key, text, lease_id=lease) for key, text in texts.items()])


@pytest.mark.seam
def test_an_ended_job_in_etcd(capsys, server):
    ledger = Ledger((), 0, (JobVerdict(STOP, 2, "a", "n0", 0, 1, 3),))
    told = job_status.encode_report(dataclasses.replace(REPORT, state="ended", at="2026-01-02 03:04:05+0000"))
    spent = goodput.encode(HostRecord(Spent((StateSeconds("productive", 3.0), StateSeconds("idle", 1.0)))))
    written = {"ledger": encode_ledger(ledger), "reports/a": told, "goodput/h": spent}
    write(server, dataclasses.replace(HEADER, state=State.CLOSED), **written)
    code, out, _ = run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=j")
    assert code == 1
    assert "job j (ext_etcd): failed, round 2" in out
    assert "exit code 65: a bug\\x1b[2J" in out
    assert "goodput productive 75.0%, idle 25.0%" in out
    assert "2026-01-02 03:04:05+0000" in out
    assert run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=none")[0] == status.EX_UNAVAILABLE


class Pauses:
    """The clock of `--watch`: each of its pauses does one thing and sets the clock forward."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self._left, self._now = iter(actions), 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        next(self._left)()


@pytest.mark.seam
def test_watch_ends_with_the_job(capsys, server, monkeypatch):
    write(server, HEADER, **{"nodes/a": encode(NODE)})
    done = dataclasses.replace(HEADER, state=State.DONE)
    monkeypatch.setattr(status, "time", Pauses(lambda: None, lambda: write(server, done)))
    code, out, _ = run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=j", "--watch", "--json")
    assert code == 0
    assert [json.loads(line)["job"]["state"] for line in out.splitlines()] == ["running", "running", "succeeded"]


@pytest.mark.seam
def test_watch_of_a_job_that_leaves_nothing_ends(capsys, server, monkeypatch):
    write(server, HEADER)

    def forget():
        with EtcdClient(server.endpoint) as client:
            client.txn([], [Delete(JobKeys("j").prefix, prefix=True)])

    monkeypatch.setattr(status, "time", Pauses(forget))
    code, out, _ = run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=j", "--watch", "--json")
    assert (code, json.loads(out.splitlines()[-1])["job"]["state"]) == (3, "ended")


@pytest.mark.seam
def test_watch_gives_up_on_a_lost_agent(capsys, monkeypatch):
    looks = int(status.LOST_S / status.WATCH_S)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(document(2)))
        monkeypatch.setattr(status, "time", Pauses(stack.close, *[lambda: None] * (looks - 1)))
        code, out, err = run(capsys, f"--url={url}", "--watch")
    assert code == status.EX_UNAVAILABLE
    assert out.count("job llama-70b (ext_etcd): running") == 1
    (line,) = err.splitlines()[:-1]  # the change, and at the end that it gives up
    assert "Connection refused; the job as it was 2.0 s ago is above; asking again for 58 s at most" in line


# An agent with TLS.


@pytest.mark.seam
def test_an_agent_that_demands_a_certificate(capsys, tmp_path):
    certificates = Certificates.make(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text("".join((tmp_path / f"client.{kind}").read_text() for kind in ("crt", "key")))
    tls = ServerTls(PemFiles(*(certificates.path(name) for name in ("server.crt", "server.key", "ca.crt"))))
    with served(document(2), tls) as url:
        trust = [f"--url={url}", f"--ca={tmp_path / 'ca.crt'}"]
        assert run(capsys, *trust, f"--cert={both}")[0] == 0
        for wrong, told in ((trust, ""), ([f"--url={url}"], "certificate verify failed")):
            code, out, err = run(capsys, *wrong)
            assert (code, out) == (status.EX_UNAVAILABLE, "")
            assert told in err


@pytest.mark.seam
def test_an_agent_that_drips_bytes_is_not_awaited(capsys, monkeypatch):
    monkeypatch.setattr(job_source, "TIMEOUT_S", 0.3)
    text = job_status.encode(document(2)).encode()
    asked, over = threading.Event(), threading.Event()

    class Drips(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.set()
            self.send_response(200)
            self.end_headers()
            for byte in text:
                if over.wait(0.1):
                    break
                self.wfile.write(bytes([byte]))

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Drips) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        serving.start()
        code, _, err = run(capsys, f"--url=http://127.0.0.1:{server.server_port}")
        assert asked.wait(LIMIT_S)
        over.set()
        server.shutdown()
        serving.join()
    assert code == status.EX_UNAVAILABLE
    assert "no whole answer within 0.3 s" in err or "timed out" in err  # a busy machine may not even send the head in time


@pytest.mark.seam
def test_nobody_is_sent_elsewhere(capsys):
    asked = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, _, err = run(capsys, f"--url=http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (code, asked) == (status.EX_UNAVAILABLE, ["/job.json"])
    assert "302" in err


def test_the_page_names_every_exit_code():
    page = (DOCS / "status.md").read_text()
    assert all(f"| {code} | {meaning} |" in page for code, meaning in status.MEANINGS.items())
