"""The picture: valid XML with the rows, marks, key and table of a timeline, in light and dark, for any number of nodes."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from elastic_ext.timeline import events, spans, svg
from elastic_ext.timeline.spans import Interruption, Row, Span
from tests.jobs import ROOT
from tests.status.pages_in_chromium import HTML, chromium

RECORDED = ROOT / "tests" / "data" / "timeline_events.jsonl"
SVG = "{http://www.w3.org/2000/svg}"
# Texts that leave the picture or run into the text to their right, on the same line.
COLLIDE = """(() => { const boxes = [...document.querySelectorAll('text')].map(each => [each.textContent, each.getBBox()]);
  return boxes.filter(([text, box], index) => box.x < 0 || box.x + box.width > 900 || boxes.some(([other, beside], later) =>
    later > index && Math.abs(box.y - beside.y) < 8 && box.x < beside.x + beside.width - 1 && beside.x < box.x + box.width - 1)
  ).map(([text]) => text); })()"""


@pytest.fixture(scope="module")
def job():
    return spans.timeline(events.parse(RECORDED.read_text(), "events")[0])


def drawn(timeline):
    """The root of the picture, and its texts."""
    root = ElementTree.fromstring(svg.svg(timeline))
    return root, [each.text or "" for each in root.iter(f"{SVG}text")]


def test_it_shows_rows_marks_key_and_table(job):
    root, texts = drawn(job)
    assert root.get("viewBox", "").startswith("0 0 900 ")
    for expected in (
        "n0",
        "n1",
        "n2",
        "whole job",
        "round",
        "checkpoints",
        "no agent",
        "left with exit",
        "when",
    ):
        assert expected in texts, expected
    assert any(re.fullmatch(r"training \d\d\.\d%", each) for each in texts)
    assert texts[0] == job.headline
    assert "was killed by SIGKILL: " in " ".join(texts)
    assert job.interruptions[0].after in " ".join(texts)
    assert len(root.findall(f".//{SVG}path[@class='saved']")) == len(job.saved)
    assert len(root.findall(f".//{SVG}path[@class='round']")) == len(job.rounds)
    assert [len(root.findall(f".//{SVG}circle[@class='{each} dot']")) for each in ("failure", "change")] == [3, 0]
    assert [len(root.findall(f".//{SVG}circle[@class='{each}']")) for each in ("failure", "change")] == [3, 1]


def test_spans_stand_where_their_time_is(job):
    """The training of a row ends where its colour does."""
    one = replace(
        job, rows=(Row("a", (Span(0, 10, spans.TRAINING), Span(10, 40, spans.GONE))),), job=(), length=40.0, interruptions=()
    )
    root, texts = drawn(one)
    state = svg.CLASSES[spans.TRAINING]
    (shape, _) = root.findall(f".//{SVG}path[@class='{state}']")  # the other one is of the key
    left, right = 84, 862
    assert shape.get("d", "").startswith(f"M{left:.1f} ")
    assert f"H{left + (right - left) / 4:.1f}v" in shape.get("d", "")
    assert "No failures." in texts


def test_what_an_event_says_is_text(job):
    bad = replace(job.interruptions[0], reason="</text><script>owned=1</script> & ]]>", node="<b>", kind='"')
    text = svg.svg(replace(job, interruptions=(bad,), rows=(Row("<i>&", job.rows[0].spans),), notes=("<u>",), headline="<title>"))
    root = ElementTree.fromstring(text)
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "title", "style", "rect", "text", "path", "circle"}
    assert "&lt;script&gt;owned=1&lt;/script&gt;" in text


def test_512_nodes_and_60_failures_fit(job):
    rows = tuple(Row(f"node-{number:03}", job.rows[number % 3].spans) for number in range(512))
    marks = tuple(Interruption(job.length * row / 61, 1, "code", "x" * 500, row, "n", 1, "stop") for row in range(60))
    root, texts = drawn(replace(job, rows=rows, interruptions=marks))
    assert 40 < sum(each.startswith("node-") for each in texts) < 60
    assert "… 20 before these are not listed" in texts
    assert {"21", "60"} <= set(texts)
    assert float(root.get("height", "0")) < 4000
    assert len(ElementTree.tostring(root)) < 1_000_000


def test_a_year_of_restarts_is_thinned(job):
    short = [Span(at, at + 1, (spans.TRAINING, spans.STARTUP)[at % 2]) for at in range(100_000)]
    many = replace(job, rows=(Row("a", tuple(short)),), length=1e5, interruptions=(), saved=(), rounds=())
    assert len(svg.svg(many)) < 100_000


def test_labels_without_room_move_a_level():
    assert svg._levels([0, 1, 1.5, 1.6, 9], 2, 3) == [0, 1, 2, None, 0]


@pytest.mark.full
@pytest.mark.parametrize("length", [0.3, 7, 47, 3000, 9e4, 4e6, 4e7])
def test_it_reads_well_in_a_browser(job, tmp_path, length):
    """No text hides another or leaves the picture; light and dark differ; what an event says is text."""
    scale = length / job.length
    rows = tuple(
        Row(row.label * 4, tuple(Span(each.begin * scale, each.end * scale, each.state) for each in row.spans))
        for row in job.rows
    )
    marks = tuple(
        replace(each, at=each.at * scale, node="a-long-name-of-a-node-12", reason=HTML * 3) for each in job.interruptions
    )
    (tmp_path / "life.svg").write_text(svg.svg(replace(job, rows=rows, interruptions=marks, length=length, saved=(), rounds=())))
    colors = set()
    with chromium() as browser:
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 900, "height": 800}, color_scheme=scheme)
            page.goto(f"file://{tmp_path}/life.svg")
            assert page.evaluate("typeof owned") == "undefined"
            assert page.evaluate(COLLIDE) == []
            colors.add(page.evaluate("getComputedStyle(document.querySelector('text')).fill"))
            page.close()
    assert len(colors) == 2
