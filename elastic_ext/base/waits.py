"""What the agent says while it waits for another node, the store or a helper: for what, for how long, and what ends the wait.

Every wait of the agent has an end, and none is silent for longer than a minute. Standard library only; times are in seconds.
"""

from __future__ import annotations

import logging
import math

logger = logging.getLogger(__name__)

EVERY_S = 60.0
SELDOM_S = 3600.0  # a wait for others to train may last for days; it is said once after EVERY_S, then as often as this


class Waiting:
    """One wait. Its caller takes the time."""

    def __init__(self, what: str, since: float, first_s: float = EVERY_S) -> None:
        """what: what is waited for, for people. first_s: for how long nothing is said."""
        self._what, self._since, self._first = what, since, since + first_s
        self._said = self._unlimited = -math.inf  # when it was last said, and when the wait last had no limit

    def text(self, now: float, until: float, then: str) -> str:
        """Return what to say now; "" if nothing.

        until: when the wait ends at the latest; infinity: with what is waited for. then: what follows, as in "this node leaves";
        where there is no limit, why.
        """
        if until == math.inf:
            self._unlimited = now
        if now < self._due(until):
            return ""
        self._said = now
        end = f"; in {max(0.0, until - now):.0f} s {then}" if until < math.inf else f": {then}"
        return f"still waiting for {self._what}, {now - self._since:.0f} s so far{end}"

    def say(self, now: float, until: float, then: str) -> None:
        if text := self.text(now, until, then):
            logger.warning("%s", text)

    def pause_s(self, now: float, until: float) -> float:
        """Return after how many seconds there is something to do."""
        return max(0.0, min(self._due(until), until) - now)

    def _due(self, until: float) -> float:
        """Return when it is said next. A limit that has just come, as while a job forms its next round, is no news yet."""
        again = self._said + SELDOM_S if until == math.inf else max(self._said, self._unlimited) + EVERY_S
        return max(self._first, again)


class Lasting:
    """For how long something has held, without a break, at all looks of one wait."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._since = limit_s, math.inf

    def is_over(self, holds: bool, now: float) -> bool:
        """Return whether it has held for the limit."""
        self._since = min(self._since, now) if holds else math.inf
        return now >= self.until

    @property
    def until(self) -> float:
        """When it will have held for the limit, if it goes on; infinity while it does not hold."""
        return self._since + self._limit_s
