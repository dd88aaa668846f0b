"""A signal between any two lines of some code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signal_at_line(line: int, files: Collection[str], number: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Raise a signal before the line-th line, from 1, that this thread runs in one of these files. Yields whether it has come."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(number)
        return trace

    sys.settrace(trace)
    try:
        yield lambda: left <= 0
    finally:
        sys.settrace(None)
