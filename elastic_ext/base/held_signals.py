"""Signals that end this process, held back while it does what must not be skipped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from elastic_ext.base.torch_private import ends_agent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torch turns them into an exception that ends the agent


@contextmanager
def held() -> Iterator[list[int]]:
    """Inside this context these signals only wake, and go into the list that it yields; those that are ignored stay so.

    So do others that end the agent: those of torchrun's --signals-to-handle, and Slurm's notices before a time limit.

    Only the main thread may change that; agents of other threads get none. Raise them again, if nobody else ends the process.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in map(int, signal.valid_signals())}
    before = {
        number: handler
        for number, handler in handlers.items()
        if (number in SIGNALS or ends_agent(handler))
        and handler not in (None, signal.SIG_IGN)  # None: not Python's, and could not be put back
    }
    holds = True

    def hold(number: int, frame: FrameType | None) -> None:
        if holds:
            received.append(number)
        else:  # its exception ends the loop below
            put_back()
            signal.raise_signal(number)

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        for number in before:
            signal.signal(number, hold)
        yield received
    finally:
        holds = False
        put_back()


def raise_again(received: list[int]) -> None:
    """Let these signals do what they would have done."""
    for number in received:
        signal.raise_signal(number)
