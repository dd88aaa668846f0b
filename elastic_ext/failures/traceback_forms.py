"""The forms in which programs print a traceback, and how each is read. Pure.

A new form is a row of `FORMS`, below: a text of its first line, where it starts, and how it is read. Texts come without colours,
as lines; each line may have a prefix, see `_prefixes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from elastic_ext.failures.evidence import RaisedException, Wrapped
from elastic_ext.failures.torch_texts import LAST_ERROR

HEADER = "Traceback (most recent call last):"
TITLE = "Traceback (most recent "  # of a box, too: rich cuts it to the width
GROUP = "+ Exception Group Traceback"
CAUSE = "The above exception was the direct cause of the following exception:"
MAX_LINES = 2000  # a recursion error prints about that many; later lines are ignored
MAX_MESSAGE_LINES = 50  # indented lines after the first line of a message, e.g. torch's list of missing keys
MAX_SYNTAX_LINES = 6
MAX_LINE = 4096  # characters

PROCESS = re.compile(r"\[(?!rank\d)[^\W\d][\w-]{0,60}\d\]:")  # torchrun, with --tee
RANK = re.compile(r"\[rank\d{1,6}\]: ")  # the excepthook of torch.distributed, before the lines of a traceback only
ACTOR = re.compile(r"\((?:[^()\n]{1,200} pid=\d{1,10}[^()\n]{0,100}|raylet)\) ")  # Ray's driver, before those of its workers
CUT = "\0"  # ends a text without a last newline, see `tracebacks`

_FRAME = re.compile(r'[> ] File "([^"\n]{1,4096})", line (\d{1,9})(?:, in ([^\n]{1,200}))?')
_RICH_FRAME = re.compile(r"([^\n]{1,1000}):(\d{1,9})(?: in ([^\n]{1,200}))?")
_RAISED = re.compile(r"(?:ray\.exceptions\.)?RayTaskError\(([\w.]{1,200})\): |([^\W\d][\w.<>]{0,300})(?:: ?|$)")
_FILE = '  File "'
_CORNERS, _ENDS, _BARS = "╭┌+", "╰└+", "│|"


@dataclass(frozen=True)
class PrintedTraceback:
    """A traceback that was read."""

    exception: RaisedException
    last: int  # number of its last line
    prefix: str = ""  # of each line
    whole: bool = True  # whether its end was printed, too


@dataclass(frozen=True)
class TracebackForm:
    """One form of a traceback."""

    printed_by: str
    sign: str  # what its first line holds
    # from all lines and the number of one with the sign: the number of its first line; None if it is not of this form
    start: Callable[[Sequence[str], int], int | None]
    # from all lines, the number of its first one, and that of the line where the text after it ends; None if it is cut
    read: Callable[[Sequence[str], int, int], PrintedTraceback | None]
    sure: bool = True  # whether a line with the sign is surely of a traceback, so that one before it did not end the script


def raised_in(line: str) -> tuple[str, str] | None:
    """Return the class and the message of a line that names an exception. Of a Ray task's: what it has raised."""
    found = _RAISED.match(line := line[:MAX_LINE].rstrip())
    return (found[1] or found[2], line[found.end() :]) if found else None


def _exception(raised: tuple[str, str], more: Sequence[str], frames: Sequence[str]) -> RaisedException:
    return RaisedException(raised[0], "\n".join((raised[1], *more)).removesuffix(CUT), tuple(frames))


def _frame(found: re.Match[str]) -> str:
    return f"{found[1]}:{found[2]} in {found[3]}" if found[3] else f"{found[1]}:{found[2]}"


# Python's own form, and those that have its lines.


def _prefixes(line: str, sign: str) -> list[str]:
    """Return what each line of a traceback may begin with, if this is its first one: all of what it has, known ones, or none.

    Lines without the prefix are another process's, and are skipped. A logger puts its prefix before the first line only.
    """
    at = 0
    for pattern in (PROCESS, ACTOR, RANK):
        at = found.end() if (found := pattern.match(line, at)) else at
    return list(dict.fromkeys((line.partition(sign)[0], line[:at], line[: len(line) - len(line.lstrip(" "))], "")))


def _read_lines(lines: Sequence[str], first: int, end: int, prefix: str) -> PrintedTraceback | None:
    """Read frames and source lines with an indent, up to the first line without one, which names the exception."""
    frames = []
    numbers = [at for at in range(first, min(end, first + MAX_LINES)) if lines[at].startswith(prefix)]
    for index, number in enumerate(numbers):
        line = lines[number][len(prefix) : len(prefix) + MAX_LINE]
        if frame := _FRAME.match(line):
            frames.append(_frame(frame))
        elif line and not line[0].isspace():
            if (raised := raised_in(line)) is None:
                return None
            more: list[str] = []
            for number in numbers[index + 1 : index + 1 + MAX_MESSAGE_LINES]:
                line = lines[number][len(prefix) : len(prefix) + MAX_LINE]
                if line[:1] not in (" ", "\t") and not line.lower().startswith(LAST_ERROR):  # nccl2 adds NCCL's last error
                    break
                more.append(line.rstrip())
            return PrintedTraceback(_exception(raised, more, frames), numbers[index + len(more)], prefix)
    return None


def _read_after(sign: str) -> Callable[[Sequence[str], int, int], PrintedTraceback | None]:
    def read(lines: Sequence[str], first: int, end: int) -> PrintedTraceback | None:
        found = (_read_lines(lines, first + 1, end, prefix) for prefix in _prefixes(lines[first], sign))
        return next(filter(None, found), None)

    return read


def _ray_task(lines: Sequence[str], at: int) -> int | None:
    return at if "(pid=" in lines[at].partition("ray::")[2] else None


def _script_file(lines: Sequence[str], at: int) -> int | None:
    """Find the first line of what Python prints, without a header, for a script that it cannot compile."""
    before, _, rest = lines[at].partition(_FILE)
    above = lines[at - 1].removeprefix(before) if at else "."
    found = _FRAME.match(_FILE + rest[:MAX_LINE])
    return at if found and not found[3] and TITLE not in above and not above[:1].isspace() else None


def _read_syntax(lines: Sequence[str], first: int, end: int) -> PrintedTraceback | None:
    for prefix in _prefixes(lines[first], _FILE):
        read = _read_lines(lines, first, min(end, first + MAX_SYNTAX_LINES), prefix)
        if read and read.exception.type in ("SyntaxError", "IndentationError", "TabError"):
            return read
    return None


# Groups of PEP 654.


def _group(lines: Sequence[str], at: int) -> int | None:
    """Find the first line of a group, from its own title or that of a member."""
    before = lines[at].partition(HEADER)[0].removesuffix("Exception Group ").rstrip()
    if not before.endswith(("|", "+")):
        return None
    outer = before[:-1].rstrip()
    for number in range(at, max(-1, at - MAX_LINES), -1):
        if lines[number].startswith(outer):
            row = lines[number][len(outer) :].lstrip()
            if row.startswith(GROUP):
                return number
            if row[:1] not in ("|", "+"):
                return None
    return None


def _read_group(lines: Sequence[str], first: int, end: int) -> PrintedTraceback | None:
    """Read the first section, the group, and its members, the outer ones first."""
    outer = lines[first].partition(GROUP)[0].rstrip()
    sections: list[tuple[int, list[str]]] = [(0, [])]
    last = first
    for number in range(first, min(end, first + MAX_LINES)):
        if not lines[number].startswith(outer):
            continue
        line = lines[number][len(outer) :]
        row = line.lstrip()
        if row[:1] not in ("|", "+"):
            break
        last = number
        if row.startswith("+-"):
            sections.append((len(line) - len(row) + 2 * row.startswith("+-+"), []))
        else:
            sections[-1][1].append(row[2:])
    (group, *others), *members = (_chain(rows) for _, rows in sorted(sections, key=lambda section: section[0]))
    if group is None:
        return None
    wrapped = tuple(Wrapped(each.type, each.message) for each in (*others, *chain.from_iterable(members)) if each)
    closed = lines[last].rstrip().removesuffix(CUT).endswith("+" + "-" * 36)
    return PrintedTraceback(replace(group, wrapped=wrapped), last, whole=closed)


def _chain(rows: Sequence[str]) -> list[RaisedException | None]:
    """Read a section of a group: its exception, and what that was raised from. One that was never raised has no traceback."""
    found: list[RaisedException | None] = []
    end = len(rows)
    for at in reversed([number for number, row in enumerate(rows) if HEADER in row]):
        read = _read_lines(rows, at + 1, end, "")
        if read is None or (found and CAUSE not in rows[at:end]):
            break
        found.append(read.exception)
        end = at
    if any(HEADER in row for row in rows):
        return found or [None]
    raised = raised_in(next((row for row in rows if row.strip()), ""))
    return [_exception(raised, (), ()) if raised else None]


# The boxes of rich.


def _margin(line: str) -> str | None:
    left = line.partition(TITLE)[0].rstrip("─- ")
    return left[:-1] if left[-1:] and left[-1] in _CORNERS and HEADER not in line else None


def _box(lines: Sequence[str], at: int) -> int | None:
    """Find the first line of a box, or of the box that it is in: those of members are in that of a group."""
    if (margin := _margin(lines[at])) is None:
        return None
    for bar in _BARS:
        if bar in margin:
            outer = margin[: margin.index(bar)]
            above = range(at - 1, max(-1, at - MAX_LINES), -1)
            return next((number for number in above if TITLE in lines[number] and _margin(lines[number]) == outer), at)
    return at


def _read_box(lines: Sequence[str], first: int, end: int) -> PrintedTraceback | None:
    """Read the frames in the box, and the line behind it, which names the exception, with what rich has wrapped of it."""
    margin = _margin(lines[first]) or ""
    width = len(lines[first].rstrip()) - len(margin)
    rows = [(number, lines[number][len(margin) :]) for number in range(first + 1, min(end, first + MAX_LINES))
            if lines[number].startswith(margin)]  # fmt: skip
    frames: list[str] = []
    path, closed = "", False
    for index, (_, row) in enumerate(rows):
        if row[:1] and row[0] in _BARS + _CORNERS + _ENDS:
            closed = row[0] in _ENDS
            inside = row[1:].rstrip().rstrip(_BARS).rstrip()
            if inside[1:2].strip("❱\\─- " + _BARS + _CORNERS + _ENDS):  # not of the source, nor of another box
                path += inside if path and inside.startswith(" in ") else inside[1:]
            else:
                if path and (frame := _RICH_FRAME.fullmatch(path)):
                    frames.append(_frame(frame))
                path = ""
        elif row.strip() and closed:
            raised = raised_in(row)
            return _below_box(rows[index:], raised, frames, margin, width) if raised else None
    return None


def _below_box(
    rows: Sequence[tuple[int, str]], raised: tuple[str, str], frames: Sequence[str], margin: str, width: int
) -> PrintedTraceback:
    """Read the message, and the boxes of a group's members. rows: numbers and lines. width: of the box, in characters."""
    last, before = rows[0]
    message = [raised[1]]
    number = 1
    for number, row in rows[1 : 1 + MAX_MESSAGE_LINES]:
        in_column = margin[-2:].isspace() and number == last + 1  # of a log record
        wrapped = in_column or len(before) == width or (before.endswith(" ") and len(before + row.split(" ")[0]) >= width)
        if not row.strip() or row[0] in _BARS + _CORNERS or not (wrapped or row[0] in " \t"):
            break
        if wrapped:
            joint = " " if message[-1] and " " in before else ""  # rich cuts only a word that is longer than a line
            message[-1] += joint + row.rstrip()
        else:
            message.append(row.rstrip())
        last, before = number, row
    members: list[Wrapped] = []
    expected = False
    for number, row in rows if raised[0].endswith("Group") else ():
        if number <= last or not row.strip():
            continue
        if row[0] not in _BARS + _CORNERS + _ENDS:
            break
        last, bare = number, row.strip(" \r" + _BARS)
        if "Sub-exception #" in bare or bare[:1] in tuple(_ENDS):
            expected = True
        elif bare:
            if expected and (member := raised_in(bare)):
                members.append(Wrapped(*member))
            expected = False
    return PrintedTraceback(
        replace(_exception(raised, (), frames), message="\n".join(message).removesuffix(CUT), wrapped=tuple(members)),
        last,
        margin,
    )


FORMS = (  # the first one that a line starts
    TracebackForm("Python, of a group, and loguru", HEADER, _group, _read_group),
    TracebackForm("rich", TITLE, _box, _read_box),
    TracebackForm("Python, loguru, hydra, and torch", HEADER, lambda lines, at: at, _read_after(HEADER)),
    TracebackForm("Ray, of a task or an actor", "ray::", _ray_task, _read_after("ray::"), sure=False),
    TracebackForm("Python, of a script that it cannot compile", _FILE, _script_file, _read_syntax, sure=False),
)
