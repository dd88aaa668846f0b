"""What is left of a copy once training goes on: a thread completes and commits it, or makes buffers for the next one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Attempt:
    """Training waits for it, but in all for no longer than its limit. Then copies that are due are left out until it is over."""

    def __init__(self, run: Callable[[], None], step: int, limit_s: float) -> None:
        self._thread = threading.Thread(target=run, name=f"memory-{step}", daemon=True)
        self._step, self._limit_s, self._left_s = step, limit_s, limit_s

    def start(self) -> None:
        """Start. Raises RuntimeError if the system has no more threads."""
        self._thread.start()

    def hold(self) -> bool:
        """Wait until it is over, or its limit is reached; return whether it is over."""
        began = time.monotonic()
        self._thread.join(self._left_s)
        if not self._thread.is_alive():
            return True
        if self._left_s:
            logger.info("no more copies to memory until the attempt at step %s is over: %.3g s are up", self._step, self._limit_s)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
        return False

    def join(self) -> None:
        self._thread.join()
