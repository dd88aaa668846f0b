"""Gets the stacks of a worker's threads. The worker writes them itself on a signal that its bootstrap handles."""

from __future__ import annotations

import logging
import os
import time

from elastic_ext.base.wakeup import readable
from elastic_ext.workers import pidfds
from elastic_ext.workers.worker_env import STACKS_SIGNAL

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # a dump takes a few ms; a worker that is stopped or asleep in the kernel never makes one
QUIET_S = 0.02


def dump(pid: int, path: str) -> str:
    """Make process `pid` append its stacks to the file `path`; return what it wrote, "" if nothing. Takes WAIT_S at most.

    Call this only for a worker whose progress row says that it handles the signal (`stacks_armed`). It would kill any other.
    """
    if not _handles_signal(pid):
        return ""
    before = _size(path)
    try:
        pidfd = pidfds.watch(pid)
    except OSError as error:  # the process has ended, or no descriptor is left
        logger.debug("cannot request the stacks of process %s: %s", pid, error)
        return ""
    deadline = time.monotonic() + WAIT_S
    size = before
    try:
        pidfds.send(pidfd, pid, STACKS_SIGNAL)
        # The dump has no end mark: it is complete once the file has grown and then stays the same. An exit ends the wait early.
        while time.monotonic() < deadline and not readable(pidfd, QUIET_S):
            last, size = size, _size(path)
            if size > before and size == last:
                break
    except ProcessLookupError:
        return ""
    finally:
        os.close(pidfd)
    if size == before:
        return ""
    with open(path, "rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _handles_signal(pid: int) -> bool:
    """Return whether the process still has a handler. After exec() it has none, but its progress row still claims one."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:")).split()[1]
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
