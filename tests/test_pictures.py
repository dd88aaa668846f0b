"""The pictures that pages show: each has a maker in `make pictures`, and none is large."""

from __future__ import annotations

import re

import pytest

from tests import pictures
from tests.jobs import ROOT


def test_each_picture_of_a_page_has_a_maker():
    shown = pictures.shown()
    assert len(shown) > 30, "the pages are found"
    assert set(shown) == pictures.made()


def test_no_maker_makes_a_picture_twice():
    made = [picture for each in pictures.MAKERS for picture in each.pictures]
    assert len(made) == len(set(made))
    assert not {f"{pictures.RESULTS}/{each}.png" for each in pictures.MEASURED} & set(made)


def test_no_picture_lies_around_unshown():
    there = {str(path.relative_to(ROOT)) for path in (ROOT / pictures.RESULTS).rglob("*.png")}
    there |= {str(path.relative_to(ROOT)) for path in (ROOT / "entrypoints").rglob("*.png")}
    assert there <= set(pictures.shown())


def test_the_tests_that_make_pictures_exist():
    tests = [part for each in pictures.MAKERS for part in each.command if "::" in part]
    assert len(tests) == 2
    for test in tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert f"def {name}(" in text
        assert re.search(r'"RECORD_\w+" in os\.environ', text)


@pytest.mark.parametrize("picture", sorted(pictures.made()))
def test_pictures_are_small_and_name_no_machine(picture):
    content = (ROOT / picture).read_bytes()
    assert len(content) < pictures.MOST_BYTES
    if picture.endswith(".svg"):
        assert not re.search(rb"/(home|root|work|Users)/", content)


def test_the_plots_are_those_that_are_drawn(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plots

    assert {str(path.relative_to(ROOT / pictures.RESULTS).with_suffix("")) for path in plots.drawn()} == set(pictures.DRAWN)
    assert plots.MEASURED == pictures.MEASURED
