"""What to do about a failure. Pure, standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic_ext.failures.classify import Diagnosis

NO_LIMIT = -1


class Action(Enum):
    STOP = "stop"
    RESTART = "restart"


@dataclass(frozen=True)
class Decision:
    """What the agent does now, and why."""

    action: Action
    kind: str
    reason: str


def decide(diagnosis: Diagnosis, restarts_charged: int, max_restarts: int) -> Decision:
    """Return what to do.

    Args:
        diagnosis: the root cause.
        restarts_charged: restarts that were charged to the budget so far.
        max_restarts: the budget; NO_LIMIT for none.
    """
    if diagnosis.deterministic:
        return Decision(Action.STOP, diagnosis.kind, diagnosis.reason)
    if max_restarts != NO_LIMIT and restarts_charged >= max_restarts:
        return Decision(
            Action.STOP,
            diagnosis.kind,
            f"{diagnosis.reason}; but all {max_restarts} restarts of the budget (--max-restarts) are spent",
        )
    budget = "no limit" if max_restarts == NO_LIMIT else f"of {max_restarts}"
    return Decision(Action.RESTART, diagnosis.kind, f"{diagnosis.reason}; restart {restarts_charged + 1} {budget}")
