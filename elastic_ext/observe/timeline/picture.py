"""Draws the course of a job with matplotlib, as PNG or SVG.

One pair of axes holds all lanes: x in seconds, y in inches from its top, so that each lane has its place whatever the number of
nodes. Below it are the meanings of the colours, the failures and the notes, as `sheet` sets them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from elastic_ext.base.printable import cut
from elastic_ext.observe.timeline import axis, course, sheet
from elastic_ext.observe.timeline.course import Course, Mark, Span
from elastic_ext.observe.timeline.sheet import COLORS, FAINT, INK, PAPER, SOFT, WARN, WIDTH, Text

RIGHT, MOST_LEFT, CHARACTER = 0.35, 2.7, 0.078  # inches, as all that follows
TITLE, ROUNDS, JOB, FAILURES, SAVES, GAP, AXIS = 0.82, 0.24, 0.26, 0.23, 0.2, 0.07, 0.75
HIGHEST_ROW, ROWS = 0.3, 10.0  # of one row; of all of them
LABEL = 0.15  # height of a row's label
CELLS = 1800  # stretches of time that can be told apart
MANY_ROWS, MANY_SPANS = 96, 6000  # above that, rows are an image in SVG, too, and have one title each
MOST_ROWS = 1024
LEVELS, APART = 3, 0.25  # of numbers on the lane of failures


@dataclass
class _Drawing:
    """A picture under way. titles: texts to show under the pointer, by id of what has them, one for each of its shapes."""

    course: Course
    figure: Figure
    axes: Axes
    width: float  # of the axes
    titles: dict[str, list[str]] = field(default_factory=dict)

    def x_inches(self, at: float) -> float:
        return at / self.course.length * self.width


def png(of: Course, dpi: int = 100) -> bytes:
    """Return the picture as PNG."""
    with _style():
        return _saved(_drawn(of, listed=True), "png", dpi)


def svg(of: Course, listed: bool = True) -> ElementTree.Element:
    """Return the picture as SVG, with titles under the pointer. listed: with the list of failures and the notes."""
    with _style():
        drawing = _drawn(of, listed)
        root = ElementTree.fromstring(_saved(drawing, "svg", 100))
    _add_titles(root, drawing.titles)
    return root


def _style() -> AbstractContextManager[None]:
    ours = {"svg.fonttype": "none", "svg.hashsalt": "elastic_ext", "font.size": 9, "text.parse_math": False}
    context: AbstractContextManager[None] = style.context(["default", ours])
    return context


def _saved(drawing: _Drawing, kind: str, dpi: int) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        drawing.figure.savefig(file, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def _drawn(of: Course, listed: bool) -> _Drawing:
    shown = of.rows[:MOST_ROWS]
    row_height = min(HIGHEST_ROW, ROWS / max(1, len(shown)))
    left = min(MOST_LEFT, max(1.35, 0.25 + CHARACTER * max((len(row.label) for row in shown), default=0)))
    marks = sorted((each for each in of.marks if each.at is not None), key=lambda each: each.at or 0.0)
    width = WIDTH - left - RIGHT
    levels = course.levels([(each.at or 0.0) / of.length * width for each in marks], APART, LEVELS)
    lanes = ROUNDS + JOB + SAVES + GAP + FAILURES * max([each + 1 for each in levels if each is not None], default=1)
    high = lanes + row_height * len(shown)
    below = sheet.below(of, listed)
    whole = TITLE + high + AXIS + below.height
    figure = Figure(figsize=(WIDTH, whole), facecolor=PAPER)
    axes = figure.add_axes((left / WIDTH, 1 - (TITLE + high) / whole, width / WIDTH, high / whole), facecolor=PAPER)
    axes.set_xlim(0, of.length)
    axes.set_ylim(high, 0)
    drawing = _Drawing(of, figure, axes, width)
    _axis(drawing)
    _lanes(drawing, marks, levels, lanes, row_height)
    _rows(drawing, lanes, row_height)
    for each in (*sheet.title(of), *(text.lower(TITLE + high + AXIS) for text in below.texts)):
        _write(figure, each, whole)
    for box in below.boxes:
        y = 1 - (box.y + TITLE + high + AXIS) / whole
        size = (box.width / WIDTH, box.height / whole)
        figure.add_artist(sheet.patch((box.x / WIDTH, y - size[1] / 2), size, box.color, figure.transFigure))
    return drawing


def _write(figure: Figure, text: Text, whole: float) -> None:
    figure.text(
        text.x / WIDTH,
        1 - text.y / whole,
        text.text,
        fontsize=text.size,
        color=text.color,
        fontweight="bold" if text.bold else "normal",
        va="center",
    )


def _axis(drawing: _Drawing) -> None:
    of, axes = drawing.course, drawing.axes
    places = axis.ticks(of.length, int(drawing.width / 0.95))
    labels = [axis.offset(at, of.length) for at in places]
    if of.began_unix is not None:
        labels = [f"{each}\n{axis.clock(of.began_unix + at, of.length)}" for each, at in zip(labels, places, strict=True)]
    axes.set_xticks(places, labels, color=SOFT)
    axes.tick_params(axis="x", color=SOFT, length=3)
    axes.set_yticks([])
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(SOFT)
    axes.vlines(places, 0, axes.get_ylim()[0], color=FAINT, linewidth=0.6, zorder=0)
    second = "; below: the time of day in UTC" if of.began_unix is not None else ""
    axes.set_xlabel(f"time since the beginning ({axis.unit(of.length)}){second}", color=INK)


def _label(drawing: _Drawing, y: float, text: str, color: str = INK, size: float = 9) -> None:
    shift = ScaledTranslation(-0.1, 0, drawing.figure.dpi_scale_trans)
    place = blended_transform_factory(drawing.axes.transAxes, drawing.axes.transData) + shift
    drawing.axes.text(0, y, text, transform=place, ha="right", va="center", color=color, fontsize=size)


def _lanes(drawing: _Drawing, marks: Sequence[Mark], levels: Sequence[int | None], high: float, row_height: float) -> None:
    """Draw what concerns the whole job. high: of all lanes."""
    of, axes = drawing.course, drawing.axes
    bottom = axes.get_ylim()[0]
    _label(drawing, ROUNDS / 2, "round", SOFT)
    starts = course.levels([drawing.x_inches(each.at) for each in of.rounds], 0.3, 1)
    for each, level in zip(of.rounds, starts, strict=True):
        if level is not None:
            axes.text(each.at, ROUNDS / 2, str(each.round), ha="left", va="center", color=SOFT, fontsize=8, clip_on=True)
    thin = 0.7 if len(of.rows) <= MANY_ROWS else 0.35
    axes.vlines([each.at for each in of.rounds], 0, bottom, color=INK, linewidth=thin, linestyle=(0, (4, 3)), zorder=3)
    y = ROUNDS
    _label(drawing, y + JOB / 2, "the whole job")
    _spans(drawing, "job", course.thinned(of.job, of.length / CELLS), y + 0.02, JOB - 0.04, "the job")
    y += JOB
    lane = high - y - SAVES - GAP
    _label(drawing, y + lane / 2, "failures", WARN)
    numbers = {id(mark): number for number, mark in enumerate(of.marks, 1)}
    for mark, level in zip(marks, levels, strict=True):
        assert mark.at is not None
        down = high + (mark.row + 0.5) * row_height if mark.row is not None and mark.row < MOST_ROWS else bottom
        _mark(drawing, mark, numbers[id(mark)], y + FAILURES * ((level or 0) + 0.5), down if level is not None else y + 0.06)
    y += lane
    _label(drawing, y + SAVES / 2, "checkpoints" if of.saved else "", SOFT)
    _saves(drawing, y)


def _mark(drawing: _Drawing, mark: Mark, number: int, y: float, down: float) -> None:
    at = mark.at or 0.0
    gid, color = f"mark-{number}", sheet.color(mark)
    lines = LineCollection([[(at, y), (at, down)]], colors=color, linewidths=0.9, zorder=4, gid=gid + "-line")
    drawing.axes.add_collection(lines, autolim=False)
    drawing.titles[gid] = drawing.titles[gid + "-line"] = [_told(mark, number, drawing.course)]
    if down < y:
        return  # there is no room for its number
    if mark.row is not None:
        drawing.axes.plot([at], [down], marker="X", markersize=6, color=color, markeredgecolor=PAPER, zorder=5, clip_on=False)
    box = {"boxstyle": "circle,pad=0.18" if number < 10 else "round,pad=0.18", "facecolor": color, "edgecolor": "none"}
    text = drawing.axes.text(
        at, y, str(number), ha="center", va="center", fontsize=7.5, color="#ffffff", fontweight="bold", bbox=box, zorder=6
    )
    text.set_gid(gid)


def _told(mark: Mark, number: int, of: Course) -> str:
    when = axis.offset(mark.at, of.length) if mark.at is not None else "unknown when"
    rank = f", rank {mark.rank}" if mark.rank is not None else ""
    what = [f"{number}: {when}, {mark.node or 'no node'}{rank}", f"{mark.kind}: {mark.decision}", mark.reason, mark.after]
    return "\n".join(each for each in what if each)


def _saves(drawing: _Drawing, y: float) -> None:
    saved = drawing.course.saved
    if not saved:
        return
    lines = LineCollection(
        [[(each.at, y + 0.03), (each.at, y + SAVES - 0.03)] for each in saved], colors=COLORS["checkpoint_save"], linewidths=1.4
    )
    lines.set_gid("saves")
    drawing.axes.add_collection(lines, autolim=False)
    drawing.titles["saves"] = [
        f"step {each.step} saved" + (f" in {axis.duration(each.seconds)}" if each.seconds is not None else "") for each in saved
    ]


def _rows(drawing: _Drawing, top: float, height: float) -> None:
    of = drawing.course
    rows = of.rows[:MOST_ROWS]
    found = [course.thinned(row.spans, of.length / CELLS) for row in rows]
    many = len(rows) > MANY_ROWS or sum(map(len, found)) > MANY_SPANS
    every = max(1, -int(-LABEL // height))
    for number, (row, spans) in enumerate(zip(rows, found, strict=True)):
        y = top + number * height
        if number % every == 0:
            _label(drawing, y + height / 2, cut(row.label, 32), size=min(9.0, 7.0 + 8 * height))
        gap = 0.12 * height if not many else 0.0
        if not many:
            _spans(drawing, f"row-{number}", spans, y + gap, height - 2 * gap, row.label)
    if many:
        _image(drawing, rows, found, top, height)


def _image(drawing: _Drawing, rows: Sequence[course.Row], spans: Sequence[Sequence[Span]], top: float, height: float) -> None:
    """Draw many rows as one image, with an invisible shape for each that has its title."""
    shapes, colors, frames, titles = [], [], [], []
    for number, (row, of) in enumerate(zip(rows, spans, strict=True)):
        y = top + number * height
        shapes += [_box(each, y, height) for each in of]
        colors += [COLORS[each.state] for each in of]
        frames.append(_box(Span(0.0, drawing.course.length, ""), y, height))
        parts = (f"{course.STATES[state]}: {part:.1%}" for state, part in course.shares([row]).items())
        titles.append("\n".join([row.label, *parts]))
    image = PolyCollection(shapes, facecolors=colors, edgecolors="none", antialiaseds=False, zorder=2, rasterized=True)
    drawing.axes.add_collection(image, autolim=False)
    drawing.axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors="none", zorder=7, gid="rows"), autolim=False)
    drawing.titles["rows"] = titles


def _spans(drawing: _Drawing, gid: str, spans: Sequence[Span], y: float, height: float, who: str) -> None:
    if not spans:
        return
    shapes = PolyCollection(
        [_box(each, y, height) for each in spans],
        facecolors=[COLORS[each.state] for each in spans],
        edgecolors="none",
        antialiaseds=False,
        zorder=2,
        gid=gid,
    )
    drawing.axes.add_collection(shapes, autolim=False)
    drawing.titles[gid] = [_span_title(each, who, drawing.course) for each in spans]


def _span_title(span: Span, who: str, of: Course) -> str:
    share = f" {span.high - span.low:.0%}" if (span.low, span.high) != (0.0, 1.0) else ""
    from_ = f"from {axis.offset(span.begin, of.length)}, for {axis.duration(span.end - span.begin)}"
    return f"{who}: {course.STATES[span.state]}{share}\n{from_}"


def _box(span: Span, y: float, height: float) -> list[tuple[float, float]]:
    low, high = y + height * (1 - span.high), y + height * (1 - span.low)
    return [(span.begin, low), (span.end, low), (span.end, high), (span.begin, high)]


def _add_titles(root: ElementTree.Element, titles: dict[str, list[str]]) -> None:
    """Give each shape its title. Text is escaped when the tree is written."""
    space = root.tag.partition("}")[0] + "}"
    for group in root.iter(f"{space}g"):
        of = titles.get(group.get("id", ""), [])
        shapes = [each for each in group.iter() if each.tag in (f"{space}path", f"{space}use")]
        if len(of) == 1:
            shapes = [group]
        if len(of) == len(shapes):
            _title_each(shapes, of, space)


def _title_each(shapes: Iterable[ElementTree.Element], titles: Iterable[str], space: str) -> None:
    for shape, text in zip(shapes, titles, strict=True):
        title = ElementTree.Element(f"{space}title")
        title.text = text
        shape.insert(0, title)
