"""Signals that tell this process to end, held back while it does what must not be skipped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torch turns them into an exception that ends the agent


@contextmanager
def held() -> Iterator[list[int]]:
    """Inside this context these signals only wake, and go into the list that it yields; those that are ignored stay so.

    Only the main thread may change that; agents of other threads get none. Raise them again, if nobody else ends the process.
    """
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    # None: a handler that is not Python's, and could not be put back.
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: told.append(number))
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_again(told: list[int]) -> None:
    """Let these signals do what they would have done."""
    for number in told:
        signal.raise_signal(number)
