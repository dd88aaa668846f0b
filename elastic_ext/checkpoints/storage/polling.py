"""Wait for a change in a storage. No storage announces changes, so it must be polled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two looks; each pause is twice the previous one


def poll(look: Callable[[], Seen], enough: Callable[[Seen], bool], deadline: float) -> Seen:
    """Call `look`, at least once, until `enough` accepts its result or the deadline passes. Return the last result.

    Args:
        deadline: in seconds of time.monotonic().
    """
    pause = FIRST_PAUSE_S
    while True:
        seen = look()
        left = deadline - time.monotonic()
        if enough(seen) or left <= 0:
            return seen
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)
