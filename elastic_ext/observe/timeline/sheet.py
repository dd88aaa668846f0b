"""What stands above and below the picture of a job: title, meanings of the colours, failures, notes; and the colours themselves.

Places are inches from the left and from the top.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.patches import Rectangle
from matplotlib.transforms import Transform

from elastic_ext.base import goodput
from elastic_ext.base.printable import cut
from elastic_ext.observe.timeline import axis, course
from elastic_ext.observe.timeline.course import Course, Mark

COLORS: Mapping[str, str] = {
    course.TRAINING: "#2e9e5b",
    course.RUNNING: "#7cc29a",
    goodput.SAVE: "#2795a1",
    goodput.DATA: "#9bb83a",
    goodput.LOST: "#d98cb3",
    course.STARTUP: "#3f78c4",
    goodput.COMPILE: "#5aa9d6",
    goodput.LOAD: "#23458f",
    course.START: "#93b5e6",
    course.RENDEZVOUS: "#8256b5",
    course.WAITING: "#c0a6de",
    goodput.DETECTION: "#a34a28",
    course.STOPPING: "#e8833a",
    course.VERDICT: "#f2bd3c",
    course.HANG: "#c3272b",
    course.BACKOFF: "#8a6d5c",
    course.BETWEEN: "#eab9a0",
    course.GONE: "#c9c9c9",
    goodput.IDLE: "#c9c9c9",
    course.UNTOLD: "#dedede",
}
ALARM, CHANGE = "#b3122f", "#6a4aa0"  # of marks: failures, and changes of membership
# These stand for what a page may show in its own colours: see `page`.
INK, SOFT, FAINT, PAPER, WARN = "#101112", "#5b5c5d", "#d7d8d9", "#fefdfc", "#b31230"

WIDTH = 14.0  # of the picture
MARGIN, LINE, KEY, CHARACTER = 0.35, 0.2, 0.24, 0.07
MOST_LISTED = 40  # failures; of more, the first and the last
COLUMNS = (("", 3), ("when", 11), ("round", 7), ("node", 18), ("rank", 6), ("kind", 13), ("decision", 24), ("reason", 0))
REASON = 110  # characters


@dataclass(frozen=True)
class Text:
    """A line of text. y: of its middle."""

    x: float
    y: float
    text: str
    size: float = 8.5
    color: str = INK
    bold: bool = False

    def lower(self, by: float) -> Text:
        return replace(self, y=self.y + by)


@dataclass(frozen=True)
class Box:
    """A box of colour. y: of its middle."""

    x: float
    y: float
    width: float
    height: float
    color: str


@dataclass(frozen=True)
class Sheet:
    """What stands below the picture."""

    texts: tuple[Text, ...]
    boxes: tuple[Box, ...]
    height: float


def headline(of: Course) -> str:
    """Return what the picture shows, in one line."""
    return f"Job {of.run_id}: {axis.duration(of.length)}, {of.restarts}, {of.end}"


def subtitle(of: Course) -> str:
    """Return how the job did, in one line."""
    began = f"Began {axis.moment(of.began_unix)}. " if of.began_unix is not None else ""
    trained = of.trained_is.format(f"{of.trained:.1%}") + ". " if of.trained is not None else ""
    changes = sum(each.kind == course.MEMBERSHIP for each in of.marks)
    counts = ((len(of.marks) - changes, "failure"), (changes, "change of members"), (len(of.saved), "checkpoint saved"))
    return began + trained + ", ".join([_counted(of.nodes, "node"), *(_counted(*each) for each in counts if each[0])]) + "."


def _counted(count: int, what: str) -> str:
    first, *rest = what.split(" ")
    return " ".join((str(count), first if count == 1 else f"{first}s", *rest))


def color(mark: Mark) -> str:
    """Return the colour of a mark."""
    return CHANGE if mark.kind == course.MEMBERSHIP else ALARM


def title(of: Course) -> list[Text]:
    """Return the lines above the picture."""
    return [Text(MARGIN, 0.27, cut(headline(of), 120), 14, bold=True), Text(MARGIN, 0.57, cut(subtitle(of), 190), 9.5, SOFT)]


def below(of: Course, listed: bool) -> Sheet:
    """Return what stands below the picture. listed: with failures and notes."""
    texts, boxes, y = _key(of)
    if listed:
        for make in (_list, _notes):
            more, y = make(of, y)
            texts += more
    return Sheet(tuple(texts), tuple(boxes), y + 0.15)


def patch(corner: tuple[float, float], size: tuple[float, float], color: str, transform: Transform) -> Rectangle:
    """Return a box for a figure."""
    return Rectangle(corner, *size, facecolor=color, edgecolor="none", transform=transform)


def _key(of: Course) -> tuple[list[Text], list[Box], float]:
    """Return the meanings of the colours, and how much of the nodes' time each has."""
    there = {span.state for row in of.rows for span in row.spans} | {span.state for span in of.job} | of.spent.keys()
    entries = [(name, state, of.spent.get(state)) for state, name in course.STATES.items() if state in there]
    texts: list[Text] = [Text(MARGIN, 0.12, "What the nodes did, in % of their time; rows by first rank", 8.5, SOFT)]
    boxes: list[Box] = []
    x, y = MARGIN, 0.12 + KEY
    for name, state, part in entries:
        text = name + (f" {part:.1%}" if part is not None and state not in course.NO_STATE else "")
        width = 0.42 + CHARACTER * len(text)
        if x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + KEY
        boxes.append(Box(x, y, 0.2, 0.13, COLORS[state]))
        texts.append(Text(x + 0.27, y, text))
        x += width
    return texts, boxes, y + KEY


def columns(mark: Mark, number: int, of: Course, most: int = 0) -> tuple[str, ...]:
    """Return a failure as the columns of a table. most: characters of the reason; 0: all."""
    when = axis.offset(mark.at, of.length) if mark.at is not None else "?"
    after = f" — {mark.after}" if mark.after else ""
    reason = (cut(mark.reason, most - len(after)) if most else mark.reason) + after
    rank = "" if mark.rank is None else str(mark.rank)
    return (str(number), when, str(mark.round), mark.node, rank, mark.kind, mark.decision, reason)


def listed(marks: Sequence[Mark]) -> list[tuple[int, Mark | None]]:
    """Return the failures to list with their numbers; None stands for those that are left out."""
    numbered: list[tuple[int, Mark | None]] = list(enumerate(marks, 1))
    if len(marks) <= MOST_LISTED:
        return numbered
    half = MOST_LISTED // 2
    return [*numbered[:half], (len(marks) - MOST_LISTED, None), *numbered[-half:]]


def _list(of: Course, y: float) -> tuple[list[Text], float]:
    if not of.marks:
        return [Text(MARGIN, y + 0.1, "No failures.", color=SOFT)], y + 0.1 + LINE
    texts = _line([name for name, _ in COLUMNS], y + 0.1, SOFT)
    y += 0.1 + LINE
    for number, mark in listed(of.marks):
        if mark is None:
            texts.append(Text(MARGIN, y, f"… {number} more are not listed", color=SOFT))
        else:
            first, *others = _line(columns(mark, number, of, REASON), y, INK)
            texts += [replace(first, color=color(mark), bold=True), *others]
        y += LINE
    return texts, y


def _line(cells: Sequence[str], y: float, color: str) -> list[Text]:
    texts, x = [], MARGIN
    for cell, (_, width) in zip(cells, COLUMNS, strict=True):
        texts.append(Text(x, y, cut(cell, width - 1 if width else REASON), color=color))
        x += width * CHARACTER
    return [each for each in texts if each.text]


def _notes(of: Course, y: float) -> tuple[list[Text], float]:
    texts = []
    y += 0.06 if of.notes else 0.0
    for note in of.notes:
        for line in textwrap.wrap(note, 185)[:3]:
            texts.append(Text(MARGIN, y, line, 8, SOFT))
            y += LINE - 0.02
    return texts, y
