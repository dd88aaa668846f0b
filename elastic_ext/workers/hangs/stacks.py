"""Where a worker is: the stacks of all its threads, dumped by itself on a signal that its bootstrap listens to."""

from __future__ import annotations

import logging
import os
import time

from elastic_ext.base.wakeup import readable
from elastic_ext.workers import pidfds
from elastic_ext.workers.worker_env import STACKS_SIGNAL

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # a dump takes some ms; a worker that is stopped or asleep in the kernel never makes one
QUIET_S = 0.02


def dump(pid: int, path: str) -> str:
    """Have process `pid` dump its stacks into the file `path`; return what it wrote, "" if it did not.

    Ask this only of a worker whose progress word says that the signal is listened to: any other would die of it.
    """
    if not _listens(pid):
        return ""
    before = _size(path)
    try:
        pidfd = pidfds.watch(pid)
    except OSError as error:  # it has ended, or there is no descriptor left
        logger.debug("the stacks of process %s cannot be asked for: %s", pid, error)
        return ""
    deadline = time.monotonic() + WAIT_S
    size = before
    try:
        pidfds.send(pidfd, pid, STACKS_SIGNAL)
        # The dump has no end mark: it is whole when the file has grown and then rests. The pidfd ends the wait with the process.
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


def _listens(pid: int) -> bool:
    """Whether the process has a handler now: a script that has replaced itself (exec) keeps its word and loses the handler."""
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
