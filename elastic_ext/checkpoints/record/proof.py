"""Which saves of a round are proved to be whole, by what its workers have noted. Pure: it reads no file and asks no clock.

A save is what was written to one entry until that was over. Proved are those of which all of this holds:

(a) Each piece of writing is over. That of the thread that trains is, when this thread has since made a step with an optimizer
    that had made one before the save; or has removed an older proved save of no more files; or has left the script without an
    exception. That of another thread, work item or child is, when it has ended, or has begun the next save.
(b) Every rank of the round has made more steps than the save has, or has left the script so, or is through with its own pieces.
(c) It has no fewer files than the last proved save before it with a name that differs in digits only.

A rename of closed files onto the name of the entry proves (b), and (a) for the thread that has written and renamed them. A script
that reports a save as complete proves both. The order of saves is that of the record: two optimizers count twice, each start
begins at 0, and a script may begin again. Events of two hosts are ordered by their counts of steps alone.

The last thing that a killed worker has noted may not have happened: a save that was renamed then may still have its old name.

Proved says that the save is whole, not that it can be resumed from: logs are proved, too. The choice of a checkpoint compares
what lies on the storage with what was there at the proof, and asks the format, which overrules a proof.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from elastic_ext.checkpoints.record.journal import ELSEWHERE, JournalLine, SaveJournal, SavePath

Who = tuple[int, int]  # number of the journal, and of the thread or work item in it

_STEP = "rank {rank} has made a step since"
_RENAMED = "rank {rank} has renamed it when its files were closed"
_REMOVED = "rank {rank} has removed an older save since"
_LEFT = "the script of rank {rank} has ended"
_ENDED = "what wrote it beside the training of rank {rank} has ended"
_NEXT = "the thread of rank {rank} that wrote it has begun the next save"
_REPORTED = "the script has reported it as complete"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class RecordedSave:
    """A save, as the workers of a round have noted it.

    Attributes:
        order: of its first writing among those of the round.
        entry: the name in its directory.
        files: those of the entry, relative to the directory; not what another process wrote for DCP.
        kind: names of the entry and of its files, with "#" for digits.
        count: optimizer steps of the rank that was furthest as it began to write.
        ranks: those that have written it.
        proved: whether it is proved to be whole.
        why: what proves it, or what is missing.
        gone: it has been removed, or written again, since.
    """

    order: int
    entry: SavePath
    files: tuple[str, ...]
    kind: str
    count: int
    ranks: tuple[int, ...]
    proved: bool
    why: str
    gone: bool = False


@dataclass(frozen=True)
class EntryRead:
    """A rank has read this file, and its round had not written the entry before."""

    place: SavePath
    rank: int
    count: int


@dataclass(frozen=True)
class RoundRecord:
    """All saves of a round in their order, also those that are gone; and what it has read."""

    saves: tuple[RecordedSave, ...] = ()
    reads: tuple[EntryRead, ...] = ()


def prove(
    journals: Sequence[SaveJournal],
    counts: Mapping[int, int],
    ended: Collection[int] = (),
    broken: Collection[int] = (),
    before: Mapping[str, int] = MappingProxyType({}),
) -> RoundRecord:
    """Return the record of a round.

    journals: of all its workers and their forked children. counts: steps of each rank of the round, now or later. ended: pids of
    children that were seen to end while their worker went on. broken: ranks whose journal is incomplete. before: files of the
    last proved save of earlier rounds with as many ranks, by its name with "#" for digits.
    """
    fold = _Fold(journals)
    for who, event in _in_order(journals):
        fold.add(who, event)
    incomplete = {*broken, *(each.rank for each in journals if each.damaged)}
    missing = _Missing(fold, _steps(journals, counts), ended, dict(before))
    if incomplete:
        missing.always = f"the record of rank {min(incomplete)} is incomplete"
    saves = (_judged(save, missing) for save in fold.saves if save.pieces)  # others were taken back, or moved on
    return RoundRecord(tuple(saves), tuple(fold.reads))


def _steps(journals: Sequence[SaveJournal], counts: Mapping[int, int]) -> dict[int, int]:
    """Return how many steps each rank has made, at least."""
    seen = dict(counts)
    for journal in journals:
        seen[journal.rank] = max([seen.get(journal.rank, 0), *(event.steps for event in journal.events)])
    return seen


def kind_of(entry: SavePath, files: Collection[str]) -> str:
    """Return the names with "#" for digits, without repetition."""
    inside = sorted({_pattern(each.removeprefix(f"{entry.path}/")) for each in files if each != entry.path})
    return _pattern(entry.path) + (f": {', '.join(inside)}" if inside else "")


def _pattern(name: str) -> str:
    return _DIGITS.sub("#", name)


def _in_order(journals: Sequence[SaveJournal]) -> Iterator[tuple[Who, JournalLine]]:
    """Yield all events; those of one journal in its own order, which a line of another thread may be late for."""
    keyed = []
    for number, journal in enumerate(journals):
        count = ns = 0
        for at, event in enumerate(journal.events):
            count, ns = max(count, event.steps), max(ns, event.ns)
            keyed.append(((count, journal.host, ns, number, at), event))
    for (*_, number, _), event in sorted(keyed, key=lambda each: each[0]):
        yield (number, event.who), event


@dataclass
class _Piece:
    """What one thread or work item has written of a save."""

    count: int = 0  # at the last writing
    over: str = ""  # why it is over; empty: it is not
    failed: bool = False
    outside_handler: bool = False  # not all of it was written within a signal handler
    removed: list[_Save] = field(default_factory=list)  # older saves that the same thread has removed since


@dataclass
class _Save:
    """One save of an entry, as far as it has been seen."""

    order: int
    entry: SavePath
    files: dict[str, tuple[Who, int]]  # of the entry: who wrote each last, and the count then
    names: set[str]  # that it has had, with "#" for digits
    written: set[str] = field(default_factory=set)  # of the files, by this save
    pieces: dict[Who, _Piece] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)  # by journal: the count at its first writing
    commit: str = ""  # _RENAMED, when no file was open; _REPORTED
    by_process: bool = False  # its files are unknown
    unseen: bool = False  # something of it was there before
    cut: int = 0  # files that were removed after it was over
    gone: bool = False

    @property
    def count(self) -> int:
        return max(self.begins.values(), default=0)

    @property
    def inside(self) -> Counter[str]:
        """How many files it wrote, by their names within the entry, without digits."""
        return Counter(_pattern(each[len(self.entry.path) :]) for each in self.written)

    def is_over(self, count: int) -> bool:
        """Return whether nothing more is written to it. count: of who asks, later than a writing that has failed."""
        return all(each.over or each.removed or (each.failed and count > each.count) for each in self.pieces.values())

    def copy(self) -> _Save:
        pieces = {who: replace(piece, removed=list(piece.removed)) for who, piece in self.pieces.items()}
        files, names, written, begins = dict(self.files), set(self.names), set(self.written), dict(self.begins)
        return replace(self, files=files, names=names, written=written, pieces=pieces, begins=begins)

    def restore(self, copied: _Save) -> None:
        vars(self).update(vars(copied))


def _is_in(path: str, place: SavePath) -> bool:
    return path == place.path or path.startswith(f"{place.path}/")


class _Entries:
    """The saves so far, and which of them is the current one of each entry."""

    def __init__(self, journals: Sequence[SaveJournal]) -> None:
        self.journals = journals
        self.saves: list[_Save] = []
        self._current: dict[SavePath, _Save] = {}
        self._open: dict[Who, list[_Save]] = {}  # those of which its piece may not be over

    def _unfinished(self, who: Who) -> list[tuple[_Save, _Piece]]:
        """Return the saves of which the piece of this thread is not over, with it."""
        found = [
            (save, piece) for save in self._open.get(who, ()) if (piece := save.pieces.get(who)) is not None and not piece.over
        ]
        self._open[who] = [save for save, _ in found]
        return found

    def _follow(self, who: Who, save: _Save) -> None:
        saves = self._open.setdefault(who, [])
        if not any(each is save for each in saves):
            saves.append(save)

    def said(self, why: str, who: Who) -> str:
        return why.format(rank=self.journals[who[0]].rank)

    def _save_of(self, entry: SavePath, event: JournalLine) -> _Save:
        """Return the save of this entry that is being written; begin one if none is."""
        current = self._current.get(entry)
        if current is not None and not current.is_over(event.steps):
            return current
        if current is not None:
            current.gone = True
        begun = _Save(len(self.saves), entry, dict(current.files) if current is not None else {}, {_pattern(entry.path)})
        self.saves.append(begun)
        self._current[entry] = begun
        return begun

    def _as_it_is(self, *entries: SavePath) -> Callable[[], None]:
        """Return what makes these entries what they are now. What other threads write to them meanwhile is lost."""
        saves = {entry: self._current.get(entry) for entry in entries}
        copies = [(save, save.copy()) for save in saves.values() if save is not None]
        number = len(self.saves)

        def restore() -> None:
            for save in self.saves[number:]:
                if save.entry in entries:
                    save.pieces.clear()
            for save, copied in copies:
                save.restore(copied)
                for who in save.pieces:
                    self._follow(who, save)
            for entry, current in saves.items():
                self._current.pop(entry, None)
                if current is not None:
                    self._current[entry] = current

        return restore


class _Fold(_Entries):
    """Takes the events of a round one after the other."""

    def __init__(self, journals: Sequence[SaveJournal]) -> None:
        super().__init__(journals)
        self.reads: list[EntryRead] = []
        self.left: set[int] = set()  # journals whose script has ended without an exception
        self.steppers: set[Who] = {(number, 0) for number, each in enumerate(journals) if not each.parent}
        self._undo: dict[Who, Callable[[], None]] = {}  # by thread: takes back what it did last

    def add(self, who: Who, event: JournalLine) -> None:
        """Take the next event."""
        if event.kind in ("w", "p"):
            self._write(who, event, event.place)
        elif event.kind == "m":
            self._rename(who, event)
        elif event.kind == "d":
            self._remove(who, event)
        elif event.kind == "u":
            self._undo.pop(who, lambda: None)()
        elif event.kind == "r":
            if event.place.entry not in self._current:
                self.reads.append(EntryRead(event.place, self.journals[who[0]].rank, event.steps))
        elif event.kind == "s":
            self.steppers.add(who)
            self._settle(who, _STEP, event)
        elif event.kind == "x":
            self.left.add(who[0])
            self._settle(who, _LEFT, event)
        elif event.kind in ("e", "f"):
            self._settle(who, _ENDED, event)
        elif event.kind == "k":
            self._report(who)

    def _settle(self, who: Who, why: str, event: JournalLine) -> None:
        for save, piece in self._unfinished(who):
            if event.kind == "f":
                piece.failed = True
            elif not (event.kind == "s" and event.number > save.begins.get(who[0], 0)) and not (
                event.kind == "x" and event.in_handler and piece.outside_handler
            ):
                piece.over = self.said(why, who)

    def _write(self, who: Who, event: JournalLine, place: SavePath) -> _Save:
        before = self._current.get(place.entry)
        save = self._save_of(place.entry, event)
        piece = save.pieces.get(who)
        added = place.path not in save.files and event.kind != "p"
        self._undo[who] = lambda: self._unwrite(who, save, place.path if added else "", before, piece)
        self._touch(save, who, event)
        if event.kind == "p":
            save.by_process = True
        else:
            save.files[place.path] = who, event.steps
            save.written.add(place.path)
        if who not in self.steppers:
            self._next_save(who, save)
        return save

    def _unwrite(self, who: Who, save: _Save, path: str, before: _Save | None, piece: _Piece | None) -> None:
        """Take back that this thread wrote the file. before: the save of the entry until then; piece: that of the thread."""
        if path:
            save.files.pop(path, None)
            save.written.discard(path)
        if piece is not None:
            save.pieces[who] = piece
            self._follow(who, save)
        else:
            save.pieces.pop(who, None)
        if not save.pieces and self._current.get(save.entry) is save:
            save.gone = True
            del self._current[save.entry]
            if before is not None and before is not save:
                before.gone = False
                self._current[save.entry] = before

    def _touch(self, save: _Save, who: Who, event: JournalLine) -> None:
        before = save.pieces.get(who)
        outside_handler = not event.in_handler or (before is not None and before.outside_handler)
        save.pieces[who] = _Piece(event.steps, outside_handler=outside_handler)
        self._follow(who, save)
        save.begins.setdefault(who[0], event.steps)
        save.commit = ""

    def _next_save(self, who: Who, save: _Save) -> None:
        """A thread that lives on has begun this save: it is through with those of the same name but for digits."""
        name = _pattern(save.entry.path)
        for each, piece in self._unfinished(who):
            if each.entry != save.entry and _pattern(each.entry.path) == name:
                piece.over = self.said(_NEXT, who)

    def _remove(self, who: Who, event: JournalLine) -> None:
        save = self._current.get(event.place.entry)
        if save is None:
            return
        is_first = not save.cut
        inside = [event.place.path] if event.kind == "d" else [each for each in save.files if _is_in(each, event.place)]
        if self._drop(save, who, event, inside) and is_first:
            self._rotate(who, save)
        if event.place == save.entry or not save.files:
            save.gone = True
            del self._current[save.entry]

    def _drop(self, save: _Save, who: Who, event: JournalLine, paths: Collection[str]) -> bool:
        """Take these files out of the save, as far as it has them. Return whether it was over then."""
        was_over = save.is_over(event.steps)
        for path in paths:
            if path not in save.files:
                continue
            writer, count = save.files[path]
            of_other_host = self.journals[writer[0]].host != self.journals[who[0]].host
            if of_other_host and count == event.steps:
                continue  # which came first is unknown; as a rule, a file is written after an old one is removed
            del save.files[path]
            if was_over:
                save.cut += 1
            else:
                save.written.discard(path)
        return was_over

    def _rotate(self, who: Who, older: _Save) -> None:
        for save, piece in self._unfinished(who):
            known = any(each is older for each in piece.removed)
            if save.order > older.order and not known and save.inside >= older.inside:
                piece.removed.append(older)

    def _rename(self, who: Who, event: JournalLine) -> None:
        if event.place.at == ELSEWHERE:
            self._write(who, event, event.to)
            return
        source = self._current.get(event.place.entry)
        self._undo[who] = self._as_it_is(event.place.entry, event.to.entry)
        moved: dict[str, tuple[Who, int]] = {}
        if source is not None and event.place.path in source.files:
            moved = {event.place.path: source.files[event.place.path]}
        elif source is not None:
            moved = {path: of for path, of in source.files.items() if _is_in(path, event.place)}
        if event.to.at == ELSEWHERE:
            self._remove(who, event)
        elif source is None or not moved:  # not seen written, or an empty directory
            if event.to.path == event.to.entry.path or source is None:
                self._write(who, event, event.to).unseen = True
        else:
            self._move(who, event, source, moved)

    def _move(self, who: Who, event: JournalLine, source: _Save, moved: dict[str, tuple[Who, int]]) -> None:
        is_whole = len(moved) == len(source.files)
        names = {path: event.to.path + path[len(event.place.path) :] for path in moved}
        renamed = {names[path]: of for path, of in moved.items()}
        writers = {of for of, _ in moved.values()}
        pieces = {of: piece for of, piece in source.pieces.items() if is_whole or of in writers}
        if event.to == event.to.entry:
            save = self._renamed(who, event, source, renamed, pieces)
            save.written = {names[path] for path in moved if path in source.written}
        else:
            save = self._save_of(event.to.entry, event)
            for path in moved if save.entry == source.entry else ():
                save.files.pop(path, None)
            save.files |= renamed
            save.written |= renamed.keys()
            for each, piece in pieces.items():
                if save is not source and not piece.over:
                    save.pieces[each] = piece
                    self._follow(each, save)
            self._touch(save, who, event)
        was_over = source.is_over(event.steps)
        for path in moved.keys() - (renamed.keys() if save is source else set()):
            source.files.pop(path, None)
            source.written.discard(path)
            source.cut += was_over and save is not source
        if not source.files and save is not source:
            source.gone = True
            source.pieces = {}
            if self._current.get(source.entry) is source:
                del self._current[source.entry]

    def _renamed(
        self, who: Who, event: JournalLine, source: _Save, files: dict[str, tuple[Who, int]], pieces: dict[Who, _Piece]
    ) -> _Save:
        """Return the save that gets its final name now, with these files and pieces of `source`."""
        replaced = self._current.get(event.to)
        if replaced is not None:
            replaced.gone = True
        names = {*source.names, _pattern(event.to.path)}
        save = _Save(len(self.saves), event.to, files, names, pieces=pieces, begins=dict(source.begins))
        save.by_process, save.unseen, save.cut = source.by_process, source.unseen, source.cut
        by_step = any(each.over in (self.said(_STEP, of), self.said(_REMOVED, of)) for of, each in pieces.items())
        if event.number == 0 and not by_step:  # else it is an older one that makes room
            save.commit = self.said(_RENAMED, who)
            if who in pieces and not pieces[who].over:
                pieces[who].over = save.commit
        self.saves.append(save)
        self._current[event.to] = save
        for each in pieces:
            self._follow(each, save)
        return save

    def _report(self, who: Who) -> None:
        of_rank = [each for each in self.saves if not each.gone and any(number == who[0] for number, _ in each.pieces)]
        if of_rank:
            of_rank[-1].commit = _REPORTED


class _Missing:
    """What is missing for a proof of each save; asked of the older ones first, because a newer one may rest on an older."""

    def __init__(self, fold: _Fold, counts: Mapping[int, int], ended: Collection[int], files: dict[str, int]) -> None:
        """files: how many the last proved save has, by its name with "#" for digits."""
        self.always = ""  # what all lack
        self.fold, self._counts, self._ended, self._files = fold, counts, ended, files
        self._proved: set[int] = set()  # their order
        self._left = {fold.journals[number].rank for number in fold.left if not fold.journals[number].parent}

    def of(self, save: _Save) -> tuple[str, str]:
        """Return what is missing, "" if nothing is, and what else proves the save."""
        over = {who: self._over(who, piece) for who, piece in save.pieces.items()}
        is_reported = save.commit == _REPORTED
        proof = (
            _REPORTED if is_reported else "; ".join(dict.fromkeys([*filter(None, over.values()), *filter(None, [save.commit])]))
        )
        missing = self.always or ("not all of it was seen to be written" if save.unseen else "")
        if not missing and not is_reported:
            open_ones = [self._not_over(who, save.pieces[who]) for who, why in over.items() if not why]
            missing = open_ones[0] if open_ones else self._behind(save)
        written, before = len(save.written), max(self._files.get(each, 0) for each in save.names)
        if not missing and not save.by_process and written < before:
            missing = f"it has {written} files, and the last proved save of this name has {before}"
        if not missing:
            self._proved.add(save.order)
            if not save.by_process:
                self._files |= dict.fromkeys(save.names, written)
        if not missing and save.cut:  # what rests on it had seen it whole
            missing = f"{save.cut} of its files have been removed since"
        return missing, proof

    def _over(self, who: Who, piece: _Piece) -> str:
        """Return why this piece is over; empty: it is not."""
        journal = self.fold.journals[who[0]]
        if not piece.over and any(each.order in self._proved for each in piece.removed):
            return self.fold.said(_REMOVED, who)
        if not piece.over and journal.parent and journal.pid in self._ended:
            return self.fold.said(_ENDED, who)
        return piece.over

    def _not_over(self, who: Who, piece: _Piece) -> str:
        if piece.failed:
            return self.fold.said("what wrote it beside the training of rank {rank} has failed", who)
        if who in self.fold.steppers:
            return self.fold.said("rank {rank} has made no step since with an optimizer that trained before", who)
        if self.fold.journals[who[0]].parent:
            return self.fold.said("the child of rank {rank} that wrote it has not ended", who)
        return self.fold.said("the thread of rank {rank} that wrote it has neither ended nor begun another save", who)

    def _behind(self, save: _Save) -> str:
        """Return which rank may still write; empty: none."""
        if save.commit:
            return ""
        through = {self.fold.journals[who[0]].rank for who in save.pieces if who in self.fold.steppers}
        for rank, count in sorted(self._counts.items()):
            if count <= save.count and rank not in self._left and rank not in through:
                return f"rank {rank} has made {count} steps, not more than the {save.count} of the save"
        return ""


def _judged(save: _Save, missing: _Missing) -> RecordedSave:
    lacks, proof = missing.of(save)
    journals = missing.fold.journals
    return RecordedSave(
        save.order,
        save.entry,
        tuple(sorted(save.files)),
        kind_of(save.entry, save.files or save.written),
        save.count,
        tuple(sorted({journals[number].rank for number, _ in save.pieces})),
        not lacks,
        lacks or proof,
        save.gone,
    )
