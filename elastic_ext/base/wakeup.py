"""A file descriptor that becomes readable when a signal arrives or another thread has news.

A signal that arrives between "look" and "wait" would otherwise be handled only when something else ends the wait: Python runs
signal handlers in the main thread between bytecodes, never inside poll(2).
"""

from __future__ import annotations

import select
import signal
import socket
import threading

MOST_MS = 2**31 - 1  # that poll(2) takes: 24 days, after which whoever waits for longer looks again


def milliseconds(timeout_s: float) -> float:
    """For poll: a setting may be of any size."""
    return min(max(0.0, timeout_s) * 1000, MOST_MS)


def readable(descriptor: Wakeup | int, timeout_s: float = 0.0) -> bool:
    """Whether a read would not block, waited for so long. Not select(2), which takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds(timeout_s)))


class Wakeup:
    """Use it as a context manager: signals are watched while inside (only in the main thread, the only one that may)."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: int | None = None

    def __enter__(self) -> Wakeup:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the waiter; from any thread, any number of times."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # the buffer is full of wake-ups already

    def clear(self) -> frozenset[int]:
        """Forget the wake-ups so far; return the numbers of the signals among them. Look for news after this call, not before."""
        return self._take() - {0}

    def signals(self) -> frozenset[int]:
        """The numbers of the signals so far, which are forgotten; news are not."""
        seen = self._take()
        if 0 in seen:
            self.set()
        return seen - {0}

    def _take(self) -> frozenset[int]:
        seen: set[int] = set()
        try:
            while data := self._reader.recv(4096):
                seen.update(data)
        except BlockingIOError:
            pass
        return frozenset(seen)
