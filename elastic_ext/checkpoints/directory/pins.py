"""Keep a checkpoint of the local tier between its choice and its load: the copier beside the agent prunes there.

A pin is a lock of a file (flock(2)), so it ends with the process that holds it, however that ends. While an agent chooses it
holds CHOOSING, and nothing is pruned; then it holds the chosen one only. Whoever prunes holds CHOOSING alone for one removal at a
time, so an agent that has got its share of it sees what stays.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.checkpoints.directory.generations import MARKERS
from elastic_ext.checkpoints.storage import Storage, polled

logger = logging.getLogger(__name__)

CHOOSING = f"{MARKERS}/choosing"
LOADING = f"{MARKERS}/loading"  # a directory with a file for each checkpoint that is pinned
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of this file system: Lustre without -o flock, say
HELD_S = 20.0  # that a removal of one checkpoint may take


class Pin:
    """One agent's, of its local directory. What cannot be locked is not pinned, which is logged: the loader has other ways."""

    def __init__(self, local: Storage) -> None:
        """From now on nothing is pruned. Waits for a removal under way, HELD_S at most."""
        self._local = local
        self._held: list[int] = []
        try:
            number = _opened(local.path(CHOOSING))
            self._held.append(number)
            if not polled(lambda: _locked(number, fcntl.LOCK_SH), bool, time.monotonic() + HELD_S):
                logger.warning("%s is being pruned for more than %.0f s: what is chosen may be gone", local.address, HELD_S)
        except OSError as error:
            logger.warning("checkpoints in %s cannot be kept from being pruned: %s", local.address, error)

    def narrow(self, name: str) -> None:
        """Hold only this one from now on."""
        before, self._held = self._held, []
        try:
            self._held.append(_opened(self._local.path(f"{LOADING}/{name}")))
            _locked(self._held[0], fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("checkpoint %s cannot be kept from being pruned: %s", self._local.path(name), error)
        _release(before)

    def release(self) -> None:
        """A second time does nothing."""
        before, self._held = self._held, []
        _release(before)


@contextmanager
def unless_pinned(local: Storage, name: str) -> Iterator[bool]:
    """Yields whether this checkpoint may be removed now; while it is, nobody chooses. Raises OSError.

    Where files cannot be locked nobody has pinned it.
    """
    number = _opened(local.path(CHOOSING))
    try:
        try:
            free = _locked(number, fcntl.LOCK_EX) and not _is_loaded(local.path(f"{LOADING}/{name}"))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            free = True
        yield free
    finally:
        os.close(number)


def _is_loaded(path: str) -> bool:
    """Does an agent hold it? Forgets what an agent has left."""
    try:
        number = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _locked(number, fcntl.LOCK_EX):
            return True
        os.unlink(path)  # no agent can be about to lock it: it would hold CHOOSING
        return False
    finally:
        os.close(number)


def _opened(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _locked(number: int, kind: int) -> bool:
    """Lock it now, or not at all. Raises OSError where files cannot be locked."""
    try:
        fcntl.flock(number, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(numbers: list[int]) -> None:
    for number in numbers:
        try:
            fcntl.flock(number, fcntl.LOCK_UN)  # a child that was forked meanwhile may have it open, too
        except OSError as error:  # where files cannot be locked: it never was
            logger.debug("a pin was not released: %s", error)
        os.close(number)
