"""Children of this process: how helpers start, and descriptors that become readable when a child ends.

These are pidfds, or a pipe and a thread if there are none: Linux before 5.4 has no pidfds, some seccomp profiles refuse them, and
an interpreter may have been built against old headers. Only for children that this process has not reaped, so that no other
process can have their pids.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from elastic_ext.workers.reaper.reaper import BLOCKED_SIGNALS

logger = logging.getLogger(__name__)

_FLAGS = 6  # fields after the name of the process in /proc/PID/stat, see proc_pid_stat(5)
_PF_EXITING = 0x4  # include/linux/sched.h
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL)


@functools.cache
def why_unavailable() -> str | None:
    """Return why pidfds do not work here; None if they do. Raises OSError if a temporary shortage prevents the answer."""
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
        return None  # a process is not its own child: the kernel supports the call
    except AttributeError as error:
        return f"this Python was built without a call for pidfds: {error}"
    except OSError as error:
        return _refusal("pidfd_send_signal or waitid", error)
    finally:
        os.close(pidfd)
    return None


def _refusal(call: str, error: OSError) -> str:
    """Return a reason for the log. Raises the error if it is temporary, such as a shortage of descriptors."""
    if error.errno not in _REFUSED:
        raise error
    reason = f"{call} is refused ({error.strerror})"
    logger.info("no pidfds, so threads wait for processes to end: %s", reason)
    return reason


def of(pid: int) -> int | None:
    """Return a pidfd of this child; None if there are no pidfds, but `send` reaches it all the same. Raises as `watch` does."""
    if why_unavailable() is None:
        return os.pidfd_open(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:
        if state(pid) in ("", "Z", "X"):
            raise ProcessLookupError(errno.ESRCH, f"no child {pid}") from error
        raise OSError(errno.ENOTSUP, f"cannot watch process {pid}: it is not our child, and {why_unavailable()}") from error
    return None


def watch(pid: int) -> int:
    """Return a descriptor that becomes readable when this child has ended. The caller closes it.

    Raises ProcessLookupError: it has ended and was reaped; OSError: ENOTSUP if there are no pidfds and this is not a child of
    this process (start method forkserver), another errno if no descriptor or thread is available.
    """
    pidfd = of(pid)
    if pidfd is not None:
        return pidfd
    ours, theirs = os.pipe()
    try:
        threading.Thread(target=_await_end, args=(pid, theirs), name="elastic_ext_end", daemon=True).start()
    except RuntimeError as error:
        os.close(ours)
        os.close(theirs)
        raise OSError(errno.EAGAIN, str(error)) from error
    return ours


def _await_end(pid: int, writer: int) -> None:
    with suppress(ChildProcessError):  # it was already reaped
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(OSError):  # no thread waits anymore
        os.write(writer, b".")  # closing it is not enough: a forked process may hold another copy
    os.close(writer)


def send(descriptor: int | None, pid: int, sig: int) -> None:
    """Send a signal to the child behind a descriptor from `watch` or `of`. Raises ProcessLookupError, PermissionError."""
    if descriptor is not None and why_unavailable() is None:
        signal.pidfd_send_signal(descriptor, sig)
    else:
        os.kill(pid, sig)


def status(descriptor: int, pid: int) -> os.waitid_result | None:
    """Return how this child ended, without reaping it; None if it has not. Raises ChildProcessError if it was reaped."""
    which = (os.P_PIDFD, descriptor) if why_unavailable() is None else (os.P_PID, pid)
    return os.waitid(*which, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def state(pid: int) -> str:
    """Return the state of a process, a letter from proc_pid_stat(5); "" if there is no such process."""
    return _stat(pid)[:1]


def is_ending(pid: int) -> bool:
    """Return whether this child, which has not been reaped, has begun to end, or has ended. False if the kernel does not say.

    The kernel marks a process before it closes its connections and devices, and reports its end only afterwards: seconds later
    where a driver has much to release.
    """
    fields = _stat(pid).split()
    return len(fields) > _FLAGS and bool(int(fields[_FLAGS]) & _PF_EXITING)


def _stat(pid: int) -> str:
    """Return what proc_pid_stat(5) says of a process from its third field on; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(") ")[2]
    except OSError:
        return ""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block what may end this process inside the context: a helper is known to the caller before a handler can raise.

    Blocked signals stay blocked across exec: none of these can end a helper, even while it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_helper(
    program: str, *arguments: str, stdin: int, stderr: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a helper process that outlives this one: a file that needs only the standard library. Raises OSError.

    Call it inside `signals_blocked` if the process would be lost without its result.
    """
    with signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, *arguments],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Without the workers' token. LD_*, because some interpreters find their own library only through LD_LIBRARY_PATH.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            pass_fds=pass_fds,
            bufsize=0,  # or closing its input would retry writes that have failed
            start_new_session=True,  # a signal to the agent's process group must not reach it
        )


def resume(pid: int, what: str) -> bool:
    """Resume a helper process if it was stopped (SIGSTOP). Return whether it was. what: its name for the log."""
    if state(pid) != "T":
        return False
    logger.warning("the %s (pid %s) was stopped from outside; resuming it", what, pid)
    with suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGCONT)
    return True
