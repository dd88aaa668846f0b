"""Hard links to the files of saves that are being copied: a script may remove the names meanwhile, and the bytes stay.

In the local directory, `.elastic_ext/held/SAVE/` has the links and the record of one save, the record last. So an interrupted
copy is finished, though the script has removed the original.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave, Trust, files_at
from elastic_ext.checkpoints.storage import LocalStorage, Storage, remove_if_there

logger = logging.getLogger(__name__)

HELD = f"{MARKERS}/held"
RECORD = ".record"  # in the directory of a held save


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


def has_changed(each: LocalSave, source: Storage) -> bool:
    """Return whether the files are no longer those that were recorded; of a part, those of this node. Raises OSError."""
    return stored.trust(replace(each.save.as_whole, proved=True), files_at(source, each.name))[0] is not Trust.PROVED


def path_of(name: str, file: str) -> str:
    """Return the path of a file of an entry; "": the entry is the file."""
    return f"{name}/{file}" if file else name


class HeldSaves:
    """The links in one local directory. Its methods raise OSError."""

    def __init__(self, local: LocalStorage) -> None:
        self._local, self._held = local, LocalStorage(local.path(HELD))

    def hold(self, each: LocalSave) -> Storage | None:
        """Return where the files of this save stay; None if they have changed since they were recorded."""
        source = LocalStorage(self._held.path(each.folder))
        if self._held.stat(f"{each.folder}/{RECORD}") is None:
            try:
                self.release(each)
                for path in (path_of(each.name, file.name) for file in each.save.files):
                    os.makedirs(os.path.dirname(source.path(path)), exist_ok=True)
                    os.link(self._local.path(path), source.path(path))
                self._held.put(f"{each.folder}/{RECORD}", _content(each))
            except FileNotFoundError:
                return None
            except OSError as error:  # no hard links here, or no room: what the script removes meanwhile is lost
                logger.debug("cannot link the files of %s: %s", each.name, error)
                source = self._local
        return None if has_changed(each, source) else source

    def has(self, each: LocalSave) -> bool:
        """Return whether all links of this save are there, as it was recorded."""
        data = self._held.read_if_there(f"{each.folder}/{RECORD}")
        return data == _content(each) and not has_changed(each, LocalStorage(self._held.path(each.folder)))

    def all(self) -> list[LocalSave]:
        """Return the saves of which all links are there; let go of the others."""
        found = []
        for folder in [each.name for each in self._held.listed()]:
            data = self._held.read_if_there(f"{folder}/{RECORD}")
            each = _held_save(data, folder) if data is not None else None
            if each is not None and not has_changed(each, LocalStorage(self._held.path(folder))):
                found.append(each)
            else:
                remove_if_there(self._held, folder)
        return found

    def release(self, each: LocalSave) -> None:
        remove_if_there(self._held, each.folder)


def _content(each: LocalSave) -> bytes:
    return f"{each.known.file}\n".encode() + each.record


def _held_save(data: bytes, folder: str) -> LocalSave | None:
    file, _, record = data.partition(b"\n")
    known = stored.known_save(file.decode(errors="replace").rpartition("/")[2])
    save = stored.save_of(record, folder)
    return LocalSave(known, save, record) if known is not None and save is not None else None
