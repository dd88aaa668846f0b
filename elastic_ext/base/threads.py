"""The threads of an agent: daemons, which may not start; those in torch's C++ code, for which the process waits as it ends; and
the main one, from which signals that end the process are held back while it does what must not be skipped.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def started(
    run: Callable[[], object], name: str, log: Callable[..., None], *without: str, kind: type[threading.Thread] = threading.Thread
) -> threading.Thread | None:
    """Start a daemon thread. If no more can be started, e.g. by a limit of the container, log that and return None.

    log: a method of a logger. without: its text and arguments, to which the error is added: what does not happen.
    """
    thread = kind(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log(*without, error)
        return None
    return thread


class StoreCall(threading.Thread):
    """A thread of the agent in torch's C++ code: one that returns from it while the interpreter ends aborts the process."""


LONGEST_CALL_S = 25.0  # torch tries twice to connect, each time for up to 10 s (`round_store.CONNECT`), with a pause in between


@atexit.register
def await_calls(timeout_s: float = LONGEST_CALL_S) -> None:
    """Wait for all calls, also those in the stores of earlier rounds. Runs as the process ends."""
    deadline = time.monotonic() + timeout_s
    for call in threading.enumerate():
        if isinstance(call, StoreCall):
            call.join(max(0.0, deadline - time.monotonic()))


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torch turns them into an exception that ends the agent


@contextmanager
def held() -> Iterator[list[int]]:
    """Inside this context these signals only wake, and go into the list that it yields; those that are ignored stay so.

    So do others that end the agent: those of torchrun's --signals-to-handle, and Slurm's notices before a time limit.

    Only the main thread may change that; agents of other threads get none. Raise them again, if nothing else ends the process.
    """
    from elastic_ext.base.torch_private import ends_agent  # not at the top: processes without torch import this module

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
