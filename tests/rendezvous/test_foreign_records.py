"""What others write beside a job's records is passed over, the job goes on, and nobody leaves with 0 that has not finished."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base import records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.cli import main
from elastic_ext.embedded.one_machine import OneMachine
from elastic_ext.etcd import KeyValue
from elastic_ext.failures import ledger as job
from elastic_ext.failures.judgement import judge
from elastic_ext.failures.ledger import Ledger
from elastic_ext.failures.policy import STOP_CODES, Action
from elastic_ext.rendezvous import round_records
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, RecordReader, RoundReport, State
from tests.chaos.mutations import mutated_json
from tests.etcd_client import EtcdClient
from tests.failures.test_ledger import RULES, report
from tests.jobs import EXT, run
from tests.rendezvous.test_etcd_jobs import assert_one_line, seen

PREFIX = JobKeys("job").prefix
DEEP = b"[" * 100_000
LEDGER, VERDICT = judge({"a": report("ha", "NameError", "x")}, Ledger(), RULES, 3)
GOOD: dict[str, bytes] = {
    "job": b'{"schema": 3, "min_nodes": 1, "max_nodes": 2}',
    "round": round_records.encode(Header(3, State.CLOSED, 1, 1, "h", 9, "why", "seal", job.encode_verdict(VERDICT))),
    "nodes/a": round_records.encode(
        Node(3, 1, "r", "h", 9, report=RoundReport(3, job.encode_report(report("ha", signal="SIGKILL"))))
    ),
    "assign/a": round_records.encode(Assignment(3, 0, 0, 0, 1, "seal")),
    "ledger": job.encode_ledger(LEDGER).encode(),
    "refused/h": b"it failed",
}


def forged(random_: random.Random, good: bytes) -> bytes:
    """A record that others have written over, or only a record that it carries as text."""
    value = json.loads(good) if good.startswith(b"{") else {}
    within, name = (value["report"], "failure") if "report" in value else (value, "verdict")
    if not within.get(name) or random_.random() < 0.5:
        return mutated_json(good, random_)
    within[name] = mutated_json(within[name].encode(), random_).decode(errors="surrogateescape")
    return json.dumps(value).encode()


def test_a_verdict_to_stop_has_an_agents_code():
    for code in (0, None, 3, 256, -1):
        told = json.loads(job.encode_verdict(VERDICT))
        told["decision"]["exit_code"] = code
        with pytest.raises(RecordError):
            job.decode_verdict(json.dumps(told))
    told = json.loads(job.encode_verdict(VERDICT))
    told["decision"]["action"] = "restart"
    with pytest.raises(RecordError):
        job.decode_verdict(json.dumps(told))
    assert 0 not in STOP_CODES


def test_what_is_out_of_range_is_one_line():
    """10,000 of them; whatever is read can be written again, and is read as the same."""
    random_, read = random.Random(7), 0
    refused: list[str] = []
    decoders: list[tuple[str, Callable[[bytes], Any], Callable[[Any], Any]]] = [
        ("round", lambda value: round_records.decode(Header, value, "k"), round_records.encode),
        ("nodes/a", lambda value: round_records.decode(Node, value, "k"), round_records.encode),
        ("assign/a", lambda value: round_records.decode(Assignment, value, "k"), round_records.encode),
        ("ledger", job.decode_ledger, job.encode_ledger),
    ]
    for number in range(10_000):
        name, decode, encode = decoders[number % 4]
        try:
            found = decode(forged(random_, GOOD[name]))
        except RecordError as error:
            refused.append(str(error))
            continue
        written = decode(encode(found))  # long texts are cut
        assert decode(encode(written)) == written
        read += 1
        if isinstance(found, Ledger):
            codes = [each.decision.exit_code for each in found.verdicts if each.decision.action is Action.STOP]
            assert set(codes) <= STOP_CODES
    assert [text for text in refused if "\n" in text or len(text) > 500] == []
    assert min(read, len(refused)) > 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": 0}, "out of range"),
        ({"port": 70_000}, "out of range"),
        ({"after": -1}, "out of range"),
        ({"after": 10**400}, "64 bits"),
        ({"after": True}, "a whole number"),
        ({"address": "a/b"}, "a text that is not allowed"),
        ({"address": "x" * 201}, "a text that is not allowed"),
        ({"done": 1.5}, "a whole number"),
    ],
)
def test_a_field_out_of_its_range_is_named(change, said):
    value = json.dumps({**json.loads(GOOD["nodes/a"]), **change}).encode()
    with pytest.raises(RecordError, match=next(iter(change))) as error:
        round_records.decode(Node, value, "k")
    assert said in str(error.value)


def test_a_too_large_record_is_not_parsed():
    with pytest.raises(RecordError, match="bytes, expected"):
        round_records.decode(Node, b" " * records.MAX_BYTES + GOOD["nodes/a"], "k")


def kv(key: bytes, value: bytes, lease_id: int = 1) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1, lease_id)


def test_each_key_and_content_is_reported_once():
    told: list[str] = []
    reader = RecordReader(told.append)
    for _ in range(3):
        assert reader.node(kv(b"/x/\xff\x1b[2J", b"\x1b")) is None
        assert reader.node(kv(b"/x/a", GOOD["nodes/a"], lease_id=0)) is None
        assert reader.id_of("/x/", b"/x/nodes/a") is None
    assert len(told) == 3
    assert all(line.isprintable() for line in told)
    assert reader.node(kv(b"/x/\xff\x1b[2J", b"other")) is None
    assert len(told) == 4
    assert reader.node(kv(b"/x/a", GOOD["nodes/a"])) is not None


def test_an_impossible_verdict_makes_a_header_invalid():
    reader, header = RecordReader([].append), json.loads(GOOD["round"])
    assert reader.header(kv(b"k", GOOD["round"])) is not None
    for verdict in ("[" * 100_000, header["verdict"].replace('"exit_code":65', '"exit_code":0')):
        assert reader.header(kv(b"k", json.dumps({**header, "verdict": verdict}).encode())) is None
    assert reader.header(kv(b"k", json.dumps({**header, "round": 4}).encode())) is None  # it is on round 3


@pytest.mark.full
def test_commands_read_what_they_can(server, capsys):
    """`explain` and `checkpoints save` over 60 jobs of forged records: no traceback, and 0 for what is whole alone."""
    random_ = random.Random(11)
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job"]
    with EtcdClient(server.endpoint) as client:
        lease_id = client.lease_grant(600).lease_id
        for number in range(60):
            client.delete_prefix(PREFIX)
            names = [] if number == 0 else random_.sample(list(GOOD), random_.randint(1, 4))
            for name, good in GOOD.items():
                value = forged(random_, good) if name in names else good
                client.put(PREFIX + name, value, lease_id=lease_id)
            if number % 5 == 1:
                client.put(PREFIX.encode() + b"nodes/\xff\x1b", GOOD["nodes/a"], lease_id=lease_id)
            code = main.main(["explain", *where])
            said = capsys.readouterr()
            assert code == (78 if said.err else 0), said
            assert number or code == 0
            assert all(line.isprintable() for line in (said.out + said.err).splitlines())
            assert all(line.startswith("elastic-ext: ") for line in said.err.splitlines())
            if number % 5 == 1:
                assert code == 78
            assert main.main(["checkpoints", "save", *where, "--timeout=0.2"]) in (69, 75, 78)
            assert len(capsys.readouterr().err.splitlines()) == 1


def strangers(client: EtcdClient) -> None:
    """What others may have left among the nodes before ours come: another job's keys, no text, no end, no lease."""
    lease_id = client.lease_grant(600).lease_id
    for key in (b"nodes/nodes/x-1-ab", b"nodes/\xff\xfe", b"nodes/a b\n", b"assign/\xff", b"nodes/" + b"x" * 300):
        client.put(PREFIX.encode() + key, GOOD["nodes/a"], lease_id=lease_id)
    for key, value in (("nodes/round", GOOD["round"]), ("nodes/deep", DEEP), ("nodes/odd", b"\xff"), ("assign/deep", DEEP)):
        client.put(PREFIX + key, value, lease_id=lease_id)
    client.put(PREFIX + "nodes/forever", GOOD["nodes/a"])  # it would be waited for
    for key in ("last", "ledger", "round", "job"):
        client.put(PREFIX + key, b"\xff\xfe")


@pytest.mark.full
def test_a_job_works_among_others_records(store, nodes):
    with EtcdClient(store.endpoint) as client:
        strangers(client)
        first = nodes.start("a", store.endpoint, "2")
        nodes.start("b", store.endpoint, "2", "segv:0").wait_for(seen(2, 0))  # it may end before the worker of "a" has come up
        nodes.wait_for(seen(2, 1))
        nodes.finish()
        assert not any("Traceback" in job.err for job in nodes.jobs.values())
        assert "ignoring it" in first.err
        assert round_records.decode(Header, client.get(PREFIX + "round").kv.value, "round").state is State.DONE


@pytest.mark.full
@pytest.mark.parametrize("run_id", ["job1/nodes", "x" * 300, "a\tb", "\udcff"])
def test_an_ambiguous_run_id_is_refused(server, tmp_path, run_id, capsys):
    (tmp_path / "ok.py").write_text("print('started')")
    for kind, endpoint in ((EtcdRendezvous, server.endpoint), (OneMachine, "localhost:0")):
        with pytest.raises(UsageError, match="--rdzv-id") as error:
            kind(RendezvousParameters("b", endpoint, run_id, 1, 1), Settings())
        assert str(error.value).isprintable()
    if "/" in run_id:
        done = run([*EXT, f"--rdzv-id={run_id}", "ok.py"], tmp_path)
        assert_one_line(done, 78, "--rdzv-id")
        assert "started" not in done.out
    for command in (["explain"], ["checkpoints", "save"]):
        assert main.main([*command, f"--rdzv-endpoint={server.endpoint}", f"--rdzv-id={run_id}"]) == 78
        said = capsys.readouterr().err
        assert len(re.findall("--rdzv-id", said)) == 1
        assert len(said.splitlines()) == 1


def test_a_run_id_may_have_any_letters(tmp_path: Path):
    for name in ("a:b", "night run", "학습-1", "x" * 200):
        assert records.is_name(name)
