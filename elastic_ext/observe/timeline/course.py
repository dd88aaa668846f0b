"""What a picture shows: the course of a job, as plain values. Times are seconds since its beginning. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from elastic_ext.base import goodput

TRAINING, RUNNING, UNTOLD = goodput.PRODUCTIVE, "running", "untold"
STARTUP, START, RENDEZVOUS, WAITING = goodput.STARTUP, "start", goodput.RENDEZVOUS, goodput.WAITING
STOPPING, VERDICT, HANG, BACKOFF, GONE = goodput.STOPPING, "verdict", goodput.HANG, goodput.BACKOFF, "gone"
BETWEEN = "between"
MEMBERSHIP = "membership"  # kind of a mark that is no failure

# By state, for people. Colours are the picture's.
STATES: Mapping[str, str] = MappingProxyType(
    {
        TRAINING: "training",
        RUNNING: "workers run, steps not told",
        goodput.SAVE: "checkpoint save (stall)",
        goodput.DATA: "data wait",
        goodput.LOST: "lost work, done again",
        STARTUP: "start-up: imports, load, first step",
        goodput.COMPILE: "compile",
        goodput.LOAD: "checkpoint load",
        START: "starting workers",
        RENDEZVOUS: "rendezvous",
        WAITING: "waiting for nodes",
        goodput.DETECTION: "detection",
        STOPPING: "stopping",
        VERDICT: "verdict",
        HANG: "hang",
        BACKOFF: "backoff",
        BETWEEN: "not training",
        GONE: "no agent",
        goodput.IDLE: "idle: no agent",
        UNTOLD: "not known",
    }
)

NO_STATE = (GONE, UNTOLD)  # of no node that takes part
STOPS_THE_JOB = (STARTUP, START, STOPPING, VERDICT, HANG, BACKOFF)  # no other node can train while one does this


@dataclass(frozen=True)
class Span:
    """A stretch of time in one state. low, high: the part of its row's height, for shares of several states."""

    begin: float
    end: float
    state: str
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Row:
    """A node, or two agents' worth of one that ran side by side. spans: in order; between them nothing is known."""

    label: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Mark:
    """Something that ended a round, or an agent.

    Attributes:
        at: None if nothing tells when.
        row: index of the node's row; None: none, or not known.
        after: what followed, e.g. "resumed from step 40"; "".
    """

    at: float | None
    row: int | None
    node: str
    rank: int | None
    round: int
    kind: str
    decision: str
    reason: str
    after: str = ""


@dataclass(frozen=True)
class Start:
    """A round began."""

    at: float
    round: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was committed. seconds: from request to commit; None if unknown."""

    at: float
    step: int
    seconds: float | None


@dataclass(frozen=True)
class Course:
    """The whole.

    Attributes:
        began_unix: Unix time of its beginning; None if unknown.
        end: how it ended, or that it goes on.
        restarts: a line about them.
        rows: by rank. nodes: number of rows that are nodes; the first rows may be something else.
        spent: the part of the nodes' time in each state, as far as it is known.
        job: whether the job trains as a whole: spans of TRAINING, RUNNING or BETWEEN.
        trained: the part of the time in which it trained; None if unknown. trained_is: says so, with {} for it.
        notes: what is not known, and how sure the rest is.
    """

    run_id: str
    began_unix: float | None
    length: float
    end: str
    restarts: str
    rows: tuple[Row, ...]
    nodes: int
    spent: Mapping[str, float]
    job: tuple[Span, ...] = ()
    trained: float | None = None
    trained_is: str = "Trained {} of the time"
    rounds: tuple[Start, ...] = ()
    marks: tuple[Mark, ...] = ()
    saved: tuple[Saved, ...] = ()
    notes: tuple[str, ...] = ()


def shares(rows: Iterable[Row]) -> dict[str, float]:
    """Return the part of all nodes' time in each state that occurs, in the order of STATES. Time of no agent does not count."""
    seconds: dict[str, float] = {}
    for row in rows:
        for span in row.spans:
            seconds[span.state] = seconds.get(span.state, 0.0) + (span.end - span.begin) * (span.high - span.low)
    total = sum(each for state, each in seconds.items() if state not in NO_STATE) or 1.0
    return {state: seconds[state] / total for state in STATES if state in seconds}


def job_spans(rows: Sequence[Row], length: float) -> tuple[Span, ...]:
    """Return when the job trained as a whole: somebody trains, and nobody does what keeps the others from it."""
    changes = [
        (at, step, span.state)
        for row in rows
        for span in row.spans
        if span.end > span.begin
        for at, step in ((span.begin, 1), (span.end, -1))
    ]
    counts: dict[str, int] = {}
    found: list[Span] = []
    since, state = 0.0, ""
    for at, step, of in sorted(changes, key=lambda each: each[0]):
        if at > since and state:
            found.append(Span(since, at, state))
        counts[of] = counts.get(of, 0) + step
        since, state = at, _job_state(counts)
    if length > since and state:
        found.append(Span(since, length, state))
    return merged(found)


def _job_state(counts: Mapping[str, int]) -> str:
    stopped = any(counts.get(each) for each in STOPS_THE_JOB)
    if not stopped and (counts.get(TRAINING) or counts.get(RUNNING)):
        return TRAINING if counts.get(TRAINING) else RUNNING
    return BETWEEN if any(count for each, count in counts.items() if each not in NO_STATE) else GONE


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, with neighbours of one state as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].state == span.state and found[-1].end >= span.begin:
            found[-1] = replace(found[-1], end=max(found[-1].end, span.end))
        elif span.end > span.begin:
            found.append(span)
    return tuple(found)


def thinned(spans: Sequence[Span], cell: float) -> tuple[Span, ...]:
    """Return spans that can be seen: of those shorter than `cell` that follow each other, the state that takes longest counts."""
    found: list[Span] = []
    group: list[Span] = []

    def close() -> None:
        if group:
            seconds: dict[str, float] = {}
            for each in group:
                seconds[each.state] = seconds.get(each.state, 0.0) + each.end - each.begin
            found.append(Span(group[0].begin, group[-1].end, max(seconds, key=lambda state: seconds[state])))
            group.clear()

    for span in spans:
        if span.end - span.begin >= cell or (span.low, span.high) != (0.0, 1.0):
            close()
            found.append(span)
            continue
        if group and span.begin > group[-1].end:
            close()
        group.append(span)
        if group[-1].end - group[0].begin >= cell:
            close()
    close()
    return merged(found) if all((each.low, each.high) == (0.0, 1.0) for each in found) else tuple(found)


def levels(places: Sequence[float], apart: float, most: int) -> list[int | None]:
    """Return for each label, by its place in order, the first of `most` levels on which it has room; None: on none."""
    last = [-float("inf")] * most
    found: list[int | None] = []
    for place in places:
        free = next((level for level, at in enumerate(last) if place - at >= apart), None)
        found.append(free)
        if free is not None:
            last[free] = place
    return found
