"""What a node tells of itself, for the job's status: a small record that nothing decides by. Pure.

Times are ages in seconds at the moment of the report: no reader compares its clock with that of another machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.records import Count, NameOrEmpty, Rank, Seconds, Within

SCHEMA = 1
MAX_ROUNDS = 50  # told, the newest
MAX_WHY = 300  # characters

Step = Annotated[int, Within(0, 2**63 - 1)]
Ratio = Annotated[float, Within(0, 1e9)]


@dataclass(frozen=True)
class Pace:
    """A worker's time per step relative to the median of its node. rank: global."""

    rank: Rank
    skew: Ratio


@dataclass(frozen=True)
class RoundSpan:
    """A round as one agent saw it. began_s, ended_s: ages; ended_s is None while it runs. why: it ended."""

    round: Count
    began_s: Seconds
    ended_s: Seconds | None = None
    why: str = ""


@dataclass(frozen=True)
class NodeReport:
    """A node at one moment.

    Attributes:
        name: of its host.
        node_rank, base_rank: its rank, and that of its first worker; -1 before its first round.
        workers: number of its workers.
        state: what its agent does, one of `families.STATES`.
        state_s: for how long.
        step: optimizer steps of its slowest worker, counted from what the script reports, or from the checkpoint that the round
            resumed from; None if unknown.
        steps_per_s: mean since the first step of the round; None before the second.
        last_step_s: age of the last step of the worker whose last step is oldest; None before the first.
        saved_step, saved_s: step and age of the last checkpoint that it saw committed in this round; None before the first.
        standbys: warm standbys that are ready.
        pace: of its workers, those that are known.
        at: wall clock of the node at this moment, as text, for people only.
        rounds: those that this agent saw, oldest first. Only the node of rank 0 tells them.
    """

    name: NameOrEmpty
    state: str
    state_s: Seconds = 0.0
    node_rank: Rank = -1
    base_rank: Rank = -1
    workers: Count = 0
    round: Count = 0
    step: Step | None = None
    steps_per_s: Ratio | None = None
    last_step_s: Seconds | None = None
    saved_step: Step | None = None
    saved_s: Seconds | None = None
    standbys: Count = 0
    pace: tuple[Pace, ...] = ()
    at: str = ""
    rounds: tuple[RoundSpan, ...] = ()


def encode(report: NodeReport) -> str:
    """Return a report as JSON, without the fields that say nothing."""
    told = {name: value for name, value in records.plain(report).items() if value not in (None, [])}
    return json.dumps({"schema": SCHEMA, **told}, separators=(",", ":"))


def decode(text: str, what: str) -> NodeReport:
    """Read a report. what: its key, for the message. Raises RecordError."""
    return records.read(NodeReport, text, what, SCHEMA)
