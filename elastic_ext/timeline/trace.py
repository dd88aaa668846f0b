"""Writes a timeline as a trace in Chrome's Trace Event Format, which Perfetto, speedscope and others open. Pure.

Each node is a process with one thread, and so is the job, with threads for its rounds and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elastic_ext.timeline.spans import Interruption, Span, Timeline

Record = dict[str, Any]
JOB, ROUNDS, CHECKPOINTS, NODES = 1, 2, 3, 4  # threads; a process has the number of its first one. 0 is the idle task of Linux


def trace(of: Timeline) -> str:
    """Return the trace as the text of a file. Its times count from the beginning of the job."""
    records = [*_named(JOB, JOB, "the whole job", "training"), *_spans(JOB, of.job)]
    records += _named(JOB, ROUNDS, "the whole job", "rounds") + _named(JOB, CHECKPOINTS, "the whole job", "checkpoints")
    records += [_instant(at, f"round {number}", ROUNDS) for at, number in of.rounds]
    records += [_instant(at, which, CHECKPOINTS) for at, which in of.saved]
    for pid, row in enumerate(of.rows, NODES):
        records += [*_named(pid, pid, row.label, "agent and workers"), *_spans(pid, row.spans)]
    records += [_failure(mark) for mark in of.interruptions]
    other = {"job": of.headline, "began_unix_s": of.began_unix, "notes": list(of.notes)}
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms", "otherData": other}) + "\n"


def _named(pid: int, tid: int, process: str, thread: str) -> list[Record]:
    names = ("process_name", {"name": process}), ("process_sort_index", {"sort_index": pid}), ("thread_name", {"name": thread})
    return [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, args in names]


def _spans(pid: int, spans: Sequence[Span]) -> list[Record]:
    of = {"ph": "X", "cat": "state", "pid": pid, "tid": pid}
    return [{**of, "name": each.state, "ts": _us(each.begin), "dur": _us(each.end) - _us(each.begin)} for each in spans]


def _instant(at: float, name: str, tid: int) -> Record:
    return {"ph": "i", "name": name, "cat": "job", "ts": _us(at), "s": "t", "pid": JOB, "tid": tid}


def _failure(mark: Interruption) -> Record:
    """Return an event of its node; of the whole trace, if it concerns no node."""
    pid, scope = (JOB, "g") if mark.row is None else (NODES + mark.row, "p")
    args = {"round": mark.round, "node": mark.node, "rank": mark.rank, "decision": mark.decision, "reason": mark.reason}
    known = {name: value for name, value in {**args, "after": mark.after}.items() if value not in ("", -1)}
    return {"ph": "i", "name": mark.kind, "cat": "failure", "ts": _us(mark.at), "s": scope, "pid": pid, "tid": pid, "args": known}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
