"""The signals that tell an agent to leave: while it has time to, the same notice again says nothing new."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from elastic_ext.agent import exits
from elastic_ext.base.torch_private import ends_agent


def take_as_one(received: signal.Signals, leave_by: Callable[[], float | None]) -> None:
    """From now on, have signals of the platform change nothing until `leave_by`, and end this agent at once after it.

    Slurm sends SIGTERM twice at a time limit, and timeout(1) sends it to its child and to its child's group. A second one that
    ended the agent would cost the checkpoint that the first one has asked for. The user's signals still end it at once.

    As torch's handlers, these stay until the process ends. Does nothing outside the main thread, where Python has no handlers.

    Args:
        received: what tells this agent to leave. After a signal of the user, any other one ends the agent at once.
        leave_by: returns the monotonic time until which the platform lets this agent run; None: not known yet.
    """
    if received in exits.USER_SIGNALS or threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals() - set(exits.USER_SIGNALS):
        first = signal.getsignal(number)
        if callable(first) and ends_agent(first):
            signal.signal(number, _unless_there_is_time(first, leave_by))


def _unless_there_is_time(
    first: Callable[[int, FrameType | None], object], leave_by: Callable[[], float | None]
) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        by = leave_by()
        if by is not None and time.monotonic() >= by:
            first(number, frame)

    return handle
