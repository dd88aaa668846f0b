"""The record of an event, with the fields that `events.schema.json` has for it. Below: a recovery, phase by phase.

That schema is the table of events, which readers get, too: a new event or field is one more entry there, and the table of the
reference follows. A reader must ignore events and fields that it does not know: SCHEMA grows only when something is removed or
means something else. Standard library only; pure, once the table is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from elastic_ext.base.printable import cut, shown

SCHEMA = 1
MAX_TEXT = 1000  # characters of one text; the rest is cut off
MAX_ITEMS = 256  # of a list or an object

Value = bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"] | None

# The names of the own fields of each event; every field is always there. Read at once: an upgrade may replace the package later.
FIELDS: dict[str, frozenset[str]] = {
    each["if"]["properties"]["event"]["const"]: frozenset(each["then"]["properties"])
    for each in json.loads(Path(__file__).with_name("events.schema.json").read_text("utf-8"))["allOf"]
}


@dataclass(frozen=True)
class Source:
    run_id: str
    node: str
    pid: int


@dataclass(frozen=True)
class EventTime:
    """When an event happens: Unix seconds, monotonic seconds, and the round."""

    unix_s: float
    monotonic_s: float
    round: int


def record(name: str, source: Source, at: EventTime, own: Mapping[str, Value]) -> dict[str, Value]:
    """Return the record of an event. Texts are cut, on one line and without credentials.

    own: the event's own fields, all of them. Raises ValueError: the table has no such event, or it has other fields.
    """
    if name not in FIELDS:
        raise ValueError(f"unknown event {name!r}")
    if own.keys() != (expected := FIELDS[name]):
        raise ValueError(f"event {name}: fields {sorted(own)}, expected {sorted(expected)}")
    common: dict[str, Value] = {
        "schema": SCHEMA,
        "event": name,
        "time": rfc3339(at.unix_s),
        "monotonic": at.monotonic_s,
        "run_id": source.run_id,
        "node": source.node,
        "pid": source.pid,
        "round": at.round,
    }
    return {key: _clean(value) for key, value in {**common, **own}.items()}


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _clean(value: Value) -> Value:
    if isinstance(value, str):
        return cut(shown(value[: 4 * MAX_TEXT]), MAX_TEXT)  # first masked, then cut: half a URL would keep its password
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {shown(str(key)): _clean(each) for key, each in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, Sequence):
        return [_clean(each) for each in value[:MAX_ITEMS]]
    return value


# A recovery: from the moment an agent stops running workers until all of them have made a step. If the workers fail again before
# their first step, it goes on. Metrics, events and spans report what is measured here.

FIRST_STEP = "first_step"  # the last phase
MEMBERSHIP = "membership"  # kind of a cause without a failure: nodes come or leave
MOST_FAILURES = 16  # of a recovery that are kept: workers may fail again and again before their first step


@dataclass(frozen=True)
class RecoveryPhase:
    """A phase. begin, end: monotonic seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Cause:
    """Why the workers were stopped. kind: of the failure, or "membership". decision: answer of the job, "" without a verdict."""

    kind: str = MEMBERSHIP
    decision: str = ""
    reason: str = ""


@dataclass(frozen=True)
class SeenFailure:
    """A failure on this node, by the worker that explains those of the others here. at: monotonic seconds.

    exit_code: None if a signal ended the worker, or the agent did. exception_type: "" if none is known. traceback: "" likewise.
    """

    at: float
    kind: str
    rule: str
    reason: str
    rank: int
    pid: int
    exit_code: int | None = None
    exception_type: str = ""
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class PastRecovery:
    """A recovery that is over, or was given up."""

    cause: Cause  # what ended the training; later failures of the same recovery are not named
    round: int  # the round that ended with it
    phases: tuple[RecoveryPhase, ...]  # in order, without gaps; a name may come several times
    recovered: bool | None  # whether all workers of this node have made a step; None: they ran again, but a step is not known
    failures: tuple[SeenFailure, ...] = ()  # on this node, the first MOST_FAILURES

    @property
    def begin(self) -> float:
        return self.phases[0].begin

    @property
    def end(self) -> float:
        return self.phases[-1].end

    def seconds(self) -> dict[str, float]:
        return _seconds(self.phases)


def _seconds(phases: Iterable[RecoveryPhase]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in phases:
        found[each.name] = found.get(each.name, 0.0) + each.end - each.begin
    return found


class RecoveryTrace:
    """The recovery that is under way, if any. Times are monotonic seconds, and never go back."""

    def __init__(self) -> None:
        self.cause: Cause | None = None  # of what stopped the workers last; the next round began with it
        self._first_cause: Cause | None = None  # of this recovery
        self._failures: list[SeenFailure] = []  # of this recovery
        self._phases: list[RecoveryPhase] = []  # those that are over
        self._current = ""  # the phase that runs; "" outside a recovery
        self._since = 0.0
        self._ran = False  # workers have run before
        self._round = 0

    def entered(self, name: str, round_: int, now: float) -> None:
        """Note that a phase begins. It is part of a recovery once workers have run. round_: the current one."""
        if not self._current:
            if not self._ran:
                return
            self._round = round_
        self._next(name, now)

    def stopped_for(self, cause: Cause) -> None:
        """Note why the workers were stopped; the first reason of a recovery counts, but a verdict more than none."""
        self.cause = cause
        if self._first_cause is None or (cause.decision and not self._first_cause.decision):
            self._first_cause = cause

    def failed(self, failure: SeenFailure) -> None:
        """Note a failure on this node, which the recovery that is under way follows."""
        if len(self._failures) < MOST_FAILURES:
            self._failures.append(failure)

    def ran(self, now: float) -> None:
        self._ran = True
        if self._current:
            self._next(FIRST_STEP, now)

    def first_steps(self, at: float) -> PastRecovery | None:
        """Note that all workers have made a step, the last of them at `at`. Return the recovery that this ends, if any."""
        if self._current != FIRST_STEP:
            return None
        self._next("", max(at, self._since))
        return self._ended(recovered=True)

    def seconds(self, now: float) -> dict[str, float]:
        """Return how long each phase of the recovery that is under way took so far."""
        return _seconds([*self._phases, *([RecoveryPhase(self._current, self._since, now)] if self._current else [])])

    def given_up(self, now: float) -> PastRecovery | None:
        """Note that the agent ends. Return the recovery that was under way; it ended when the workers ran again, if they did.

        Without a cause it is not a recovery, but the end of a job that is done or was stopped.
        """
        if not self._current or self._first_cause is None:
            return None
        if self._current == FIRST_STEP and self._phases:
            self._current = ""
            return self._ended(recovered=None)
        self._next("", now)
        return self._ended(recovered=False)

    def _next(self, name: str, now: float) -> None:
        if self._current:
            self._phases.append(RecoveryPhase(self._current, self._since, now))
        self._current, self._since = name, now

    def _ended(self, recovered: bool | None) -> PastRecovery:
        recovery = PastRecovery(self._first_cause or Cause(), self._round, tuple(self._phases), recovered, tuple(self._failures))
        self._phases, self._failures, self._first_cause = [], [], None
        return recovery
