"""The events of an agent: their names and fields, and the record of one. `schema` is what `events.schema.json` holds. Below: a
recovery, phase by phase.

A new event or field is one more row here; the tables of the reference and the JSON Schema follow. A reader must ignore events and
fields that it does not know: SCHEMA grows only when something is removed or means something else. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from elastic_ext.base.printable import cut, shown

SCHEMA = 1
MAX_TEXT = 1000  # characters of one text; the rest is cut off
MAX_ITEMS = 256  # of a list or an object

Value = bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"] | None

TEXT, INTEGER, NUMBER, BOOLEAN = "string", "integer", "number", "boolean"
INTEGERS, TEXTS, NUMBERS = "array of integer", "array of string", "object of number"
ANY = "object"


@dataclass(frozen=True)
class Field:
    name: str
    type: str  # as in JSON Schema; "array of T" and "object of T" hold values of type T
    meaning: str
    unit: str = ""
    optional: bool = False  # it may be null: unknown or absent; every field of an event is always there


@dataclass(frozen=True)
class EventType:
    """An event. what: when it is written."""

    what: str
    fields: tuple[Field, ...]


def _event(what: str, *fields: Field) -> EventType:
    return EventType(what, fields)


COMMON = (
    Field("schema", INTEGER, f"version of this table: {SCHEMA}"),
    Field("event", TEXT, "name of the event"),
    Field("time", TEXT, "when it happened, by this host's clock: RFC 3339, UTC, with microseconds"),
    Field("monotonic", NUMBER, "the same by a clock that is never set; only differences between events of one host count", "s"),
    Field("run_id", TEXT, "run id of the job"),
    Field("node", TEXT, "name of the node"),
    Field("pid", INTEGER, "process id of the agent"),
    Field("round", INTEGER, "the round, the same on all nodes; 0 before the first"),
)

_REASON = Field("reason", TEXT, "the reason, as one line of text")
_SECONDS = "s"

EVENTS: dict[str, EventType] = {
    "agent_started": _event(
        "The agent begins to supervise this node.",
        Field("version", TEXT, "version of elastic_ext"),
        Field("torch", TEXT, "version of torch"),
        Field("backend", TEXT, "--rdzv-backend"),
        Field("workers", INTEGER, "workers of this node"),
        Field("max_restarts", INTEGER, "budget of the job; -1: no limit"),
        Field("settings", ANY, "settings that differ from their defaults, as strings, without secrets"),
    ),
    "node_refused": _event("The job refuses this node for now.", _REASON),
    "node_drained": _event(
        "This node leaves the job because an operator has drained it.",
        _REASON,
        Field(
            "step",
            INTEGER,
            "step of the checkpoint that was saved before; null: unknown, or none was saved",
            "steps",
            optional=True,
        ),
    ),
    "round_started": _event(
        "This node has joined a round and knows the checkpoint to resume from.",
        Field("nodes", INTEGER, "nodes of the round"),
        Field("node_rank", INTEGER, "rank of this node"),
        Field("world_size", INTEGER, "workers of the round, on all nodes"),
        Field("ranks", INTEGERS, "ranks of this node's workers"),
        Field("cause", TEXT, "kind of the failure before; `membership`: nodes came or left; `start`: the first round"),
    ),
    "membership_changed": _event(
        "The number of nodes or workers is not that of the last round of this agent.",
        Field("nodes_before", INTEGER, "nodes of the round before"),
        Field("nodes", INTEGER, "nodes of this round"),
        Field("world_size_before", INTEGER, "workers of the round before"),
        Field("world_size", INTEGER, "workers of this round"),
    ),
    "checkpoint_chosen": _event(
        "The nodes have agreed on what this round resumes from; only with `checkpoint_dir`.",
        Field("path", TEXT, "path or URL of the checkpoint; null: from nothing", optional=True),
        Field("step", INTEGER, "its step; null: unknown", optional=True),
        _REASON,
    ),
    "workers_started": _event(
        "All workers of this node have been started.",
        Field("pids", INTEGERS, "their process ids, by local rank"),
        Field("warm", INTEGER, "those that were warm standbys"),
        Field("cold", INTEGER, "the others"),
        Field("seconds", NUMBER, "time of the start", _SECONDS),
    ),
    "first_step": _event(
        "All workers of this node have made an optimizer step in this round.",
        Field("seconds", NUMBER, "from the workers' start to the first step of the last of them", _SECONDS),
    ),
    "recovered": _event(
        "A recovery is over: all workers of this node have made a step again.",
        Field("cause", TEXT, "kind of the failure that ended training; `membership`: nodes came or left"),
        _REASON,
        Field("seconds", NUMBER, "from the end of training on this node to the first step of the last worker", _SECONDS),
        Field("phases", NUMBERS, "time by phase: those of `elastic_ext_recovery_seconds`, and `backoff`", _SECONDS),
    ),
    "checkpoint_saved": _event(
        "The workers have seen a checkpoint of theirs committed.",
        Field("step", INTEGER, "its step"),
        Field("seconds", NUMBER, "from the request to the commit; null: unknown", _SECONDS, optional=True),
    ),
    "checkpoint_copied": _event(
        "A checkpoint is complete in `checkpoint_dir`, copied from `local_dir`.",
        Field("lag_steps", INTEGER, "steps by which the newest local one is ahead; null: unknown", "steps", optional=True),
    ),
    "straggler": _event(
        "A rank, or a whole host, is late from now on, or no longer: it issues the collectives of a step later than the others. "
        "Written by the agent of rank 0.",
        Field("late", BOOLEAN, "false: it is late no longer; the figures are those of when it last was"),
        Field("host", TEXT, "its host"),
        Field("rank", INTEGER, "its rank; null: all ranks of the host", optional=True),
        Field("seconds", NUMBER, "by how much per step, median", _SECONDS),
        Field("p90_seconds", NUMBER, "the same, 90th percentile", _SECONDS),
        Field("step_seconds", NUMBER, "time of a step", _SECONDS),
        Field("share", NUMBER, "`seconds` as a part of the step"),
        Field("error_seconds", NUMBER, "by how much `seconds` may be wrong, because the clocks of hosts differ", _SECONDS),
    ),
    "round_over": _event(
        "The workers of this node must stop, though none of them has failed.",
        Field(
            "cause",
            TEXT,
            "`stalled`: the job hangs; `differs`: replicas are no longer equal; `broken`: another node failed, left or "
            "joined; `cut_off`: this node may be taken for dead; `closed`: the job is over",
        ),
        _REASON,
    ),
    "etcd_unavailable": _event(
        "etcd, or the store of `ext_c10d` over several nodes, has not answered for half of `lease_ttl`. Training goes on.",
        Field("endpoint", TEXT, "address that was asked last"),
        Field("seconds", NUMBER, "since the first call that failed", _SECONDS),
    ),
    "etcd_available": _event(
        "It answers again; only after `etcd_unavailable`.",
        Field("endpoint", TEXT, "address that answers"),
        Field("seconds", NUMBER, "how long it did not answer", _SECONDS),
    ),
    "hang": _event(
        "The job hangs, and this agent has examined its workers.",
        Field("culprits", INTEGERS, "ranks of this node that the other ranks seem to wait for, as far as this node knows"),
        Field("reasons", TEXTS, "what each of them does"),
        Field("seconds", NUMBER, "since a worker of this node last gave a sign of life; null: unknown", _SECONDS, optional=True),
    ),
    "failure": _event(
        "Workers of this node have failed; the fields describe the one whose failure explains the others.",
        Field("rank", INTEGER, "its rank"),
        Field("local_rank", INTEGER, "its local rank"),
        Field("worker_pid", INTEGER, "its process id"),
        Field("exit_code", INTEGER, "its exit code; null: a signal ended it", optional=True),
        Field("signal", TEXT, "the signal that ended it", optional=True),
        Field("exception", TEXT, "type of the exception that it raised", optional=True),
        Field("step", INTEGER, "optimizer steps that it had done since it started; null: unknown", "steps", optional=True),
        Field("kind", TEXT, "kind of this worker's failure; the verdict of the job may differ"),
        Field("rule", TEXT, "rule that gives this kind"),
        Field("fingerprint", TEXT, "has the same value when the same failure happens again"),
        _REASON,
        Field("others", INTEGERS, "ranks of the other workers of this node that failed"),
    ),
    "decision": _event(
        "The verdict of the job on a round that has ended, as this agent carries it out.",
        Field("decision", TEXT, "answer of the job: stop, confirm, restart, restart_free, replace_node or requeue"),
        Field("action", TEXT, "what this agent does: restart or stop"),
        Field("kind", TEXT, "kind of the failure"),
        Field("rule", TEXT, "the rule that decided"),
        _REASON,
        Field("culprit_rank", INTEGER, "rank of the cause; -1: none"),
        Field("culprit_host", TEXT, "host of the cause; empty: unknown"),
        Field("charged", BOOLEAN, "whether the restart counts against the budget"),
        Field("restarts", INTEGER, "restarts charged so far, with this one"),
        Field("max_restarts", INTEGER, "budget of the job; -1: no limit, or not known to this verdict"),
        Field("delay", NUMBER, "wait before the restart", _SECONDS),
        Field("phases", NUMBERS, "time by phase since the end of training on this node, as in `recovered`", _SECONDS),
        Field("exit_code", INTEGER, "exit code of this agent; null: it goes on", optional=True),
    ),
    "workers_stopped": _event(
        "All workers of this node have ended.",
        Field("exit_codes", ANY, "exit code of each worker by its rank, negative for a signal; null: unknown"),
        Field("seconds", NUMBER, "how long they ran", _SECONDS),
    ),
    "preemption_noticed": _event(
        "A signal from the platform asks the agent to end.",
        Field("signal", TEXT, "name of the signal"),
        Field("grace", NUMBER, "time until the platform kills it", _SECONDS),
    ),
    "interrupted": _event("A signal from the user asks the agent to end.", Field("signal", TEXT, "name of the signal")),
    "events_dropped": _event(
        "Events before this one were dropped: they could not be written, or came too fast.",
        Field("count", INTEGER, "how many"),
    ),
    "agent_ended": _event(
        "The agent ends. After a signal, events of copies that are still under way may follow.",
        Field("exit_code", INTEGER, "exit code of the process, as far as the agent decides it"),
        Field("state", TEXT, "`succeeded`, `failed` (by a verdict), `signalled`, `drained` or `error` (any other exception)"),
        Field("error", TEXT, "the exception that ended it", optional=True),
    ),
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
    event = EVENTS.get(name)
    if event is None:
        raise ValueError(f"unknown event {name!r}")
    if own.keys() != (expected := {each.name for each in event.fields}):
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


def schema() -> dict[str, object]:
    """Return the JSON Schema of a line. It accepts what a newer version adds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of events_file, schema {SCHEMA}",
        "type": "object",
        "required": [each.name for each in COMMON],
        "properties": {**{each.name: _property(each) for each in COMMON}, "schema": {"const": SCHEMA}},
        "allOf": [_if_event(name, event) for name, event in EVENTS.items()],
    }


def _if_event(name: str, event: EventType) -> dict[str, object]:
    own: dict[str, object] = {"description": event.what, "properties": {each.name: _property(each) for each in event.fields}}
    if event.fields:
        own["required"] = [each.name for each in event.fields]
    return {"if": {"properties": {"event": {"const": name}}}, "then": own}


def _property(field: Field) -> dict[str, object]:
    container, _, item = field.type.rpartition(" of ")
    types = [container or item, "null"] if field.optional else (container or item)
    found: dict[str, object] = {"type": types, "description": field.meaning + (f" ({field.unit})" if field.unit else "")}
    if container == "array":
        found["items"] = {"type": item}
    elif container == "object":
        found["additionalProperties"] = {"type": item}
    if field.name == "time":
        found["pattern"] = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$"
    return found


# A recovery: from the moment an agent stops running workers until all of them have made a step. If the workers fail again before
# their first step, it goes on. Metrics, events and spans report what is measured here.

FIRST_STEP = "first_step"  # the last phase
MEMBERSHIP = "membership"  # kind of a cause without a failure


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
class PastRecovery:
    """A recovery that is over, or was given up."""

    cause: Cause  # what ended the training; later failures of the same recovery are not named
    round: int  # the round that ended with it
    phases: tuple[RecoveryPhase, ...]  # in order, without gaps; a name may come several times
    recovered: bool | None  # whether all workers of this node have made a step; None: they ran again, but a step is not known

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
        recovery = PastRecovery(self._first_cause or Cause(), self._round, tuple(self._phases), recovered)
        self._phases, self._first_cause = [], None
        return recovery
