"""The table of limits in elastic_ext/docs/hangs.md has the figures of the code."""

from __future__ import annotations

import re

import pytest

from elastic_ext.base.diagnosis import HANG
from elastic_ext.hangs import detector
from elastic_ext.hangs.detector import WAIT_FLOOR_S, Stuck, WaitFor
from tests.jobs import ROOT

PAGE = (ROOT / "elastic_ext" / "docs" / "hangs.md").read_text()
LIMITS = {15.0: "15 seconds", 60.0: "one minute", 1800.0: "half an hour"}


def test_limits_of_the_hang_table():
    table = PAGE.partition("| limit | where |\n|---|---|\n")[2].partition("\n\n")[0]
    shown = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line.split("|")[1]).strip() for line in table.splitlines()]
    assert len(set(WAIT_FLOOR_S.values())) == 2
    floors = (
        *(WAIT_FLOOR_S[WaitFor.RANKS], WAIT_FLOOR_S[WaitFor.DEVICE]),
        *(detector.IDLE_FLOOR_S, detector.WORKING_FLOOR_S, detector.START_FLOOR_S),
    )
    assert shown == [*(LIMITS[limit_s] for limit_s in floors), "more"]


def test_the_first_steps_quote_what_is_logged():
    steps = PAGE.partition("\n## ")[2].partition("\n## ")[0]
    assert steps.startswith("Your job hangs: do this\n")
    stack = 'File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce'
    logged = Stuck(0, 31, 60.2, condition="asleep", stack=f"Current thread 0x1 (most recent call first):\n  {stack}\n").reason
    logged += f" (kind {HANG}, rule hang)"
    quoted = [each for each in re.findall("`(.*?)`", steps) if " " in each]
    assert quoted == ["made no progress", "waits for other ranks", "kind hang"]
    assert all(each in logged for each in quoted)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (detector.QUANTILE_FACTOR, {10.0: "ten times the gap that 99 % stay below, at most half an hour"}),
        (detector.QUANTILE, {0.99: "ten times the gap that 99 % stay below"}),
        (detector.LONGEST_FACTOR, {2.0: "twice the longest gap"}),
        (detector.STEADY_GAPS, {20: "from the 20th step on"}),
        (detector.CONNECT_S, {0.01: "Both limits become 10 ms per rank"}),
        (detector.LONG_FLOOR_S, {1800.0: '"compile", "checkpoint": half an hour'}),
    ],
)
def test_other_figures_of_the_hang_page(value, text):
    assert text[value] in PAGE
