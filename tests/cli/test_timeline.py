"""`elastic-ext timeline`: its two kinds of file, from the recorded events of a real job, and what it says of bad input."""

from __future__ import annotations

import io
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from elastic_ext.cli import main
from elastic_ext.timeline import events, spans
from elastic_ext.timeline.spans import GONE, STARTUP, TRAINING
from tests.jobs import ROOT

EVENTS = ROOT / "tests" / "data" / "timeline_events.jsonl"  # made by test_timeline_job.py
PICTURE = ROOT / "entrypoints" / "monitoring" / "timeline.svg"


def run(capsys, *arguments):
    code = main.main(["timeline", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_what_the_recorded_job_did():
    """A crash, a lost node, a requeue of the whole job, and its end."""
    found, faults = events.parse(EVENTS.read_text(), "events")
    assert faults == []
    job = spans.timeline(found)
    assert sorted(each.label for each in job.rows) == ["n0", "n1", "n2"]
    assert [(each.kind, each.node, each.decision) for each in job.interruptions[:2]] == [
        ("unknown", "n1", "restart"),
        ("node_lost", "n2", "restart_free"),
    ]
    assert [each.kind for each in job.interruptions[2:]] == ["preemption", "membership"]
    assert re.fullmatch(r"resumed from step \d+0", job.interruptions[0].after)
    assert [number for _, number in job.rounds] == ["1", "2", "3", "4", "5"]
    assert len(job.saved) >= 12
    assert job.headline.endswith("ended: succeeded")
    for row in job.rows:  # no hole, no overlap
        assert all(one.end == two.begin for one, two in zip(row.spans, row.spans[1:], strict=False))
        assert row.spans[-1].end == job.length
        assert {TRAINING, STARTUP, GONE} <= {each.state for each in row.spans}
    assert sum(each.end - each.begin for each in job.job) == pytest.approx(job.length)


def test_the_two_kinds(tmp_path, capsys):
    for kind in ("json", "svg"):
        code, out, err = run(capsys, EVENTS, "-o", tmp_path / f"life.{kind}")
        assert (code, err) == (0, ""), err
        assert re.search(r"3 rows, 3 failures, \d+ checkpoints", out)
    assert len(json.loads((tmp_path / "life.json").read_text())["traceEvents"]) > 60
    assert ElementTree.fromstring((tmp_path / "life.svg").read_text()).tag == "{http://www.w3.org/2000/svg}svg"


def test_unreported_checkpoints_are_not_counted_as_none(tmp_path, capsys):
    lines = [line for line in EVENTS.read_text().splitlines(keepends=True) if '"checkpoint_saved"' not in line]
    (tmp_path / "e.jsonl").write_text("".join(lines))
    _, out, _ = run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / "life.svg")
    assert out.endswith("3 rows, 3 failures, no checkpoint reported\n")
    assert "No save is known" in (tmp_path / "life.svg").read_text()


def test_the_picture_of_the_docs_is_current(tmp_path, capsys):
    """`make pictures` records both. To draw it alone: elastic-ext timeline tests/data/timeline_events.jsonl -o FILE."""
    assert run(capsys, EVENTS, "-o", tmp_path / "life.svg")[0] == 0
    assert PICTURE.read_text() == (tmp_path / "life.svg").read_text()


def test_a_bad_line_is_named_others_are_shown(tmp_path, capsys, monkeypatch):
    (tmp_path / "e.jsonl").write_text(EVENTS.read_text() + '{"schema":1}\n\n{"half": ')
    code, _, err = run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / "life.svg")
    count = len(EVENTS.read_text().splitlines())
    assert (code, len(err.splitlines())) == (78, 1)
    assert err.startswith(f"elastic-ext: {tmp_path}/e.jsonl:{count + 1}: time is not")
    assert (tmp_path / "life.svg").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EVENTS.read_bytes())))
    assert run(capsys, "-", "-o", tmp_path / "stdin.svg")[0] == 0


def test_many_bad_lines_are_counted(tmp_path, capsys):
    (tmp_path / "e.jsonl").write_text("{\n" * 50 + EVENTS.read_text())
    code, _, err = run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / "life.svg")
    assert (code, len(err.splitlines())) == (78, 21)
    assert err.endswith("30 more lines are not events\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{events}", "--rdzv-id=other"), "no events of a job other"),
        (("{empty}",), "no events in"),
        (("{missing}",), "cannot be read"),
        (("{two}",), "events of 2 jobs: llama-70b, second; choose one with --rdzv-id"),
        (("{events}", "-o", "life.gif"), "--output life.gif: expected a name that ends with .json or .svg"),
        (("{events}", "-o", "life"), "expected a name that ends with .json or .svg"),
        (("{events}", "-o", "{missing}/life.svg"), "cannot be written"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, said):
    (tmp_path / "empty").touch()
    first = EVENTS.read_text().splitlines()[0]
    (tmp_path / "two").write_text(first + "\n" + first.replace('"run_id":"llama-70b"', '"run_id":"second"') + "\n")
    places = {"events": EVENTS, "empty": tmp_path / "empty", "missing": tmp_path / "missing", "two": tmp_path / "two"}
    where = ["-o", str(tmp_path / "life.svg")] if "-o" not in arguments else []
    code, out, err = run(capsys, *(each.format(**places) for each in arguments), *where)
    assert (code, out, len(err.splitlines())) == (78, "", 1)
    assert said in err
    assert not (tmp_path / "life.svg").exists()


def test_files_are_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["timeline", "-o", "life.svg"])
    assert ended.value.code == 78
    assert "EVENTS" in capsys.readouterr().err
