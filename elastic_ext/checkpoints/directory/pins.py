"""Keep a checkpoint in the local tier between its choice and its load, although the copier beside the agent prunes there.

A pin is a file lock (flock(2)), so it ends with its process, however that ends. While an agent chooses, it holds a shared lock on
CHOOSING, and nothing is pruned. Then it locks only the chosen checkpoint. The copier locks CHOOSING exclusively for each removal,
so everything that an agent sees once it holds the shared lock will stay.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.storage import Storage, poll

logger = logging.getLogger(__name__)

CHOOSING = f"{MARKERS}/choosing"
LOADING = f"{MARKERS}/loading"  # a directory with one file per pinned checkpoint
REMOVAL_S = 20.0  # time limit for the removal of one checkpoint
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from filesystems without locks, such as Lustre without -o flock


class Pin:
    """One agent's pin in its local directory.

    If files cannot be locked, nothing is pinned, and a warning is logged. A load that finds its checkpoint gone uses the copy in
    the remote directory.
    """

    def __init__(self, local: Storage) -> None:
        """Keep everything from now on. Wait at most REMOVAL_S for a removal in progress."""
        self._local = local
        self._locks: list[int] = []  # file descriptors
        try:
            descriptor = _open(local.path(CHOOSING))
            self._locks.append(descriptor)
            if not poll(lambda: _try_lock(descriptor, fcntl.LOCK_SH), bool, time.monotonic() + REMOVAL_S):
                logger.warning(
                    "a removal in %s takes more than %.0f s: the chosen checkpoint may be gone", local.address, REMOVAL_S
                )
        except OSError as error:
            logger.warning("cannot keep the checkpoints in %s from being pruned: %s", local.address, error)

    def keep_only(self, name: str) -> None:
        """Keep only this checkpoint from now on."""
        before, self._locks = self._locks, []
        try:
            self._locks.append(_open(self._local.path(f"{LOADING}/{name}")))
            _try_lock(self._locks[0], fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("cannot keep the checkpoint %s from being pruned: %s", self._local.path(name), error)
        _release(before)

    def release(self) -> None:
        """Stop keeping anything. A second call does nothing."""
        before, self._locks = self._locks, []
        _release(before)


@contextmanager
def unless_pinned(local: Storage, name: str) -> Iterator[bool]:
    """Yield whether this checkpoint may be removed now. No agent can choose until the context ends. Raises OSError.

    If files cannot be locked, it counts as not pinned.
    """
    descriptor = _open(local.path(CHOOSING))
    try:
        try:
            free = _try_lock(descriptor, fcntl.LOCK_EX) and not _is_loaded(local.path(f"{LOADING}/{name}"))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            free = True
        yield free
    finally:
        os.close(descriptor)


def _is_loaded(path: str) -> bool:
    """Return whether an agent holds the lock. If none does, remove the lock file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            return True
        os.unlink(path)  # no agent is about to lock it, because that agent would hold CHOOSING
        return False
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file without waiting; return whether that succeeded. Raises OSError if files cannot be locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile may also have it open
        except OSError as error:  # files cannot be locked here, so it never was locked
            logger.debug("cannot release a pin: %s", error)
        os.close(descriptor)
