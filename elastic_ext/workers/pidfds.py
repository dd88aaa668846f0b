"""Descriptors that become readable when a child of this process ends: pidfds, or, where there are none, a pipe and a thread.

There are none on Linux before 5.4, under a seccomp profile that does not know them, and with an interpreter that was built
against old headers. All that is here is for children that this process has not reaped: nobody else can have their numbers.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import threading

logger = logging.getLogger(__name__)

_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL)


@functools.cache
def why_none() -> str | None:
    """Why there are no pidfds here; None: there are. Raises OSError where it cannot be found out now."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except AttributeError:
        return "this Python was built without os.pidfd_open"
    except OSError as error:
        return _refusal("pidfd_open", error)
    try:
        signal.pidfd_send_signal(pidfd, 0)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None  # a process is no child of its own: the kernel has understood the question
    except AttributeError as error:
        return f"this Python was built without it: {error}"
    except OSError as error:
        return _refusal("pidfd_send_signal or waitid", error)
    finally:
        os.close(pidfd)
    return None


def _refusal(call: str, error: OSError) -> str:
    """Raises the error where it is a passing one, a lack of descriptors, say."""
    if error.errno not in _REFUSED:
        raise error
    reason = f"{call} is refused ({error.strerror})"
    logger.info("the ends of processes are waited for by threads: %s", reason)
    return reason


def watch(pid: int) -> int:
    """Return a descriptor, to be closed, that is readable once this child has ended.

    Raises:
        ProcessLookupError: it has ended and was reaped.
        OSError: no descriptor, or no thread, is to be had.
    """
    if why_none() is None:
        return os.pidfd_open(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:
        raise ProcessLookupError(errno.ESRCH, f"no child {pid}") from error
    ours, theirs = os.pipe()
    try:
        threading.Thread(target=_await_end, args=(pid, theirs), name="elastic_ext_end", daemon=True).start()
    except RuntimeError as error:
        os.close(ours)
        os.close(theirs)
        raise OSError(errno.EAGAIN, str(error)) from error
    return ours


def _await_end(pid: int, told: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        pass  # somebody has reaped it
    try:
        os.write(told, b".")  # not its end alone: a forked process may hold another copy of it
    except OSError:
        pass  # nobody waits any more
    os.close(told)


def send(descriptor: int, pid: int, sig: int) -> None:
    """Send a signal to the child behind a descriptor of `watch`. Raises ProcessLookupError, PermissionError."""
    if why_none() is None:
        signal.pidfd_send_signal(descriptor, sig)
    else:
        os.kill(pid, sig)


def status(descriptor: int, pid: int) -> os.waitid_result | None:
    """How this child has ended, without reaping it; None: it has not. Raises ChildProcessError where it was reaped."""
    which = (os.P_PIDFD, descriptor) if why_none() is None else (os.P_PID, pid)
    return os.waitid(*which, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def state(pid: int) -> str:
    """The letter of proc_pid_stat(5); "" where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(") ")[2][:1]
    except OSError:
        return ""


def go_on(pid: int, what: str) -> bool:
    """Let a helper process that somebody has stopped (SIGSTOP) run again; True where it was stopped."""
    if state(pid) != "T":
        return False
    logger.warning("the %s (pid %s) was stopped from outside; it is told to go on", what, pid)
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError:
        pass  # it has ended
    return True
