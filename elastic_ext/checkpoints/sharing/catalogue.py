"""What one node has in its local directory, in one message.

A catalogue is one JSON object: `schema` (SCHEMA) and the fields of `Catalogue`. It lists what a script may have saved: neither
our own checkpoints, nor hidden names, nor links, which lead to what has another name or lies elsewhere.

What only this node can say, it says here: whether its record vouches for its files, and whether a mark holds, by its own clock.
Other nodes compare neither its times nor their own.

At most MAX_FILES files are listed, those of the newest saves first. An entry with more files than that says so, and counts as
torn: else another node's part of it would look like all of it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.directory.own_files import MARKERS, Mark
from elastic_ext.checkpoints.formats.candidates import ANY, order_of
from elastic_ext.checkpoints.record.stored import KnownSave, Trust, changed_at, known_saves, newest_attempt, save_of, trust
from elastic_ext.checkpoints.storage import Entry, LocalStorage, files_of

SCHEMA = 1
MAX_FILES = 20_000  # of a node; each entry counts as one at least
MAX_BYTES = 64 << 20  # of an encoded catalogue
MAX_NAME, MAX_PATH = 255, 4096  # bytes, as of Linux
MOST_SHOWN = 3  # names in a message
MIRRORED = f"{MARKERS}/mirrored"
_LARGEST = 1 << 62  # of any number


def is_entry_name(text: str) -> bool:
    """Return whether this names something directly in a directory, and nothing that is hidden."""
    return not text.startswith(".") and "/" not in text and is_path(text)


def is_path(text: str) -> bool:
    """Return whether this is the path of a file below a directory, however its folders are linked."""
    names = text.split("/")
    fine = all(0 < len(each) <= MAX_NAME and each not in (".", "..") for each in names)
    return fine and len(text) <= MAX_PATH and "\0" not in text


Size = Annotated[int, records.Within(0, _LARGEST)]
FilePath = Annotated[str, is_path]
FilePathOrEmpty = Annotated[str, lambda text: not text or is_path(text)]


@dataclass(frozen=True)
class NodeFile:
    """name: relative to the entry; "": the entry itself is a file. mtime: by the clock of that node."""

    name: FilePathOrEmpty
    size: Size
    mtime: float


@dataclass(frozen=True)
class NodeEntry:
    """What a node has of one name. Without files it is an empty directory, or has gone and left its record, or a mark.

    Attributes:
        mtime: of the entry itself.
        attempt, order: of its recorded save; 0: none is recorded.
        record: the content of the record's file.
        vouched: the record vouches for this node's part as it is now.
        mark: the quarantine that holds for what is here now; None: it is not quarantined here.
        more: it has files that are not listed.
        older_than: number of a save (`KnownSave`) of that name that was recorded later, on other nodes; 0: none is known.
    """

    name: Annotated[str, is_entry_name]
    is_dir: bool = False
    mtime: float = 0.0
    files: tuple[NodeFile, ...] = ()
    attempt: Size = 0
    order: Size = 0
    record: str = ""
    vouched: bool = False
    mark: Mark | None = None
    more: bool = False
    older_than: Size = 0

    @property
    def is_there(self) -> bool:
        return self.is_dir or bool(self.files) or self.more

    @property
    def known(self) -> KnownSave | None:
        return KnownSave(self.attempt, self.order, self.name) if self.record else None


@dataclass(frozen=True)
class MirroredPart:
    """Another node's part of a save, which this one keeps in case that one is lost. See `mirrored`.

    origin: the directory that it is of, see `Catalogue`. record: as that node has recorded its part.
    """

    origin: records.Name
    name: Annotated[str, is_entry_name]
    is_dir: bool
    attempt: Size
    order: Size
    record: str

    @property
    def known(self) -> KnownSave:
        return KnownSave(self.attempt, self.order, self.name)

    @property
    def folder(self) -> str:
        """Where it is in the local directory: its own place, so no other save of that name ever gets there."""
        said = repr((self.origin, self.name, self.attempt, self.order, self.record))
        return f"{MIRRORED}/{hashlib.sha256(said.encode()).hexdigest()[:32]}"

    @property
    def files(self) -> str:
        """The folder in which its files are, by the paths that they have in the local directory of the other node."""
        return f"{self.folder}/part"


@dataclass(frozen=True)
class KeptParts:
    """What a directory keeps of other nodes, and its own name, see `Catalogue`."""

    directory: str = ""
    parts: tuple[MirroredPart, ...] = ()

    @property
    def rounds(self) -> int:
        """The number of the last round of which there is something; 0: there is nothing."""
        return newest_attempt(each.known for each in self.parts)


NOTHING_KEPT = KeptParts()


@dataclass(frozen=True)
class Catalogue:
    """What one node has.

    left_out: what is not listed, for people; "": nothing is missing. directory: a name of this directory that no other one has;
    "": it has none. mirrored: parts of other nodes, of which all files have the recorded sizes.
    """

    entries: tuple[NodeEntry, ...] = ()
    left_out: str = ""
    directory: records.NameOrEmpty = ""
    mirrored: tuple[MirroredPart, ...] = ()


def catalogue_of(local: LocalStorage) -> Catalogue:
    """Look at a local directory. One that does not exist has nothing. Raises OSError, also for more than MAX_FILES names."""
    known = {name: each for name, each in known_saves(local).items() if _may_be(name) and each.number < _LARGEST}
    there = {each.name: each for each in local.listed() if _may_be(each.name) and not (each.is_link or each.unusable)}
    marks = {name for name in own_files.quarantined_names(local) if _may_be(name)}
    older = {each.name for each in local.listed(notes.OLDER)}
    names = {*known, *there, *marks}
    if len(names) > MAX_FILES:
        raise OSError(errno.E2BIG, f"it holds {len(names)} names, expected {MAX_FILES} at most: empty it", local.address)
    oldest, found = KnownSave(0, 0, ""), dict[str, NodeEntry]()
    room = MAX_FILES - len(names)  # the first file of an entry is counted with its name
    for entry in sorted(there.values(), key=lambda each: (known.get(each.name, oldest), each.mtime or 0.0), reverse=True):
        found[entry.name] = _listed(local, entry, known.get(entry.name), room + 1)
        if entry.name in older:
            number = notes.older_than(local, entry.name, changed_at(local, entry.name))
            found[entry.name] = replace(found[entry.name], older_than=number)
        room -= max(0, len(found[entry.name].files) - 1)
    for name in known.keys() - there.keys():
        found[name] = _with_record(local, NodeEntry(name), known[name], {})
    for name in marks:
        mark = _mark_here(local, name, found.values())
        if mark is not None:
            found[name] = replace(found.get(name, NodeEntry(name)), mark=mark)
    cut = sorted(name for name, each in found.items() if each.more)
    left_out = f"not all files are listed of {', '.join(cut[:MOST_SHOWN])}: {counted(len(cut), 'name')}" if cut else ""
    return Catalogue(tuple(found.values()), left_out)


def _may_be(name: str) -> bool:
    """Return whether a script may have saved this, under a name that a message can hold."""
    return _is_text(name) and is_entry_name(name) and order_of(name) is None


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # not of UTF-8
        return False
    return True


def _listed(local: LocalStorage, entry: Entry, known: KnownSave | None, most: int) -> NodeEntry:
    """Return what is there of an entry, with this many files at most."""
    try:
        every = dict(itertools.islice(files_of(local, entry.name), most + 1)) if entry.is_dir else {"": entry}
    except FileNotFoundError:  # it was removed meanwhile
        every = {}
    root = os.path.realpath(local.address)
    served = {name: each for name, each in every.items() if _is_text(name) and _is_inside(each, root)}
    files = tuple(NodeFile(name, each.size, each.mtime or 0.0) for name, each in itertools.islice(served.items(), most))
    made = NodeEntry(entry.name, entry.is_dir, entry.mtime or 0.0, files, more=len(files) < len(every))
    return _with_record(local, made, known, served) if known is not None else made


def _is_inside(file: Entry, root: str) -> bool:
    """Return whether a file lies below the directory: through a link it may lie elsewhere, and is not sent to other nodes."""
    return not file.is_link or os.path.realpath(file.path).startswith(f"{root}/")


def _with_record(local: LocalStorage, entry: NodeEntry, known: KnownSave, found: Mapping[str, Entry]) -> NodeEntry:
    data = local.read_if_there(known.file)
    save = save_of(data, local.path(known.file)) if data is not None else None
    if data is None or save is None:  # another version wrote it
        return entry
    vouched = not entry.more and trust(save.as_whole, found)[0] is Trust.PROVED
    return replace(entry, attempt=known.attempt, order=known.order, record=data.decode(), vouched=vouched)


def _mark_here(local: LocalStorage, name: str, entries: Iterable[NodeEntry]) -> Mark | None:
    """Return the mark of a name, or of the files of all ranks, if it holds for what is here now."""
    mark = own_files.quarantine_of(local, name)
    fits = re.compile(re.escape(name).replace(re.escape(ANY), r"\d+")).fullmatch
    times = [file.mtime for each in entries if fits(each.name) for file in each.files]
    return mark if mark is not None and mark.holds(max(times, default=None)) else None


def encode(catalogue: Catalogue) -> bytes:
    """Raises OSError if it is too large."""
    data = records.encode(catalogue, SCHEMA).encode()
    if len(data) > MAX_BYTES:
        raise OSError(errno.E2BIG, f"its catalogue has {len(data)} bytes, expected {MAX_BYTES} at most: remove old saves")
    return data


def decode(data: bytes, what: str) -> Catalogue:
    """what: for error messages. Raises RecordError."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, expected {MAX_BYTES} at most")
        found = json.loads(data)
        schema = found.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise records.RecordError(f"{what} holds no catalogue of elastic_ext: {type(error).__name__}") from error
    if schema != SCHEMA:
        text = f"{what} is a catalogue of another schema than {SCHEMA}: all nodes of a job need the same version of elastic_ext"
        raise records.OtherSchema(text)
    return records.build(Catalogue, found, what)
