"""The reader of the workers' journals of saves, while they grow. What the lines mean is in workers/bootstrap/saves.py.

A script may write where it should not, and the last line may be torn. So a journal ends with the first line that has no such
form, and `SaveJournal.damaged` says whether there was one before a torn last line.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, BinaryIO, NamedTuple

from elastic_ext.base import records

VERSION = 1
MAX_PART = records.MAX_BYTES // 8
"""Bytes of a journal in one record. JSON makes up to 6 of each; the rest of a record with one part is far below a quarter."""
_PAGE = 4096  # bytes, the least that a filesystem frees; the first line is shorter
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE: see fallocate(2)
_LIBC = ctypes.CDLL(None)
ELSEWHERE = -1  # `at` of a path that is in none of the directories
_HEAD = re.compile(rf"elastic_ext-saves {VERSION} (\d+) (\d+) (\d+)\n")
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
        number: of a rename, how many files below it were open; of a step, the count at its optimizer's first one; of a report,
            the step, -1 if it is unknown.
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

    name: what no other journal of the round is called. host: the same text for journals of one host: times of two hosts are not
    comparable. damaged: some lines could not be read.
    """

    rank: int
    pid: int
    parent: int = 0
    events: tuple[JournalLine, ...] = ()
    host: str = ""
    damaged: bool = False
    name: str = ""


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
    **dict.fromkeys("wlpdru", _place),
    "m": _rename,
    **dict.fromkeys("sk", _step),
    **dict.fromkeys("efx", _nothing),
}


def event_of(line: str) -> JournalLine:
    """Return the event of a line. Raises ValueError, KeyError: the line has no such form."""
    kind, steps, ns, who, *fields = line.split("\t")
    in_handler = who.endswith("h")
    known = _FIELDS[kind](fields)
    return JournalLine(kind, int(steps), int(ns), int(who.removesuffix("h")), in_handler, **known)  # type: ignore[arg-type]


def journal_of(data: bytes, host: str = "") -> SaveJournal | None:
    """Return what is in the file of a journal; None: it is empty or of another version."""
    found = _HEAD.match(data.decode("utf-8", "surrogateescape"))
    if found is None:  # the first line is torn, too
        return None
    rank, pid, parent = map(int, found.groups())
    return JournalPart("", rank, pid, parent, data[data.index(b"\n") + 1 :].decode("latin-1")).parsed(host)


@dataclass(frozen=True)
class JournalPart:
    """Some lines of a journal, one after the other. name, rank, pid, parent: see `SaveJournal`. lines: its bytes, as latin-1."""

    name: Annotated[str, records.is_name]
    rank: records.Count
    pid: records.Count
    parent: records.Count
    lines: str

    def parsed(self, host: str = "") -> SaveJournal:
        """Return the events of these lines. The last one is left out if it has no end."""
        events: list[JournalLine] = []
        damaged = False
        for line in self.lines.encode("latin-1", "replace").decode("utf-8", "surrogateescape").split("\n")[:-1]:
            try:
                events.append(event_of(line))
            except (ValueError, KeyError):
                damaged = True
                break
        return SaveJournal(self.rank, self.pid, self.parent, tuple(events), host, damaged, self.name)


class JournalTail:
    """Reads the journals of one worker and its forked children as they grow, and frees the memory of what it has read.

    Invariant: all that was there before a read has been returned once nothing is new, or `fault` says why it may not have been.
    """

    def __init__(self, path: str) -> None:
        """path: as in the worker's message."""
        self._folder, self._prefix = os.path.split(f"{path}.")
        self._read: dict[str, int] = {}  # bytes read, by name; behind the first line there
        self.fault = ""  # the first one: it stays, because steps may have been counted whose lines were not there

    def read(self) -> list[JournalPart]:
        """Return what is new, at most MAX_PART bytes of each journal. A fault of one journal loses nothing of the others."""
        found = []
        for name in self._names():
            try:
                with open(os.path.join(self._folder, name), "r+b") as file:
                    part = self._part(name, file)
            except OSError as error:
                self._fail(error)
                continue
            if part is not None:
                found.append(part)
        return found

    def _names(self) -> list[str]:
        try:
            names = sorted(each for each in os.listdir(self._folder) if each.startswith(self._prefix))
        except OSError as error:
            self._fail(error)
            return []
        for name in sorted(self._read.keys() - set(names))[:1]:
            self._fail(f"{os.path.join(self._folder, name)} has gone")
        return names

    def _fail(self, why: object) -> None:
        self.fault = self.fault or str(why)

    def _part(self, name: str, file: BinaryIO) -> JournalPart | None:
        first = file.read(_PAGE)
        head = _HEAD.match(first.decode("utf-8", "surrogateescape"))
        if head is None:
            if b"\n" in first or len(first) == _PAGE:
                raise OSError(f"{file.name} is no journal of saves: it begins with {first[:40]!r}")
            return None
        begin = self._read.setdefault(name, head.end())  # the first line is of ASCII
        if os.fstat(file.fileno()).st_size < begin:
            raise OSError(f"{file.name} is shorter than it was")
        file.seek(begin)
        data = file.read(MAX_PART)
        lines = data[: data.rfind(b"\n") + 1]
        if not lines:
            if len(data) == MAX_PART:
                raise OSError(f"{file.name} is no journal of saves: a line has {MAX_PART} bytes and more")
            return None
        self._read[name] = end = begin + len(lines)
        free_pages(file.fileno(), _PAGE, end // _PAGE * _PAGE)
        rank, pid, parent = map(int, head.groups())
        return JournalPart(name, rank, pid, parent, lines.decode("latin-1"))


def free_pages(file: int, begin: int, end: int) -> None:
    """Give back the memory of these bytes of a file; its size stays. Where the filesystem cannot do that, nothing happens."""
    if end > begin:
        _LIBC.fallocate(file, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
