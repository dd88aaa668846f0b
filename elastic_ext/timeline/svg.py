"""Draws a timeline as SVG: plain shapes and text, readable in light and dark. A trace has the details. Pure.

Lengths are pixels. All text from outside is escaped; `events` has made it printable.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape

from elastic_ext.base.printable import counted, cut
from elastic_ext.timeline import spans
from elastic_ext.timeline.spans import Interruption, Span, Timeline, offset

WIDTH, MARGIN, RIGHT = 900.0, 16.0, 862.0  # of the picture; beside it; where the rows end
LINE, CHARACTER = 16.0, 6.6  # of text
LANE, ROW, ALL_ROWS, LABEL = 20.0, 20.0, 640.0, 14.0  # heights: of a lane; of a row, at most; of all rows; of a label
LEVELS, APART = 3, 17.0  # of the numbers of interruptions
MOST_LISTED, MOST_LINES = 40, 3  # interruptions in the table; lines of a cell
STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
DAY_S, TICKS = 86400, 10
COLUMNS = (("", 3), ("when", 9), ("round", 6), ("node", 14), ("rank", 5), ("kind", 13), ("decision", 19), ("reason", 63))
COLORS = "#2e9e5b #7cc29a #3f78c4 #93b5e6 #8256b5 #c0a6de #e8833a #f2bd3c #c3272b #8a6d5c #eab9a0 #c9c9c9"  # of spans.STATES
CLASSES = {state: f"c{number}" for number, state in enumerate(spans.STATES)}
STYLE = f"""
text{{font:11px "DejaVu Sans",Verdana,sans-serif;fill:#1f2328}} .b{{font-size:15px;font-weight:bold}}
.r{{text-anchor:end}} .m{{text-anchor:middle}} .n{{text-anchor:middle;font-weight:bold;font-size:10px;fill:#fff}}
.soft{{fill:#59636e}} .paper{{fill:#fff}} .grid{{stroke:#d8dee4}} .axis{{stroke:#59636e}}
.round{{stroke:#1f2328;stroke-dasharray:4 3}} .saved{{stroke:#2795a1;stroke-width:1.5}}
.failure{{fill:#b3122f;stroke:#b3122f}} .change{{fill:#6a4aa0;stroke:#6a4aa0}} .dot{{stroke:#fff}}
text.failure,text.change{{stroke:none}} path{{shape-rendering:crispEdges}}
{" ".join(f".c{number}{{fill:{color}}}" for number, color in enumerate(COLORS.split()))}
@media (prefers-color-scheme:dark){{text{{fill:#e6edf3}} .soft{{fill:#9198a1}} .paper{{fill:#0d1117}} .grid{{stroke:#30363d}}
.axis{{stroke:#9198a1}} .round{{stroke:#e6edf3}} .n{{fill:#fff}} text.failure{{fill:#ff7b86}} text.change{{fill:#b79df0}}
.{CLASSES[spans.BETWEEN]}{{fill:#8a5a44}} .{CLASSES[spans.GONE]}{{fill:#3d444d}}}}
"""  # without variables, which only browsers know


def svg(of: Timeline) -> str:
    """Return the picture as the text of a file."""
    return _Picture(of).text()


class _Picture:
    def __init__(self, of: Timeline) -> None:
        self._of, self._parts = of, list[str]()
        self._left = min(200.0, max(84.0, MARGIN + CHARACTER * max(len(row.label) for row in of.rows)))
        self._title()
        self._lanes()
        self._key()
        self._table()
        for note in of.notes:
            self._lines(textwrap.wrap(note, 140))

    def text(self) -> str:
        size = f'viewBox="0 0 {WIDTH:.0f} {self._y:.0f}" width="{WIDTH:.0f}" height="{self._y:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self._of.headline)}</title>'
        paper = '<rect class="paper" width="100%" height="100%"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", paper, *self._parts, "</svg>\n"])

    def _x(self, at: float) -> float:
        return self._left + at / self._of.length * (RIGHT - self._left)

    def _write(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write a line, whose middle is at y."""
        self._parts.append(f'<text class="{style}" x="{x:.1f}" y="{y + 4:.1f}">{escape(text)}</text>')

    def _lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._write(MARGIN, self._y, text, "soft")
            self._y += LINE

    def _line(self, style: str, at: float, top: float, bottom: float) -> None:
        self._parts.append(f'<path class="{style}" d="M{self._x(at):.1f} {top:.1f}V{bottom:.1f}"/>')

    def _title(self) -> None:
        of = self._of
        changes = sum(mark.is_change for mark in of.interruptions)
        counts = {
            "node": len(of.rows),
            "failure": len(of.interruptions) - changes,
            "change of members": changes,
            "checkpoint": len(of.saved),
        }
        figures = ", ".join(counted(count, what) for what, count in counts.items() if count)
        trained = f"Trained {of.trained:.1%} of the time, steps done twice included"
        if spans.RUNNING in of.shares:
            trained = f"Workers ran {of.trained:.1%} of the time; steps are not reported"
        began = datetime.fromtimestamp(of.began_unix, timezone.utc)
        self._write(MARGIN, 22, cut(of.headline, 90), "b")
        self._write(MARGIN, 44, f"Began {began:%Y-%m-%d %H:%M:%S} UTC. {trained}. {figures}.", "soft")
        self._y = 64.0

    def _lanes(self) -> None:
        """Draw what has a place in time: the rounds, the whole job, interruptions, checkpoints, and rows."""
        of, top = self._of, self._y
        levels = _levels([self._x(mark.at) for mark in of.interruptions], APART, LEVELS)
        marks = top + 2 * LANE
        saves = marks + LANE * (1 + max((level for level in levels if level is not None), default=0))
        rows, high = saves + LANE, min(ROW, max(1.0, ALL_ROWS / len(of.rows)))
        bottom = rows + high * len(of.rows) + 4
        self._axis(top, bottom)
        for y, name, style in ((top, "round", "soft"), (top + LANE, "whole job", ""), (marks, "failures", "failure")):
            self._write(self._left - 8, y + LANE / 2, name, f"r {style}")
        self._draw(of.job, top + LANE + 2, LANE - 4)
        every, gap = -int(-LABEL // high), high / 10 if high > 6 else 0.0
        for number, row in enumerate(of.rows):
            y = rows + number * high
            if number % every == 0:
                self._write(self._left - 8, y + high / 2, cut(row.label, 27), "r")
            self._draw(row.spans, y + gap, high - 2 * gap)
        for (at, number_), level in zip(of.rounds, _levels([self._x(at) for at, _ in of.rounds], 24, 1), strict=True):
            self._line("round", at, top + 2, bottom)
            if level is not None:
                self._write(self._x(at) + 3, top + LANE / 2, number_, "soft")
        if of.saved:
            self._write(self._left - 8, saves + LANE / 2, "checkpoints", "r soft")
        for at, _ in of.saved:
            self._line("saved", at, saves + 3, saves + LANE - 3)
        for number, (mark, level) in enumerate(zip(of.interruptions, levels, strict=True), 1):
            down = bottom if mark.row is None else rows + (mark.row + 0.5) * high
            self._mark(number, mark, None if level is None else marks + LANE * (level + 0.5), marks, down)

    def _mark(self, number: int, mark: Interruption, y: float | None, top: float, down: float) -> None:
        """y: of its number; None: there is no room for it. down: where its line ends."""
        x, style = self._x(mark.at), _style(mark)
        self._line(style, mark.at, top if y is None else y, down)
        if mark.row is not None:
            self._parts.append(f'<circle class="{style} dot" cx="{x:.1f}" cy="{down:.1f}" r="4"/>')
        if y is not None:
            self._parts.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
            self._write(x, y, str(number), "n")

    def _axis(self, top: float, bottom: float) -> None:
        length = self._of.length
        step = next((each for each in STEPS_S if length / each <= TICKS), DAY_S * (1 + length // DAY_S // TICKS))
        for number in range(int(length / step + 1e-9) + 1):
            at = number * step
            self._line("grid", at, top, bottom)
            moment = datetime.fromtimestamp(self._of.began_unix + at, timezone.utc)
            self._write(self._x(at), bottom + 12, offset(at, length), "m soft")
            self._write(self._x(at), bottom + 26, f"{moment:%m-%d %H:%M}" if length >= DAY_S else f"{moment:%H:%M:%S}", "m soft")
        self._parts.append(f'<path class="axis" d="M{self._left:.1f} {bottom:.1f}H{RIGHT:.1f}"/>')
        self._write(self._left - 34, bottom + 26, "UTC", "r soft")
        self._y = bottom + 52

    def _visible(self, of: Sequence[Span]) -> list[Span]:
        """Return spans that can be seen: of those within one pixel, the longer one counts."""
        found: list[Span] = []
        for span in of:
            if found and self._x(span.end) - self._x(found[-1].begin) < 1:
                longer = max(found.pop(), span, key=lambda each: each.end - each.begin)
                span = Span(found[-1].end if found else of[0].begin, span.end, longer.state)
            found.append(span)
        return found

    def _draw(self, of: Sequence[Span], y: float, high: float) -> None:
        """Draw spans, all of a state as one shape."""
        shapes: dict[str, str] = {}
        for span in self._visible(of):
            begin, end = self._x(span.begin), self._x(span.end)
            shapes[span.state] = shapes.get(span.state, "") + f"M{begin:.1f} {y:.1f}H{end:.1f}v{high:.1f}H{begin:.1f}z"
        self._parts += [f'<path class="{CLASSES[state]}" d="{shape}"/>' for state, shape in shapes.items()]

    def _key(self) -> None:
        """Write the meanings of the colours, and how much of the nodes' time each has."""
        there = {span.state for spans_ in (self._of.job, *(row.spans for row in self._of.rows)) for span in spans_}
        self._lines(["What the nodes did, in % of their time; rows by first rank"])
        x = MARGIN
        for state in (each for each in spans.STATES if each in there):
            text = state + (f" {self._of.shares[state]:.1%}" if state in self._of.shares else "")
            wide = 38 + CHARACTER * len(text)
            if x + wide > WIDTH:
                x, self._y = MARGIN, self._y + LINE
            self._parts.append(f'<path class="{CLASSES[state]}" d="M{x:.1f} {self._y - 5:.1f}h14v10h-14z"/>')
            self._write(x + 20, self._y, text)
            x += wide
        self._y += 1.7 * LINE

    def _table(self) -> None:
        """Write the interruptions; of many, the last."""
        of, count = self._of, len(self._of.interruptions)
        if count:
            self._cells([name for name, _ in COLUMNS], "soft")
        if not 0 < count <= MOST_LISTED:
            self._lines([f"… {count - MOST_LISTED} before these are not listed" if count else "No failures."])
        for number, mark in list(enumerate(of.interruptions, 1))[-MOST_LISTED:]:
            rank = str(mark.rank) if mark.rank >= 0 else ""
            reason = f"{cut(mark.reason, 130)} — {mark.after}" if mark.after else mark.reason
            what = [offset(mark.at, of.length), str(mark.round), mark.node, rank, mark.kind, mark.decision, reason]
            self._cells([str(number), *what], "", _style(mark))
        self._y += 8

    def _cells(self, cells: Sequence[str], style: str, first: str = "") -> None:
        x, high = MARGIN, 1
        for number, (cell, (_, wide)) in enumerate(zip(cells, COLUMNS, strict=True)):
            lines = textwrap.wrap(cell, wide - 1, max_lines=MOST_LINES, placeholder="…")
            for index, line in enumerate(lines):
                self._write(x, self._y + index * (LINE - 2), line, first if first and not number else style)
            high = max(high, len(lines))
            x += CHARACTER * wide
        self._y += LINE + (high - 1) * (LINE - 2)


def _style(mark: Interruption) -> str:
    return "change" if mark.is_change else "failure"


def _levels(places: Sequence[float], apart: float, most: int) -> list[int | None]:
    """Return for each label, by its place in order, the first of `most` levels on which it has room; None: on none."""
    last = [-float("inf")] * most
    found: list[int | None] = []
    for place in places:
        free = next((level for level, at in enumerate(last) if place - at >= apart), None)
        found.append(free)
        if free is not None:
            last[free] = place
    return found
