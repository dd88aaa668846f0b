"""Copies what a script has saved in `local_dir` in its own way, whatever its format, to the remote directory.

What is copied is what the record of saves proves there, the newest of each kind: of the names that differ only in digits. At the
end of the job it is everything. Its record goes along, with the times of the remote files, so it vouches for the copy as for the
original. Until all of it has arrived, the record there says that it has not, and nothing resumes from it.

Invariants:

- A copy has the bytes that were proved. They are copied from hard links, which stay when the script removes the names; and what
  was written again meanwhile, by size or time, is not recorded.
- Only a copy is ever removed here, and only after a worker was seen to remove its original (`notes`) and a newer one of its kind
  has arrived.

While a save is copied, its links and its record are in `.elastic_ext/held/SAVE/` of the local directory, the record last: so an
interrupted copy is finished, though the script has removed the original.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base import errors, records
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.reports import CopyState
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import is_hidden, order_of, step_of
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordBook, RecordedFile, StoredSave, Trust, files_at
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage, files_of, remove_if_there

logger = logging.getLogger(__name__)

HELD = f"{MARKERS}/held"
RECORD = ".record"  # in the directory of a held save
ARRIVING = "it is being copied from local_dir, and not all of it has arrived"


@dataclass(frozen=True)
class LocalSave:
    """A recorded save of a script in the local directory. record: the content of its file."""

    known: KnownSave
    save: StoredSave
    record: bytes

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def identity(self) -> str:
        return notes.identity(self.known, self.record)

    @property
    def folder(self) -> str:
        return f"{self.known.attempt:06}.{self.known.order:08}"


def newest_of_each_kind(saves: Iterable[tuple[KnownSave, int]]) -> list[KnownSave]:
    """Return what is worth to be copied, oldest first. Pure.

    Files of which each rank wrote its own for one save are of one kind and one moment: of a round, and its count of steps.

    saves: each with its count.
    """
    newest: dict[str, tuple[int, int]] = {}
    ordered = sorted(saves, reverse=True)
    for known, count in ordered:
        newest.setdefault(pattern_of(known.name), (known.attempt, count))
    return sorted(known for known, count in ordered if newest[pattern_of(known.name)] == (known.attempt, count))


class ScriptSaves:
    """Copies from one local directory. `turn` does all that can be done now."""

    def __init__(self, local: LocalStorage, remote: Storage, pattern: str, throttle: Callable[[int], None]) -> None:
        """pattern: the setting checkpoint_pattern. throttle: called with the size of each block before it is sent; may wait."""
        self._local, self._remote, self._pattern, self._throttle = local, remote, pattern, throttle
        self._held = LocalStorage(local.path(HELD))
        self._sent: dict[str, tuple[int, float | None]] = {}  # size and time of files without a record, by name
        self._seen_at: dict[str, float] = {}  # by name, when each was first seen that waits
        self._last = CopyState()

    def turn(self, finish: bool) -> CopyState:
        """Copy one save, and remove what the script has removed; `finish`: copy everything, because no worker runs any more.

        Does not raise: storage errors go into the report.
        """
        waiting: list[str] = []
        reason, copy_s, arrived = "", None, self._last.arrived
        try:
            pending = self.pending()
            waiting = [each.name for each in pending]
            began = time.monotonic()
            for each in pending[: None if finish else 1]:
                if self.copy(each):
                    waiting.remove(each.name)
                    arrived, copy_s = each.name, time.monotonic() - began
            self.follow_removals()
            waiting += [name for name in (self.copy_rest() if finish else ()) if name not in waiting]
        except (OSError, errors.ElasticExtError) as error:
            reason = f"{type(error).__name__}: {error}"
            waiting = waiting or [self._local.address]
        now = time.monotonic()
        self._seen_at = {name: self._seen_at.get(name, now) for name in waiting}
        self._last = CopyState(
            lag_steps=lag_steps(waiting, arrived),
            lag_s=max((now - since for since in self._seen_at.values()), default=0.0),
            waiting=tuple(waiting),
            failures=self._last.failures + 1 if reason else 0,
            reason=reason,
            copy_s=copy_s,
            arrived=arrived,
        )
        return self._last

    def pending(self) -> list[LocalSave]:
        """Return the saves that must still be copied, oldest first. Raises OSError."""
        left = [each for each in self._wanted() if not self._is_copied(each)]
        held = [each for each in self._interrupted() if each.known not in {of.known for of in left}]
        kinds = {pattern_of(each.name): each.known for each in left}  # the newest
        for each in held:  # what is newer takes its place
            if kinds.get(pattern_of(each.name), each.known) > each.known or self._is_copied(each):
                self._release(each.folder)
                held = [of for of in held if of is not each]
        return sorted([*held, *left], key=lambda each: each.known)

    def copy(self, each: LocalSave) -> bool:
        """Copy a save and its record; return whether it has arrived. If not, it was written again. Raises OSError, CopyError."""
        source = self._hold(each)
        if source is None:
            self._release(each.folder)
            return False
        wanted = {file.name for file in each.save.files}
        found = {name: file for name, file in files_at(source, each.name).items() if name in wanted}
        arriving = self._announce(each, found)
        for file in sorted(found, key=_commit_last):
            path = _join(each.name, file)
            there = self._remote.stat(path) if arriving is not None else None
            if there is None or there.size != found[file].size or not _is_later(there, arriving):
                upkeep.send(source, self._remote, path, found[file].size, self._throttle)
        if self._changed(each, source):
            return False
        self._commit(each, found)
        self._release(each.folder)
        notes.note_copied(self._local, each.name, each.identity)
        return True

    def copy_rest(self) -> list[str]:
        """Copy everything else below the local directory, once no worker runs; return what could not be. Raises OSError."""
        book, left = RecordBook(self._local), []
        for entry in sorted(listing.list_entries(self._local), key=lambda each: each.name):
            if is_hidden(entry.name) or order_of(entry.name) is not None or entry.unusable:
                continue
            save = self._read(known) if (known := book.known(entry)) is not None else None
            if entry.sibling and isinstance(self._remote, LocalStorage):
                _link(self._remote, entry)
            elif save is not None and not self._changed(save, self._local):
                if not self._is_copied(save) and not self.copy(save):
                    left.append(entry.name)
            elif not entry.is_link:
                self._send_unrecorded(entry)
        return left

    def follow_removals(self) -> None:
        """Remove the copies whose originals the script has removed. Raises OSError."""
        there = {each.name for each in listing.list_entries(self._local)}
        held = {each.name for each in self._interrupted()}
        for name in notes.removed_names(self._local):
            if name in there:
                notes.forget(self._local, name, copied=False)
            elif name not in held and self._remove_copy(name, notes.copied_as(self._local, name)):
                notes.forget(self._local, name)

    def _wanted(self) -> list[LocalSave]:
        """Return the newest proved save of each kind that a job might resume from, oldest first."""
        book, listed = RecordBook(self._local), listing.list_entries(self._local)
        found = listing.candidates_among(listed, self._pattern)
        names = {part.name for each in found for part in each.parts or (each,)}
        names |= {each.name for each in listed if pattern_of(each.name) in book.loads}
        read = [self._read(each) for each in book.saves if each.name in names and order_of(each.name) is None]
        proved = {each.known: each for each in read if each is not None and each.save.proved}
        newest = newest_of_each_kind((known, each.save.count) for known, each in proved.items())
        return [proved[known] for known in newest if not self._changed(proved[known], self._local) and not self._is_barred(known)]

    def _is_barred(self, known: KnownSave) -> bool:
        mark = own_files.quarantine_of(self._local, known.name)
        entry = candidates.entry_of(self._local, known.name) if mark is not None else None
        return mark is not None and entry is not None and mark.holds(detect.check(self._local, entry, named=True).written_at)

    def _read(self, known: KnownSave) -> LocalSave | None:
        """Return a recorded save; None if its file is gone or says nothing."""
        data = self._local.read_if_there(known.file)
        save = stored.save_of(data, self._local.path(known.file)) if data is not None else None
        return LocalSave(known, save, data) if data is not None and save is not None else None

    def _is_copied(self, each: LocalSave) -> bool:
        return notes.copied_as(self._local, each.name) == each.identity

    def _changed(self, each: LocalSave, source: Storage) -> bool:
        """Return whether the files are no longer those that were recorded."""
        return stored.trust(replace(each.save, proved=True), files_at(source, each.name))[0] is not Trust.PROVED

    # The links.

    def _hold(self, each: LocalSave) -> Storage | None:
        """Return where the files of this save stay; None if they have changed since they were recorded."""
        source = LocalStorage(self._held.path(each.folder))
        if self._held.stat(f"{each.folder}/{RECORD}") is None:
            try:
                self._release(each.folder)
                for path in (_join(each.name, file.name) for file in each.save.files):
                    os.makedirs(os.path.dirname(source.path(path)), exist_ok=True)
                    os.link(self._local.path(path), source.path(path))
                self._held.put(f"{each.folder}/{RECORD}", f"{each.known.file}\n".encode() + each.record)
            except FileNotFoundError:
                return None
            except OSError as error:  # no hard links here: what the script removes meanwhile is lost
                logger.debug("cannot link the files of %s: %s", each.name, error)
                source = self._local
        return None if self._changed(each, source) else source

    def _interrupted(self) -> list[LocalSave]:
        """Return the saves of which links are held; let go of those that are not whole."""
        found = []
        for folder in [each.name for each in self._held.listed()]:
            data = self._held.read_if_there(f"{folder}/{RECORD}")
            each = _held_save(data, folder) if data is not None else None
            if each is not None and not self._changed(each, LocalStorage(self._held.path(folder))):
                found.append(each)
            else:
                self._release(folder)
        return found

    def _release(self, folder: str) -> None:
        remove_if_there(self._held, folder)

    # The copy.

    def _announce(self, each: LocalSave, found: Mapping[str, Entry]) -> Entry | None:
        """Say that it is on its way, if it is of several files; return the announcement of an earlier attempt, if it is there."""
        if found.keys() == {""}:
            return None  # a file appears whole
        book, identity = stored.known_saves(self._remote), each.identity
        save = stored.read_save(self._remote, each.known) if book.get(each.name) == each.known else None
        if save is not None and save.arriving and save.why.endswith(identity):
            return self._remote.stat(each.known.file)
        before = stored.read_save(self._remote, book[each.name]) if each.name in book else None
        why = f"{ARRIVING}: {identity}"
        self._put_record(each, replace(each.save, proved=False, why=why, files=(), arriving=True, copied=True))
        for file in before.files if before is not None and before.copied else ():
            if file.name and file.name not in found:  # of an older copy of this name
                remove_if_there(self._remote, f"{each.name}/{file.name}")
        return None

    def _commit(self, each: LocalSave, found: Mapping[str, Entry]) -> None:
        """Record the copy as the original is recorded."""
        there = files_at(self._remote, each.name)
        ranks = {file.name: file.rank for file in each.save.files}
        files = tuple(
            RecordedFile(name, there[name].size, there[name].mtime or 0.0, ranks.get(name, -1)) for name in found if name in there
        )
        if len(files) < len(found):
            raise FileNotFoundError(f"{self._remote.path(each.name)} lacks files that were just copied there")
        if all(there[name].mtime is not None for name in found):
            self._put_record(each, replace(each.save, files=files, copied=True))
        else:  # this storage keeps no times, so nothing can be recorded
            remove_if_there(self._remote, each.known.file)

    def _put_record(self, each: LocalSave, save: StoredSave) -> None:
        before = [known for known in stored.known_saves(self._remote).values() if known.name == each.name]
        self._remote.put(each.known.file, records.encode(save, stored.SCHEMA).encode())
        for known in before:
            if known != each.known:
                remove_if_there(self._remote, known.file)

    def _send_unrecorded(self, entry: Entry) -> None:
        files = dict(files_of(self._local, entry.name)) if entry.is_dir else {"": entry}
        for file in sorted(files, key=_commit_last):
            path, now = _join(entry.name, file), (files[file].size, files[file].mtime)
            if self._sent.get(path) != now:
                upkeep.send(self._local, self._remote, path, files[file].size, self._throttle)
                self._sent[path] = now

    def _remove_copy(self, name: str, identity: str) -> bool:
        """Remove a copy if that may be. Return whether there is nothing more to do."""
        known = stored.known_saves(self._remote).get(name)
        save = stored.read_save(self._remote, known) if known is not None else None
        if not identity or known is None or save is None or not save.copied or f"{known.number:x}" != identity.split()[0]:
            return True  # never copied, or something else has this name there
        if name in own_files.pinned_names(self._remote) | own_files.quarantined_names(self._remote):
            return True
        newer = [each for each in stored.known_saves(self._remote).values() if _replaces(each, known)]
        if not any((of := stored.read_save(self._remote, each)) is not None and of.proved for each in newer):
            return False
        entry = candidates.entry_of(self._remote, name)
        if entry is not None:
            upkeep.delete_entry(self._remote, entry)
        remove_if_there(self._remote, known.file)
        logger.info("removed %s, as the script has removed its original", self._remote.path(name))
        return True


def _join(name: str, file: str) -> str:
    return f"{name}/{file}" if file else name


def _link(remote: LocalStorage, entry: Entry) -> None:
    """Make a link to the same name beside it; what is no link stays. Raises OSError."""
    path = remote.path(entry.name)
    if os.path.islink(path):
        os.unlink(path)
    if not os.path.exists(path):
        os.symlink(entry.sibling, path)


def _replaces(one: KnownSave, other: KnownSave) -> bool:
    return one > other and one.name != other.name and pattern_of(one.name) == pattern_of(other.name)


def lag_steps(waiting: Sequence[str], arrived: str) -> int | None:
    """Return by how many steps the last copy is behind, as far as names say; None: none has arrived yet. Pure."""
    if not (waiting and arrived):
        return None if waiting else 0
    return max(0, max(step_of(name) or 0 for name in waiting) - (step_of(arrived) or 0))


def _held_save(data: bytes, folder: str) -> LocalSave | None:
    file, _, record = data.partition(b"\n")
    known = stored.known_save(file.decode(errors="replace").rpartition("/")[2])
    save = stored.save_of(record, folder)
    return LocalSave(known, save, record) if known is not None and save is not None else None


def _is_later(there: Entry, announced: Entry | None) -> bool:
    """Return whether a remote file was written after the announcement of its save, by the clock of that storage."""
    return announced is not None and None not in (there.mtime, announced.mtime) and there.mtime > announced.mtime  # type: ignore[operator]


def _commit_last(file: str) -> tuple[int, str]:
    commits = detect.COMMIT_FILES
    return (commits.index(file) + 1 if file in commits else 0), file
