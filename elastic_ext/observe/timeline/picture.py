"""Draws a job's life with matplotlib: PNG, SVG, or an HTML page that holds the SVG."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import shown
from elastic_ext.observe.timeline import story as story_module
from elastic_ext.observe.timeline.story import STATES, Mark, Row, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "html")
# By state: the palette of Okabe and Ito, which colour-blind people can tell apart; waiting is pale.
COLORS = {
    story_module.TRAINING: "#009E73",
    story_module.RUNNING: "#009E73",
    story_module.HUNG: "#CC79A7",
    story_module.STOPPING: "#D55E00",
    story_module.BACKOFF: "#999999",
    story_module.JOINING: "#C9DDEC",
    story_module.STARTING: "#0072B2",
    story_module.LOADING: "#E69F00",
    story_module.BETWEEN: "#C9DDEC",
}
MARK_COLOR = "#B00020"
WIDTH = 12.0  # inches
STRIP, LINE = 0.3, 0.18  # inches: what the job did, and a line of text
ROW, LEAST_ROWS, MOST_ROWS_HEIGHT = 0.3, 2, 9.0  # inches; but for the number of rows
MOST_LABELS = 40  # of rows
MOST_MARKS = 24  # in the list below the picture; all have their lines in it
TEXT_WIDTH, NAME_WIDTH = 175, 24  # characters of a line of that list, and of the name of a row
DPI = 110
SCALES = ((180.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h"), (math.inf, 86400.0, "d"))  # up to so many seconds


def draw(story: Story, kind: str) -> bytes:
    """Return the picture. kind: one of FORMATS. Raises UsageError: matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("timeline: matplotlib is missing; pip install 'elastic_ext[timeline]'") from error
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "elastic_ext", "text.parse_math": False, "font.size": 9}):
        figure = _figure(story, Figure)
        file = io.BytesIO()
        metadata = {"Date": None} if kind != "png" else {}
        figure.savefig(file, format="png" if kind == "png" else "svg", dpi=DPI, metadata=metadata)
    if kind != "html":
        return file.getvalue()
    return _page(story, file.getvalue().decode()).encode()


def title(story: Story) -> str:
    """Return what the job was, in one line."""
    began = datetime.fromtimestamp(story.begin, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    nodes = f"{len(story.rows)} node{'s' * (len(story.rows) != 1)}"
    rounds = f"{story.restarts} restart{'s' * (story.restarts != 1)}"
    return f"job {story.run_id}: {duration(story.end - story.begin)} from {began}, {nodes}, {rounds}"


def duration(seconds: float) -> str:
    """Return a time for people: 90 -> "90.0 s", 7300 -> "2.0 h"."""
    _, unit, name = next(each for each in SCALES if seconds <= each[0])
    return f"{seconds / unit:.1f} {name}"


def _listed(story: Story) -> list[str]:
    """Return the lines below the picture: the marks by number, then the notes."""
    marks = [
        f"{number}  +{duration(mark.at - story.begin)}  {mark.node}: {mark.text}" for number, mark in enumerate(story.marks, 1)
    ]
    more = [f"and {len(marks) - MOST_MARKS} more: see the HTML form"] if len(marks) > MOST_MARKS else []
    return [shown(line) for line in (*marks[:MOST_MARKS], *more, *(f"note: {note}" for note in story.notes))]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _figure(story: Story, make: type[Figure]) -> Figure:
    lines = [_cut(line, TEXT_WIDTH) for line in _listed(story)]
    rows = max(LEAST_ROWS, len(story.rows))
    of_lines, of_legend, of_axis = LINE * len(lines) + 0.1, 0.5, 0.5  # heights in inches, from the bottom
    rows_at = of_lines + of_legend + of_axis
    strip_at = rows_at + min(MOST_ROWS_HEIGHT, ROW * rows) + 0.1
    height = strip_at + STRIP + 0.6
    figure = make(figsize=(WIDTH, height))
    of_job, of_rows = (
        figure.add_axes((0.14, bottom / height, 0.84, (top - bottom) / height))
        for bottom, top in ((strip_at, strip_at + STRIP), (rows_at, strip_at - 0.1))
    )
    _, unit, name = next(each for each in SCALES if story.end - story.begin <= each[0])
    for axes in (of_job, of_rows):
        axes.set_xlim(0, max(story.end - story.begin, 1e-3) / unit)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    _job_strip(of_job, story, unit)
    _rows(of_rows, story, unit)
    of_rows.set_xlabel(f"{name} since {datetime.fromtimestamp(story.begin, timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
    figure.text(0.01, 1 - 0.2 / height, shown(title(story)), fontsize=11, fontweight="bold", va="center")
    _legend(figure, story, (of_lines + of_legend) / height)
    for number, line in enumerate(lines):
        figure.text(0.01, (of_lines - LINE * (number + 0.5)) / height, line, va="center", fontsize=8)
    return figure


def _job_strip(axes: Axes, story: Story, unit: float) -> None:
    trains = [((begin - story.begin) / unit, (end - begin) / unit) for begin, end in story.trains]
    axes.broken_barh([(0, (story.end - story.begin) / unit)], (0, 1), color="#EEEEEE", linewidth=0)
    axes.broken_barh(trains, (0, 1), color=COLORS[story_module.TRAINING], linewidth=0)
    axes.set_yticks([0.5], [f"job trains: {story.trained_share:.1%}"])
    axes.set_ylim(0, 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    last = -math.inf
    for number, mark in enumerate(story.marks, 1):
        at = (mark.at - story.begin) / unit
        axes.axvline(at, color=MARK_COLOR, linewidth=1)
        if at - last >= 0.009 * axes.get_xlim()[1]:  # numbers do not lie over each other
            axes.text(at, 1.12, str(number), color=MARK_COLOR, fontsize=8, ha="center", va="bottom")
            last = at


def _rows(axes: Axes, story: Story, unit: float) -> None:
    count = len(story.rows)
    gap = 0.1 if count <= MOST_LABELS else 0.0
    for state, color in COLORS.items():
        for place, row in enumerate(story.rows):
            bars = [
                ((span.begin - story.begin) / unit, (span.end - span.begin) / unit) for span in row.spans if span.state == state
            ]
            if bars:
                axes.broken_barh(bars, (place + gap, 1 - 2 * gap), color=color, linewidth=0)
    for place, row in enumerate(story.rows):
        _ticks(axes, row, place, story.begin, unit)
    for at in story.rounds[1:]:
        axes.axvline((at - story.begin) / unit, color="black", linewidth=0.6, linestyle=(0, (2, 2)), alpha=0.6)
    for mark in story.marks:
        axes.axvline((mark.at - story.begin) / unit, color=MARK_COLOR, linewidth=0.8, alpha=0.7)
    every = math.ceil(count / MOST_LABELS) if count else 1
    shown_rows = range(0, count, every)
    names = [_cut(shown(story.rows[place].name), NAME_WIDTH) for place in shown_rows]
    axes.set_yticks([place + 0.5 for place in shown_rows], names)
    axes.set_ylim(max(count, 1), 0)


def _ticks(axes: Axes, row: Row, place: int, begin: float, unit: float) -> None:
    if row.saves:
        axes.vlines([(at - begin) / unit for at in row.saves], place + 0.1, place + 0.35, color="white", linewidth=1.2)
        axes.vlines([(at - begin) / unit for at in row.saves], place + 0.1, place + 0.3, color="black", linewidth=0.7)
    lost = [(at - begin) / unit for at in row.lost_at]
    axes.plot(lost, [place + 0.5] * len(lost), marker="x", linestyle="none", color=MARK_COLOR, markersize=6)


def _legend(figure: Figure, story: Story, top: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {span.state for row in story.rows for span in row.spans}
    handles: list[Patch | Line2D] = [Patch(color=COLORS[state], label=name) for state, name in STATES.items() if state in used]
    if len(story.rounds) > 1:
        handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=(0, (2, 2)), label="a new round"))
    if any(row.saves for row in story.rows):
        handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label="checkpoint saved"))
    if story.marks:
        handles.append(Line2D([], [], color=MARK_COLOR, linewidth=1, label="numbered: see below"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, top), ncols=6, frameon=False, fontsize=8)


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 75rem; padding: 0 1rem }
figure { background: white; margin: 0; overflow-x: auto } svg { width: 100%; min-width: 50rem; height: auto; display: block }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0 }
tr + tr { border-top: 1px solid #8884 } td:nth-child(-n+3) { white-space: nowrap }
"""


def _page(story: Story, svg: str) -> str:
    """Return a page without any reference to elsewhere; every text in it is escaped."""
    marks = "".join(_table_row(number, mark, story.begin) for number, mark in enumerate(story.marks, 1))
    table = f"<table><tr><th>No.<th>After<th>Node<th>What</tr>{marks}</table>" if marks else "<p>Nothing failed.</p>"
    notes = "".join(f"<li>{html.escape(shown(note))}" for note in story.notes)
    heading = html.escape(shown(title(story)))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{heading}</title><style>{_STYLE}</style>'
        f"<h1>{heading}</h1><figure>{svg[svg.index('<svg') :]}</figure>{table}<ul>{notes}</ul></html>\n"
    )


def _table_row(number: int, mark: Mark, begin: float) -> str:
    cells: Sequence[str] = (str(number), duration(mark.at - begin), mark.node, mark.text)
    return "<tr>" + "".join(f"<td>{html.escape(shown(cell))}" for cell in cells) + "</tr>"
