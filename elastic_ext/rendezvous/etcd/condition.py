"""The condition on which the agent's main thread waits for other nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 1.0  # how often a waiting main thread looks for a signal that was lost


class InterruptibleCondition(threading.Condition):
    """A condition whose waits end within POLL_S, so that `on_wait` is called again and again; it may raise.

    A signal ends a wait by the exception that its handler raises, unless other code (such as logging) catches it. Then `on_wait`
    raises it.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification, for at most the lesser of `timeout` and POLL_S (seconds); the caller must check again."""
        self._on_wait()
        return super().wait(POLL_S if timeout is None else min(timeout, POLL_S))
