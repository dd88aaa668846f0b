"""What a script has saved in the local directory, by the record there; what has not changed is read and checked once."""

from __future__ import annotations

import time

from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying.held import LocalSave, has_changed
from elastic_ext.checkpoints.copying.targets import OneSave, may_be_resumed_from, shared_by_kind
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import is_hidden, order_of
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import SAVES, KnownSave
from elastic_ext.checkpoints.storage import Entry, LocalStorage

SETTLED_S = 1.0  # a file that was written more recently may be written again without a change of its time


class LocalRecord:
    """The last recorded save of each entry. Its methods raise OSError."""

    def __init__(self, local: LocalStorage, pattern: str) -> None:
        """pattern: the setting checkpoint_pattern."""
        self._local, self._pattern = local, pattern
        self._read: dict[Entry, LocalSave | None] = {}  # by the file of the record
        self._checked: dict[str, bool] = {}  # by identity, whether it is a checkpoint
        self._by_name: dict[str, LocalSave] = {}
        self._loads: tuple[str, ...] = ()

    def look(self) -> list[Entry]:
        """Read what is new. Return the entries of the directory."""
        last: dict[str, tuple[KnownSave, Entry]] = {}
        for entry in self._local.listed(SAVES):
            known = stored.known_save(entry.name)
            if known is not None and (known.name not in last or last[known.name][0] < known):
                last[known.name] = known, entry
        read = {entry: self._read[entry] if entry in self._read else self._read_one(known) for known, entry in last.values()}
        now = time.time()
        self._read = {entry: each for entry, each in read.items() if now - (entry.mtime or now) > SETTLED_S}
        saves = [each for each in read.values() if each is not None and order_of(each.name) is None]
        self._by_name = {each.name: each for each in saves}
        newest = max(saves, key=lambda each: each.known, default=None)
        self._loads = newest.save.loads if newest is not None else ()
        identities = {each.identity for each in saves}
        self._checked = {identity: checked for identity, checked in self._checked.items() if identity in identities}
        return listing.list_entries(self._local)

    def _read_one(self, known: KnownSave) -> LocalSave | None:
        """Return a recorded save; None if its file is gone or says nothing."""
        data = self._local.read_if_there(known.file)
        save = stored.save_of(data, self._local.path(known.file)) if data is not None else None
        return LocalSave(known, save, data) if data is not None and save is not None else None

    def of(self, name: str) -> LocalSave | None:
        return self._by_name.get(name)

    @property
    def kinds_of_several(self) -> frozenset[str]:
        """The kinds of checkpoints that have parts on several nodes, or files of their ranks, also where these have gone."""
        shared = shared_by_kind(self._by_name.values())[1]
        return frozenset(kind for kind, ones in shared.items() if any(self._may_be_checkpoint(one) for one in ones))

    def _may_be_checkpoint(self, one: OneSave) -> bool:
        """Return whether a job may resume from it, by its names."""
        suffixes = (*candidates.CHECKED_SUFFIXES, ".distcp")
        named = any(may_be_resumed_from(each.save) or each.name.endswith(suffixes) for each in one.entries)
        return named or one.kind in self._loads or listing.is_named(Entry(one.name, "", one.is_part, 0, None), self._pattern)

    def gone(self, listed: list[Entry]) -> list[OneSave]:
        """Return the recorded saves of several nodes that this node leads, and whose entries here have been removed since."""
        names = {each.name for each in listed}
        shared = shared_by_kind(self._by_name.values())[1]
        return [one for ones in shared.values() for one in ones if one.leads and not names & {each.name for each in one.entries}]

    def candidates(self, listed: list[Entry]) -> list[LocalSave]:
        """Return the saves that may be checkpoints, judging by their names. listed: the entries of the directory."""
        found = listing.candidates_among(listed, self._pattern)
        names = {part.name for each in found for part in each.parts or (each,)}
        names |= {each.name for each in listed if pattern_of(each.name) in self._loads and not is_hidden(each.name)}
        return [each for name, each in self._by_name.items() if name in names]

    def is_good(self, each: LocalSave) -> bool:
        """Return whether it is worth copying: proved, as it was recorded, and a job may resume from it."""
        return each.save.proved and not (self.is_barred(each.name) or has_changed(each, self._local)) and self.is_checkpoint(each)

    def is_checkpoint(self, each: LocalSave) -> bool:
        """Return whether a job may resume from it: logs and caches are proved, too."""
        if pattern_of(each.name) in self._loads:
            return True
        if each.identity not in self._checked:
            entry = self._local.stat(each.name)
            if entry is None:
                return False
            named = listing.is_named(entry, self._pattern)
            by_names = named or may_be_resumed_from(each.save)
            self._checked[each.identity] = by_names if each.save.parts > 1 else detect.check(self._local, entry, named).complete
        return self._checked[each.identity]

    def is_barred(self, name: str) -> bool:
        mark = own_files.quarantine_of(self._local, name)
        if mark is None:
            return False
        entry = candidates.entry_of(self._local, name)
        return entry is None or mark.holds(detect.check(self._local, entry, named=True).written_at)
