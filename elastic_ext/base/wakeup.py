"""A file descriptor that becomes readable when a signal arrives at this process or another thread calls `set`.

Without it, Python would handle a signal that arrives just before the main thread waits only when something else ends
the wait: Python runs signal handlers in the main thread between bytecodes, never inside poll(2).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading

MAX_MS = 2**31 - 1  # the longest timeout of poll(2), 24 days; callers look again after that


def milliseconds(timeout_s: float) -> float:
    """Return a timeout for poll(2) in milliseconds, capped because a setting may have any size."""
    return min(max(0.0, timeout_s) * 1000, MAX_MS)


def readable(descriptor: Wakeup | int, timeout_s: float = 0.0) -> bool:
    """Wait up to timeout_s; return whether a read would not block. select(2) cannot take descriptors above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds(timeout_s)))


_entered: set[int] = set()  # writers of the wakeups that this process's signals wake, or did before another was entered
_mask = threading.local()  # of a thread that forks


# The handler of a signal that another thread has caught may raise at any instruction of these in the main thread, and what a hook
# raises is dropped. So the mask is known before it changes, and forgotten only once it is set again: by the second call at least.


def _hold() -> None:
    """Before a fork: a signal to the new process may come before it runs at all, so before `_leave_to_parent`."""
    if _entered:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_go() -> None:
    if (before := _mask.__dict__.get("before")) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del _mask.before


def _leave_to_parent() -> None:
    """In a forked process: its signals would wake the parent, which would take them for its own and end."""
    if _entered and threading.current_thread() is threading.main_thread():
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor not in _entered:
            signal.set_wakeup_fd(descriptor)
    _entered.clear()
    try:
        _let_go()
    except BaseException:  # noqa: BLE001 - the parent's handler wants this process to end, and what a hook raises is dropped
        os._exit(1)


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_leave_to_parent)
os.register_at_fork(after_in_parent=_let_go)


class Wakeup:
    """A context manager. Inside it, signals wake the waiter if the main thread entered it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: int | None = None

    def __enter__(self) -> Wakeup:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            _entered.add(self._writer.fileno())
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous)
            _entered.discard(self._writer.fileno())
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the waiter. Any thread may call this, any number of times."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # the buffer is already full of wake-ups

    def clear(self) -> frozenset[int]:
        """Forget all wake-ups so far and return the signals among them. Look for events after this call, not before."""
        return self._take() - {0}

    def signals(self) -> frozenset[int]:
        """Return the numbers of the signals so far and forget them, but keep wake-ups from `set`."""
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
