"""Every page speaks to its reader, in short sentences. What the code generates and what is Korean is not counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import prose
from tests.jobs import ROOT

MOST_OF, LEAST_YOU = 15, 8  # in a thousand words
GENERATED = {"event_list.md", "metric_list.md", "rules.md", "settings.md"}
KOREAN = {"ko.md", "README.ko.md"}


def pages() -> list[Path]:
    found = [ROOT / "README.md", *ROOT.glob("elastic_ext/docs/*.md"), *ROOT.glob("entrypoints/**/*.md")]
    return sorted(path for path in found if path.name not in GENERATED | KOREAN)


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_speaks_to_its_reader(page: Path):
    found = prose.measure(page.read_text())
    assert found.longest == (), f"over {prose.MOST_WORDS} words"
    assert found.of <= MOST_OF, "noun compounds: 'NCCL hangs', not 'hangs of NCCL'"
    assert found.you >= LEAST_YOU, "say what you, the reader, do"


def test_what_is_measured():
    page = """# A heading of words

Kill the worker of rank 1. You see its [verdict](failures.md#of) at once;
`torchrun --of` ends.

- Your first point
- a second one of five words

| a | table of words |
```sh
of of of
```
"""
    found = prose.measure(page)
    assert found.words == 23
    assert found.per_sentence == pytest.approx(23 / 5)
    assert (round(found.of * found.words / 1000), round(found.you * found.words / 1000)) == (2, 2)
    assert found.longest == ()
    assert prose.measure("one " * 26 + ".").longest == (("one " * 26).strip() + " .",)
