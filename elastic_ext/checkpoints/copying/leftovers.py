"""At the end of a job: copies everything else below the local directory.

Several nodes may have something of one name: logs, a final model. What is there already was sent by another node, or is of other
people, and stays. A node sends what is not there, or what it has sent itself, by its notes. What may be a checkpoint is of one
node, whole; of other directories each node sends its own files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.held import LocalSave, path_of
from elastic_ext.checkpoints.copying.removals import is_whole
from elastic_ext.checkpoints.copying.targets import may_be_newest
from elastic_ext.checkpoints.copying.together import Tiers
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import UNKNOWN
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, files_at
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage, files_of

logger = logging.getLogger(__name__)

UNRECORDED = "without a record"  # noted of an entry that was copied so, before the files that this node has sent


class LeftoverFiles:
    """Its methods raise OSError, CopyError."""

    def __init__(self, tiers: Tiers, throttle: Callable[[int], None]) -> None:
        self._local, self._remote, self._throttle = tiers.local, tiers.remote, throttle
        self._there, self._here = tiers.there, tiers.here
        self._logged: set[str] = set()  # names of entries without a record

    def copy(self, entry: Entry, save: LocalSave | None) -> None:
        """Copy an entry without a record. save: its recorded save, if it is as it was recorded."""
        if entry.sibling and isinstance(self._remote, LocalStorage):
            self._link(self._remote, entry)
        elif save is not None and self._here.is_barred(entry.name):
            own_files.quarantine(self._remote, entry.name, f"as in {self._local.address}", "replicate")
            self._send(entry)
        elif not entry.is_link:
            self._send(entry)

    def passes_by(self, entry: Entry) -> bool:
        """Say, once, that an entry is not copied: other nodes may have more of it, and nothing says what belongs together.

        Return whether nothing is lost without it: a later round has begun without it, or a newer save of its kind is there.
        """
        name = entry.name
        is_older = notes.is_of_earlier_round(self._local, name)
        if name not in self._logged:
            self._logged.add(name)
            why = "it is left from an earlier round, and" if is_older else "it may be torn:"
            logger.warning("%s is not copied: %s no record says which part of a save it is", entry.path, why)
        return is_older or not may_be_newest(name, self._there.arrived(pattern_of(name)))

    def copy_new(self, save: LocalSave) -> None:
        """Copy what came into the directory of a save after its record was written, beside the copy of that save.

        What is there of other nodes, or of people, stays.
        """
        name, known = save.name, self._there.known.get(save.name)
        recorded = {file.name for file in (*save.save.files, *save.save.elsewhere)}
        new = {path: file for path, file in files_at(self._local, name).items() if path not in recorded}
        if known != save.known or not new:
            return
        there = files_at(self._remote, name)
        for path in sorted(new.keys() - there.keys(), key=upkeep.commit_order):
            upkeep.send(self._local, self._remote, path_of(name, path), new[path], self._throttle)

    def is_worse(self, save: LocalSave) -> bool:
        """Return whether a save was not proved, and a proved one has its name in the remote directory."""
        known = self._there.known.get(save.name)
        return not save.save.proved and known is not None and is_whole(self._remote, known)

    def _link(self, remote: LocalStorage, entry: Entry) -> None:
        """Make a link to the same name beside it. What is no link stays, and a link to a newer save."""
        path = remote.path(entry.name)
        before = os.readlink(path) if os.path.islink(path) else ""
        if before == entry.sibling or (not before and os.path.exists(path)):
            return
        noted = notes.copied_as(self._local, entry.name) == UNRECORDED
        if before and not noted and not _is_newer(self._there.known, entry.sibling, before):
            logger.info("%s is not copied: %s leads to %s already", entry.path, path, before)
            return
        notes.note_copied(self._local, entry.name, UNRECORDED)
        if before:
            os.unlink(path)
        os.symlink(entry.sibling, path)

    def _send(self, entry: Entry) -> None:
        name, noted = entry.name, notes.copied_as(self._local, entry.name)
        try:
            files = dict(files_of(self._local, name)) if entry.is_dir else {"": entry}
        except PermissionError as error:  # lost+found
            logger.warning("%s is not copied: %s", entry.path, error.strerror)
            return
        known = self._there.known.get(name)
        if known is not None and (not noted or is_whole(self._remote, known)):
            logger.info("%s is not copied: a save has its name in %s", entry.path, self._remote.address)
            return
        there = files_at(self._remote, name) if noted.startswith(UNRECORDED) or not noted else {}
        own = set(noted.split("\n")[1:])  # "" is the entry itself
        others = there.keys() - own
        if others and not self._may_be_mixed(entry):
            logger.info("%s is not copied: %s is there, and of others", entry.path, self._remote.path(name))
            return
        wanted = sorted(files.keys() - others, key=upkeep.commit_order)
        left_out = len(files) - len(wanted)
        if left_out:
            logger.info("%s of the files of %s are not copied: others have sent files of these names", left_out, entry.path)
        notes.note_copied(self._local, name, "\n".join([UNRECORDED, *sorted(own | set(wanted))]))
        for file in wanted:
            upkeep.send(self._local, self._remote, path_of(name, file), files[file], self._throttle)

    def _may_be_mixed(self, entry: Entry) -> bool:
        """Return whether files of this node may be added to what others have there: neither can be a checkpoint."""
        there = self._remote.stat(entry.name)
        if not (entry.is_dir and there is not None and there.is_dir):
            return False
        return all(_is_unknown(storage, each) for storage, each in ((self._local, entry), (self._remote, there)))


def _is_unknown(storage: Storage, entry: Entry) -> bool:
    return detect.check(storage, entry, named=False).format == UNKNOWN


def _is_newer(known: Mapping[str, KnownSave], name: str, other: str) -> bool:
    return name in known and (other not in known or known[name] > known[other])
