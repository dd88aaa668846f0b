"""A trace keeps the rules of the Trace Event Format, and says what the timeline does."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from elastic_ext.timeline import events, spans, trace
from tests.jobs import ROOT

RECORDED = ROOT / "tests" / "data" / "timeline_events.jsonl"
ARGUMENT = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}
SCOPES = {"g", "p", "t"}  # of instant events: the whole trace, a process, a thread


@pytest.fixture(scope="module")
def job():
    found, faults = events.parse(RECORDED.read_text(), "events")
    assert faults == []
    return spans.timeline(found)


def check_format(text):
    """Check each record against the rules of its phase; return the document.

    X: ts and dur in microseconds, and those of a thread one inside the other or one after the other. i: ts and scope. M: the one
    argument of its name. Each thread has a name.
    """
    document = json.loads(text)
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices, named = {}, set()
    for record in document["traceEvents"]:
        thread = record["pid"], record["tid"]
        assert type(record["name"]) is str
        assert all(type(each) is int and each > 0 for each in thread)
        if record["ph"] == "M":
            argument, kind = ARGUMENT[record["name"]]
            assert {name: type(value) for name, value in record["args"].items()} == {argument: kind}
            named |= {thread} if record["name"] == "thread_name" else set()
            continue
        assert type(record["ts"]) is int
        assert record["ts"] >= 0
        assert type(record["cat"]) is str
        if record["ph"] == "X":
            assert type(record["dur"]) is int
            slices.setdefault(thread, []).append((record["ts"], record["ts"] + record["dur"]))
        else:
            assert (record["ph"], record["s"] in SCOPES) == ("i", True)
        assert thread in named
    for of_thread in slices.values():
        for (_, end), (begin, last) in itertools.pairwise(sorted(of_thread)):
            assert begin >= end or last <= end
    return document


def test_it_keeps_the_rules(job):
    check_format(trace.trace(job))


@pytest.mark.parametrize(
    ("field", "value"), [("ts", 1.5), ("ts", -1), ("dur", None), ("pid", 0), ("tid", 99), ("ph", "x"), ("name", None)]
)
def test_the_check_finds_what_breaks_them(job, field, value):
    document = json.loads(trace.trace(job))
    of_phase = next(each for each in document["traceEvents"] if each["ph"] == "X")
    of_phase[field] = value
    with pytest.raises((AssertionError, KeyError)):
        check_format(json.dumps(document))


def test_it_says_what_the_timeline_does(job):
    document = check_format(trace.trace(job))
    records = document["traceEvents"]
    phases = Counter(each["ph"] for each in records)
    assert phases["X"] == len(job.job) + sum(len(row.spans) for row in job.rows)
    assert phases["i"] == len(job.rounds) + len(job.saved) + len(job.interruptions)
    failures = [each for each in records if each.get("cat") == "failure"]
    assert [(each["name"], each["s"]) for each in failures] == [
        *(("unknown", "p"), ("node_lost", "p"), ("preemption", "p"), ("membership", "g"))
    ]
    first = failures[0]
    assert first["args"] == {"round": 1, "node": "n1", "rank": job.interruptions[0].rank, "decision": "restart"} | {
        "reason": job.interruptions[0].reason,
        "after": job.interruptions[0].after,
    }
    names = {each["pid"]: each["args"]["name"] for each in records if each["name"] == "process_name"}
    assert list(names.values()) == ["the whole job", *(row.label for row in job.rows)]
    assert names[first["pid"]] == "n1"
    stretches = [each for row in job.rows if row.label == "n1" for each in row.spans]
    stretch = max(stretches, key=lambda each: each.end - each.begin)
    longest = max((each for each in records if each["ph"] == "X" and each["pid"] == first["pid"]), key=lambda each: each["dur"])
    assert (longest["name"], longest["dur"] // 1_000_000) == (stretch.state, int(stretch.end - stretch.begin))
    assert sum(each["name"].startswith("step ") for each in records) == len(job.saved)
