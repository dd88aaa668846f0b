"""How often a host joins a job that is under way. Each time costs all nodes a restart, so a host that comes and goes is refused.

This module decides; `etcd.late_joins` counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

WINDOW_S = 3600
NO_LIMIT = -1


class Answer(Enum):
    """What follows from a join."""

    NOTHING = "nothing"
    REFUSE = "refuse"  # the host stays, but once it has left it may not come back yet
    LEAVE = "leave"  # the host is refused, and has to leave: its agent has outlived the time when it was away


@dataclass(frozen=True)
class Decision:
    """joins: how often the host has joined within WINDOW_S. reason: for people."""

    answer: Answer
    joins: int
    reason: str

    @property
    def level(self) -> int:
        """The level of the log line: a host that joins once is nothing to worry about."""
        return logging.INFO if self.answer is Answer.NOTHING and self.joins == 1 else logging.WARNING

    def line(self, refused_s: int) -> str:
        """Return what the agent of the host says. refused_s: the setting `refuse_node`."""
        if self.answer is Answer.NOTHING:
            return f"this host was not in the round before: {self.reason}"
        told = f"this host may not come back for {refused_s} s: {self.reason}"
        return f"once it has left, {told}" if self.answer is Answer.REFUSE else told


def is_late(round_: int, last: int) -> bool:
    """Return whether a node that enters this round joins a job under way. last: its round before; 0 if this is its first."""
    return round_ > 1 and last != round_ - 1


def decide(joins: int, limit: int) -> Decision:
    """Decide on a host after a join. joins: how often it has joined within WINDOW_S, this time included. limit: `max_rejoins`."""
    times = "once" if joins == 1 else f"{joins} times"
    reason = f"it has joined the running job {times} within {WINDOW_S // 60} minutes"
    if limit == NO_LIMIT:
        return Decision(Answer.NOTHING, joins, f"{reason} (max_rejoins: no limit)")
    reason = f"{reason} (max_rejoins={limit})"
    if joins <= limit:
        return Decision(Answer.NOTHING, joins, reason)
    answer = Answer.REFUSE if joins == limit + 1 else Answer.LEAVE
    return Decision(answer, joins, f"{reason}, which restarts all nodes each time")
