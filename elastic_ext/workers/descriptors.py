"""The limit of open files: the agent raises its own as far as it may, and its workers keep the one that the user has set.

Rank 0's agent holds a connection for each client of the round's store. A worker with a very high limit could hurt itself:
select(2) takes no descriptor above 1,023, and some programs loop over all descriptors that they could have.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

MOST = 1 << 20  # the kernel's default maximum (fs.nr_open); a hard limit may be 2 ** 63

_lock = threading.Lock()
_agents = 0  # agents of this process that have raised the limit
_users: tuple[int, int] | None = None  # the limit before the first of them did; None: it could not be raised


@contextmanager
def raised() -> Iterator[None]:
    """Inside, the soft limit is the hard one, or MOST if that is less."""
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
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, _users)
                except (OSError, ValueError) as error:  # somebody has lowered the hard one
                    logger.info("the limit of open files cannot be set back: %s", error)
                _users = None


def _raise() -> tuple[int, int] | None:
    """Return the limit as it was; None if it could not be raised."""
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
    """The soft and the hard limit; None if the kernel refuses to tell (a seccomp profile)."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError as error:
        logger.info("the limit of open files cannot be read: %s", error)
        return None


def as_users(pid: int) -> None:
    """Set the user's own limit for a process that this one has started."""
    with _lock:
        users = _users
    if users is None:
        return
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, users)
    except OSError as error:  # it has ended, or runs as another user by now
        logger.debug("the limit of open files of process %s cannot be set: %s", pid, error)


def left() -> int:
    """How many more files this process can open once its limit is raised."""
    now = limit()
    hard = MOST if now is None or now[1] == resource.RLIM_INFINITY else min(now[1], MOST)
    return hard - len(os.listdir("/proc/self/fd"))
