"""Wait for a change in a storage. No storage announces changes, so it must be polled."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")

# What a storage raises that does not answer now. s3fs: EBUSY for 503 SlowDown, EREMOTEIO for 500. We: EIO for what is no OSError.
_IO = (errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE)
_NETWORK = (errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH)

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


def is_away(error: OSError) -> bool:
    """Return whether the storage does not answer now, and may later. Else another try would end the same way."""
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in (*_IO, *_NETWORK)
