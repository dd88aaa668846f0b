"""Reads the exception out of a traceback that was printed, for scripts whose exception nothing recorded. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from elastic_ext.failures.evidence import RaisedException, Wrapped
from elastic_ext.failures.torch_texts import LAST_ERROR

HEADER = "Traceback (most recent call last):"
IGNORED = "Exception ignored "  # of a destructor, say: the line above its traceback, and the script goes on
CAUSE = "The above exception was the direct cause of the following exception:"
MAX_CAUSES = 4
MAX_LINES = 2000  # a recursion error prints about that many; later lines are ignored
MAX_MESSAGE_LINES = 50  # indented lines after the first line of a message, e.g. torch's list of missing keys
MAX_LINE = 4096  # characters

_FRAME = re.compile(r'  File "([^"\n]{1,4096})", line (\d{1,9})(?:, in ([^\n]{1,200}))?')
_RAISED = re.compile(r"([^\W\d][\w.]{0,200})(?:: ?|$)")


def last_exception(text: str) -> RaisedException | None:
    """Return the exception of the last traceback in `text`, or None.

    Any text before "Traceback" on its line counts as a prefix, like those that torch ("[rank0]: ") and torchrun ("[default0]:")
    put before each line of a rank. Lines with another prefix are skipped. What it was raised from is in `wrapped`.
    """
    found = None
    causes: list[Wrapped] = []
    end = len(text)
    while len(causes) <= MAX_CAUSES:
        at = text.rfind(HEADER, 0, end)
        if at < 0:
            break
        start = text.rfind("\n", 0, at) + 1
        above = text[text.rfind("\n", 0, max(start - 1, 0)) + 1 : start]
        if found is None and above.removeprefix(text[start:at]).startswith(IGNORED):
            end = start
            continue
        lines = text[at:end].split("\n", MAX_LINES)[1 : MAX_LINES + 1]
        raised = _read(_without_prefix(lines, text[start:at])) or _read(lines)
        if raised is None:
            break
        if found is None:
            found = raised
        else:
            causes.append(Wrapped(raised.type, raised.message))
        end = text.rfind(CAUSE, 0, start)
        if end < 0 or HEADER in text[end:start]:
            break
    return replace(found, wrapped=tuple(causes)) if found else None


def _without_prefix(lines: list[str], prefix: str) -> list[str]:
    return [line[len(prefix) :] for line in lines if line.startswith(prefix)] if prefix else lines


def _read(lines: list[str]) -> RaisedException | None:
    """Read the indented frames and source lines up to the first line without indent, which names the exception."""
    frames = []
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line[:MAX_LINE]):
            path, line_number, function = frame.groups()
            frames.append(f"{path}:{line_number} in {function}" if function else f"{path}:{line_number}")
        elif line and not line[0].isspace():
            raised = _RAISED.match(line[:MAX_LINE].rstrip())
            if raised is None:
                return None
            message = [line[raised.end() : MAX_LINE].rstrip(), *_continued(lines[number + 1 : number + 1 + MAX_MESSAGE_LINES])]
            return RaisedException(raised[1], "\n".join(message), tuple(frames))
    return None


def _continued(lines: list[str]) -> list[str]:
    """Return the lines that go on with a message: those with an indent, and NCCL's last error, as nccl2 adds it."""
    found = []
    for line in lines:
        if line[:1] not in (" ", "\t") and not line.lower().startswith(LAST_ERROR):
            break
        found.append(line[:MAX_LINE].rstrip())
    return found
