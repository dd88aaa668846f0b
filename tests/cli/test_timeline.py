"""`elastic-ext timeline`: what it reads, what it draws, and what it says of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elastic_ext.cli.main import main
from elastic_ext.observe import event_table
from elastic_ext.observe.event_table import Moment, Source
from elastic_ext.observe.timeline import picture
from elastic_ext.observe.timeline.story import JOINING, TRAINING, Mark, Row, Span, Story
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Job

SHOT = Path(__file__).parents[2] / "entrypoints" / "monitoring" / "timeline.png"
WORST = "<script>alert(1)</script> $x^2$ \x1b[31m & ünïcode"


def line(name: str, at: float, node: str = "a", **own) -> str:
    """A line of events_file, as the agent writes it."""
    fields = {field.name: None for field in event_table.EVENTS[name].fields}
    return json.dumps(event_table.record(name, Source("job", node, 7), Moment(at, at, 1), {**fields, **own})) + "\n"


def life(reason: str = "r") -> str:
    parts = [line("agent_started", 0), line("round_started", 1, node_rank=0), line("workers_started", 2), line("first_step", 3)]
    parts += [
        line("failure", 9, rank=0),
        line("decision", 9, culprit_rank=0, kind="code", decision="stop", reason=reason, delay=0),
    ]
    return "".join([*parts, line("workers_stopped", 10), line("agent_ended", 11, exit_code=65)])


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text(life())
    return path


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")])
def test_each_form_is_whole(events, tmp_path, capsys, kind, begins):
    output = tmp_path / f"life.{kind}"
    assert main(["timeline", str(events), "-o", str(output)]) == 0
    assert output.read_bytes().startswith(begins)
    assert "job job: 11.0 s from 1970-01-01 00:00:00 UTC, 1 node, 0 restarts; trained 54.5%" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", output.name]


def test_texts_of_strangers_are_only_text(tmp_path):
    (tmp_path / "events").write_text(life(WORST))
    for kind in picture.FORMATS:
        assert main(["timeline", str(tmp_path / "events"), "-o", str(tmp_path / f"life.{kind}")]) == 0
    page = (tmp_path / "life.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "alert(1)" in page
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)  # nothing from elsewhere
    ElementTree.parse(tmp_path / "life.svg")


def test_unreadable_lines_are_named_and_the_others_count(tmp_path, capsys):
    whole = life()
    bad = ["{]\n", '{"schema": 1}\n', "[]\n", whole.splitlines()[0].replace('"schema": 1', '"schema": 9') + "\n"]
    (tmp_path / "events").write_text("".join(bad) + whole + '{"schema": 1, "half a li')
    assert main(["timeline", str(tmp_path / "events"), "-o", str(tmp_path / "life.svg")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [re.search(r"line (\d)", each).group(1) for each in said] == ["1", "2", "3", "4"]
    assert "no 'time'" in said[1]
    assert "schema 9, expected 1" in said[3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["EVENTS", "-o", "life.gif"], r"expected --output to end in .png, .svg or .html, got life.gif"),
        (["-o", "life.png"], r"expected files of events, or a job"),
        (["EVENTS", "--rdzv-id=j", "-o", "life.png"], r"expected files of events, or a job"),
        (["--rdzv-id=j", "-o", "life.png"], r"expected a job with --rdzv-endpoint and --rdzv-id"),
        (["/dev/null", "-o", "life.png"], r"no event in /dev/null"),
        (["/no/such", "-o", "life.png"], r"No such file"),
        (["EVENTS", "-o", "/no/such/life.png"], r"No such file"),
    ],
)
def test_wrong_usage_is_one_line_and_78(events, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", *(str(events) if each == "EVENTS" else each for each in arguments)]) == 78
    (found,) = capsys.readouterr().err.splitlines()
    assert re.search(said, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl"]


def test_two_jobs_are_not_one(events, tmp_path, capsys):
    (tmp_path / "other").write_text(life().replace('"run_id": "job"', '"run_id": "other"'))
    assert main(["timeline", str(events), str(tmp_path / "other"), "-o", str(tmp_path / "life.png")]) == 78
    assert "expected the events of one job, got 2: job, other" in capsys.readouterr().err


def test_a_job_that_nobody_knows_is_69(server: EtcdServer, tmp_path, capsys):
    output = str(tmp_path / "life.png")
    assert main(["timeline", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=none", "-o", output]) == 69
    assert "no job with --rdzv-id=none" in capsys.readouterr().err


@pytest.mark.long
def test_512_nodes_with_a_hundred_rounds_fit_on_one_picture():
    spans = tuple(Span(TRAINING if at % 2 else JOINING, at, at + 1) for at in range(100))
    rows = tuple(Row(f"node-{number:03}", spans) for number in range(512))
    marks = tuple(Mark(at, "node-000", "crash -> restart: x" * 20) for at in range(0, 100, 2))
    image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib")
    drawn = picture.draw(Story("job", 0, 100, rows, ((0, 50),), tuple(range(0, 100, 2)), marks, 49), "png")
    width, height = image.open(io.BytesIO(drawn)).size
    assert width < 2000
    assert height < 2500


@pytest.mark.long
def test_the_life_of_a_real_job(server: EtcdServer, tmp_path, capsys):
    """A worker is killed, then a whole node; it comes back; the job ends. The picture tells all of it, in this order."""
    with ExitStack() as stack:

        def start(node: str) -> Job:
            where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=demo", "--nnodes=2:3", "--max-restarts=5"]
            command = [*TORCHRUN, "--rdzv-backend=ext_etcd", *where, "--rdzv-conf=lease_ttl=2", SCRIPTS / "long_job.py", tmp_path]
            variables = {"NODE_NAME": node, "EVENTS_FILE": str(tmp_path / f"{node}.jsonl"), "STANDBY": "off"}
            return stack.enter_context(
                Job(command, tmp_path, **{f"ELASTIC_EXT_{name}": value for name, value in variables.items()})
            )

        def pids(node: str) -> list[int]:
            lines = (tmp_path / f"{node}.jsonl").read_text().splitlines()
            return [json.loads(each)["pids"] for each in lines if '"workers_started"' in each][-1]

        jobs = {node: start(node) for node in ("node-a", "node-b", "node-c")}
        jobs["node-a"].wait_for("steps of this round")
        os.kill(pids("node-b")[0], signal.SIGKILL)
        jobs["node-a"].wait_for("steps of this round", count=2)
        jobs["node-c"].process.kill()
        jobs["node-a"].wait_for("steps of this round", count=3)
        jobs["node-c again"] = start("node-c")
        jobs["node-a"].wait_for("steps of this round", count=4)
        live = ["timeline", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=demo", "-o", str(tmp_path / "live.html")]
        assert main(live) == 0
        (tmp_path / "end").touch()
        assert [job.finish().returncode for name, job in jobs.items() if name != "node-c"] == [0, 0, 0], jobs["node-a"].err
    files = [str(tmp_path / f"node-{name}.jsonl") for name in "cab"]
    for kind in picture.FORMATS:
        assert main(["timeline", *files, "-o", str(tmp_path / f"life.{kind}")]) == 0
    assert "3 nodes, 3 restarts" in capsys.readouterr().out
    page = (tmp_path / "live.html").read_text()
    assert "SIGKILL" in page
    assert "from the job&#x27;s status: give the files of events_file" in page
    page = (tmp_path / "life.html").read_text()
    killed, lost = page.index("SIGKILL"), page.index("last word of its agent")
    assert killed < lost
    image = pytest.importorskip("PIL.Image", reason="pillow makes the picture small: it comes with matplotlib")
    image.open(tmp_path / "life.png").convert("RGB").quantize(128, dither=0).save(SHOT, optimize=True)
