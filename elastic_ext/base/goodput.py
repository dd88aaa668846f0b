"""Where the time of a job goes: the states, what a node has spent in each, and the record that its agents share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from elastic_ext.base import records

SCHEMA = 1

PRODUCTIVE, LOST, DATA, COMPILE = "productive", "lost_work", "data_wait", "compile"
SAVE, LOAD, STARTUP, STOPPING = "checkpoint_save", "checkpoint_load", "startup", "stopping"
RENDEZVOUS, WAITING, BACKOFF, IDLE, DETECTION, HANG = "rendezvous", "waiting_for_nodes", "backoff", "idle", "detection", "hang"

# A node is in exactly one of these at any moment. The states of running workers are the mean over the workers of the node.
STATES: Mapping[str, str] = MappingProxyType(
    {
        PRODUCTIVE: "Training: optimizer steps that were not done before, with all that the script does between them and names "
        "no phase for; evaluation too. Without the bootstrap, all the time that workers run.",
        LOST: "Steps computed again: from the checkpoint up to the highest step reached before the restart, where both are known "
        "(`checkpoint_dir`); what a phase names stays in its state. Also the step that a restart interrupted, up to this "
        "worker's mean time from step to step.",
        STARTUP: "From the start of the workers until the end of the first step, or until the script enters the phase `step` or "
        "`data`: processes, imports, process groups.",
        COMPILE: 'What the script calls `phase("compile")`.',
        DATA: 'What the script calls `phase("data")`.',
        SAVE: 'The training loop waits for a checkpoint: `Checkpointer.save` and `wait`, or `phase("checkpoint")` after the '
        "first step. What is written in the background does not count.",
        LOAD: '`Checkpointer.load`, or `phase("checkpoint")` before the first step.',
        DETECTION: "At the end of a round: from when a step takes longer than the worker's mean, until the agent stops "
        "the workers, which wait for a peer that is gone.",
        HANG: "The same, if the verdict is a hang.",
        STOPPING: "The agent stops the workers and waits for the job's verdict; or the script has ended, and its process or "
        "other nodes have not.",
        RENDEZVOUS: "The nodes form a round and agree on the checkpoint.",
        WAITING: "What a rendezvous takes beyond 2 s: it waits for nodes.",
        BACKOFF: "The pause before a restart.",
        IDLE: "After the end of the job; also from the end of an agent to the start of the next one on the same host.",
    }
)

RUNNING = (PRODUCTIVE, DATA, SAVE)  # what a job does as long as nothing fails

_Amount = Annotated[float, records.Within(0, 1e15)]


@dataclass(frozen=True)
class StateSeconds:
    """Seconds in one state."""

    state: records.NameOrEmpty
    seconds: _Amount


@dataclass(frozen=True)
class CheckpointPosition:
    """Where a checkpoint lies in the job. step: its own, as it was saved. at: optimizer steps of the job up to it."""

    step: _Amount
    at: _Amount


KEPT_POSITIONS = 4  # of a sum; a job resumes from the newest checkpoint, or from one before, if that is damaged


@dataclass(frozen=True)
class Spent:
    """What one node, or all of them, have spent."""

    seconds: tuple[StateSeconds, ...] = ()  # by state; a state that is not there was not entered
    starts: _Amount = 0  # rounds whose workers have run
    interruptions: _Amount = 0  # those of them that did not end well
    saves: _Amount = 0  # committed checkpoints, as each node saw them
    reached: _Amount = 0  # the most optimizer steps of the job that were reached
    positions: tuple[CheckpointPosition, ...] = ()  # of the newest checkpoints, in order

    @property
    def by_state(self) -> dict[str, float]:
        found = {each.state: each.seconds for each in self.seconds}
        return {state: found.get(state, 0.0) for state in STATES}

    @property
    def total_s(self) -> float:
        return sum(self.by_state.values())

    @property
    def effective_ratio(self) -> float | None:
        """Return the part of the job's time, without that after its end, that failures and starts did not take."""
        running_s, lived_s = sum(self.by_state[state] for state in RUNNING), self.total_s - self.by_state[IDLE]
        return running_s / lived_s if lived_s > 0 else None

    @property
    def ratio(self) -> float | None:
        """Return the productive part of the time; None before any time has passed."""
        return self.by_state[PRODUCTIVE] / self.total_s if self.total_s > 0 else None

    def plus(self, other: Spent) -> Spent:
        """Return the sum. Of `reached`, return the greater."""
        more = other.by_state
        return Spent(
            seconds_of({state: seconds + more[state] for state, seconds in self.by_state.items()}),
            self.starts + other.starts,
            self.interruptions + other.interruptions,
            self.saves + other.saves,
            max(self.reached, other.reached),
            newest_positions((*self.positions, *other.positions)),
        )

    def since(self, before: Spent) -> Spent:
        """Return what was spent after `before`, which is an earlier value of the same sum."""
        less = before.by_state
        return Spent(
            seconds_of({state: max(0.0, seconds - less[state]) for state, seconds in self.by_state.items()}),
            max(0, self.starts - before.starts),
            max(0, self.interruptions - before.interruptions),
            max(0, self.saves - before.saves),
            self.reached,
            self.positions,
        )


@dataclass(frozen=True)
class Shared:
    """What the agents of a job have shared: the sum, over this many hosts."""

    spent: Spent = field(default_factory=Spent)
    hosts: records.Count = 0


def best_interval_s(stall_s: float, between_s: float) -> float:
    """Return Daly's optimum (Future Generation Computer Systems 22, 2006; Young's with two more terms) of the time between saves.

    stall_s: seconds for which a save stalls training. between_s: mean running time between two interruptions.
    """
    if stall_s >= 2 * between_s:
        return between_s
    part = stall_s / (2 * between_s)
    return math.sqrt(2 * stall_s * between_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


def newest_positions(positions: Iterable[CheckpointPosition]) -> tuple[CheckpointPosition, ...]:
    """Return those of the newest checkpoints. A repeated step replaces its earlier entry."""
    by_step = {each.step: each for each in positions}
    return tuple(sorted(by_step.values(), key=lambda each: each.at)[-KEPT_POSITIONS:])


def seconds_of(by_state: Mapping[str, float]) -> tuple[StateSeconds, ...]:
    """Return the seconds by state without the states that were not entered."""
    return tuple(StateSeconds(state, seconds) for state, seconds in by_state.items() if seconds > 0)


@dataclass(frozen=True)
class HostRecord:
    """What all agents of a job on one host have spent, as they keep it for the agents after them."""

    spent: Spent = field(default_factory=Spent)
    at: _Amount = 0.0  # Unix time of this host when this was written. Only this host compares it with its clock

    def with_more(self, spent: Spent, now: float, first: bool) -> HostRecord:
        """Return the record after an agent has spent more.

        now: Unix time of this host. first: it is this agent's first; the time since the last write belongs to no agent, and
        counts as idle.
        """
        gap_s = max(0.0, now - self.at - spent.total_s) if first and self.at else 0.0
        idle = Spent(seconds_of({IDLE: gap_s}))
        return HostRecord(self.spent.plus(idle).plus(spent), now)


def encode(record: HostRecord | Shared) -> str:
    return records.encode(record, SCHEMA)


def decode(text: str | bytes, what: str) -> HostRecord:
    """Read a record. what: its key or file, for error messages. Raises RecordError."""
    return records.read(HostRecord, text, what, SCHEMA)


def decode_sum(text: str | bytes, what: str) -> Shared:
    """Read a sum. what: its key, for error messages. Raises RecordError."""
    return records.read(Shared, text, what, SCHEMA)


def total(found: Mapping[str, HostRecord]) -> Spent:
    whole = Spent()
    for record in found.values():
        whole = whole.plus(record.spent)
    return whole


def summary(spent: Spent) -> str:
    """Return one line: the goodput, then what took the rest, the most first."""
    ratio = spent.ratio
    if ratio is None:
        return "goodput unknown: no time has passed"
    rest = sorted(((seconds, state) for state, seconds in spent.by_state.items() if state != PRODUCTIVE), reverse=True)
    parts = [
        f"{state.replace('_', ' ')} {seconds / spent.total_s:.1%}" for seconds, state in rest if seconds / spent.total_s >= 5e-4
    ]
    return f"goodput {ratio:.1%}{': ' if parts else ''}{', '.join(parts)}"
