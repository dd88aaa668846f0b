"""Where a script that saves in its own way saves in one round: `local_dir`, or `checkpoint_dir` if there is no room in it."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.record.stored import known_saves, read_save
from elastic_ext.checkpoints.storage import open_storage

logger = logging.getLogger(__name__)

LEAST_FREE = 256 << 20  # bytes; a pod without a volume of its own at /dev/shm has 64 MiB there
SAVES_AT_ONCE = 2  # a script removes its old save after the new one
MOST_READ = 8  # of the last saves


@dataclass(frozen=True)
class SavePlace:
    """Whether to save in `local_dir`, and why not, for people; "" where it is not set."""

    local: bool
    reason: str = ""
    full: bool = False  # because there is no room


def decide(nodes: int, free: int, last: int, named: bool) -> SavePlace:
    """Pure. free: bytes in `local_dir`. last: bytes of the job's last save; 0: unknown. named: `resume_from` is set."""
    if nodes > 1:
        return SavePlace(False, f"there are {nodes} nodes, and files that a script saves on one are not on the others")
    if named:
        return SavePlace(False, "resume_from is set, which overrides local_dir")
    needed = max(LEAST_FREE, SAVES_AT_ONCE * last)
    if free < needed:
        return SavePlace(False, f"it has {free / 1e6:.0f} MB free, and a save needs {needed / 1e6:.0f} MB", full=True)
    return SavePlace(True)


def find(settings: Settings, nodes: int) -> SavePlace:
    """Return where to save in this round."""
    if settings.local_dir is None or settings.checkpoint_dir is None:
        return SavePlace(False)
    local = open_storage(settings.local_dir).address
    try:
        os.makedirs(local, exist_ok=True)
        free, last = shutil.disk_usage(local).free, _last_size(settings.local_dir)
    except OSError as error:
        return SavePlace(False, f"it cannot be used: {error}", full=True)
    if not last and nodes == 1:
        try:
            last = _last_size(settings.checkpoint_dir)
        except OSError as error:
            logger.debug("the size of the last save is unknown: %s", error)
    return decide(nodes, free, last, bool(settings.resume_from))


def _last_size(directory: str) -> int:
    """Return the bytes of the largest one of the last saves of each kind. Raises OSError."""
    storage = open_storage(directory)
    saves = [read_save(storage, known) for known in sorted(known_saves(storage).values())[-MOST_READ:]]
    return max((sum(file.size for file in save.files) for save in saves if save is not None), default=0)
