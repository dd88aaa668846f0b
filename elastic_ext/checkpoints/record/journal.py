"""The reader of the workers' journals of saves. What the lines mean is in workers/bootstrap/saves.py.

A script may write where it should not, and the last line may be torn. So a journal ends with the first line that has no such
form, and `SaveJournal.damaged` says whether there was one before a torn last line.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

VERSION = 1
ELSEWHERE = -1  # `at` of a path that is in none of the directories
_HEAD = re.compile(rf"elastic_ext-saves {VERSION} (-?\d+) (\d+) (\d+)")
_ESCAPE = re.compile(r"\\(.)")


class SavePath(NamedTuple):  # a tuple, because a round may have a million, and frozen dataclasses take three times as long
    """A path below a directory of checkpoints. at: number of the directory in the worker's message. path: relative to it."""

    at: int
    path: str

    @property
    def entry(self) -> SavePath:
        """The first component."""
        return SavePath(self.at, self.path.partition("/")[0])


NOWHERE = SavePath(ELSEWHERE, "")


class JournalLine(NamedTuple):
    """One line of a journal.

    Attributes:
        kind: its letter.
        steps: optimizer steps of the worker by then.
        ns: time.monotonic_ns() of its host.
        who: number of the thread or work item; 0: the main thread.
        in_handler: a signal handler has done it.
        place, to: the path; of a rename, the old one and the new one.
        number: of a rename, how many files below it were open; of a step, the count at its optimizer's first one.
    """

    kind: str
    steps: int
    ns: int
    who: int = 0
    in_handler: bool = False
    place: SavePath = NOWHERE
    to: SavePath = NOWHERE
    number: int = 0


@dataclass(frozen=True)
class SaveJournal:
    """What one process has noted. parent: pid of the process that forked it; 0: it is the worker itself.

    host: the same text for journals of one host: times of two hosts are not comparable. damaged: some lines could not be read.
    """

    rank: int
    pid: int
    parent: int = 0
    events: tuple[JournalLine, ...] = ()
    host: str = ""
    damaged: bool = False


def _path(text: str) -> str:
    return _ESCAPE.sub(lambda found: {"t": "\t", "n": "\n"}.get(found[1], found[1]), text) if "\\" in text else text


def _place(fields: list[str]) -> Mapping[str, object]:
    at, path = fields
    return {"place": SavePath(int(at), _path(path))}


def _rename(fields: list[str]) -> Mapping[str, object]:
    at, path, to_at, to, files = fields
    return {"place": SavePath(int(at), _path(path)), "to": SavePath(int(to_at), _path(to)), "number": int(files)}


def _step(fields: list[str]) -> Mapping[str, object]:
    (first,) = fields
    return {"number": int(first)}


def _nothing(fields: list[str]) -> Mapping[str, object]:
    () = fields
    return {}


_FIELDS: Mapping[str, Callable[[list[str]], Mapping[str, object]]] = {
    **dict.fromkeys("wpdru", _place),
    "m": _rename,
    "s": _step,
    **dict.fromkeys("efxk", _nothing),
}


def event_of(line: str) -> JournalLine:
    """Return the event of a line. Raises ValueError, KeyError: the line has no such form."""
    kind, steps, ns, who, *fields = line.split("\t")
    in_handler = who.endswith("h")
    known = _FIELDS[kind](fields)
    return JournalLine(kind, int(steps), int(ns), int(who.removesuffix("h")), in_handler, **known)  # type: ignore[arg-type]


def journal_of(data: bytes, host: str = "") -> SaveJournal | None:
    """Return what is in the file of a journal; None: it is empty or of another version."""
    head, *lines = data.decode("utf-8", "surrogateescape").split("\n")
    found = _HEAD.fullmatch(head)
    if found is None or not lines:  # the first line is torn, too
        return None
    rank, pid, parent = map(int, found.groups())
    events: list[JournalLine] = []
    damaged = False
    for line in lines[:-1]:  # what follows the last newline is torn, or empty
        try:
            events.append(event_of(line))
        except (ValueError, KeyError):
            damaged = True
            break
    return SaveJournal(rank, pid, parent, tuple(events), host, damaged)


def read_journals(path: str, host: str = "") -> list[SaveJournal]:
    """Return the journals of one worker and its forked children. path: as in the worker's message. Raises OSError."""
    found = []
    for each in sorted(glob.glob(f"{glob.escape(path)}.*")):
        with open(each, "rb") as file:
            journal = journal_of(file.read(), host)
        if journal is not None:
            found.append(journal)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process of this id has not ended. It may be another one by now."""
    return os.path.exists(f"/proc/{pid}")
