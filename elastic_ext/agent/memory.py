"""The agent's part in copies of the state in memory: it owns the directory, bounds it, and tells its workers of it.

The directory is in the agent's private directory on tmpfs, and goes with that: the agent removes it at its end, the reaper if the
agent is killed.
"""

from __future__ import annotations

import logging
import os

from elastic_ext.agent import launch
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.memory.room import Room
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.workers.standby.memory import available

logger = logging.getLogger(__name__)

SHARE = 4  # a quarter of the memory that is free, and what the copies already have


def open_room(settings: Settings, run_dir: str) -> Room | None:
    """Return the room for copies of this node's workers; None if there is none. run_dir: the agent's private directory."""
    if not settings.copies_to_memory or not run_dir.startswith(launch.IN_MEMORY):
        return None
    directory = os.path.join(run_dir, "memory")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        limit = (available() + _used(directory)) // SHARE if settings.memory_limit is None else settings.memory_limit
    except (OSError, ValueError) as error:
        logger.warning("no copies of the state in memory: %s", error)
        return None
    return Room(directory, limit, settings.memory_every)


def forget(room: Room) -> None:
    """Remove all copies on this node, so that no round resumes from them. Raises OSError."""
    storage = open_storage(room.directory)
    for name in tiers.own_checkpoints(storage):
        storage.remove_tree(name)


def _used(directory: str) -> int:
    """Return the bytes that the copies have."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)
