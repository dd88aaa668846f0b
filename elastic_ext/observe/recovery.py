"""Measures recoveries from what the agent does: from the moment it stops running until all its workers have made a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.observe.families import ENDED, RUNNING, STARTING


@dataclass(frozen=True)
class Recovered:
    """A recovery that is over. Monotonic seconds.

    Attributes:
        whole_s: since the agent noticed what ended the round.
        first_step_s: since the workers run again: imports, the process group, the checkpoint, the first step.
    """

    whole_s: float
    first_step_s: float


class Recovery:
    """The recovery that is under way, if any. If its workers fail before their first step, it goes on."""

    def __init__(self) -> None:
        self._down_at: float | None = None  # when the workers that ran last before it were stopped
        self._started_at = 0.0  # when the agent began to start these workers
        self._running_at: float | None = None  # when they ran; None before the first
        self._left_at: float | None = None  # when they were stopped; None while they run

    def entered(self, state: str, now: float) -> None:
        """Note what the agent does from `now` on. state: one of families.STATES."""
        if state == STARTING:
            self._started_at = now
        if state == RUNNING:
            self._running_at, self._left_at = now, None
        elif self._running_at is not None and self._left_at is None and state != ENDED:
            self._left_at = now
            self._down_at = now if self._down_at is None else self._down_at

    def first_steps(self, at: float) -> Recovered | None:
        """Note that all workers have made their first step, the last one at `at`. Return the recovery that this ends, if any.

        May be called after they were stopped: the next recovery has then begun.
        """
        if self._down_at is None or self._running_at is None or at < max(self._down_at, self._started_at):
            return None  # no recovery, or steps of the workers before
        recovered = Recovered(at - self._down_at, max(0.0, at - self._running_at))
        self._down_at = self._left_at
        return recovered
