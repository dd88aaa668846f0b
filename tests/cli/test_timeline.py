"""`elastic-ext timeline`: its three kinds of picture, from the recorded events of a real job, and what it says of bad input."""

from __future__ import annotations

import io
import re
import sys
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elastic_ext.cli import job_source, main, timeline
from elastic_ext.timeline import builder, events, model
from tests.jobs import ROOT
from tests.status.pages_in_chromium import HTML, PHONE, chromium, document, served
from tests.until import LIMIT_S

with suppress(ImportError):  # on a fresh machine it lists the fonts, with a process of its own: no test is to be the first
    import matplotlib.font_manager  # noqa: F401

EVENTS = ROOT / "tests" / "data" / "timeline_events.jsonl"  # made by test_timeline_job.py
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SVG = "{http://www.w3.org/2000/svg}"


def run(capsys, *arguments):
    code = main.main(["timeline", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def job():
    pytest.importorskip("matplotlib", reason="pip install 'elastic_ext[timeline]'")
    found, faults = events.parse(EVENTS.read_text(), "events")
    assert faults == []
    return builder.from_events(found)


def test_what_the_recorded_job_did(job):
    """A crash, a lost node, a requeue of the whole job, and its end."""
    assert sorted(each.label for each in job.rows) == ["n0", "n1", "n2"]
    kinds = [each.kind for each in job.interruptions]
    assert [kinds.count(kind) for kind in ("unknown", "node lost", "preemption")] == [1, 1, 1]
    crash = job.interruptions[0]
    assert (crash.node, crash.decision, crash.after[:17]) == ("n1", "restart", "resumed from step")
    assert [each.round for each in job.rounds][:3] == [1, 2, 3]
    assert len(job.saved) >= 12
    assert job.end == "ended: succeeded"
    for row in job.rows:  # no hole, no overlap
        assert all(one.end == two.begin for one, two in zip(row.spans, row.spans[1:], strict=False))
        assert row.spans[-1].end == job.length
        assert {model.TRAINING, model.STARTUP, model.GONE} <= {each.state for each in row.spans}
    assert sum(each.end - each.begin for each in job.job) == pytest.approx(job.length)


def test_the_three_kinds(job, tmp_path, capsys):
    for kind in ("png", "svg", "html"):
        code, out, err = run(capsys, EVENTS, "-o", tmp_path / f"life.{kind}")
        assert (code, err) == (0, ""), err
        assert "3 rows" in out
    assert (tmp_path / "life.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.fromstring((tmp_path / "life.svg").read_text())
    titles = [each.text or "" for each in root.iter(f"{SVG}title")]
    assert len(titles) > 40
    assert any(each.startswith("n1: training\nfrom ") for each in titles)
    assert any(each.startswith("1: ") and "SIGKILL" in each for each in titles)
    assert any(re.fullmatch(r"step \d+ saved in .*", each) for each in titles)
    page = (tmp_path / "life.html").read_text()
    assert "was killed by SIGKILL" in page
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page)


def test_what_an_event_says_is_text(job, tmp_path, capsys):
    (tmp_path / "e.jsonl").write_text(
        EVENTS.read_text().replace("was killed by SIGKILL", "<script>owned=1</script></title> $x_{1}$")
    )
    for kind in ("svg", "html"):
        assert run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / f"life.{kind}")[0] == 0
        text = (tmp_path / f"life.{kind}").read_text()
        assert "&lt;script&gt;owned=1&lt;/script&gt;" in text
        assert "<script" not in text


@pytest.mark.full
def test_the_page_in_a_browser(job, tmp_path, capsys):
    """What an event says is text, whatever it says; light and dark; a phone scrolls the picture, not the page."""
    text = EVENTS.read_text().replace(
        "was killed by SIGKILL", HTML.replace('"', "'") + "</title><script>owned=1</script> $x_{1}$"
    )
    (tmp_path / "e.jsonl").write_text(text)
    assert run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / "life.html")[0] == 0
    with chromium() as browser:
        colors = set()
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=PHONE, color_scheme=scheme)
            page.goto(f"file://{tmp_path}/life.html")
            assert page.evaluate("typeof owned") == "undefined"
            assert page.evaluate("document.images.length + document.scripts.length") == 0
            assert page.evaluate(WIDER) <= 0
            assert "$x_{1}$" in page.inner_text("td >> nth=7")
            colors.add(page.evaluate("getComputedStyle(document.querySelector('svg text')).fill"))
            page.close()
        assert len(colors) == 2


def test_512_nodes_and_60_failures_fit_one_image(job):
    from elastic_ext.timeline import picture

    rows = tuple(model.Row(f"node-{number:03}", job.rows[number % 3].spans) for number in range(512))
    times = [job.length * number / 61 for number in range(60)]
    ends = tuple(model.Interruption(at, row, "n", 1, 1, "code", "stop", "x" * 500) for row, at in enumerate(times))
    big = model.Timeline("big", None, job.length, "", "", rows, 512, {}, job.job, interruptions=ends)
    root = picture.svg_tree(big, listed=True)
    assert len(root.findall(f".//{SVG}image")) == 1
    titles = [each.text or "" for each in root.iter(f"{SVG}title")]
    assert sum(each.startswith("node-") for each in titles) == 512
    shown = [each.text or "" for each in root.iter(f"{SVG}text")]
    labels = [each for each in shown if each.startswith("node-")]
    assert 40 < len(labels) < 120
    assert "… 20 more are not listed" in shown
    assert float(root.get("height", "0pt")[:-2]) / 72 < 25  # inches
    assert len(picture.html(big)) < 2_000_000
    numbers = {each for each in shown if each.isdecimal() and len(each) <= 2}
    assert {"1", "20", "41", "60"} <= numbers


@pytest.mark.seam
def test_by_the_page_of_an_agent(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job_source, "TIMEOUT_S", LIMIT_S)
    with served(document(4)) as url:
        assert run(capsys, f"--url={url}", "-o", tmp_path / "life.svg")[0] == 0
    shown = [each.text or "" for each in ElementTree.fromstring((tmp_path / "life.svg").read_text()).iter(f"{SVG}text")]
    assert any(each.startswith("Job llama-70b: 1 h, round 2") for each in shown)
    assert any("Only events" in each for each in shown)
    assert run(capsys, f"--url={url}", "-o", tmp_path / "life.svg")[::2][0] == timeline.EX_UNAVAILABLE


@pytest.mark.seam
def test_a_job_that_etcd_does_not_know(job, tmp_path, capsys, server):
    code, _, err = run(capsys, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=none", "-o", tmp_path / "life.svg")
    assert code == timeline.EX_UNAVAILABLE
    assert "no job with --rdzv-id=none" in err


def test_a_bad_line_is_named_others_are_drawn(job, tmp_path, capsys, monkeypatch):
    (tmp_path / "e.jsonl").write_text(EVENTS.read_text() + '{"schema":1}\n\n{"half": ')
    code, _, err = run(capsys, tmp_path / "e.jsonl", "-o", tmp_path / "life.png")
    count = len(EVENTS.read_text().splitlines())
    assert (code, err) == (
        78,
        f"elastic-ext: {tmp_path}/e.jsonl:{count + 1}: event is missing, or no text\n",
    ) or "monotonic" in err
    assert len(err.splitlines()) == 1
    assert (tmp_path / "life.png").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EVENTS.read_bytes())))
    assert run(capsys, "-", "-o", tmp_path / "stdin.png")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected files of events"),
        (("--rdzv-endpoint=x",), "expected files of events"),
        (("{events}", "--url=http://x"), "expected files of events"),
        (("{events}", "--ca=x"), "belong to --url"),
        (("{events}", "--rdzv-id=other"), "no events of a job other"),
        (("{empty}",), "no events in"),
        (("{missing}",), "cannot be read"),
        (("{two}",), "events of 2 jobs: llama-70b, second; choose one with --rdzv-id"),
        (("{events}", "-o", "life.gif"), "expected a name that ends with .png, .svg, .html"),
        (("{events}", "-o", "{missing}/life.png"), "cannot be written"),
    ],
)
def test_wrong_usage(job, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").touch()
    first = EVENTS.read_text().splitlines()[0]
    (tmp_path / "two").write_text(first + "\n" + first.replace('"run_id":"llama-70b"', '"run_id":"second"') + "\n")
    places = {"events": EVENTS, "empty": tmp_path / "empty", "missing": tmp_path / "missing", "two": tmp_path / "two"}
    where = ["-o", str(tmp_path / "life.png")] if "-o" not in arguments else []
    code, out, err = run(capsys, *(each.format(**places) for each in arguments), *where)
    assert (code, out, len(err.splitlines())) == (78, "", 1)
    assert said in err
    assert not (tmp_path / "life.png").exists()


def test_without_matplotlib_the_error_names_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, EVENTS, "-o", tmp_path / "life.png")
    assert (code, err) == (78, f"elastic-ext: {timeline.MISSING}\n")
    assert not Path(tmp_path / "life.png").exists()
