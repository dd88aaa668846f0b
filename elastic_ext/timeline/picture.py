"""Draws a timeline with matplotlib, as PNG, SVG, or one page of HTML that loads nothing. All text from outside is escaped.

One pair of axes holds all lanes: x in seconds, y in inches from its top, so that each lane has its place for any number of
nodes. Above it stands the title; below it the meanings of the colours, the interruptions and the notes. These have places in
inches from the left and the top.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from string import Template
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.collections import Collection, LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from elastic_ext.base import goodput
from elastic_ext.base.printable import counted, cut
from elastic_ext.timeline import model
from elastic_ext.timeline.model import MEMBERSHIP, NO_STATE, STATES, Interruption, Row, Span, Timeline

FAILURE, CHANGE = "#b3122f", "#6a4aa0"  # of interruptions: failures, and changes of membership
# In a page these are replaced by its own colours.
INK, SOFT, FAINT, PAPER, WARN = "#101112", "#5b5c5d", "#d7d8d9", "#fefdfc", "#b31230"
_OF_PAGE = {INK: "var(--ink)", SOFT: "var(--soft)", FAINT: "var(--faint)", PAPER: "var(--paper)", WARN: "var(--alarm)"}

WIDTH = 14.0  # inches, as all that follows; of the picture
RIGHT, MOST_LEFT = 0.35, 2.7
TITLE, ROUNDS, JOB, FAILURES, SAVES, GAP, AXIS = 0.82, 0.24, 0.26, 0.23, 0.2, 0.07, 0.75
HIGHEST_ROW, ROWS = 0.3, 10.0  # of one row; of all of them
LABEL, LABEL_CHARACTER = 0.15, 0.078  # height of a row's label; width of a character
MARGIN, LINE, KEY, CHARACTER = 0.35, 0.2, 0.24, 0.07  # of the text around the axes
CELLS = 1800  # stretches of time that the eye can distinguish
MANY_ROWS, MANY_SPANS = 96, 6000  # above that, rows are an image in SVG, too, and have one title each
MOST_ROWS = 1024
LEVELS, APART = 3, 0.25  # of numbers on the lane of failures
MOST_LISTED = 40  # interruptions; of more, the first and the last
COLUMNS = (("", 3), ("when", 11), ("round", 7), ("node", 18), ("rank", 6), ("kind", 13), ("decision", 24), ("reason", 0))
REASON = 110  # characters
OURS = {"svg.fonttype": "none", "svg.hashsalt": "elastic_ext", "font.size": 9, "text.parse_math": False}  # of matplotlib's style


def png(of: Timeline) -> bytes:
    with style.context(["default", OURS]):
        return _saved(_drawn(of, listed=True), "png")


def svg(of: Timeline) -> str:
    """Return the picture as a file of SVG, with titles under the pointer."""
    return _text(svg_tree(of, listed=True))


def html(of: Timeline) -> str:
    """Return a page with the picture, which takes its colours from the page, and all interruptions below it."""
    root = svg_tree(of, listed=False)
    for element in root.iter():
        if (found := element.get("style")) is not None:
            for color, variable in _OF_PAGE.items():
                found = found.replace(color, variable)
            element.set("style", found)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    page = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    return page.substitute(
        title=escape(headline(of)),
        picture=_text(root),
        failures=_table(of),
        notes="".join(f"<li>{escape(note)}</li>" for note in of.notes),
    )


def svg_tree(of: Timeline, listed: bool) -> ElementTree.Element:
    """Return the picture as SVG, with titles under the pointer. listed: with the list of interruptions and the notes."""
    with style.context(["default", OURS]):
        drawing = _drawn(of, listed)
        root = ElementTree.fromstring(_saved(drawing, "svg"))
    _add_titles(root, drawing.titles)
    return root


def _saved(drawing: _Drawing, kind: str) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        drawing.figure.savefig(file, format=kind, dpi=100, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def _text(root: ElementTree.Element) -> str:
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _add_titles(root: ElementTree.Element, titles: dict[str, list[str]]) -> None:
    """Give each shape its title. Text is escaped when the tree is written."""
    space = root.tag.partition("}")[0] + "}"
    for group in root.iter(f"{space}g"):
        texts = titles.get(group.get("id", ""), [])
        shapes = [each for each in group.iter() if each.tag in (f"{space}path", f"{space}use")]
        if len(texts) == 1:
            shapes = [group]
        if len(texts) == len(shapes):
            for shape, text in zip(shapes, texts, strict=True):
                title = ElementTree.Element(f"{space}title")
                title.text = text
                shape.insert(0, title)


# The axes.


@dataclass
class _Drawing:
    """A picture under way. titles: texts to show under the pointer, by id of what has them, one for each of its shapes."""

    timeline: Timeline
    figure: Figure
    axes: Axes
    width: float  # of the axes
    titles: dict[str, list[str]] = field(default_factory=dict)

    def add(self, gid: str, shapes: Collection, titles: list[str]) -> None:
        shapes.set_gid(gid)
        self.axes.add_collection(shapes, autolim=False)
        self.titles[gid] = titles


def _drawn(of: Timeline, listed: bool) -> _Drawing:
    rows = of.rows[:MOST_ROWS]
    row_height = min(HIGHEST_ROW, ROWS / max(1, len(rows)))
    left = min(MOST_LEFT, max(1.35, 0.25 + LABEL_CHARACTER * max((len(row.label) for row in rows), default=0)))
    width = WIDTH - left - RIGHT
    dated = sorted((each for each in of.interruptions if each.at is not None), key=lambda each: each.at or 0.0)
    levels = model.levels([(each.at or 0.0) / of.length * width for each in dated], APART, LEVELS)
    lanes = ROUNDS + JOB + SAVES + GAP + FAILURES * max([each + 1 for each in levels if each is not None], default=1)
    high = lanes + row_height * len(rows)
    below, height = _below(of, listed)
    whole = TITLE + high + AXIS + height
    figure = Figure(figsize=(WIDTH, whole), facecolor=PAPER)
    axes = figure.add_axes((left / WIDTH, 1 - (TITLE + high) / whole, width / WIDTH, high / whole), facecolor=PAPER)
    axes.set_xlim(0, of.length)
    axes.set_ylim(high, 0)
    drawing = _Drawing(of, figure, axes, width)
    _axis(drawing)
    _lanes(drawing, dated, levels, lanes, row_height)
    _rows(drawing, lanes, row_height)
    for text in (*_title(of), *(replace(each, y=each.y + TITLE + high + AXIS) for each in below)):
        _write(figure, text, whole)
    return drawing


def _axis(drawing: _Drawing) -> None:
    of, axes = drawing.timeline, drawing.axes
    places = model.ticks(of.length, int(drawing.width / 0.95))
    labels = [model.offset(at, of.length) for at in places]
    second = ""
    if of.began_unix is not None:
        labels = [f"{each}\n{model.clock(of.began_unix + at, of.length)}" for each, at in zip(labels, places, strict=True)]
        second = "; below: the time of day in UTC"
    axes.set_xticks(places, labels, color=SOFT)
    axes.tick_params(axis="x", color=SOFT, length=3)
    axes.set_yticks([])
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(SOFT)
    axes.vlines(places, 0, axes.get_ylim()[0], color=FAINT, linewidth=0.6, zorder=0)
    axes.set_xlabel(f"time since the beginning ({model.unit(of.length)}){second}", color=INK)


def _label(drawing: _Drawing, y: float, text: str, color: str = INK, size: float = 9) -> None:
    shift = ScaledTranslation(-0.1, 0, drawing.figure.dpi_scale_trans)
    place = blended_transform_factory(drawing.axes.transAxes, drawing.axes.transData) + shift
    drawing.axes.text(0, y, text, transform=place, ha="right", va="center", color=color, fontsize=size)


def _lanes(
    drawing: _Drawing, dated: Sequence[Interruption], levels: Sequence[int | None], high: float, row_height: float
) -> None:
    """Draw what concerns the whole job. high: of all lanes."""
    of, axes = drawing.timeline, drawing.axes
    bottom = axes.get_ylim()[0]
    _label(drawing, ROUNDS / 2, "round", SOFT)
    starts = model.levels([each.at / of.length * drawing.width for each in of.rounds], 0.3, 1)
    for each, level in zip(of.rounds, starts, strict=True):
        if level is not None:
            axes.text(each.at, ROUNDS / 2, str(each.round), ha="left", va="center", color=SOFT, fontsize=8, clip_on=True)
    thin = 0.7 if len(of.rows) <= MANY_ROWS else 0.35
    axes.vlines([each.at for each in of.rounds], 0, bottom, color=INK, linewidth=thin, linestyle=(0, (4, 3)), zorder=3)
    y = ROUNDS
    _label(drawing, y + JOB / 2, "the whole job")
    _spans(drawing, "job", model.thinned(of.job, of.length / CELLS), y + 0.02, JOB - 0.04, "the job")
    y += JOB
    lane = high - y - SAVES - GAP
    _label(drawing, y + lane / 2, "failures", WARN)
    numbers = {id(each): number for number, each in enumerate(of.interruptions, 1)}
    for end, level in zip(dated, levels, strict=True):
        down = high + (end.row + 0.5) * row_height if end.row is not None and end.row < MOST_ROWS else bottom
        _interruption(
            drawing, end, numbers[id(end)], y + FAILURES * ((level or 0) + 0.5), down if level is not None else y + 0.06
        )
    y += lane
    _label(drawing, y + SAVES / 2, "checkpoints" if of.saved else "", SOFT)
    if of.saved:
        lines = [[(each.at, y + 0.03), (each.at, y + SAVES - 0.03)] for each in of.saved]
        titles = [
            f"step {each.step} saved" + (f" in {model.duration(each.seconds)}" if each.seconds is not None else "")
            for each in of.saved
        ]
        drawing.add("saves", LineCollection(lines, colors=STATES[goodput.SAVE][1], linewidths=1.4), titles)


def _interruption(drawing: _Drawing, end: Interruption, number: int, y: float, down: float) -> None:
    at, gid, color = end.at or 0.0, f"mark-{number}", _color(end)
    rank = f", rank {end.rank}" if end.rank is not None else ""
    what = [
        f"{number}: {model.offset(at, drawing.timeline.length)}, {end.node or 'no node'}{rank}",
        *(f"{end.kind}: {end.decision}", end.reason, end.after),
    ]
    titles = ["\n".join(each for each in what if each)]
    drawing.add(f"{gid}-line", LineCollection([[(at, y), (at, down)]], colors=color, linewidths=0.9, zorder=4), titles)
    drawing.titles[gid] = titles
    if down < y:
        return  # there is no room for its number
    if end.row is not None:
        drawing.axes.plot([at], [down], marker="X", markersize=6, color=color, markeredgecolor=PAPER, zorder=5, clip_on=False)
    box = {"boxstyle": "circle,pad=0.18" if number < 10 else "round,pad=0.18", "facecolor": color, "edgecolor": "none"}
    font = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "#ffffff", "fontweight": "bold"}
    drawing.axes.text(at, y, str(number), font, bbox=box, zorder=6, gid=gid)


def _color(end: Interruption) -> str:
    return CHANGE if end.kind == MEMBERSHIP else FAILURE


def _rows(drawing: _Drawing, top: float, height: float) -> None:
    of = drawing.timeline
    rows = of.rows[:MOST_ROWS]
    found = [model.thinned(row.spans, of.length / CELLS) for row in rows]
    many = len(rows) > MANY_ROWS or sum(map(len, found)) > MANY_SPANS
    every = max(1, -int(-LABEL // height))
    for number, (row, spans) in enumerate(zip(rows, found, strict=True)):
        y = top + number * height
        if number % every == 0:
            _label(drawing, y + height / 2, cut(row.label, 32), size=min(9.0, 7.0 + 8 * height))
        if not many:
            _spans(drawing, f"row-{number}", spans, y + 0.12 * height, 0.76 * height, row.label)
    if many:
        _image(drawing, rows, found, top, height)


def _image(drawing: _Drawing, rows: Sequence[Row], spans: Sequence[Sequence[Span]], top: float, height: float) -> None:
    """Draw many rows as one image, with an invisible shape for each that has its title."""
    shapes, colors, frames, titles = [], [], [], []
    for number, (row, of) in enumerate(zip(rows, spans, strict=True)):
        y = top + number * height
        shapes += [_box(each, y, height) for each in of]
        colors += [STATES[each.state][1] for each in of]
        frames.append(_box(Span(0.0, drawing.timeline.length, ""), y, height))
        parts = (f"{STATES[state][0]}: {part:.1%}" for state, part in model.shares([row]).items())
        titles.append("\n".join([row.label, *parts]))
    image = PolyCollection(shapes, facecolors=colors, edgecolors="none", antialiaseds=False, zorder=2, rasterized=True)
    drawing.axes.add_collection(image, autolim=False)
    drawing.add("rows", PolyCollection(frames, facecolors="none", edgecolors="none", zorder=7), titles)


def _spans(drawing: _Drawing, gid: str, spans: Sequence[Span], y: float, height: float, who: str) -> None:
    if spans:
        boxes, colors = [_box(each, y, height) for each in spans], [STATES[each.state][1] for each in spans]
        shapes = PolyCollection(boxes, facecolors=colors, edgecolors="none", antialiaseds=False, zorder=2)
        drawing.add(gid, shapes, [_span_title(each, who, drawing.timeline.length) for each in spans])


def _span_title(span: Span, who: str, length: float) -> str:
    share = "" if span.fills_row else f" {span.high - span.low:.0%}"
    return f"{who}: {STATES[span.state][0]}{share}\nfrom {model.offset(span.begin, length)}, for {model.duration(span.seconds)}"


def _box(span: Span, y: float, height: float) -> list[tuple[float, float]]:
    low, high = y + height * (1 - span.high), y + height * (1 - span.low)
    return [(span.begin, low), (span.end, low), (span.end, high), (span.begin, high)]


# The text around the axes.


@dataclass(frozen=True)
class Text:
    """A line of text. y: of its middle. key: colour of a box before it; ""."""

    x: float
    y: float
    text: str
    size: float = 8.5
    color: str = INK
    bold: bool = False
    key: str = ""


def _write(figure: Figure, text: Text, whole: float) -> None:
    """whole: height of the figure."""
    place, y = (text.x / WIDTH, 1 - text.y / whole), 0.13 / whole
    weight = "bold" if text.bold else "normal"
    figure.text(*place, text.text, fontsize=text.size, color=text.color, fontweight=weight, va="center")
    if text.key:
        corner = ((text.x - 0.27) / WIDTH, place[1] - y / 2)
        figure.add_artist(Rectangle(corner, 0.2 / WIDTH, y, facecolor=text.key, edgecolor="none", transform=figure.transFigure))


def headline(of: Timeline) -> str:
    return f"Job {of.run_id}: {model.duration(of.length)}, {of.restarts}, {of.end}"


def _title(of: Timeline) -> list[Text]:
    began = f"Began {model.moment(of.began_unix)}. " if of.began_unix is not None else ""
    trained = of.trained_is.format(f"{of.trained:.1%}") + ". " if of.trained is not None else ""
    changes = sum(each.kind == MEMBERSHIP for each in of.interruptions)
    counts = ((len(of.interruptions) - changes, "failure"), (changes, "change of members"), (len(of.saved), "checkpoint saved"))
    figures = ", ".join([counted(of.nodes, "node"), *(counted(*each) for each in counts if each[0])])
    return [
        Text(MARGIN, 0.27, cut(headline(of), 120), 14, bold=True),
        Text(MARGIN, 0.57, cut(f"{began}{trained}{figures}.", 190), 9.5, SOFT),
    ]


def _below(of: Timeline, listed: bool) -> tuple[list[Text], float]:
    """Return what stands below the axes, and its height. listed: with interruptions and notes."""
    texts, y = _key(of)
    for make in (_list, _notes) if listed else ():
        more, y = make(of, y)
        texts += more
    return texts, y + 0.15


def _key(of: Timeline) -> tuple[list[Text], float]:
    """Return the meanings of the colours, and how much of the nodes' time each has."""
    there = {span.state for row in of.rows for span in row.spans} | {span.state for span in of.job} | of.spent.keys()
    texts = [Text(MARGIN, 0.12, "What the nodes did, in % of their time; rows by first rank", color=SOFT)]
    x, y = MARGIN, 0.12 + KEY
    for state, (name, color) in STATES.items():
        if state not in there:
            continue
        text = name + (f" {of.spent[state]:.1%}" if state in of.spent and state not in NO_STATE else "")
        width = 0.42 + CHARACTER * len(text)
        if x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + KEY
        texts.append(Text(x + 0.27, y, text, key=color))
        x += width
    return texts, y + KEY


def _cells(end: Interruption, number: int, of: Timeline, most: int = 0) -> tuple[str, ...]:
    """Return an interruption as the cells of COLUMNS. most: characters of the reason; 0: all."""
    when = model.offset(end.at, of.length) if end.at is not None else "?"
    after = f" — {end.after}" if end.after else ""
    reason = (cut(end.reason, most - len(after)) if most else end.reason) + after
    rank = "" if end.rank is None else str(end.rank)
    return (str(number), when, str(end.round), end.node, rank, end.kind, end.decision, reason)


def _list(of: Timeline, y: float) -> tuple[list[Text], float]:
    y += 0.1
    if not of.interruptions:
        return [Text(MARGIN, y, "No failures.", color=SOFT)], y + LINE
    texts = _line([name for name, _ in COLUMNS], y, SOFT)
    numbered = list(enumerate(of.interruptions, 1))
    left_out, half = len(numbered) - MOST_LISTED, MOST_LISTED // 2
    for number, end in numbered if left_out <= 0 else [*numbered[:half], *numbered[-half:]]:
        if left_out > 0 and number == len(numbered) - half + 1:
            y += LINE
            texts.append(Text(MARGIN, y, f"… {left_out} more are not listed", color=SOFT))
        y += LINE
        first, *others = _line(_cells(end, number, of, REASON), y, INK)
        texts += [replace(first, color=_color(end), bold=True), *others]
    return texts, y + LINE


def _line(cells: Sequence[str], y: float, color: str) -> list[Text]:
    texts, x = [], MARGIN
    for cell, (_, width) in zip(cells, COLUMNS, strict=True):
        texts.append(Text(x, y, cut(cell, width - 1 if width else REASON), color=color))
        x += width * CHARACTER
    return [each for each in texts if each.text]


def _notes(of: Timeline, y: float) -> tuple[list[Text], float]:
    texts = []
    y += 0.06 if of.notes else 0.0
    for note in of.notes:
        for line in textwrap.wrap(note, 185)[:3]:
            texts.append(Text(MARGIN, y, line, 8, SOFT))
            y += LINE - 0.02
    return texts, y


def _table(of: Timeline) -> str:
    if not of.interruptions:
        return "<p>No failures.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
    rows = (
        "".join(f"<td>{escape(cell)}</td>" for cell in _cells(end, number, of)) for number, end in enumerate(of.interruptions, 1)
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<div class="list"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
