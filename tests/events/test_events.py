"""Structured events: the table, the file with all that can be wrong with it, and the lines of real jobs."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import jsonschema
import pytest

import elastic_ext
from elastic_ext.agent.journal import Journal, cause_of, ended, shown_settings
from elastic_ext.base.settings import Settings
from elastic_ext.events import event_table
from elastic_ext.events.event_table import FIELDS, EventTime, Source
from elastic_ext.events.output import Events
from elastic_ext.rendezvous.contract import EndKind, RoundEnd
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Gate, Job, run
from tests.reference import EVENT_SCHEMA, EVENTS
from tests.until import LIMIT_S

SOURCE = Source("job", "n1", 7)
ELASTIC = str(SCRIPTS / "elastic_job.py")
VALIDATOR = jsonschema.Draft202012Validator(EVENT_SCHEMA)


def read(path: Path) -> list[dict]:
    """The events of a file, each of them valid."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for each in found:
        VALIDATOR.validate(each)
        assert each.keys() == {*EVENT_SCHEMA["properties"], *FIELDS[each["event"]]}
    return found


def names(found: list[dict]) -> list[str]:
    return [each["event"] for each in found]


def open_events(path: object, **more: int) -> Events:
    return Events(str(path), SOURCE, lambda: 3, **more)


def emit(events: Events, reason: str = "r") -> None:
    events.emit("node_refused", reason=reason)


def handled(events: Events) -> threading.Semaphore:
    """Released for each event that its thread has written, or could not write."""
    done, write = threading.Semaphore(0), events._outbox._send

    def send(record: dict) -> None:
        write(record)
        done.release()

    events._outbox._send = send
    return done


# The table.


def test_the_schema_is_valid_and_refuses_other_events():
    jsonschema.Draft202012Validator.check_schema(EVENT_SCHEMA)
    assert EVENT_SCHEMA["properties"]["schema"] == {"const": event_table.SCHEMA}
    assert all(event.get("required", []) == list(event["properties"]) for event in (EVENT_SCHEMA, *EVENTS.values()))
    line = event_table.record("node_refused", SOURCE, EventTime(0.5, 1.0, 3), {"reason": "r"})
    assert line["time"] == "1970-01-01T00:00:00.500000Z"
    VALIDATOR.validate(line)
    VALIDATOR.validate({**line, "event": "of a newer version", "more": 1})
    for wrong in ({"schema": 2}, {"reason": 1}, {"round": "3"}, {"time": "now"}):
        assert list(VALIDATOR.iter_errors({**line, **wrong})), wrong
    assert list(VALIDATOR.iter_errors({key: value for key, value in line.items() if key != "reason"}))


@pytest.mark.parametrize(("name", "own"), [("no_event", {}), ("node_refused", {}), ("node_refused", {"reason": "r", "more": 1})])
def test_unknown_and_missing_fields_are_errors(name, own):
    with pytest.raises(ValueError):
        event_table.record(name, SOURCE, EventTime(0.0, 0.0, 0), own)


def test_the_package_emits_what_the_table_says():
    """Also where no test gets to: each call names an event and gives all of its fields by name."""
    emitted = {}
    for path in Path(elastic_ext.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit" and node.keywords:
                (name,) = node.args
                assert isinstance(name, ast.Constant), path
                emitted[name.value] = {each.arg for each in node.keywords}
    emitted["events_dropped"] = {"count"}
    assert emitted == FIELDS


def test_secrets_and_forged_lines_do_not_get_in():
    settings = Settings(etcd_password="hunter22", etcd_user="me", checkpoint_dir="s3://key:hunter33@bucket/x", hang_timeout=0.0)
    shown = shown_settings(settings)
    assert shown.keys() == {"etcd_user", "checkpoint_dir", "hang_timeout"}
    own = {
        **dict.fromkeys(("version", "torch", "backend"), "a\nb\x1b[0m\ud800"),
        "workers": 1,
        "max_restarts": 1,
        "settings": shown,
    }
    line = json.dumps(event_table.record("agent_started", SOURCE, EventTime(0.0, 0.0, 0), own))
    assert "hunter" not in line
    assert r"\n" not in line.replace(r"\\n", "")
    assert "***@bucket" in line


@pytest.mark.parametrize("length", range(event_table.MAX_TEXT - 20, event_table.MAX_TEXT))
def test_a_secret_cut_by_the_limit_stays_out(length):
    reason = "x" * (length - 1) + " https://user:hunter44@host/x"
    line = json.dumps(event_table.record("node_refused", SOURCE, EventTime(0.0, 0.0, 0), {"reason": reason}))
    assert "hunter" not in line
    assert "user:" not in line


def test_how_an_agent_ended():
    assert ended(None, None, clean=True) == (0, "succeeded")
    assert ended(None, None, clean=False) == (1, "error")  # the rendezvous was closed: torch then fails
    assert ended(None, 65, clean=False) == (65, "failed")
    assert ended(SystemExit(78), None, clean=False) == (78, "error")
    assert ended(OSError(), None, clean=False) == (1, "error")


# The file.


@pytest.mark.full
def test_lines_of_several_processes_do_not_mix(tmp_path):
    code = (
        "import sys\nfrom elastic_ext.events.output import Events\nfrom elastic_ext.events.event_table import Source\n"
        "events = Events(sys.argv[1], Source('job', sys.argv[2], 1), lambda: 0, 10**6)\n"
        "for _ in range(500): events.emit('node_refused', reason='x' * 900)\n"
        "events.close(300)"
    )
    path = tmp_path / "events"
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [each.wait(300) for each in started] == [0, 0, 0]
    found = read(path)
    assert [sum(each["node"] == name for each in found) for name in "abc"] == [500, 500, 500]


@pytest.mark.seam
def test_stdout(tmp_path):
    code = (
        "from elastic_ext.events.output import Events\nfrom elastic_ext.events.event_table import Source\n"
        "events = Events('stdout', Source('job', 'n', 1), lambda: 0)\nevents.emit('node_refused', reason='r')\nevents.close(300)"
    )
    (tmp_path / "out").write_bytes(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    assert names(read(tmp_path / "out")) == ["node_refused"]


def test_a_file_that_was_rotated_away_is_left(tmp_path):
    path = tmp_path / "events"
    events = open_events(path)
    done = handled(events)
    emit(events, "before")
    assert done.acquire(timeout=LIMIT_S)
    path.rename(tmp_path / "events.1")
    emit(events, "after")
    events.close(LIMIT_S)
    assert [each["reason"] for each in (*read(tmp_path / "events.1"), *read(path))] == ["before", "after"]


def test_a_link_is_not_followed(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    events = open_events(tmp_path / "link")
    emit(events)
    emit(events)
    events.close(LIMIT_S)
    assert not (tmp_path / "target").exists()
    assert caplog.text.count("events are dropped until it works") == 1


def test_a_full_disk_loses_events_and_counts_them(tmp_path):
    """The limit of a file's size makes real half lines, as a full disk does."""
    path, limit = tmp_path / "events", 1000
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = open_events(path)
    done = handled(events)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        for _ in range(20):
            emit(events, "x" * 300)  # the limit is no multiple of such a line, however long the machine has been up
        assert all(done.acquire(timeout=LIMIT_S) for _ in range(20))
        full = path.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    emit(events, "last")
    events.close(LIMIT_S)
    assert len(full) == limit
    torn = full.rpartition(b"\n")[2]
    assert torn
    text = path.read_bytes().replace(torn + b"\n", b"", 1)
    path.write_bytes(text)
    found = read(path)
    written = names(found).count("node_refused") - 1
    assert names(found)[-2:] == ["events_dropped", "node_refused"]
    assert found[-2]["count"] == 20 - written


def test_a_reader_that_stops_holds_up_nothing(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    events = open_events(path, most=10)
    done_with = handled(events)
    emit(events, "nobody listens")  # there is no reader yet
    assert done_with.acquire(timeout=LIMIT_S)
    assert events._lost == 1
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 16)  # by default it holds 16 pages, of whatever size
    for _ in range(2000):
        emit(events, "x" * 900)
    text, done = bytearray(), threading.Event()

    def drain() -> None:
        os.set_blocking(reader, True)
        while chunk := os.read(reader, 1 << 16):
            text.extend(chunk)
        done.set()

    threading.Thread(target=drain, daemon=True).start()
    events.close(LIMIT_S)
    assert done.wait(LIMIT_S)
    os.close(reader)
    (tmp_path / "read").write_bytes(text)
    found = read(tmp_path / "read")
    dropped = sum(each["count"] for each in found if each["event"] == "events_dropped")
    assert dropped > 1000
    assert dropped + names(found).count("node_refused") == 2001


# Real jobs.

STEPS = """
import os, signal, time, torch
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
open(f"{attempt}.{rank}", "w").close()
while not os.path.exists(f"{attempt}.{1 - rank}"):
    time.sleep(0.001)
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), 9)
if attempt == 1 and rank == 0:
    misspelled
signal.pause()
"""


@pytest.mark.seam
def test_events_and_spans_of_crash_and_bug(tmp_path):
    """A worker is killed, the job recovers, and a bug ends it. Torch's own events are there, too."""
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    (tmp_path / "job.py").write_text(STEPS)
    secret = {"ELASTIC_EXT_ETCD_PASSWORD": "hunter2222", "ELASTIC_EXT_BACKOFF": "0"}
    job = run(
        [
            *AGENT,
            "--nproc-per-node=2",
            "--max-restarts=3",
            "--event-log-handler=console",
            "--rdzv-id=job1",
            str(tmp_path / "job.py"),
        ],
        tmp_path,
        ELASTIC_EXT_EVENTS_FILE=str(tmp_path / "events"),
        OTEL_TRACES_EXPORTER="console",
        OTEL_SERVICE_NAME="mine",
        **secret,
    )
    assert job.returncode == 65, job.all
    found = read(tmp_path / "events")
    first = ["round_started", "workers_started", "first_step"]
    failed = ["failure", "decision", "workers_stopped"]
    assert names(found) == ["agent_started", *first, *failed, *first, "recovered", *failed, "agent_ended"]
    assert [each["round"] for each in found] == [0] + 6 * [1] + 8 * [2]
    assert {(each["run_id"], each["pid"]) for each in found} == {("job1", found[0]["pid"])}
    assert "hunter2222" not in (tmp_path / "events").read_text()
    assert "events_file" in found[0]["settings"]
    crash, bug = (each for each in found if each["event"] == "failure")
    assert (crash["rank"], crash["signal"], crash["exit_code"]) == (1, "SIGKILL", None)
    assert (bug["rank"], bug["kind"], bug["exception"]) == (0, "code", "NameError")
    again, stop = (each for each in found if each["event"] == "decision")
    assert (again["decision"], again["charged"], again["restarts"], again["max_restarts"]) == ("restart", True, 1, 3)
    assert (stop["action"], stop["kind"], stop["exit_code"], stop["culprit_rank"]) == ("stop", "code", 65, 0)
    (recovered,) = (each for each in found if each["event"] == "recovered")
    assert list(again["phases"]) == ["stop", "verdict"]
    assert again["phases"]["stop"] == recovered["phases"]["stop"]
    assert recovered["cause"] == again["kind"]
    assert list(recovered["phases"]) == ["stop", "verdict", "rendezvous", "start", "first_step"]
    assert abs(sum(recovered["phases"].values()) - recovered["seconds"]) < 0.001
    assert (found[-1]["exit_code"], found[-1]["state"]) == (65, "failed")
    assert '"source": "WORKER"' in job.err
    assert_spans(spans(job.out), recovered, [crash["kind"], bug["kind"]])


def spans(text: str) -> list[dict]:
    """What OpenTelemetry's console exporter has written between the output of workers."""
    decoder, found = json.JSONDecoder(), []
    while "{\n" in text:
        span, end = decoder.raw_decode(text := text[text.index("{\n") :])
        text = text[end:]
        found.append(span)
    return found


def assert_spans(found: list[dict], recovered: dict, kinds: list[str]) -> None:
    whole, stopped = (each for each in found if each["name"] == "recovery")
    children = [each["name"] for each in found if each["parent_id"] == whole["context"]["span_id"]]
    assert children == ["failure", *recovered["phases"]]
    assert whole["attributes"]["elastic_ext.decision"] == "restart"
    assert whole["attributes"]["elastic_ext.round"] == 1
    assert whole["attributes"]["elastic_ext.reason"] == recovered["reason"]
    assert whole["status"]["status_code"] == "UNSET"
    assert whole["resource"]["attributes"]["service.name"] == "mine"
    assert stopped["status"]["status_code"] == "ERROR"
    assert stopped["attributes"]["elastic_ext.kind"] == stopped["attributes"]["error.type"] == "code"
    assert [each["attributes"]["error.type"] for each in found if each["name"] == "failure"] == kinds


@pytest.mark.full
def test_the_events_of_a_hang(tmp_path):
    where = {"ELASTIC_EXT_EVENTS_FILE": str(tmp_path / "events"), "STOP": str(tmp_path / "stop")}
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=3", "--rdzv-conf=hang_timeout=6,backoff=0"]
    with Job([*command, str(SCRIPTS / "hang_job.py"), "deadlock:1"], tmp_path, **where) as job:
        (url,) = job.wait_for(r"serving (http://\S+)")
        job.wait_for('"attempt": 1', count=2)
        page = urlopen(url[1], timeout=LIMIT_S).read().decode()
        assert "elastic_ext_hangs_total 1.0\n" in page
        assert float(re.search(r'elastic_ext_recovery_seconds_sum{phase="detect"} (\S+)', page)[1]) >= 6
        (tmp_path / "stop").touch()
        assert job.finish().returncode == 0
    found = read(tmp_path / "events")
    at = names(found).index("round_over")
    assert names(found)[at : at + 5] == ["round_over", "hang", "failure", "decision", "workers_stopped"]
    assert found[at]["cause"] == "stalled"
    assert found[at + 1]["culprits"] == [1]
    assert found[at + 1]["seconds"] >= 6
    assert (found[at + 2]["kind"], found[at + 3]["culprit_rank"]) == ("hang", 1)
    assert names(found)[-3:] == ["recovered", "workers_stopped", "agent_ended"]
    assert found[-3]["cause"] == "hang"


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        (RoundEnd(EndKind.BROKEN, "lost b", lost=True), "node_lost"),
        (RoundEnd(EndKind.CUT_OFF, "this node is cut off"), "node_lost"),
        (RoundEnd(EndKind.BROKEN, "growing by c"), "membership"),
        (RoundEnd(EndKind.FAILED, "workers of b failed"), "membership"),
        (RoundEnd(EndKind.CLOSED, "b closed the job"), "membership"),
    ],
)
def test_the_end_of_a_round_has_a_kind(over, kind):
    assert cause_of(over) == event_table.Cause(kind, reason=over.reason)


def test_what_an_agent_saw_first_counts():
    """A restart is counted once its workers are stopped: the others may have begun the next round by then."""
    journal = object.__new__(Journal)
    journal._trace, journal.events = event_table.RecoveryTrace(), SimpleNamespace(emit=lambda *_, **__: None)
    later = RoundEnd(EndKind.BROKEN, "another round runs")
    assert journal.restarts_unfailed(None) == "membership"
    journal.round_over(RoundEnd(EndKind.BROKEN, "lost b", lost=True))
    assert journal.restarts_unfailed(later) == "node_lost"
    journal._trace.cause = None  # the next round has begun
    assert journal.restarts_unfailed(RoundEnd(EndKind.BROKEN, "lost c", lost=True)) == "node_lost"
    assert journal._trace.cause.reason == "lost c"


def node_of_two(name: str, server: EtcdServer, gate: Gate) -> Job:
    """A node of a job on etcd. Both write to one file; both are there before the last call is over."""
    folder = gate.path.parent
    command = [*TORCHRUN, "--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=1:2"]
    conf = "--rdzv-conf=lease_ttl=60,last_call_timeout=240,platform_grace=60"
    where = {"GATE": str(gate.path), "ELASTIC_EXT_EVENTS_FILE": str(folder / "events"), "ELASTIC_EXT_NODE_NAME": name}
    return Job([*command, conf, ELASTIC], folder, NODE=name, **where)


@pytest.mark.full
def test_events_of_two_nodes_when_one_leaves(server, tmp_path):
    """The nodes number the rounds alike."""
    gate = Gate(tmp_path / "gate")
    with node_of_two("a", server, gate) as stays, node_of_two("b", server, gate) as leaves:
        stays.wait_for('"world": 2')
        leaves.wait_for('"world": 2')
        leaves.process.send_signal(signal.SIGTERM)
        assert leaves.finish().returncode == 75
        stays.wait_for('"world": 1, "attempt": 1')
        gate.open()
        assert stays.finish().returncode == 0
    found = read(tmp_path / "events")
    a, b = ([each for each in found if each["node"] == name] for name in "ab")
    started = ["agent_started", "round_started", "workers_started"]
    assert names(b) == [*started, "preemption_noticed", "workers_stopped", "agent_ended"]
    assert (b[3]["signal"], b[3]["grace"]) == ("SIGTERM", 60)
    assert (b[-1]["exit_code"], b[-1]["state"]) == (75, "signalled")
    after = ["round_over", "workers_stopped", "round_started", "membership_changed", "workers_started"]
    assert names(a) == [*started, *after, "workers_stopped", "agent_ended"]
    assert (a[3]["cause"], a[5]["cause"]) == ("broken", "membership")
    assert (a[6]["world_size_before"], a[6]["world_size"]) == (2, 1)
    assert [each["round"] for each in a] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert a[-1]["state"] == "succeeded"


@pytest.mark.full
def test_a_lost_node_is_so_called_without_failures(server, tmp_path):
    """No worker fails of it: they are not in a collective. The event, the metric and the recovery say the same."""
    gate = Gate(tmp_path / "gate")
    with node_of_two("a", server, gate) as stays, node_of_two("b", server, gate) as lost:
        (url,) = stays.wait_for(r"serving (http://\S+)")
        stays.wait_for('"world": 2')
        lost.wait_for('"world": 2')
        lost.process.kill()
        stays.wait_for('"world": 1, "attempt": 1')
        page = urlopen(url[1], timeout=LIMIT_S).read().decode()
        gate.open()
        assert stays.finish().returncode == 0
    a = [each for each in read(tmp_path / "events") if each["node"] == "a"]
    assert not {"failure", "decision"} & set(names(a))
    (over,) = (each for each in a if each["event"] == "round_over")
    assert (over["cause"], over["kind"]) == ("broken", "node_lost")
    assert [each["cause"] for each in a if each["event"] == "round_started"] == ["start", "node_lost"]
    assert 'elastic_ext_restarts_total{kind="node_lost"} 1.0\n' in page
    assert 'elastic_ext_restarts_total{kind="membership"} 0.0\n' in page
