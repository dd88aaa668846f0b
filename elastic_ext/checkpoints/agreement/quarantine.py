"""Quarantine the checkpoint that a failure is blamed on, or those that were saved after the job went wrong."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.choice.decisions import Resume
from elastic_ext.checkpoints.directory import catalogue, own_files, tiers
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from elastic_ext.checkpoints.record.stored import KnownSave, Trust, files_at, known_saves, read_save, trust
from elastic_ext.checkpoints.sharing.fetching import FETCHED
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage, split_path

logger = logging.getLogger(__name__)


def quarantine(settings: Settings, resumed_from: str, newest: bool, reason: str, save_number: int = 0) -> str | None:
    """Quarantine the checkpoint that a failure is blamed on; return its name, or None if no checkpoint is to blame.

    Args:
        resumed_from: path of the checkpoint that the failed round resumed from; "" if none.
        newest: blame the last saved checkpoint (for numbers that left their range) instead of `resumed_from`.
        reason: for people.
        save_number: of `resumed_from`, by the record; 0: unknown.

    It stays if no other one could be used: the cause may be newer than it, or the code, or a file of the data.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None:
        return None
    if newest:
        return _quarantine_newest(open_storage(settings.checkpoint_dir), settings, reason)
    if not resumed_from:
        return None
    storage, name = _place_of(settings, resumed_from)
    remote = open_storage(settings.checkpoint_dir)
    if not _another(remote, settings, name):
        return None
    if storage.address != remote.address and order_of(name) is None:
        _quarantine_in(remote, name, reason)  # the copy of what a script has saved in local_dir
        if not _is_whole_here(storage, name):
            return _mark(storage, name, reason, _newest_time(storage, name), save_number=save_number)
    return _quarantine_in(storage, name, reason)


def _place_of(settings: Settings, path: str) -> tuple[Storage, str]:
    """Return the directory of a checkpoint, and its name; of one that was fetched from other nodes, `local_dir`."""
    storage, name = open_parent(path)
    local = open_storage(settings.local_dir) if settings.local_dir else None
    if local is not None and storage.address.startswith(local.path(FETCHED) + "/"):
        return local, name
    return storage, name


def _is_whole_here(storage: Storage, name: str) -> bool:
    """Return whether all of what a script has saved is in this directory, and not parts of it on other nodes."""
    known = known_saves(storage).get(name)
    save = read_save(storage, known) if known is not None else None
    return candidates.entry_of(storage, name) is not None and (save is None or save.parts == 1)


def _newest_time(storage: Storage, name: str) -> float | None:
    """Return when this node's part of a save was written; None if it has none."""
    return max((each.mtime for each in files_at(storage, name).values() if each.mtime is not None), default=None)


def _parts_here(local: Storage) -> dict[str, KnownSave]:
    """Return the saves of several nodes of which this one has a part that is as it was recorded."""
    known = known_saves(local)
    saves = {name: save for name, each in known.items() if (save := read_save(local, each)) is not None and save.parts > 1}
    return {name: known[name] for name, save in saves.items() if trust(save.as_whole, files_at(local, name))[0] is Trust.PROVED}


def quarantine_newer(settings: Settings, than: int, resumed_from: str, reason: str, shared: bool = True) -> list[str]:
    """Quarantine the checkpoints of later steps, or of unknown ones; return their names. Each node does so for its own tier.

    Unlike `quarantine`, also where no other one may be used: what is in them is surely wrong. What a script has not finished to
    save is left alone: nothing resumes from it, and its mark, without a time, would hold for a good one of that name, too.

    Args:
        than: the last step of the job whose checkpoint may be used.
        resumed_from: path of the checkpoint that the failed round resumed from, which stays; "": it began from nothing, and the
            next one may do so, too.
        reason: for people.
        shared: in `checkpoint_dir`, too. One node does that.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None or not (shared or settings.local_dir):
        return []
    remote = open_storage(settings.checkpoint_dir)
    found = dict(_newer_in(remote, settings, than, resumed_from)) if shared else {}
    if settings.local_dir:  # they may be on their way to the other tier, or on no other node
        known = {*found, *own_files.quarantined_names(remote)}
        local = tiers.own_checkpoints(open_storage(settings.local_dir))
        found |= {name: None for name in local if order_or_oldest(name)[1] > than and name not in known}
        _quarantine_local(settings, than, resumed_from, reason)
    return [_mark(remote, name, reason, written_at, not resumed_from) for name, written_at in found.items()]


def _newer_in(remote: Storage, settings: Settings, than: int, resumed_from: str) -> Iterator[tuple[str, float | None]]:
    """Yield the name of each that is to be quarantined, and when it was written; None for ours, as no other one gets its name."""
    for each in catalogue.list_checkpoints(remote, settings.checkpoint_pattern):
        later = each.step is None or each.step > than
        if later and not each.quarantined and remote.path(each.name) != resumed_from:
            seen = detect.check(remote, each.entry, named=True)
            is_ours = order_of(each.name) is not None
            if each.complete or seen.unreadable is not None or is_ours:
                yield each.name, None if is_ours else seen.written_at


def _quarantine_local(settings: Settings, than: int, resumed_from: str, reason: str) -> None:
    """Quarantine what a script has saved in `local_dir`; its copy, if there is one, is for the node that does so there."""
    local = _script_saves(settings)
    if local is None:
        return
    later = {name: at for name, at in _newer_in(local, settings, than, resumed_from) if order_of(name) is None}
    for name in _parts_here(local):
        step = candidates.step_of(name, settings.checkpoint_pattern)
        if (step is None or step > than) and name != split_path(resumed_from)[1]:
            later[name] = _newest_time(local, name)
    for name, written_at in later.items():
        _mark(local, name, reason, written_at, not resumed_from)


def _script_saves(settings: Settings) -> Storage | None:
    """Return `local_dir`, if a script has saved there in its own way."""
    local = open_storage(settings.local_dir) if settings.local_dir else None
    return local if local is not None and known_saves(local) else None


def _newest_besides(storage: Storage, settings: Settings, left_out: str) -> Resume | None:
    return listing.newest_in(storage, listing.Wanted(pattern=settings.checkpoint_pattern, without=left_out)).resume


def _another(remote: Storage, settings: Settings, name: str) -> bool:
    """Return whether a checkpoint besides this one may be used."""
    kept = frozenset[str]()
    if settings.local_dir:
        kept = frozenset(each.name for each in tiers.offers(open_storage(settings.local_dir))) - own_files.quarantined_names(
            remote
        )
    if settings.resume_from or kept - {name} or _newest_besides(remote, settings, name):
        return True
    local = _script_saves(settings)
    if local is not None and (_parts_here(local).keys() - {name} or _newest_besides(local, settings, name)):
        return True
    logger.warning("checkpoint %s is not quarantined: no other one may be used, so it is tried", remote.path(name))
    return False


def _quarantine_newest(remote: Storage, settings: Settings, reason: str) -> str | None:
    found, on_its_way = _newest_besides(remote, settings, ""), False
    local = _script_saves(settings)
    of_script = _newest_besides(local, settings, "") if local is not None else None
    here = _parts_here(local) if local is not None else {}
    last = max(here, key=lambda name: here[name], default="")
    if local is not None and last and here[last].number >= max(_number(found), _number(of_script)):
        return quarantine(settings, local.path(last), False, reason, here[last].number)
    if of_script is not None and (found is None or _number(of_script) >= _number(found)):
        return quarantine(settings, of_script.path, False, reason)
    newest = split_path(found.path)[1] if found is not None else ""
    if settings.local_dir:
        of_local = next(iter(tiers.own_checkpoints(open_storage(settings.local_dir))), "")
        if order_or_oldest(of_local) > order_or_oldest(newest):
            newest, on_its_way = of_local, True
    if not newest or not _another(remote, settings, newest):
        return None
    # A quarantine by name holds for both tiers.
    return _mark(remote, newest, reason, None) if on_its_way else _quarantine_in(remote, newest, reason)


def _number(found: Resume | None) -> int:
    return (found.save_number or 0) if found is not None else 0


def _quarantine_in(storage: Storage, name: str, reason: str) -> str | None:
    entry = candidates.entry_of(storage, name)
    return None if entry is None else _mark(storage, name, reason, detect.check(storage, entry, named=True).written_at)


def _mark(
    storage: Storage, name: str, reason: str, written_at: float | None, from_nothing: bool = False, save_number: int = 0
) -> str:
    own_files.quarantine(storage, name, reason, f"{platform.node()} pid {os.getpid()}", written_at, from_nothing, save_number)
    logger.warning("checkpoint %s is quarantined: %s; the next round resumes from the one before it", storage.path(name), reason)
    return name
