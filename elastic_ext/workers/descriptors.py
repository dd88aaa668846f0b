"""How many files this agent may have open: as many as it is allowed to. Its workers keep the limit that the user has set.

Rank 0's agent holds a connection for each client of the round's store. A worker with a very high limit could hurt itself:
select(2) takes no descriptor above 1,023, and some programs go over all that they could have open.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

MOST = 1 << 20  # what the kernel grants by default at most (fs.nr_open); a hard limit may be 2 ** 63

_lock = threading.Lock()
_agents = 0  # of this process that have raised it
_users: tuple[int, int] | None = None  # the limit before the first of them has; None: it stays what it was


@contextmanager
def raised() -> Iterator[None]:
    """Inside, the soft limit is the hard one, or MOST where that is less."""
    global _agents, _users
    with _lock:
        if not _agents:
            _users = _raise()
        _agents += 1
    try:
        yield
    finally:
        with _lock:
            _agents -= 1
            if not _agents and _users is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, _users)
                _users = None


def _raise() -> tuple[int, int] | None:
    """Return the limit as it was; None where it stays that."""
    before = limit()
    if before is None:
        return None
    soft, hard = before
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.info("the limit of open files stays at %s: %s", soft, error)
        return None
    return before


def limit() -> tuple[int, int] | None:
    """Soft and hard; None where the kernel refuses to tell (a seccomp profile)."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError as error:
        logger.info("the limit of open files is not known: %s", error)
        return None


def as_users(pid: int) -> None:
    """Give a process that this one has started the user's own limit."""
    with _lock:
        users = _users
    if users is None:
        return
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, users)
    except OSError as error:  # it has ended, or is another user's by now
        logger.debug("the limit of open files of process %s stays: %s", pid, error)


def left() -> int:
    """How many more files this process can open."""
    now = limit()
    soft = MOST if now is None or now[0] == resource.RLIM_INFINITY else now[0]
    return soft - len(os.listdir("/proc/self/fd"))
