"""How long the end of an agent waits for those who take its last words: files and pipes, servers, etcd."""

from __future__ import annotations

import time

LAST_WORDS_S = 3.0  # for all of them together
HURRIED_S = 1.0  # the same where a signal ends the agent: the platform will kill it
LEAST_S = 0.2  # for each, even if another one has used up the time: who works needs a moment


class LastWords:
    """Time that several waits share. All are told first, and then waited for: so they work beside each other."""

    def __init__(self) -> None:
        self._by: float | None = None

    def begin(self, limit_s: float) -> None:
        """Let the time begin. limit_s: seconds for all."""
        self._by = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return how long the next one may be waited for, in seconds. The first call begins, if nothing has."""
        if self._by is None:
            self.begin(LAST_WORDS_S)
            return LAST_WORDS_S
        return max(LEAST_S, self._by - time.monotonic())
