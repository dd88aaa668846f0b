"""Where a script that saves in its own way saves in one round: `local_dir`, or `checkpoint_dir` if there is no room in it.

On several nodes it is the same everywhere, as a save is a whole only in one of them: `local_dir` if all nodes have room there.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

from elastic_ext.base.contracts import SavePlace
from elastic_ext.checkpoints.record.stored import known_saves, read_save
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

LEAST_FREE = 256 << 20  # bytes; a pod without a volume of its own at /dev/shm has 64 MiB there
SAVES_AT_ONCE = 2  # a script removes its old save after the new one
MOST_READ = 8  # of the last saves


SEVERAL = SavePlace(False, "there are several nodes, and local_saves is not `all`")
NAMED = SavePlace(False, "resume_from is set, which overrides local_dir")


def decide(free: int, last: int) -> SavePlace:
    """Pure. free: bytes in `local_dir`. last: bytes of the job's last save; 0: unknown."""
    needed = max(LEAST_FREE, SAVES_AT_ONCE * last)
    if free < needed:
        return SavePlace(False, f"it has {free / 1e6:.0f} MB free, and a save needs {needed / 1e6:.0f} MB", full=True)
    return SavePlace(True)


def of_all(places: Sequence[SavePlace], nodes: int) -> SavePlace:
    """Return the place for a round of this many nodes. places: of those that have said theirs, by group rank. Pure."""
    if len(places) < nodes:
        return SavePlace(False, f"{nodes - len(places)} of {nodes} nodes have not said whether they have room there", full=True)
    away = next(((node, each) for node, each in enumerate(places) if not each.local), None)
    if away is None:
        return SavePlace(True)
    node, place = away
    return replace(place, reason=f"node {node}: {place.reason}" if nodes > 1 and place.reason else place.reason)


def find(local: Storage, remote: Storage) -> SavePlace:
    """Return where this node can save in this round. local, remote: `local_dir` and `checkpoint_dir`."""
    try:
        os.makedirs(local.address, exist_ok=True)
        free, last = shutil.disk_usage(local.address).free, last_size(local)
    except OSError as error:
        return SavePlace(False, f"it cannot be used: {error}", full=True)
    return decide(free, last or _size_at_start(remote))


_at_start: dict[str, int] = {}  # by address


def _size_at_start(remote: Storage) -> int:
    """Return the bytes of the job's last save, asked once: a restart must not wait for that. 0: unknown."""
    if remote.address not in _at_start:
        try:
            _at_start[remote.address] = last_size(remote)
        except OSError as error:
            logger.debug("the size of the last save is unknown: %s", error)
    return _at_start.get(remote.address, 0)


def last_size(storage: Storage) -> int:
    """Return the bytes of the largest one of the last saves of each kind. Raises OSError."""
    saves = [read_save(storage, known) for known in sorted(known_saves(storage).values())[-MOST_READ:]]
    return max((sum(file.size for file in save.files) for save in saves if save is not None), default=0)
