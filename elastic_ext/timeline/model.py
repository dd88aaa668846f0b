"""A timeline as plain values, and times for people. Times are seconds since the beginning of the timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from types import MappingProxyType

from elastic_ext.base import goodput

TRAINING, RUNNING, UNKNOWN = goodput.PRODUCTIVE, "running", "unknown"
STARTUP, START, RENDEZVOUS, WAITING = goodput.STARTUP, "start", goodput.RENDEZVOUS, goodput.WAITING
STOPPING, VERDICT, HANG, BACKOFF, GONE = goodput.STOPPING, "verdict", goodput.HANG, goodput.BACKOFF, "gone"
BETWEEN = "between"
MEMBERSHIP = "membership"  # kind of an interruption that is not a failure

# By state: what it means, and its colour.
STATES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        TRAINING: ("training", "#2e9e5b"),
        RUNNING: ("workers run, steps not reported", "#7cc29a"),
        goodput.SAVE: ("checkpoint save (stall)", "#2795a1"),
        goodput.DATA: ("data wait", "#9bb83a"),
        goodput.LOST: ("lost work, done again", "#d98cb3"),
        STARTUP: ("start-up: imports, load, first step", "#3f78c4"),
        goodput.COMPILE: ("compile", "#5aa9d6"),
        goodput.LOAD: ("checkpoint load", "#23458f"),
        START: ("starting workers", "#93b5e6"),
        RENDEZVOUS: ("rendezvous", "#8256b5"),
        WAITING: ("waiting for nodes", "#c0a6de"),
        goodput.DETECTION: ("detection", "#a34a28"),
        STOPPING: ("stopping", "#e8833a"),
        VERDICT: ("verdict", "#f2bd3c"),
        HANG: ("hang", "#c3272b"),
        BACKOFF: ("backoff", "#8a6d5c"),
        BETWEEN: ("not training", "#eab9a0"),
        GONE: ("no agent", "#c9c9c9"),
        goodput.IDLE: ("idle: no agent", "#c9c9c9"),
        UNKNOWN: ("not known", "#dedede"),
    }
)

NO_STATE = (GONE, UNKNOWN)  # of no node that takes part
STOPS_THE_JOB = (STARTUP, START, STOPPING, VERDICT, HANG, BACKOFF)  # no other node can train while one does this

_TICKS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000),
)
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


@dataclass(frozen=True)
class Span:
    """A stretch of time in one state. low, high: the part of its row's height, for shares of several states."""

    begin: float
    end: float
    state: str
    low: float = 0.0
    high: float = 1.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def fills_row(self) -> bool:
        return (self.low, self.high) == (0.0, 1.0)


@dataclass(frozen=True)
class Row:
    """A node, or two agents' worth of one that ran side by side. spans: in order; between them nothing is known."""

    label: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Interruption:
    """The end of a round, or of an agent."""

    at: float | None  # None if nothing says when
    row: int | None  # index of the node's row; None: none, or not known
    node: str
    rank: int | None
    round: int
    kind: str
    decision: str
    reason: str
    after: str = ""  # what followed, e.g. "resumed from step 40"; ""


@dataclass(frozen=True)
class Start:
    at: float
    round: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was committed. seconds: from request to commit; None if unknown."""

    at: float
    step: int
    seconds: float | None


@dataclass(frozen=True)
class Timeline:
    run_id: str
    began_unix: float | None  # Unix time of its beginning; None if unknown
    length: float
    end: str  # how it ended, or that it goes on
    restarts: str  # a line about them
    rows: tuple[Row, ...]  # by rank
    nodes: int  # number of rows that are nodes; the first rows may be something else
    spent: Mapping[str, float]  # the part of the nodes' time in each state, as far as it is known
    job: tuple[Span, ...] = ()  # whether the job trains as a whole: spans of TRAINING, RUNNING or BETWEEN
    trained: float | None = None  # the part of the time in which it trained; None if unknown
    trained_is: str = "Trained {} of the time"  # says so, with {} for it
    rounds: tuple[Start, ...] = ()
    interruptions: tuple[Interruption, ...] = ()
    saved: tuple[Saved, ...] = ()
    notes: tuple[str, ...] = ()  # what is not known, and how sure the rest is


def shares(rows: Iterable[Row]) -> dict[str, float]:
    """Return the part of all nodes' time in each state that occurs, in the order of STATES. Time of no agent does not count."""
    seconds = dict.fromkeys(STATES, 0.0)
    for row in rows:
        for span in row.spans:
            seconds[span.state] += span.seconds * (span.high - span.low)
    occur = {span.state for row in rows for span in row.spans}
    total = sum(each for state, each in seconds.items() if state not in NO_STATE) or 1.0
    return {state: each / total for state, each in seconds.items() if state in occur}


def job_spans(rows: Sequence[Row], length: float) -> tuple[Span, ...]:
    """Return when the job trained as a whole: some node trains, and no node does what keeps the others from it."""
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
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1] if groups else []
        is_long = span.seconds >= cell or not span.fills_row
        if last and not is_long and last[-1].end - last[0].begin < cell and last[-1].fills_row and span.begin <= last[-1].end:
            last.append(span)
        else:
            groups.append([span])
    found = [group[0] if len(group) == 1 else Span(group[0].begin, group[-1].end, _longest(group)) for group in groups]
    return merged(found) if all(each.fills_row for each in found) else tuple(found)


def _longest(spans: Sequence[Span]) -> str:
    seconds: dict[str, float] = {}
    for each in spans:
        seconds[each.state] = seconds.get(each.state, 0.0) + each.seconds
    return max(seconds, key=lambda state: seconds[state])


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


# Times for people.


def ticks(length: float, most: int) -> list[float]:
    """Return round times from 0 to `length` seconds, at most `most` + 1 of them."""
    step = next((each for each in _TICKS_S if length / each <= most), length)
    return [number * step for number in range(int(length / step + 1e-9) + 1)]


def offset(at: float, length: float) -> str:
    """Return a time since the beginning as `unit` says, as exact as a picture of `length` seconds needs it."""
    if length < MINUTE_S:
        return f"{at:.0f} s" if abs(at - round(at)) < 1e-6 else f"{at:.{2 if length < 2 else 1}f} s"
    seconds = round(at)
    hours, minutes = seconds // HOUR_S, seconds % HOUR_S // MINUTE_S
    if length < HOUR_S:
        return f"{seconds // MINUTE_S}:{seconds % MINUTE_S:02d}"
    if length < DAY_S:
        return f"{hours}:{minutes:02d}:{seconds % MINUTE_S:02d}"
    return f"{hours // 24} d {hours % 24}:{minutes:02d}"


def unit(length: float) -> str:
    """Return what `offset` counts in."""
    for limit, name in ((MINUTE_S, "seconds"), (HOUR_S, "min:s"), (DAY_S, "h:min:s")):
        if length < limit:
            return name
    return "days h:min"


def clock(unix_s: float, length: float) -> str:
    """Return a moment of the day in UTC, with the day if the picture spans several."""
    at = datetime.fromtimestamp(unix_s, timezone.utc)
    return at.strftime("%m-%d %H:%M" if length >= DAY_S else "%H:%M" if length >= 6 * HOUR_S else "%H:%M:%S")


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """Return a length of time: "45.2 s", "12 min 5 s", "3 h 12 min", "2 d 4 h"."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    for size, name, below, less in ((DAY_S, "d", HOUR_S, "h"), (HOUR_S, "h", MINUTE_S, "min"), (MINUTE_S, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {less}" if rest else "")
    return f"{whole} s"
