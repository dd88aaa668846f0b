"""The lines between an agent and its copier, and what the agent makes of them."""

from __future__ import annotations

import json

import pytest

from elastic_ext.base.records import OtherSchema, RecordError
from elastic_ext.checkpoints.copying.copier import Progress
from elastic_ext.checkpoints.copying.protocol import SCHEMA, Pulse, Report, decode, encode

BUSY = Report(7, None, 1.5, ("step_00000004.g0001",), "step_00000002.g0001", 1, "OSError: a\nb", "2 []")


@pytest.mark.parametrize("message", [BUSY, Report(), Pulse(5)])
def test_a_message_is_one_line_and_comes_back(message):
    line = encode(message)
    assert "\n" not in line
    assert decode(line.encode()) == message


def test_a_line_of_another_version_is_refused():
    with pytest.raises(OtherSchema, match="schema 2, expected 1"):
        decode(json.dumps({"schema": SCHEMA + 1, "pulse": 5}).encode())


@pytest.mark.parametrize(
    "line", [b"", b"a print", b"{}", b"[1]", b"\xff", b'{"schema": 1, "pulse": "x"}', b'{"schema": 1, "sent": []}']
)
def test_a_print_of_a_library_is_no_message(line):
    with pytest.raises(RecordError):
        decode(line)


def test_bytes_are_counted_once():
    progress = Progress(0.0)
    assert [progress.heard(Pulse(sent), 1.0) for sent in (10, 30)] == [10, 20]
    assert progress.heard(Report(sent=35), 2.0) == 5
    assert progress.heard(Pulse(4), 3.0) == 4
    progress.started(4.0)  # another process, which counts from 0 again
    assert progress.heard(Pulse(6), 5.0) == 6


def test_what_counts_as_progress():
    progress = Progress(0.0)
    waiting = Report(waiting=("a",), complete="b", others="2 []")
    progress.heard(waiting, 1.0)
    progress.heard(waiting, 2.0)
    assert (progress.progress_at, progress.heard_at, progress.working) == (1.0, 2.0, True)
    progress.heard(Report(waiting=("a",), complete="b", others="1 []"), 3.0)  # another node has sent something
    assert progress.progress_at == 3.0
    progress.heard(Report(complete="a"), 4.0)
    assert (progress.progress_at, progress.working) == (4.0, False)
    progress.ordered(5.0)
    assert (progress.heard_at, progress.working) == (5.0, True)
    progress.ordered(6.0)
    assert progress.heard_at == 5.0  # it had work already, and is silent since
