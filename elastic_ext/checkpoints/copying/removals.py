"""Removes the copies of a script's saves whose originals the script has removed.

Invariant: only a copy is ever removed, as it was copied, and only after a worker was seen to remove its original (`notes`) and a
newer copy can be used; or where not all of it has arrived, and its leader has given it up. What is pinned or quarantined stays.
Each node may remove the copy of a save of several nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.held import HeldSaves
from elastic_ext.checkpoints.copying.remote_record import RemoteRecord, follows_rank_0, is_given_up
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave, Trust, files_at
from elastic_ext.checkpoints.storage import Storage, remove_if_there

logger = logging.getLogger(__name__)


def is_whole(remote: Storage, known: KnownSave) -> bool:
    """Return whether a save in the remote directory is proved, and as it was recorded. Raises OSError."""
    save = stored.read_save(remote, known)
    return save is not None and stored.trust(save, files_at(remote, known.name))[0] is Trust.PROVED


def follow_removals(local: Storage, remote: Storage, held: HeldSaves) -> None:
    """Remove what may be removed now. held: saves that are still to be copied. Raises OSError."""
    removed = notes.removed_names(local)
    if not removed:
        return
    there, waiting = {each.name for each in listing.list_entries(local)}, {each.name for each in held.all()}
    kept = own_files.pinned_names(remote) | own_files.quarantined_names(remote)
    book = stored.known_saves(remote)
    for name in removed:
        if name in there:
            notes.forget(local, name, copied=False)
        elif name not in waiting and _remove_copy(remote, name, notes.copied_as(local, name), kept, book):
            notes.forget(local, name)


def _remove_copy(remote: Storage, name: str, identity: str, kept: Collection[str], book: dict[str, KnownSave]) -> bool:
    """Remove a copy if that may be. Return whether there is nothing more to do. identity: of what was copied, see `notes`."""
    known = book.get(name)
    save = stored.read_save(remote, known) if known is not None else None
    if known is None or save is None or not save.copied or not identity.startswith(f"{known.number:x} ") or name in kept:
        return True  # never copied, or something else has this name there, or a person keeps it
    found = files_at(remote, name)
    if stored.trust(save, found)[0] is not Trust.PROVED or found.keys() != {file.name for file in save.files}:
        return True  # others have written to it
    newer = sorted((each for each in book.values() if each > known and each.name not in kept), reverse=True)
    with_it = _with_it(remote, known, save, book)
    if not any(_can_be_used(remote, each, book) for each in newer if each not in with_it):
        return False
    _remove(remote, name)
    remove_if_there(remote, known.file)
    del book[name]
    logger.info("removed %s, as the script has removed its original", remote.path(name))
    return True


def _can_be_used(remote: Storage, known: KnownSave, book: Mapping[str, KnownSave]) -> bool:
    save = stored.read_save(remote, known)
    if save is None or follows_rank_0(save) or not is_whole(remote, known):
        return False
    there = (of for each, of in _with_it(remote, known, save, book).items() if is_whole(remote, each))
    return not (save.is_of_moment and {*save.moment}.difference(*(each.ranks for each in there)))


def _with_it(remote: Storage, known: KnownSave, save: StoredSave, book: Mapping[str, KnownSave]) -> dict[KnownSave, StoredSave]:
    return stored.of_same_moment(known, save, book.values(), lambda each: stored.read_save(remote, each))


def _remove(remote: Storage, name: str) -> None:
    """Remove an entry; another node may do the same."""
    entry = candidates.entry_of(remote, name)
    if entry is None:
        return
    try:
        upkeep.delete_entry(remote, entry)
    except FileNotFoundError:
        remove_if_there(remote, f"{name}{own_files.UNFINISHED}")


def remove_given_up(remote: Storage, record: RemoteRecord, kind: str, before: KnownSave) -> None:
    """Remove what has arrived of older saves of a kind that were given up, but not what people keep or have put there.

    before: a save that is whole. Raises OSError.
    """
    given_up = {each: save for each, save in record.saves(kind).items() if each < before and is_given_up(save)}
    kept = own_files.pinned_names(remote) | own_files.quarantined_names(remote) if given_up else frozenset()
    for each, save in given_up.items():
        if each.name not in kept and files_at(remote, each.name).keys() <= {file.name for file in save.files if file.name}:
            _remove(remote, each.name)
            record.remove(each)
            logger.info("removed %s, of which not all had arrived", remote.path(each.name))
