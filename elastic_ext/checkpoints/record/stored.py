"""The record on the storage: a small file for each save that is still there, `.elastic_ext/saves/ATTEMPT.ORDER.NAME`.

ATTEMPT numbers the rounds that have recorded something in this directory, ORDER the saves of a round, and NAME is the entry. So
one listing gives all recorded entries in the order in which the job has saved them. The file holds the JSON of a `StoredSave`.

A proved one vouches for its entry while each file has the size and the time that it had when the save was proved. If there is
more in the entry than that, it still does: people leave notes. What was not proved by the end of its round says what was missing.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from elastic_ext.base import records
from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.formats.candidates import ANY, order_of
from elastic_ext.checkpoints.record.fold import EntryRead, pattern_of
from elastic_ext.checkpoints.record.proof import RecordedSave
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage, files_of, is_away

logger = logging.getLogger(__name__)

SAVES = f"{MARKERS}/saves"
BEGAN = f"{MARKERS}/began"  # in a node's own directory: its time is that at which the last round began here
SCHEMA = 1
MAX_FILES = 10_000  # of an entry: about 1 MB of JSON; one with more is found by its format
MAX_LOADS = 16
LEAST_SHARE = 0.5  # of the bytes of the last one: what has fewer is cut short, as where a script goes on when the disk is full
MOST_SHOWN = 3  # names in a message
MAX_NAME = 255 - len("000000.00000000.")  # bytes of an entry's name, which is part of a file's name
COARSE_S = 2.0  # the step of the coarsest times that copies keep: those of FAT; tar cuts them to whole seconds
_FILE = re.compile(r"(\d{6,})\.(\d{8,})\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class RecordedFile:
    """A file as it was when the record was written.

    name: relative to the entry; "": the entry itself is a file. mtime: in seconds since the epoch, by the clock of the storage.
    rank: which wrote it; -1: that was not seen.
    """

    name: str
    size: int
    mtime: float
    rank: records.Rank = -1


@dataclass(frozen=True)
class NodePart:
    """Which part of a save one node has.

    parts: number of nodes that have some. part: which of them this is; that of the node of the lowest group rank is 0. elsewhere:
    the files of the other parts, without times. Of two files with one name that counts which this save has written, and then that
    of the lower part. `elsewhere` of the other node names it, too.
    """

    part: records.Count = 0
    parts: records.Count = 1
    elsewhere: tuple[RecordedFile, ...] = ()
    moment: tuple[records.Rank, ...] = ()  # see `StoredSave`


ALL_OF_IT = NodePart()


@dataclass(frozen=True)
class StoredSave:
    """What is known of a save, and what was there then.

    proved: it is whole. why: what proves it, or what is missing, for people. count: optimizer steps of that round when the save
    began. ranks: which wrote it. world: number of ranks. written: number of files that this save wrote, or was about to. kept:
    number of those that were there before, and that it has not written again. loads: names, with "#" for digits, of recorded
    entries that the job's scripts were seen to read before their first step. usual: see `RecordedSave`. arriving: it is being
    copied to here, and not all of it is there. copied: it was saved in `local_dir`, and copied to here.

    Of a save of several nodes, each into a `local_dir` of its own, each node's record has the files of that node: its part. See
    `NodePart`. All parts of a save have the same `KnownSave`.

    here: number of ranks of the node that has recorded it in its own `local_dir`, where the round has several nodes; 0: one node
    has all. So a copier knows whether files of other ranks must be on other nodes. moment: the ranks that have saved entries of
    this kind at this count, where there are several entries; each node has recorded its own.
    """

    proved: bool
    why: str
    count: records.Count
    ranks: tuple[records.Rank, ...]
    world: records.Count
    written: records.Count
    kept: records.Count
    files: tuple[RecordedFile, ...]
    loads: tuple[str, ...] = ()
    usual: records.Count = 0
    arriving: bool = False
    copied: bool = False
    part: records.Count = 0
    parts: records.Count = 1
    elsewhere: tuple[RecordedFile, ...] = ()
    here: records.Count = 0
    moment: tuple[records.Rank, ...] = ()

    @property
    def as_whole(self) -> StoredSave:
        """The same of this part alone, as if there were no others: `trust` says then whether the part is as it was recorded."""
        return replace(self, part=0, parts=1, elsewhere=())

    @property
    def counting(self) -> tuple[RecordedFile, ...]:
        """The files of this part that count for the whole save."""
        others = {each.name for each in self.elsewhere}
        return tuple(each for each in self.files if each.name not in others)

    @property
    def leader(self) -> int:
        """The rank of whose file the record is committed last, where each rank has written an entry of its own."""
        return min(self.moment, default=0)

    @property
    def is_of_moment(self) -> bool:
        """Return whether other ranks have saved entries of their own then. Counts of 0 say nothing: no optimizer was seen."""
        return len(self.moment) > 1 and self.count > 0

    @property
    def files_of_all(self) -> int:
        """Number of files that it wrote; of a part, that all parts have."""
        return self.written if self.parts == 1 else len({each.name for each in (*self.files, *self.elsewhere)})

    @property
    def size_of_all(self) -> int:
        """Bytes of the files of all parts."""
        return sum({each.name: each.size for each in (*self.files, *self.elsewhere)}.values())

    @property
    def kinds(self) -> Counter[str]:
        """How many files it has of each name, with "#" for digits."""
        return Counter(pattern_of(each.name) for each in self.files)


@dataclass(frozen=True, order=True)
class KnownSave:
    """A recorded save, by the name of its file. The greatest was saved last."""

    attempt: int
    order: int
    name: str

    @property
    def number(self) -> int:
        """A number of its own, greater than those of all saves before it."""
        return self.attempt << 32 | self.order

    @property
    def file(self) -> str:
        return f"{SAVES}/{self.attempt:06}.{self.order:08}.{self.name}"


def known_saves(storage: Storage) -> dict[str, KnownSave]:
    """Return the last recorded save of each entry, by its name; some entries may have gone since. One listing. Raises OSError."""
    found: dict[str, KnownSave] = {}
    try:
        listed = storage.listed(SAVES)
    except PermissionError as error:
        logger.warning("the record of saves cannot be read: %s", error)
        return found
    for save in (known_save(each.name) for each in listed):
        if save is not None:
            found[save.name] = max(save, found.get(save.name, save))
    return found


def known_save(file: str) -> KnownSave | None:
    """Return which save a file of this name records; None: none."""
    match = _FILE.fullmatch(file)
    return KnownSave(int(match[1]), int(match[2]), match[3]) if match is not None else None


def began_at(storage: Storage) -> float | None:
    """Return when the last round began, by the clock of a node's own directory; None: it is unknown. Raises OSError."""
    entry = storage.stat(BEGAN) if isinstance(storage, LocalStorage) else None
    return entry.mtime if entry is not None else None


def changed_at(local: LocalStorage, name: str) -> float:
    """Return when something of an entry in a node's own directory was changed last; 0: nothing is there. Raises OSError.

    By the clock of that node, and also where a program has kept the time of the original, as `cp -p` does.
    """
    paths = [local.path(name), *(each.path for each in files_at(local, name).values())]
    times = (os.lstat(path) for path in paths if os.path.lexists(path))
    return max((max(each.st_mtime, each.st_ctime) for each in times), default=0.0)


def newest_attempt(saves: Iterable[KnownSave]) -> int:
    """Return the number of the last round that has recorded something; 0: none has."""
    return max((each.attempt for each in saves), default=0)


def read_save(storage: Storage, save: KnownSave) -> StoredSave | None:
    """Return what is recorded of a save; None if its file is gone, or another version wrote it. Raises OSError."""
    try:
        data = storage.read_if_there(save.file)
    except OSError as error:
        if is_away(error):
            raise
        logger.warning("the record of a save says nothing: %s", error)
        return None
    return save_of(data, storage.path(save.file)) if data is not None else None


def save_of(data: bytes, where: str) -> StoredSave | None:
    """Return what the content of a file records; None if another version wrote it. where: for the log."""
    try:
        return records.read(StoredSave, data, where, SCHEMA)
    except records.RecordError as error:
        logger.warning("the record of a save says nothing: %s", error)
        return None


def of_same_moment(
    known: KnownSave, save: StoredSave, saves: Iterable[KnownSave], read: Callable[[KnownSave], StoredSave | None]
) -> dict[KnownSave, StoredSave]:
    """Return what several ranks have saved at one moment, each an entry of its own, with this save; nothing if it is whole alone.

    saves: all that are known. read: returns their records.
    """
    if not save.is_of_moment:
        return {}
    alike = (each for each in saves if each.attempt == known.attempt and pattern_of(each.name) == pattern_of(known.name))
    found = {each: of for each in alike if (of := read(each)) is not None}
    return {each: of for each, of in found.items() if of.count == save.count}


class Trust(Enum):
    """What a record says of an entry as it is now."""

    PROVED = "proved"
    UNPROVED = "unproved"  # whether it is whole, only its format can say
    CHANGED = "changed"  # the same, because all of it was written again since
    TORN = "torn"  # some of it is of one save, and some of another


def trust(save: StoredSave, found: Mapping[str, Entry]) -> tuple[Trust, str]:
    """Return whether a record vouches for an entry, and why not, for people. found: see `files_at`. Pure."""
    if save.arriving:
        return Trust.TORN, save.why
    if save.parts > 1:
        return Trust.TORN, f"it is part {save.part + 1} of {save.parts}: the others are in the local_dir of other nodes"
    differs = {each.name: text for each in save.files if (text := _differs(each, found.get(each.name)))}
    if differs and len(differs) < len(save.files):
        name, text = next(iter(differs.items()))
        return Trust.TORN, f"{name or 'the file'} {text} since it was recorded, and other files have not changed"
    if differs:
        return Trust.CHANGED, "it has been written again since it was recorded"
    if save.proved:
        return Trust.PROVED, save.why
    if save.kept:
        return Trust.TORN, f"it holds {counted(save.kept, 'file')} of an older save: {save.why}"
    return Trust.UNPROVED, save.why


def _differs(recorded: RecordedFile, found: Entry | None) -> str:
    if found is None:
        return "has gone"
    if found.size != recorded.size or found.mtime is None or not _same_time(recorded.mtime, found.mtime):
        return "has been written again"
    return ""


def _same_time(proved: float, found: float) -> bool:
    """Return whether a file has kept its time, or a copy has cut it to whole seconds."""
    return proved == found or (proved != int(proved) and found in (math.floor(proved), math.floor(proved / COARSE_S) * COARSE_S))


def files_at(storage: Storage, name: str) -> dict[str, Entry]:
    """Return the files of an entry by their paths relative to it, "" for the entry itself; none if it is not there.

    Raises OSError.
    """
    found = storage.stat(name)
    if found is None:
        return {}
    try:
        return dict(files_of(storage, name)) if found.is_dir else {"": found}
    except FileNotFoundError:
        return {}


@dataclass(frozen=True)
class RecordVerdict:
    """What the record says of an entry as it is now. save: None if none of it is recorded. kinds: see `StoredSave`."""

    trust: Trust
    why: str
    save: StoredSave | None = None
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.save.count if self.save is not None else -1

    def lacks(self, proved: Counter[str]) -> str:
        """Return what the entry lacks that a proved save of its kind has, for people; "": nothing. proved: the files of that."""
        missing = proved - self.kinds
        names = ", ".join(sorted(missing)[:MOST_SHOWN])
        return f"its save was not proved, and it has fewer files than the one before it: {names}" if missing else ""


class RecordBook:
    """Reads the record of a directory, each save at most once. Its methods raise OSError."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._known = storage, known_saves(storage)
        self._read: dict[KnownSave, StoredSave | None] = {}

    @property
    def saves(self) -> tuple[KnownSave, ...]:
        """The last recorded save of each entry, also of those that have gone since."""
        return tuple(self._known.values())

    def known(self, entry: Entry) -> KnownSave | None:
        """Return which save of an entry is recorded; None: none is. Of files of all ranks, all must be."""
        found = [self._known.get(each.name) for each in entry.parts or (entry,)]
        known = [each for each in found if each is not None]
        return max(known) if len(known) == len(found) else None

    def saved(self, entry: Entry) -> StoredSave | None:
        """Return what is recorded of an entry; of files of all ranks, of the last one."""
        known = self.known(entry)
        return self.read(known) if known is not None else None

    def proved_files(self, entry: Entry) -> Counter[str]:
        """Return what a proved save of this entry has had, see `StoredSave.kinds`; nothing if none is known as proved."""
        found = [self.read(known) for each in entry.parts or (entry,) if (known := self._known.get(each.name)) is not None]
        saves = [each for each in found if each is not None and each.proved]
        return sum((each.kinds for each in saves), Counter[str]()) if len(saves) == len(entry.parts or (entry,)) else Counter()

    def read(self, known: KnownSave) -> StoredSave | None:
        """Return what is recorded of a save; None if that is gone, or another version wrote it."""
        if known not in self._read:
            self._read[known] = read_save(self._storage, known)
        return self._read[known]

    def size(self, entry: Entry) -> int:
        """Return the recorded bytes of an entry; of files of all ranks, of the last one. -1: it is not recorded."""
        save = self.saved(entry)
        return sum(each.size for each in save.files) if save is not None else -1

    @functools.cached_property
    def loads(self) -> tuple[str, ...]:
        """What the job's scripts were seen to load, by the last save; see `StoredSave`."""
        last = max(self._known.values(), default=None)
        save = self.read(last) if last is not None else None
        return save.loads if save is not None else ()

    def verdict(self, entry: Entry) -> RecordVerdict:
        """Return what the record says of an entry, which is listed for that."""
        parts = entry.parts or (entry,)
        found = [self._verdict(each) for each in parts]
        worst = max(found, key=lambda each: list(Trust).index(each.trust))
        attempts = {known.attempt for each in parts if (known := self._known.get(each.name)) is not None}
        counts = {each.save.count for each in found if each.save is not None}
        changed = {each.trust is Trust.CHANGED for each in found}
        if len(changed) > 1 or (False in changed and max(len(attempts), len(counts)) > 1):
            return RecordVerdict(Trust.TORN, "its files are of several saves", worst.save)
        gone = self._gone(entry) if entry.parts else ""
        if gone:
            return RecordVerdict(Trust.TORN, f"{gone} has gone since it was recorded", worst.save)
        absent = next(filter(None, (self._absent(each, parts) for each in parts)), "")
        if absent:
            return RecordVerdict(Trust.TORN, absent, worst.save)
        return RecordVerdict(worst.trust, worst.why, worst.save, sum((each.kinds for each in found), Counter[str]()))

    def _gone(self, entry: Entry) -> str:
        """Return the name of a file that the last save of this entry had, as recorded, and that has gone; "": none has."""
        fits = re.compile(re.escape(entry.name).replace(re.escape(ANY), r"\d+")).fullmatch
        last, there = self.known(entry), {part.name for part in entry.parts}
        of_round = sorted(each.name for each in self.saves if last is not None and each.attempt == last.attempt)
        away = (name for name in of_round if fits(name) and name not in there)
        return next((name for name in away if self._storage.stat(name) is None), "")

    def _absent(self, entry: Entry, parts: Sequence[Entry]) -> str:
        """Return which rank's entry of the same moment is missing, for people; "": none is. parts: that were looked at."""
        known = self._known.get(entry.name)
        save = self.read(known) if known is not None else None
        if known is None or save is None:
            return ""
        names = {each.name for each in parts}
        alike = of_same_moment(known, save, self.saves, self.read)
        there = (of for each, of in alike.items() if each.name in names or self._is_there(each, of))
        lacking = sorted({*save.moment}.difference(*(each.ranks for each in there))) if alike else []
        return f"what rank {lacking[0]} has saved then is not there" if lacking else ""

    def _is_there(self, known: KnownSave, save: StoredSave) -> bool:
        return trust(save, files_at(self._storage, known.name))[0] in (Trust.PROVED, Trust.UNPROVED)

    def _verdict(self, entry: Entry) -> RecordVerdict:
        found = files_at(self._storage, entry.name) if not entry.is_link else {}  # which may lead anywhere
        kinds = Counter(pattern_of(each) for each in found)
        known = self._known.get(entry.name)
        save = self.read(known) if known is not None else None
        if save is None:
            return RecordVerdict(Trust.UNPROVED, "no save of it is recorded", None, kinds)
        return RecordVerdict(*trust(save, found), save, kinds)


def kept_of(found: Mapping[str, Entry], save: RecordedSave, before: StoredSave | None, unwritten: Collection[str] = ()) -> int:
    """Return how many files of an entry are of older saves: of its round, or of the one before, as recorded. Pure.

    unwritten: see `unwritten_of`. A single file is of one save.
    """
    begin = len(save.entry.path) + 1
    written, known = {path[begin:] for path in save.written}, {path[begin:] for path in save.files}
    kept = (((known & found.keys()) | _unchanged(found, before)) - written) | {*unwritten}
    return len(kept) if len(found) > 1 else 0


def unwritten_of(found: Mapping[str, Entry], save: RecordedSave, before: StoredSave | None) -> frozenset[str]:
    """Return the files below a URL that the save was about to write, but that are as the one before has left them. Pure.

    To write them may have failed, or was done within the same second. On a disk a write that has failed is noted, and copies keep
    the times of their originals.
    """
    begin = len(save.entry.path) + 1
    return frozenset(_unchanged(found, before) & {path[begin:] for path in save.written})


def is_as_before(found: Mapping[str, Entry], before: StoredSave | None) -> bool:
    """Return whether nothing of an entry has changed since that record, as where it was moved away and back. Pure.

    Times of whole seconds cannot say that.
    """
    fine = all(each.mtime is not None and each.mtime != int(each.mtime) for each in found.values())
    return fine and found.keys() == _unchanged(found, before)


def _unchanged(found: Mapping[str, Entry], before: StoredSave | None) -> set[str]:
    return {each.name for each in before.files if not _differs(each, found.get(each.name))} if before is not None else set()


@dataclass
class UsualSizes:
    """How many bytes saves of a kind have. Pure. last: of the last whole one, by its name with "#" for digits."""

    last: dict[str, int] = field(default_factory=dict)
    _shorter: dict[str, tuple[int, int]] = field(default_factory=dict)  # by kind: order and bytes of the last one cut short

    def is_short(self, kind: str, order: int, size: int) -> bool:
        """Return whether a save has too few bytes, unless another one since had as few. order: of the save in its round."""
        before, shorter = self._shorter.get(kind, (order, 0))
        if size >= LEAST_SHARE * self.last.get(kind, 0) or (before != order and size >= LEAST_SHARE * shorter):
            return False
        self._shorter[kind] = order, size
        return True


class AttemptRecord:
    """The record of one round, as it grows on the storage. One process writes it: the agent of group rank 0.

    That in a directory of each node's own is written by that node's agent.
    """

    def __init__(self, storage: Storage, world: int, least: int = 1, here: int = 0) -> None:
        """world: number of ranks of the round. least: its number, at least. here: see `StoredSave`. Raises OSError."""
        self._storage, self._world, self._here = storage, world, here
        self._known = known_saves(storage)
        self._attempt = max(least, newest_attempt(self._known.values()) + 1)  # this round's number
        self._earlier = frozenset(self._known)
        self._older: dict[str, StoredSave] = {}  # by name: of an entry that this round has recorded, the save before that
        there = {each.name for each in storage.listed()}  # NFS may not show yet what another host has saved in the last round
        for each in [each for each in self._known.values() if each.name not in there and each.attempt < self._attempt - 1]:
            save = read_save(storage, each)
            if save is None or not save.arriving:  # a copy whose first file is not there yet
                self.forget(each.name)
        last = {pattern_of(each.name): each for each in sorted(self._known.values())}
        read = {pattern: read_save(storage, each) for pattern, each in sorted(last.items(), key=lambda each: each[1])}
        saves = {pattern: each for pattern, each in read.items() if each is not None}
        # files of the last save, by its name with "#" for digits, where it is proved and as many ranks wrote it
        self.before = {pattern: each.files_of_all for pattern, each in saves.items() if each.proved and each.world == world}
        self.sizes = UsualSizes({pattern: saves[pattern].size_of_all for pattern in self.before})
        self._loads = next((each.loads for each in reversed(saves.values())), ())
        self._alone = {pattern for pattern, each in saves.items() if each.proved and each.parts == 1}

    @property
    def attempt(self) -> int:
        """The number of the round."""
        return self._attempt

    def begin(self, attempt: int) -> bool:
        """Take the number that the round has on all nodes, before anything is written; return whether it fits this record."""
        self._attempt = max(self._attempt, attempt)
        return self._attempt == attempt

    def listed(self, save: RecordedSave) -> dict[str, Entry]:
        """Return the files of a save; none if it is proved and they are not all there, or if it is nothing to record.

        Raises OSError.
        """
        name = save.entry.path
        if name.startswith(".") or order_of(name) is not None or not _is_storable(name):
            return {}
        if os.path.islink(self._storage.path(name)):
            return {}
        found = files_at(self._storage, name)
        wanted = {path[len(name) + 1 :] for path in save.files}
        known = len(found) <= MAX_FILES and all(each.mtime is not None for each in found.values())
        return found if known and (wanted <= found.keys() or not save.proved) else {}

    def write(self, save: RecordedSave, found: Mapping[str, Entry], reads: Iterable[EntryRead], of: NodePart = ALL_OF_IT) -> None:
        """Record a save, or this node's part of it, of which these files were there. Raises OSError."""
        name = save.entry.path
        ranks = {path[len(name) + 1 :]: rank for path, rank in save.files.items()}
        files = tuple(RecordedFile(path, each.size, each.mtime or 0.0, ranks.get(path, -1)) for path, each in found.items())
        known, last = KnownSave(self._attempt, save.order, name), self._known.get(name)
        before = self._before(known, last)
        if of.parts == 1 and is_as_before(found, before):
            return
        doubt = ""
        if save.proved and of.parts == 1:  # of several nodes, it was said before
            doubt = self.unseen(name, found, ranks.keys()) or self._cut_short(known, found)
        left = sorted(unwritten_of(found, save, before)) if not isinstance(self._storage, LocalStorage) else []
        if left and save.proved:
            doubt = doubt or f"{len(left)} of its files are as an older save has left them: {', '.join(left[:MOST_SHOWN])}"
        stored = StoredSave(
            proved=save.proved and not doubt,
            why=doubt or save.why,
            count=save.count,
            ranks=save.ranks,
            world=self._world,
            written=len(save.written),
            kept=kept_of(found, save, before, left),
            files=files,
            loads=self._loads_with(reads),
            usual=save.usual,
            part=of.part,
            parts=of.parts,
            elsewhere=of.elsewhere,
            here=self._here,
            moment=of.moment,
        )
        self._storage.put(known.file, records.encode(stored, SCHEMA).encode())
        self._known[name] = known
        (self._alone.add if stored.proved and of == ALL_OF_IT else self._alone.discard)(pattern_of(name))
        if last is not None and last != known:
            self._remove(last)

    def _before(self, known: KnownSave, last: KnownSave | None) -> StoredSave | None:
        """Return the record of the save before this one. last: the last one of its entry, which may be of this save itself."""
        if last != known:
            before = read_save(self._storage, last) if last is not None else None
            self._older.pop(known.name, None)
            if before is not None:
                self._older[known.name] = before
        return self._older.get(known.name)

    def unseen(self, name: str, found: Mapping[str, Entry], seen: Collection[str]) -> str:
        """Return which files of an entry may be of something else although its save is proved, for people; "": none.

        seen: those that were seen to be written, by their paths relative to the entry. Raises OSError.
        """
        known = self._known.get(name)
        before = read_save(self._storage, known) if known is not None else None
        older = [] if before is None else [each for each in before.files if each.rank >= 0]
        same = {each.name for each in older if not _differs(each, found.get(each.name))}
        unseen = sorted(path for path in found.keys() - seen - same if not self._is_between(found[path], found, seen))
        if unseen:
            return f"{len(unseen)} of its files were not seen to be written: {', '.join(unseen[:MOST_SHOWN])}"
        return ""

    def _is_between(self, file: Entry, found: Mapping[str, Entry], seen: Collection[str]) -> bool:
        """Return whether a file was written in this round, and before the last one that was seen to be.

        So it was not left by an earlier round, and nothing still writes to it: as what a library in C has saved.
        """
        began = began_at(self._storage)
        last = max((each.mtime or 0.0 for path, each in found.items() if path in seen), default=0.0)
        return began is not None and file.mtime is not None and began <= file.mtime <= last

    def _cut_short(self, save: KnownSave, found: Mapping[str, Entry]) -> str:
        """Return whether a save of this node alone has too few bytes, for people; "": no. Another one as short is not."""
        size, kind = sum(each.size for each in found.values()), pattern_of(save.name)
        if self.sizes.is_short(kind, save.order, size):
            return f"it has {size} bytes, and the last one of this name {self.sizes.last[kind]}"
        self.sizes.last[kind] = size
        return ""

    def write_unproved(self, save: RecordedSave, reads: Iterable[EntryRead]) -> None:
        """Record a save that was not proved, unless what was proved of its entry before is still as it was. Raises OSError."""
        found, known = self.listed(save), self._known.get(save.entry.path)
        before = read_save(self._storage, known) if known is not None else None
        if found and (before is None or trust(before, found)[0] is not Trust.PROVED):
            self.write(save, found, reads)

    def is_of_one_node(self, name: str) -> bool:
        """Return whether the last recorded save of this kind was proved, and all of it was in this directory."""
        return pattern_of(name) in self._alone

    def _loads_with(self, reads: Iterable[EntryRead]) -> tuple[str, ...]:
        now = (pattern_of(each.place.entry.path) for each in reads if each.count == 0 and each.place.entry.path in self._earlier)
        self._loads = tuple(dict.fromkeys([*now, *self._loads]))[:MAX_LOADS]
        return self._loads

    def knows(self, name: str) -> bool:
        return name in self._known

    def known(self, name: str) -> KnownSave | None:
        return self._known.get(name)

    def forget(self, name: str) -> None:
        """An entry has gone: remove its file. Raises OSError."""
        known = self._known.pop(name, None)
        self._older.pop(name, None)
        if known is not None:
            self._remove(known)

    def _remove(self, known: KnownSave) -> None:
        try:
            self._storage.remove(known.file)
        except FileNotFoundError:
            logger.debug("%s was removed already", known.file)


def _is_storable(name: str) -> bool:
    """Return whether the name can be part of a file's name, and of JSON."""
    try:
        return len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:  # not of UTF-8
        return False
