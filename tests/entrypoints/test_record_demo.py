"""The picture of the demonstration: it is what the demonstration printed, and no more than a page may load."""

from __future__ import annotations

import xml.etree.ElementTree as xml

import pytest

from entrypoints.record_demo import ROWS, Line, chosen, draw
from tests.jobs import ROOT

PICTURE = ROOT / "entrypoints" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"

PRINTED = [
    "$ python -m elastic_ext.agent",
    "UserWarning: of a library",
    *(f"    epoch 0 step {step} loss 5.7" for step in range(1, 26)),
    "",
    ">>> kill -9 7  (the worker of rank 1)",
    "2026-11-22 13:23:51,359 node1 ERROR elastic_ext: restart: rank 1 was killed & more",
    "    resumed from /tmp/step_00000020 at step 20",
    *(f"    epoch 0 step {step} loss 5.7" for step in range(21, 61)),
    "    done at step 60 of 60",
    "",
    "The job finished. From the kill to the next training step: 0.4 s.",
]


@pytest.fixture
def shown() -> list[Line]:
    return chosen([Line(10.0 * number, text) for number, text in enumerate(PRINTED)])


def test_it_shows_the_kill_and_the_recovery(shown: list[Line]) -> None:
    texts = [each.text for each in shown]
    kill = texts.index(">>> kill -9 7  (the worker of rank 1)")
    assert texts[0] == "$ make demo"
    assert texts[kill - 1] == "epoch 0 step 25 loss 5.7"
    assert texts[kill + 1] == "13:23:51 ERROR elastic_ext: restart: rank 1 was killed & more"
    assert texts[kill + 3] == "epoch 0 step 21 loss 5.7"
    assert texts[-1].startswith("The job finished.")
    assert not [text for text in texts if "UserWarning" in text]


def test_its_pauses_are_short(shown: list[Line]) -> None:
    times = [each.at for each in shown]
    assert times == sorted(times)
    assert times[-1] < 60


def test_it_is_a_picture_of_text(shown: list[Line]) -> None:
    for text, lines in ((draw(shown), len(shown)), (PICTURE.read_text(), None)):
        assert len(text) < 100_000
        found = list(xml.fromstring(text).iter(f"{SVG}text"))
        assert lines is None or len(found) == lines
        assert len(found) >= ROWS
        assert any(">>> kill -9" in (each.text or "") for each in found)
