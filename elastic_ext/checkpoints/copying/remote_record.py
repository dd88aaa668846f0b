"""The record of saves in the remote directory, as copiers write it: what has arrived there, and what is on its way.

The record of a save that is on its way says so (`StoredSave.arriving`), and nothing resumes from it. Its `why` begins with
ARRIVING while its leader works on it: then other nodes send their parts, too. It begins with GIVEN_UP once the leader has passed
it by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from elastic_ext.base import records
from elastic_ext.checkpoints.copying.targets import OneSave, RankMoment, moment_of
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import SAVES, KnownSave, StoredSave
from elastic_ext.checkpoints.storage import Entry, Storage, remove_if_there

ARRIVING = "it is being copied from local_dir, and not all of it has arrived"
WITH_RANK_0 = "it is being copied from local_dir after the file of rank 0, and has not arrived"  # without a leader of its own
GIVEN_UP = "its copy from local_dir was given up, and not all of it has arrived"


REMOVED = f"{MARKERS}/removed_by_leader"  # see `RemoteRecord.note_removed`


def is_announced(save: StoredSave) -> bool:
    return save.arriving and save.why.startswith(ARRIVING)


def is_given_up(save: StoredSave) -> bool:
    return save.arriving and save.copied and save.why == GIVEN_UP


def follows_rank_0(save: StoredSave) -> bool:
    """Return whether it is a file of a rank that counts only with that of rank 0, or of the lowest rank that has written one."""
    return save.here > 0 and len(save.ranks) == 1 and save.leader not in save.ranks


class RemoteRecord:
    """Lists the record once, until `forget`, and reads each state of a file once. Its methods raise OSError."""

    def __init__(self, remote: Storage) -> None:
        self._remote = remote
        self._read: dict[Entry, StoredSave | None] = {}
        self._listed: dict[KnownSave, Entry] | None = None
        self._put: dict[KnownSave, StoredSave] = {}  # since it was listed

    def forget(self) -> None:
        """List it again when it is asked next."""
        self._listed = None

    @property
    def _entries(self) -> dict[KnownSave, Entry]:
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    def _list(self) -> dict[KnownSave, Entry]:
        listed = [(stored.known_save(each.name), each) for each in self._remote.listed(SAVES)]
        found = {known: each for known, each in listed if known is not None}
        self._read = {each: self._read[each] for each in found.values() if each in self._read}
        self._put = {}
        return found

    @property
    def known(self) -> dict[str, KnownSave]:
        """The last save of each entry, as of the last listing and by what was put since."""
        return {each.name: each for each in sorted(self._entries)}

    def saves(self, kind: str) -> dict[KnownSave, StoredSave]:
        """Return what is recorded of the entries of a kind."""
        found = {each: self.save(each) for name, each in self.known.items() if pattern_of(name) == kind}
        return {each: save for each, save in found.items() if save is not None}

    def arrived(self, kind: str) -> list[str]:
        """Return the names of the saves of a kind that count as there."""
        return [each.name for each, save in self.saves(kind).items() if not (save.arriving or follows_rank_0(save))]

    def of_moment(self, kind: str, moment: RankMoment) -> dict[KnownSave, StoredSave]:
        """Return the files of ranks of one save."""
        return {each: save for each, save in self.saves(kind).items() if moment_of(each, save) == moment}

    def save(self, known: KnownSave) -> StoredSave | None:
        """Return what is recorded of a save; None: nothing is, or another version wrote it."""
        if known in self._put:
            return self._put[known]
        entry = self._entries.get(known)
        if entry is None:
            return None
        if entry.mtime is None:  # nothing shows whether it has changed
            return stored.read_save(self._remote, known)
        if entry not in self._read:
            self._read[entry] = stored.read_save(self._remote, known)
        return self._read[entry]

    def changed(self, known: KnownSave) -> float | None:
        """Return when the file of a save was written, by the clock of the storage; None: that is unknown, or it has gone."""
        entry = self._remote.stat(known.file)
        return entry.mtime if entry is not None else None

    def put(self, known: KnownSave, save: StoredSave) -> None:
        """Record a save. An older record of its entry goes."""
        self._remote.put(known.file, records.encode(save, stored.SCHEMA).encode())
        before = self.known.get(known.name)
        if before is not None and before < known:
            remove_if_there(self._remote, before.file)
            del self._entries[before]
        self._entries.setdefault(known, Entry(known.file, "", False, 0, None))
        self._put[known] = save

    def note_removed(self, ones: Iterable[OneSave]) -> None:
        """Tell the other nodes, at the end of the job, that the script has removed saves which this node leads."""
        said = self._removed()
        names = said | {json.dumps(one.shared_name) for one in ones}
        if names != said:
            self._remote.put(REMOVED, "\n".join(sorted(names)).encode())

    def is_removed(self, one: OneSave) -> bool:
        """Return whether its leader cannot copy it any more, because the script has removed it there."""
        return json.dumps(one.shared_name) in self._removed()

    def _removed(self) -> set[str]:
        return set((self._remote.read_if_there(REMOVED) or b"").decode(errors="replace").split("\n")) - {""}

    def give_up(self, known: KnownSave) -> None:
        """Note that a save that was announced is passed by."""
        save = self.save(known)
        if save is not None and is_announced(save) and self.known.get(known.name) == known:
            self.put(known, replace(save, why=GIVEN_UP))

    def remove(self, known: KnownSave) -> None:
        remove_if_there(self._remote, known.file)
        self._entries.pop(known, None)
        self._put.pop(known, None)
