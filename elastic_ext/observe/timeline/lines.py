"""Reads events as they stand in files: what is no event is named by file and line, and the rest is read. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from elastic_ext.base.printable import shown
from elastic_ext.observe.event_table import SCHEMA

MAX_NAME = 80  # characters of a name that is shown
LATEST, LONGEST_S = 2**33, 2**32  # the year 2242, and 136 years: dates end somewhere


@dataclass(frozen=True)
class Line:
    """An event. at: Unix seconds by its host's clock. own: all its fields, of any type."""

    name: str
    at: float
    monotonic: float
    run_id: str
    node: str
    pid: int
    round: int
    own: Mapping[str, object]

    def number(self, field: str) -> float | None:
        """Return a field that holds a finite number, else None."""
        value = self.own.get(field)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 else None

    def whole(self, field: str) -> int | None:
        """Return a field that holds a whole number, else None."""
        value = self.own.get(field)
        return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None

    def text(self, field: str) -> str:
        """Return a field that holds a text, in one line that is safe to show; else ""."""
        value = self.own.get(field)
        return shown(value) if isinstance(value, str) else ""

    def numbers(self, field: str) -> dict[str, float]:
        """Return the finite numbers that are not negative in a field that holds an object, by name."""
        value = self.own.get(field)
        found = value if isinstance(value, Mapping) else {}
        return {
            str(name): float(each)
            for name, each in found.items()
            if isinstance(each, (int, float)) and not isinstance(each, bool) and 0 <= each < 1e15
        }


@dataclass(frozen=True)
class Fault:
    """A line that is no event. number: of the line, from 1."""

    file: str
    number: int
    why: str


def parse(text: str, file: str) -> tuple[list[Line], list[Fault]]:
    """Return the events of a file, and its faults. The last line may be half written."""
    lines: list[Line] = []
    faults: list[Fault] = []
    *whole, last = text.split("\n")  # not splitlines(): a JSON text may hold other line breaks
    for number, line in enumerate(whole, 1):
        try:
            lines += [_event(line)] if line.strip() else []
        except ValueError as error:
            faults.append(Fault(file, number, shown(str(error))))
    with contextlib.suppress(ValueError):  # its writer has not finished it
        lines += [_event(last)] if last.strip() else []
    return lines, faults


def once(lines: Iterable[Line]) -> list[Line]:
    """Return lines without those that are there twice, as if a file was given twice."""
    return list({(each.node, each.pid, each.monotonic, each.name): each for each in lines}.values())


def _event(text: str) -> Line:
    """Raises ValueError, with a reason that does not repeat the line."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {type(found).__name__}")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, found {str(found.get('schema'))[:20]}: another version wrote it")
    monotonic = found.get("monotonic")
    if not isinstance(monotonic, (int, float)) or isinstance(monotonic, bool) or not abs(monotonic) < LONGEST_S:
        raise ValueError("monotonic is missing, or no number of seconds")
    return Line(
        name=_text(found, "event"),
        at=_unix(_text(found, "time")),
        monotonic=float(monotonic),
        run_id=_text(found, "run_id")[:MAX_NAME],
        node=_text(found, "node")[:MAX_NAME],
        pid=_count(found, "pid"),
        round=_count(found, "round"),
        own=found,
    )


def _text(found: Mapping[str, object], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is missing, or no text")
    return shown(value)


def _count(found: Mapping[str, object], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"{name} is missing, or no number from 0 on")
    return value


def _unix(time: str) -> float:
    try:
        at = datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError("time is not as RFC 3339 says") from None
    if at.tzinfo is None:
        raise ValueError("time has no zone")
    if not 0 <= at.timestamp() < LATEST:
        raise ValueError("time is out of range")
    return at.timestamp()


def _refuse(constant: str) -> float:
    raise ValueError(f"not JSON: {constant}")
