"""Reads the lines of `events_file`, of one agent or of many. An unreadable line is named, and the others count."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elastic_ext.base.printable import shown
from elastic_ext.observe import event_table

MAX_LINE = 1 << 20  # characters


@dataclass(frozen=True)
class Told:
    """An event as it was read.

    Attributes:
        node, pid: the agent's.
        wall: Unix seconds by its host's clock; monotonic: seconds by the clock that nobody sets.
        fields: the event's own, none of them checked.
    """

    name: str
    node: str
    pid: int
    run_id: str
    round: int
    wall: float
    monotonic: float
    fields: dict[str, Any]

    def text(self, field: str) -> str:
        """Return a field as text; "" if it has none."""
        value = self.fields.get(field)
        return shown(value)[: event_table.MAX_TEXT] if isinstance(value, str) else ""

    def whole(self, field: str, missing: int = -1) -> int:
        """Return a field as a whole number."""
        value = self.fields.get(field)
        return value if isinstance(value, int) and not isinstance(value, bool) else missing

    def seconds(self, field: str) -> float:
        """Return a field as seconds; 0 if it has none."""
        value = self.fields.get(field)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9 else 0.0


@dataclass(frozen=True)
class Reading:
    """What the lines of a file hold. faults: one line for each that is not an event."""

    told: tuple[Told, ...]
    faults: tuple[str, ...] = ()


def read(lines: Iterable[str], file: str) -> Reading:
    """Read the lines of a file. The last line of a file that is still written may be half a line: it is passed over."""
    told, faults = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told.append(_told(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if line.endswith("\n"):
                faults.append(f"{shown(file)}, line {number}: expected a line of events_file: {_why(error)}")
    return Reading(tuple(told), tuple(faults))


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else shown(str(error))


def _told(line: str) -> Told:
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if (schema := record["schema"]) != event_table.SCHEMA:
        raise ValueError(f"schema {shown(str(schema))}, expected {event_table.SCHEMA}: use the elastic-ext that wrote it")
    wall = datetime.fromisoformat(str(record["time"]).replace("Z", "+00:00")).timestamp()
    told = Told(
        *(shown(str(record["event"])), shown(str(record["node"])), int(record["pid"]), shown(str(record["run_id"]))),
        *(int(record["round"]), wall, float(record["monotonic"]), record),
    )
    if not abs(told.monotonic) < 1e12:
        raise ValueError(f"monotonic is {told.monotonic}")
    return told
