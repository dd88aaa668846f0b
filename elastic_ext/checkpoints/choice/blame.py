"""Quarantine the checkpoint that a failure is blamed on, so that the next round resumes from the one before it."""

from __future__ import annotations

import logging
import os
import platform

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.choice.discovery import Wanted
from elastic_ext.checkpoints.directory import marks, tiers
from elastic_ext.checkpoints.formats import detect, names
from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage, split_path

logger = logging.getLogger(__name__)


def quarantine(settings: Settings, resumed_from: str, newest: bool, reason: str) -> str | None:
    """Quarantine the checkpoint that a failure is blamed on; return its name, or None if no checkpoint is to blame.

    Args:
        resumed_from: path of the checkpoint that the failed round resumed from; "" if none.
        newest: blame the last saved checkpoint (for numbers that left their range) instead of `resumed_from`.
        reason: for people.

    It stays if no other one could be used: the cause may be newer than it, or the code, or a file of the data.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None:
        return None
    if newest:
        return _quarantine_newest(open_storage(settings.checkpoint_dir), settings, reason)
    if not resumed_from:
        return None
    storage, name = open_parent(resumed_from)
    if not _another(open_storage(settings.checkpoint_dir), settings, name):
        return None
    return _quarantine_in(storage, name, reason)


def _newest_besides(remote: Storage, settings: Settings, left_out: str) -> str:
    found = discovery.newest_in(remote, Wanted(pattern=settings.checkpoint_pattern, without=left_out)).resume
    return split_path(found.path)[1] if found is not None else ""


def _another(remote: Storage, settings: Settings, name: str) -> bool:
    """Return whether a checkpoint besides this one may be used."""
    kept = frozenset[str]()
    if settings.local_dir:
        kept = frozenset(each.name for each in tiers.offers(open_storage(settings.local_dir))) - marks.quarantined_names(remote)
    if settings.resume_from or kept - {name} or _newest_besides(remote, settings, name):
        return True
    logger.warning("checkpoint %s is not quarantined: no other one may be used, so it is tried", remote.path(name))
    return False


def _quarantine_newest(remote: Storage, settings: Settings, reason: str) -> str | None:
    newest, on_its_way = _newest_besides(remote, settings, ""), False
    if settings.local_dir:
        of_local = next(iter(tiers.own_checkpoints(open_storage(settings.local_dir))), "")
        if order_or_oldest(of_local) > order_or_oldest(newest):
            newest, on_its_way = of_local, True
    if not newest or not _another(remote, settings, newest):
        return None
    # A quarantine by name holds for both tiers.
    return _mark(remote, newest, reason, None) if on_its_way else _quarantine_in(remote, newest, reason)


def _quarantine_in(storage: Storage, name: str, reason: str) -> str | None:
    entry = names.entry_of(storage, name)
    return None if entry is None else _mark(storage, name, reason, detect.check(storage, entry, named=True).written_at)


def _mark(storage: Storage, name: str, reason: str, written_at: float | None) -> str:
    marks.quarantine(storage, name, reason, f"{platform.node()} pid {os.getpid()}", written_at)
    logger.warning("checkpoint %s is quarantined: %s; the next round resumes from the one before it", storage.path(name), reason)
    return name
