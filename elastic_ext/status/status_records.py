"""The status of a whole job as one document: what the page shows and `elastic-ext status` prints. `job_status` builds it.

Every time in it is an age in seconds by one clock: that of the reader. Reports carry ages too, so no two machines' clocks are
ever compared; a report's ages grow by as long as the reader has seen it unchanged.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.base.records import Count, NameOrEmpty, Rank, Seconds, Within
from elastic_ext.telemetry.families import RUNNING

REPORT_SCHEMA = 1
MAX_ROUNDS = 50  # the newest are reported
MAX_WHY = 300  # characters

Step = Annotated[int, Within(0, 2**63 - 1)]
Ratio = Annotated[float, Within(0, 1e9)]


@dataclass(frozen=True)
class Straggler:
    """A rank, or a host (rank -1), that is late: it issues the collectives of a step later than the others (`hangs.lateness`)."""

    node: NameOrEmpty
    rank: Rank
    # late_s, p90_s: per step, median and 90th percentile
    late_s: Seconds
    p90_s: Seconds
    step_s: Seconds
    share: Ratio  # part of a step that it is late by
    error_s: Seconds = 0.0  # by how much late_s may be wrong, because the clocks of hosts differ; 0 within a host

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}" if self.rank >= 0 else f"{self.node}, with all its ranks,"

    @property
    def text(self) -> str:
        clocks = f" (clocks aligned to {self.error_s * 1e3:.2g} ms)" if self.error_s else ""
        return f"{self.who} is late by {_ms(self.late_s)} of a step of {_ms(self.step_s)}: {self.share:.0%}{clocks}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


@dataclass(frozen=True)
class RoundSpan:
    """A round as one agent saw it. began_s, ended_s: ages; ended_s is None while it runs. why: it ended."""

    round: Count
    began_s: Seconds
    ended_s: Seconds | None = None
    why: str = ""


@dataclass(frozen=True)
class NodeReport:
    """A node at one moment."""

    name: NameOrEmpty  # of its host
    state: str  # what its agent does, one of `families.STATES`
    state_s: Seconds = 0.0  # for how long
    # node_rank, base_rank: its rank, and that of its first worker; -1 before its first round
    node_rank: Rank = -1
    base_rank: Rank = -1
    workers: Count = 0  # number of its workers
    round: Count = 0
    # optimizer steps of its slowest worker, counted from what the script reports, or from the checkpoint that the round resumed
    # from; None if unknown
    step: Step | None = None
    steps_per_s: Ratio | None = None  # mean since the first step of the round; None before the second
    last_step_s: Seconds | None = None  # age of the last step of the worker whose last step is oldest; None before the first
    # saved_step, saved_s: step and age of the last checkpoint that it saw committed in this round; None before the first
    saved_step: Step | None = None
    saved_s: Seconds | None = None
    standbys: Count = 0  # warm standbys that are ready
    stragglers: tuple[Straggler, ...] = ()  # of the whole job; only the node of rank 0 reports them
    uncompared: str = ""  # why no replicas of one of its workers are compared, though `integrity_every` is set; ""
    at: str = ""  # wall clock of the node at this moment, as text, for people only
    rounds: tuple[RoundSpan, ...] = ()  # those that this agent saw, oldest first; only the node of rank 0 reports them


def encode_report(report: NodeReport) -> str:
    """Return a report as JSON, without the fields that say nothing."""
    known = {name: value for name, value in records.plain(report).items() if value not in (None, [])}
    return json.dumps({"schema": REPORT_SCHEMA, **known}, separators=(",", ":"))


def decode_report(text: str, what: str) -> NodeReport:
    """Read a report. what: its key, for the message. Raises RecordError."""
    return records.read(NodeReport, text, what, REPORT_SCHEMA)


@dataclass(frozen=True)
class _Round:
    """A round. began, ended: monotonic; ended is None while its workers run."""

    round: int
    began: float
    ended: float | None = None
    why: str = ""


class RoundHistory:
    """The last MAX_ROUNDS rounds."""

    def __init__(self) -> None:
        self._rounds: deque[_Round] = deque(maxlen=MAX_ROUNDS)

    def entered(self, state: str, round_: int, now: float) -> None:
        """Note what the agent does from `now` on. state: one of families.STATES."""
        last = self._rounds[-1] if self._rounds else None
        runs = last is not None and last.ended is None
        if last is not None and runs and (state != RUNNING or round_ != last.round):
            self._rounds[-1] = replace(last, ended=now)
            runs = False
        if state == RUNNING and not runs:
            self._rounds.append(_Round(round_, now))

    def explain(self, round_: int, why: str) -> None:
        """Note why a round ended, unless that is known."""
        for number, each in enumerate(self._rounds):
            if each.round == round_ and each.ended is not None and not each.why:
                self._rounds[number] = replace(each, why=why[:MAX_WHY])

    def spans(self, now: float) -> tuple[RoundSpan, ...]:
        """Return the rounds, oldest first, with ages at `now`."""
        return tuple(
            RoundSpan(each.round, age_s(now, each.began), age_s(now, each.ended) if each.ended is not None else None, each.why)
            for each in self._rounds
        )


def age_s(now: float, at: float) -> float:
    return round(max(0.0, now - at), 3)


SCHEMA = 1
SILENT, WAITS, GONE = "silent", "waits", "ended"  # states of a node without a report; others are families.STATES
ENDED_STATES = ("succeeded", "failed", "ended")  # of a job


@dataclass(frozen=True)
class Failure:
    """A verdict of the job. rank, host: of the cause. at: wall clock of the agent that judged, as text, for people only."""

    round: int
    decision: str
    kind: str
    reason: str
    rule: str
    host: str
    rank: int
    exit_code: int | None
    restarts: int
    limit: int | None
    at: str


@dataclass(frozen=True)
class Job:
    """The job."""

    run_id: str
    backend: str
    state: str  # forming, starting, running, recovering, succeeded, failed, ended (how is unknown)
    reason: str  # why it is in this state; "" if nothing is to be said
    round: int
    # nodes, world_size: of the current round, or the last one
    nodes: int
    world_size: int
    # restarts_charged, restarts_limit: of the budget, by the last verdict; the limit is None without one, or if unknown
    restarts_charged: int
    restarts_limit: int | None
    last_verdict: Failure | None  # None before the first
    # step, steps_per_s: of the slowest node in the round; the step, of those that reported last
    step: int | None = None
    steps_per_s: float | None = None
    # saved_step, saved_s: of the newest checkpoint that a node saw committed
    saved_step: int | None = None
    saved_s: float | None = None


@dataclass(frozen=True)
class NodeStatus:
    """A node. Ages in seconds; None where unknown."""

    # Where nothing is said here, see NodeReport.
    id: str  # unique within the job
    name: str  # of its host
    state: str  # of its agent (`families.STATES`); "waits" for a round; "silent": in the round, but without a report
    node_rank: int = -1  # -1 outside the round; so is first_rank
    first_rank: int = -1
    workers: int = 0
    state_s: float | None = None
    step: int | None = None
    steps_per_s: float | None = None
    last_step_s: float | None = None
    saved_step: int | None = None
    saved_s: float | None = None
    standbys: int = 0
    # age of its report, as far as the reader can know; 0 for the node that shows this; None: read only once. Then its ages are as
    # of told_at, or as of that of the newest report if both run in the same round
    seen_s: float | None = None
    told_at: str = ""  # wall clock of the node at its report, as text, for people only


@dataclass(frozen=True)
class Refusal:
    """A host that may not come back yet."""

    host: str
    why: str


@dataclass(frozen=True)
class Unknown:
    """What this document cannot show, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class GoodputPoint:
    """The goodput of the job at an earlier moment, as far as the node that shows this knew it. age_s: of the moment."""

    age_s: float
    goodput: tuple[StateSeconds, ...]


@dataclass(frozen=True)
class Document:
    """The whole document."""

    job: Job
    nodes: tuple[NodeStatus, ...] = ()
    rounds: tuple[RoundSpan, ...] = ()
    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    refused: tuple[Refusal, ...] = ()
    goodput: tuple[StateSeconds, ...] = ()  # of all hosts together, over all rounds and agents of the job
    goodput_points: tuple[GoodputPoint, ...] = ()  # earlier values of it, since the agent that shows this started
    unknown: tuple[Unknown, ...] = ()
    shown_by: str = ""  # id of that agent's node; "" for a command
    rounds_by: str = ""  # name of the node that saw the rounds; "" if none did
    read_s: float | None = 0.0  # age of what is shown of the other nodes; None: nothing was read yet
    fault: str = ""  # why nothing newer was read; ""
    schema: int = SCHEMA


def encode(document: Document) -> str:
    return json.dumps(records.plain(document), separators=(",", ":"))
