"""The status of a whole job as one document: what the page shows and `elastic-ext status` prints. `job_status` builds it.

Every time in it is an age in seconds by one clock: that of the reader. Reports carry ages too, so no two machines' clocks are
ever compared; a report's ages grow by as long as the reader has seen it unchanged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.observe.node_report import RoundSpan

SCHEMA = 1
SILENT, WAITS, GONE = "silent", "waits", "ended"  # states of a node that tells nothing; others are families.STATES
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
    """The job.

    Attributes:
        state: forming, starting, running, recovering, succeeded, failed, ended (how is unknown).
        reason: why it is in this state; "" if nothing is to be said.
        nodes, world_size: of the current round, or the last one.
        restarts_charged, restarts_limit: of the budget, by the last verdict; the limit is None without one, or if unknown.
        step, steps_per_s: of the slowest node in the round; the step, of those that have told theirs last.
        saved_step, saved_s: of the newest checkpoint that a node saw committed.
        last_verdict: None before the first.
    """

    run_id: str
    backend: str
    state: str
    reason: str
    round: int
    nodes: int
    world_size: int
    restarts_charged: int
    restarts_limit: int | None
    last_verdict: Failure | None
    step: int | None = None
    steps_per_s: float | None = None
    saved_step: int | None = None
    saved_s: float | None = None


@dataclass(frozen=True)
class NodeStatus:
    """A node. Ages in seconds; None where unknown.

    Attributes:
        id, name: unique within the job; of its host.
        node_rank, first_rank: -1 outside the round.
        state: of its agent (`families.STATES`); "waits" for a round; "silent": in the round, but it has told nothing.
        seen_s: age of what it told, as far as the reader can know; 0 for the node that shows this; None: read only once. Then
            its ages are as of told_at, or as of that of the node that told last if both run in the same round.
        told_at: wall clock of the node when it told this, as text, for people only.
        The others: see NodeReport.
    """

    id: str
    name: str
    state: str
    node_rank: int = -1
    first_rank: int = -1
    workers: int = 0
    state_s: float | None = None
    step: int | None = None
    steps_per_s: float | None = None
    last_step_s: float | None = None
    saved_step: int | None = None
    saved_s: float | None = None
    standbys: int = 0
    seen_s: float | None = None
    told_at: str = ""


@dataclass(frozen=True)
class Straggler:
    """A worker that takes longer per step than the median of its node, by this factor; or a node, rank -1, than the others."""

    node: str
    rank: int
    skew: float


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
    """The whole document.

    Attributes:
        goodput: of all hosts together, over all rounds and agents of the job.
        goodput_points: earlier values of it, since the agent that shows this started.
        shown_by: id of that agent's node; "" for a command.
        rounds_by: name of the node that saw the rounds; "" if none did.
        read_s: age of what is shown of the other nodes; None: nothing was read yet.
        fault: why nothing newer was read; "".
    """

    job: Job
    nodes: tuple[NodeStatus, ...] = ()
    rounds: tuple[RoundSpan, ...] = ()
    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    refused: tuple[Refusal, ...] = ()
    goodput: tuple[StateSeconds, ...] = ()
    goodput_points: tuple[GoodputPoint, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    shown_by: str = ""
    rounds_by: str = ""
    read_s: float | None = 0.0
    fault: str = ""
    schema: int = SCHEMA


def encode(document: Document) -> str:
    """Return the document as JSON."""
    return json.dumps(records.plain(document), separators=(",", ":"))
