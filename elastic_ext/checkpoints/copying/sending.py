"""Sends files of a save to the remote directory, and keeps the record of it there.

    announce    the record says that the save is on its way: nothing resumes from what is there of it
    send        the files
    commit      the record says what is there, and vouches for it

A file counts as sent if it has the right size, and is later than the announcement, by the clock of the storage: an older file of
the same name and size is of another save. It may also arrive late. So each node acknowledges its part of this very save once it
has sent that, and the leader commits by the acknowledgements, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from elastic_ext.checkpoints.copying.held import LocalSave, path_of
from elastic_ext.checkpoints.copying.remote_record import ARRIVING, RemoteRecord
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordedFile, files_at
from elastic_ext.checkpoints.storage import Entry, Storage, remove_if_there

ACKNOWLEDGED = f"{own_files.MARKERS}/acknowledged"  # a file for each part that has arrived, until the commit


def _acknowledgement(known: KnownSave, part: int | str = "") -> str:
    return f"{ACKNOWLEDGED}/{known.attempt:06}.{known.order:08}.{part}"


def is_sent(file: RecordedFile, found: Mapping[str, Entry], announced: float) -> bool:
    """Return whether a file has arrived since the announcement. found: what is there of the entry."""
    there = found.get(file.name)
    return there is not None and there.size == file.size and there.mtime is not None and there.mtime > announced


class SaveSender:
    """Writes to the remote directory. Its methods raise OSError, CopyError."""

    def __init__(self, remote: Storage, record: RemoteRecord, throttle: Callable[[int], None]) -> None:
        """throttle: called with the size of each block before it is sent; may wait."""
        self._remote, self._record, self._throttle = remote, record, throttle
        self._sent: dict[KnownSave, set[str]] = {}  # by this process, of the parts that it does not lead

    def announce(self, each: LocalSave, text: str = ARRIVING) -> float | None:
        """Say that it is on its way. Return when that was said, if an earlier attempt did; else None: all is still to be sent."""
        before_known = self._record.known.get(each.name)
        before = self._record.save(before_known) if before_known is not None else None
        why = f"{text}: {each.identity}"
        if before is not None and before_known == each.known and before.arriving and before.why == why:
            return self._record.changed(each.known)
        files = (*each.save.files, *each.save.elsewhere)
        self._record.put(each.known, replace(each.save.as_whole, proved=False, why=why, files=files, arriving=True, copied=True))
        if before_known is not None and before_known != each.known:
            self.forget_acknowledged(before_known)
        names = {file.name for file in files}
        for file in before.files if before is not None and before.copied else ():
            if file.name and file.name not in names:  # of an older copy of this name
                remove_if_there(self._remote, path_of(each.name, file.name))
        return None

    def announced_at(self, each: LocalSave, text: str = ARRIVING) -> float:
        """Say that it is on its way, unless an earlier attempt did; return when that was said. CopyError: that is unknown."""
        said = self.announce(each, text) or self._record.changed(each.known)
        if said is None:
            raise upkeep.CopyError(
                f"{each.name} is not copied: {self._remote.address} keeps no times of files, so nothing shows whether those of "
                "all nodes are of one save; set a checkpoint_dir that keeps them"
            )
        return said

    def send(self, each: LocalSave, source: Storage, announced: float | None) -> None:
        """Send the files that count, but those that were sent since the announcement."""
        found = files_at(source, each.name)
        there = files_at(self._remote, each.name) if announced is not None else {}
        files = {file.name: file for file in each.save.counting}
        for name in sorted(files, key=upkeep.commit_order):
            if announced is None or not is_sent(files[name], there, announced):
                upkeep.send(source, self._remote, path_of(each.name, name), found[name], self._throttle)

    def send_part(self, each: LocalSave, source: Storage, announced: float) -> None:
        """Send the files that count of what may be passed by meanwhile. What arrives after that is taken back.

        A part that others lead: what is there counts only if this process has sent it, or the part is acknowledged. It may be a
        late upload of an older save, by a process that was killed before it could take that back.

        Raises CopyError if it was passed by for a newer save of that name.
        """
        found, there = files_at(source, each.name), files_at(self._remote, each.name)
        files = {file.name: file for file in each.save.counting}
        is_own = each.save.parts == 1 or each.save.part == 0 or self._is_acknowledged(each, each.save.part, announced)
        kind = pattern_of(each.name)
        self._sent = {known: of for known, of in self._sent.items() if known >= each.known or pattern_of(known.name) != kind}
        sent = self._sent.setdefault(each.known, set())
        for name in sorted(files, key=upkeep.commit_order):
            if is_sent(files[name], there, announced) and (is_own or name in sent):
                continue
            path = path_of(each.name, name)
            upkeep.send(source, self._remote, path, found[name], self._throttle)
            if self._remote.stat(each.known.file) is None:
                remove_if_there(self._remote, path)
                raise upkeep.CopyError(f"{path} was sent when a newer save already had its name in {self._remote.address}")
            sent.add(name)

    def acknowledge(self, each: LocalSave, announced: float) -> None:
        """Tell the leader that this node has sent its part of this very save, if all of it is still there."""
        there = files_at(self._remote, each.name)
        arrived = all(is_sent(file, there, announced) for file in each.save.counting)
        if arrived and not self._is_acknowledged(each, each.save.part, announced):
            self._remote.put(_acknowledgement(each.known, each.save.part), b"")

    def unacknowledged(self, each: LocalSave, announced: float) -> list[str]:
        """Return the parts of other nodes that these have not acknowledged."""
        parts = (part for part in range(each.save.parts) if part != each.save.part)
        return [f"part {part}" for part in parts if not self._is_acknowledged(each, part, announced)]

    def _is_acknowledged(self, each: LocalSave, part: int, announced: float) -> bool:
        there = self._remote.stat(_acknowledgement(each.known, part))
        return there is not None and there.mtime is not None and there.mtime > announced

    def forget_acknowledged(self, known: KnownSave) -> None:
        for entry in self._remote.listed(ACKNOWLEDGED):
            if entry.name.startswith(_acknowledgement(known).rpartition("/")[2]):
                remove_if_there(self._remote, f"{ACKNOWLEDGED}/{entry.name}")

    def missing(self, each: LocalSave, announced: float) -> list[str]:
        """Return the files of other nodes that have not arrived."""
        there = files_at(self._remote, each.name)
        return [file.name for file in each.save.elsewhere if not is_sent(file, there, announced)]

    def commit(self, each: LocalSave) -> None:
        """Record the copy as the original is recorded, with all its parts."""
        there = files_at(self._remote, each.name)
        files = (*each.save.counting, *each.save.elsewhere)
        lost = [file.name for file in files if file.name not in there or there[file.name].size != file.size]
        if lost:
            raise FileNotFoundError(f"{self._remote.path(each.name)} lacks files that were just copied there: {lost[0]}")
        if any(there[file.name].mtime is None for file in files):
            self._record.remove(each.known)  # this storage keeps no times, so nothing can be recorded
            return
        recorded = tuple(replace(file, mtime=there[file.name].mtime or 0.0) for file in files)
        self._record.put(each.known, replace(each.save.as_whole, files=recorded, copied=True))
        remove_if_there(self._remote, f"{each.name}{own_files.UNFINISHED}")  # of a removal that was interrupted


def needs_announcement(entries: Iterable[LocalSave]) -> bool:
    """Return whether something could be seen of them before all is there. A single file appears whole."""
    listed = list(entries)
    return len(listed) > 1 or any(file.name for each in listed for file in each.save.files)
