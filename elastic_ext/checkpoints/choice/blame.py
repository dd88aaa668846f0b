"""Quarantine the checkpoint that a failure is blamed on, so that the next round resumes from the one before it."""

from __future__ import annotations

import logging
import os
import platform

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.choice.discovery import Wanted
from elastic_ext.checkpoints.directory import marks, tiers
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage, split_path

logger = logging.getLogger(__name__)


def quarantine(settings: Settings, resumed_from: str, newest: bool, reason: str) -> str | None:
    """Quarantine the checkpoint that a failure is blamed on; return its name, or None if no checkpoint is to blame.

    Args:
        resumed_from: path of the checkpoint that the failed round resumed from; "" if none.
        newest: blame the last saved checkpoint (for numbers that left their range) instead of `resumed_from`.
        reason: for people.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None:
        return None
    if newest:
        return _quarantine_newest(open_storage(settings.checkpoint_dir), settings, reason)
    if not resumed_from:
        return None
    storage, name = open_parent(resumed_from)
    return _quarantine_in(storage, name, reason)


def _quarantine_newest(remote: Storage, settings: Settings, reason: str) -> str | None:
    found = discovery.newest_in(remote, Wanted(pattern=settings.checkpoint_pattern)).resume
    name = split_path(found.path)[1] if found is not None else ""
    if settings.local_dir:
        local = next(iter(tiers.own_checkpoints(open_storage(settings.local_dir))), "")
        if order_or_oldest(local) > order_or_oldest(name):
            # It may be on its way to the remote tier. A quarantine by name holds for both tiers.
            return _mark(remote, local, reason, None)
    return _quarantine_in(remote, name, reason) if name else None


def _quarantine_in(storage: Storage, name: str, reason: str) -> str | None:
    entry = storage.stat(name)
    return None if entry is None else _mark(storage, name, reason, detect.check(storage, entry).written_at)


def _mark(storage: Storage, name: str, reason: str, written_at: float | None) -> str:
    marks.quarantine(storage, name, reason, f"{platform.node()} pid {os.getpid()}", written_at)
    logger.warning("checkpoint %s is quarantined: %s; the next round resumes from the one before it", storage.path(name), reason)
    return name
