"""Copies what a script has saved in `local_dir` in its own way, whatever its format, to the remote directory.

What is copied is what the record of saves proves there and a job may resume from, the newest of each kind: of the names that
differ only in digits. At the end of the job it is everything, if the script saves there. The record goes along, with the times
of the remote files, so it vouches for the copy as for the original. Until all of a save has arrived, the record says that it has
not, and nothing resumes from it.

Invariants:

- A copy has the bytes that were recorded. They are copied from hard links (`held`), and a file that was written again meanwhile,
  by its size or time, does not appear.
- What is newer in the remote directory, by the record, is never replaced, nor what is proved by what is not.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elastic_ext.base import errors, records
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.held import HeldSaves, LocalSave, has_changed, path_of
from elastic_ext.checkpoints.copying.removals import follow_removals, is_whole
from elastic_ext.checkpoints.copying.reports import CopyState
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import is_hidden, order_of, step_of
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordBook, files_at
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage, files_of, remove_if_there

logger = logging.getLogger(__name__)

ARRIVING = "it is being copied from local_dir, and not all of it has arrived"
PLAIN = "without a record"  # noted of an entry that was copied so

Done = TypeVar("Done")
Unit = tuple[LocalSave, ...]
"""A save of one rank for all, or the files of which each rank wrote its own for one save."""


def newest_of_each_kind(saves: Iterable[LocalSave]) -> list[Unit]:
    """Return what is worth copying, oldest first. Pure.

    Files of different ranks are of one save if they are of one kind and moment: of a round, and its count of steps.
    """
    newest: dict[str, dict[tuple[int, ...], LocalSave]] = {}
    for each in sorted(saves, key=lambda each: each.known, reverse=True):
        unit = newest.setdefault(pattern_of(each.name), {})
        first = next(iter(unit.values()), each)
        if (each.known.attempt, each.save.count) == (first.known.attempt, first.save.count):
            unit.setdefault(each.save.ranks, each)
    return sorted((tuple(unit.values()) for unit in newest.values()), key=lambda unit: max(each.known for each in unit))


class ScriptSaves:
    """Copies from one local directory. `turn` does all that can be done now."""

    def __init__(self, local: LocalStorage, remote: Storage, pattern: str, throttle: Callable[[int], None]) -> None:
        """pattern: the setting checkpoint_pattern. throttle: called with the size of each block before it is sent; may wait."""
        self._local, self._remote, self._pattern, self._throttle = local, remote, pattern, throttle
        self._held = HeldSaves(local)
        self._done: set[str] = set()  # identities of what was copied, also where there is no room to note that
        self._seen_at: dict[str, float] = {}  # by name, when each was first seen that waits
        self._last = CopyState()
        self._reasons: list[str] = []  # why something has failed in this turn
        self._waiting: list[str] = []

    def turn(self, finish: bool) -> CopyState:
        """Copy one save, and remove what the script has removed; `finish`: copy everything, because no worker runs any more.

        Does not raise: storage errors go into the report, and what fails holds nothing else up.
        """
        self._reasons, self._waiting = [], []
        began, arrived = time.monotonic(), ""
        if finish or not notes.is_off(self._local):
            units = self._tried(self._pending) or []
            for unit in units:
                name = unit[0].name
                if not arrived or finish:
                    done = self._tried(lambda unit=unit: self._copy(unit))  # type: ignore[misc]
                    arrived = name if done else arrived
                    if done:
                        continue
                self._waiting.append(name)
        if finish:
            self._tried(self._copy_rest)
        self._tried(lambda: follow_removals(self._local, self._remote, self._held))
        now = time.monotonic()
        self._seen_at = {name: self._seen_at.get(name, now) for name in self._waiting}
        self._last = CopyState(
            lag_steps=lag_steps(self._waiting, arrived or self._last.arrived),
            lag_s=max((now - since for since in self._seen_at.values()), default=0.0),
            waiting=tuple(self._waiting),
            failures=self._last.failures + 1 if self._reasons else 0,
            reason=self._reasons[0] if self._reasons else "",
            copy_s=now - began if arrived else None,
            arrived=arrived or self._last.arrived,
        )
        return self._last

    def _tried(self, act: Callable[[], Done]) -> Done | None:
        try:
            return act()
        except (OSError, errors.ElasticExtError) as error:
            self._reasons.append(f"{type(error).__name__}: {error}")
            return None

    # What is to be copied.

    def _pending(self) -> list[Unit]:
        """Return the saves that must still be copied, oldest first. Raises OSError."""
        book, listed = RecordBook(self._local), listing.list_entries(self._local)
        found = listing.candidates_among(listed, self._pattern)
        names = {part.name for each in found for part in each.parts or (each,)}
        names |= {each.name for each in listed if pattern_of(each.name) in book.loads}
        read = [self._read(each) for each in book.saves if each.name in names and order_of(each.name) is None]
        fit = [each for each in read if each is not None and each.save.proved and not self._is_barred(each.name)]
        units = newest_of_each_kind(
            each for each in fit if not has_changed(each, self._local) and self._is_checkpoint(each, book)
        )
        newest = {pattern_of(unit[0].name): max(each.known for each in unit) for unit in units}
        wanted = {each.known for unit in units for each in unit}
        for each in self._held.all():
            if newest.get(pattern_of(each.name), each.known) > each.known or self._is_copied(each) or self._is_barred(each.name):
                self._held.release(each)  # what is newer takes its place
            elif each.known not in wanted:
                units.append((each,))
        left = [unit for unit in units if not all(map(self._is_copied, unit))]
        there = stored.known_saves(self._remote) if left else {}
        return [unit for unit in left if not self._is_older(unit, there)]

    def _is_older(self, unit: Unit, there: Mapping[str, KnownSave]) -> bool:
        """Return whether something newer has one of its names in the remote directory."""
        newer = [there[each.name].name for each in unit if each.name in there and there[each.name] > each.known]
        for name in newer:
            logger.info("%s is not copied: a newer save has its name in %s", name, self._remote.address)
        self._done |= {each.identity for each in unit} if newer else set()
        return bool(newer)

    def _is_checkpoint(self, each: LocalSave, book: RecordBook) -> bool:
        """Return whether a job may resume from it: logs and caches are proved, too."""
        if pattern_of(each.name) in book.loads:
            return True
        entry = self._local.stat(each.name)
        return entry is not None and detect.check(self._local, entry, listing.is_named(entry, self._pattern)).complete

    def _read(self, known: KnownSave) -> LocalSave | None:
        """Return a recorded save; None if its file is gone or says nothing."""
        data = self._local.read_if_there(known.file)
        save = stored.save_of(data, self._local.path(known.file)) if data is not None else None
        return LocalSave(known, save, data) if data is not None and save is not None else None

    def _is_copied(self, each: LocalSave) -> bool:
        return each.identity in self._done or notes.copied_as(self._local, each.name) == each.identity

    def _is_barred(self, name: str) -> bool:
        mark = own_files.quarantine_of(self._local, name)
        entry = candidates.entry_of(self._local, name) if mark is not None else None
        if mark is None:
            return False
        return entry is None or mark.holds(detect.check(self._local, entry, named=True).written_at)

    # The copy.

    def _copy(self, unit: Unit) -> bool:
        """Copy a save and its record; return whether it has arrived. If not, it was written again, or quarantined.

        Raises OSError, CopyError.
        """
        sources = [self._held.hold(each) for each in unit]
        arrived = all(source is not None for source in sources)
        if arrived:
            pairs = [(each, source) for each, source in zip(unit, sources, strict=True) if source is not None]
            announced = [self._announce(each, len(unit) > 1) for each in unit]
            for (each, source), before in zip(pairs, announced, strict=True):
                self._send(each, source, before)
            arrived = not any(has_changed(each, source) or self._is_barred(each.name) for each, source in pairs)
        for each in unit:
            if arrived:
                self._commit(each)
                self._done.add(each.identity)
            self._held.release(each)
        for each in unit if arrived else ():
            notes.note_copied(self._local, each.name, each.identity)
        return arrived

    def _announce(self, each: LocalSave, of_several: bool) -> Entry | None:
        """Say that it is on its way, if it is of several files; return the announcement of an earlier attempt, if it is there."""
        files = {file.name for file in each.save.files}
        if files == {""} and not of_several:
            return None  # a file appears whole
        book = stored.known_saves(self._remote)
        before = stored.read_save(self._remote, book[each.name]) if each.name in book else None
        if before is not None and before.arriving and before.why.endswith(each.identity):
            return self._remote.stat(each.known.file)
        why = f"{ARRIVING}: {each.identity}"
        self._put_record(each, replace(each.save, proved=False, why=why, files=(), arriving=True, copied=True), book)
        for file in before.files if before is not None and before.copied else ():
            if file.name and file.name not in files:  # of an older copy of this name
                remove_if_there(self._remote, path_of(each.name, file.name))
        return None

    def _send(self, each: LocalSave, source: Storage, announced: Entry | None) -> None:
        """Send the files, but those that were sent since the announcement."""
        found = files_at(source, each.name)
        for file in sorted((file.name for file in each.save.files), key=upkeep.commit_order):
            path = path_of(each.name, file)
            there = self._remote.stat(path) if announced is not None else None
            if there is None or there.size != found[file].size or not _is_later(there, announced):
                upkeep.send(source, self._remote, path, found[file], self._throttle)

    def _commit(self, each: LocalSave) -> None:
        """Record the copy as the original is recorded."""
        there = files_at(self._remote, each.name)
        lost = [file.name for file in each.save.files if file.name not in there or there[file.name].size != file.size]
        if lost:
            raise FileNotFoundError(f"{self._remote.path(each.name)} lacks files that were just copied there: {lost[0]}")
        if any(there[file.name].mtime is None for file in each.save.files):
            remove_if_there(self._remote, each.known.file)  # this storage keeps no times, so nothing can be recorded
            return
        files = tuple(replace(file, mtime=there[file.name].mtime or 0.0) for file in each.save.files)
        self._put_record(each, replace(each.save, files=files, copied=True), stored.known_saves(self._remote))
        remove_if_there(self._remote, f"{each.name}{own_files.UNFINISHED}")  # of a removal that was interrupted

    def _put_record(self, each: LocalSave, save: stored.StoredSave, book: Mapping[str, KnownSave]) -> None:
        self._remote.put(each.known.file, records.encode(save, stored.SCHEMA).encode())
        if each.name in book and book[each.name] != each.known:
            remove_if_there(self._remote, book[each.name].file)

    # The end of the job.

    def _copy_rest(self) -> None:
        """Copy everything else below the local directory, if the script saves there. Raises OSError."""
        if not notes.is_used(self._local):
            return
        book, there = RecordBook(self._local), stored.known_saves(self._remote)
        for entry in sorted(listing.list_entries(self._local), key=lambda each: each.name):
            if not (is_hidden(entry.name) or order_of(entry.name) is not None or entry.unusable):
                before = len(self._reasons)
                known = book.known(entry)
                save = self._read(known) if known is not None else None
                self._tried(lambda entry=entry, save=save: self._copy_at_the_end(entry, save, there))  # type: ignore[misc]
                if len(self._reasons) > before and entry.name not in self._waiting:
                    self._waiting.append(entry.name)

    def _copy_at_the_end(self, entry: Entry, save: LocalSave | None, there: Mapping[str, KnownSave]) -> None:
        name = entry.name
        if entry.sibling and isinstance(self._remote, LocalStorage):
            _link(self._remote, entry)
        elif save is not None and not has_changed(save, self._local):
            known = there.get(name)
            if self._is_older((save,), there) or (self._is_copied(save) and self._remote.stat(name) is not None):
                return
            if not save.save.proved and known is not None and is_whole(self._remote, known):
                raise upkeep.CopyError(f"{name} was not proved, and its proved copy stays in {self._remote.address}")
            if self._is_barred(name):
                own_files.quarantine(self._remote, name, f"as in {self._local.address}", "replicate")
                self._send_plainly(entry)
            elif not self._copy((save,)):
                raise upkeep.CopyError(f"{self._local.path(name)} is written to while it is copied")
        elif not entry.is_link:
            self._send_plainly(entry)

    def _send_plainly(self, entry: Entry) -> None:
        """Copy an entry without its record. What others have put there under its name stays."""
        noted = bool(notes.copied_as(self._local, entry.name))
        if not noted and self._remote.stat(entry.name) is not None:
            logger.warning("%s is not copied: %s is there, and of others", entry.path, self._remote.path(entry.name))
            return
        try:
            files = dict(files_of(self._local, entry.name)) if entry.is_dir else {"": entry}
        except PermissionError as error:  # lost+found
            logger.warning("%s is not copied: %s", entry.path, error.strerror)
            return
        notes.note_copied(self._local, entry.name, PLAIN)
        for file in sorted(files, key=upkeep.commit_order):
            upkeep.send(self._local, self._remote, path_of(entry.name, file), files[file], self._throttle)


def left(local: Storage) -> list[str]:
    """Return what a script has saved and has not arrived, as far as notes say, where the copier says nothing. Raises OSError."""
    used, found = notes.is_used(local), []
    for each in sorted(stored.known_saves(local).values()):
        entry = local.stat(each.name) if order_of(each.name) is None else None
        if entry is not None and not notes.copied_as(local, each.name).startswith(f"{each.number:x} "):
            found += [each.name] if used or detect.check(local, entry).complete else []
    return found or ([f"what else is in {local.address}"] if used else [])


def lag_steps(waiting: Sequence[str], arrived: str) -> int | None:
    """Return by how many steps the last copy is behind, as far as names say; None: none has arrived yet. Pure."""
    if not (waiting and arrived):
        return None if waiting else 0
    return max(0, max(step_of(name) or 0 for name in waiting) - (step_of(arrived) or 0))


def _is_later(there: Entry, announced: Entry | None) -> bool:
    """Return whether a remote file was written after the announcement of its save, by the clock of that storage."""
    times = (there.mtime, announced.mtime if announced is not None else None)
    return times[0] is not None and times[1] is not None and times[0] > times[1]


def _link(remote: LocalStorage, entry: Entry) -> None:
    """Make a link to the same name beside it; what is no link stays. Raises OSError."""
    path = remote.path(entry.name)
    if os.path.islink(path):
        os.unlink(path)
    if not os.path.exists(path):
        os.symlink(entry.sibling, path)
