"""Wait for what no event reports: the one poll of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 60.0  # of a test that waits for an event: only a real fault takes this long, on any machine under any load
PAUSE_S = 0.02


def until(condition: Callable[[], T], what: str = "", limit_s: float = LIMIT_S) -> T:
    """Wait until `condition` returns something true, and return that; fail with `what` was expected, and what was seen last."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what or condition}; seen last: {found!r}"
        time.sleep(PAUSE_S)
    return found
