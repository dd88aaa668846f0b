"""What the workers of a round have saved, entry by entry, one event of their journals after the other.

A save is what was written to one entry until that was over. `proof.py` says when it is proved to be whole. Here each event is
put where it belongs: to the save and its files, and to the piece of the thread or work item that has written them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from elastic_ext.checkpoints.record.journal import ELSEWHERE, JournalLine, SaveJournal, SavePath

Who = tuple[int, int]  # number of the journal, and of the thread or work item in it

STEP = "rank {rank} has made a step since"
RENAMED = "rank {rank} has renamed it when its files were closed"
REMOVED = "rank {rank} has removed an older save since"
LEFT = "the script of rank {rank} has ended"
ENDED = "what wrote it beside the training of rank {rank} has ended"
NEXT = "the thread of rank {rank} that wrote it has begun the next save"
REPORTED = "the script has reported it as complete"
MOST_GONE = 64  # removed saves that are kept, because their proof may still come, and prove others; and names of removed ones
MOST_NAMES = 1000  # of which it is known how often each was saved
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class EntryRead:
    """A rank has read this file, and its round had not written the entry before."""

    place: SavePath
    rank: int
    count: int


def _name_of(entry: SavePath) -> str:
    """Return what saves of one kind have in common: the directory, and the name with "#" for digits."""
    return f"{entry.at}/{pattern_of(entry.path)}"


def pattern_of(name: str) -> str:
    """Return the name with "#" for digits."""
    return _DIGITS.sub("#", name)


@dataclass
class SavePiece:
    """What one thread or work item has written of a save."""

    count: int = 0  # at the last writing
    over: str = ""  # why it is over; empty: it is not
    failed: bool = False
    outside_handler: bool = False  # not all of it was written within a signal handler
    removed: list[OpenSave] = field(default_factory=list)  # older saves that the same thread has removed since


@dataclass(frozen=True)
class SaveName:
    """What is known of the name of a save: see `proof.RecordedSave`."""

    entry: SavePath
    number: int
    since: int
    was: str = ""


@dataclass
class OpenSave:
    """One save of an entry, as far as it has been seen."""

    order: int
    name: SaveName
    files: dict[str, tuple[Who, int]]  # of the entry: who wrote each last, and the count then
    names: set[str]  # that it has had, with "#" for digits; none if another process wrote it, whose files are unknown
    written: set[str] = field(default_factory=set)  # of the files, by this save
    pieces: dict[Who, SavePiece] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)  # by journal: the count at its first writing
    commit: str = ""  # RENAMED, when no file was open; REPORTED
    unseen: bool = False  # something of it was there before
    cut: int = 0  # files that were removed after it was over
    gone: bool = False
    changes: int = 0  # how often something of it was written, or removed from it

    @property
    def entry(self) -> SavePath:
        return self.name.entry

    @property
    def count(self) -> int:
        return max(self.begins.values(), default=0)

    @property
    def inside(self) -> Counter[str]:
        """How many files it wrote, by their names within the entry, without digits."""
        return Counter(pattern_of(each[len(self.entry.path) :]) for each in self.written)

    def is_over(self, count: int) -> bool:
        """Return whether nothing more is written to it. count: of who asks, later than a writing that has failed."""
        return all(each.over or each.removed or (each.failed and count > each.count) for each in self.pieces.values())

    def copy(self) -> OpenSave:
        pieces = {who: replace(piece, removed=list(piece.removed)) for who, piece in self.pieces.items()}
        files, names, written, begins = dict(self.files), set(self.names), set(self.written), dict(self.begins)
        return replace(self, files=files, names=names, written=written, pieces=pieces, begins=begins)

    def restore(self, copied: OpenSave) -> None:
        vars(self).update(vars(copied))


def _is_in(path: str, place: SavePath) -> bool:
    return path == place.path or path.startswith(f"{place.path}/")


class _Entries:
    """The saves so far, and which of them is the current one of each entry."""

    def __init__(self) -> None:
        self.journals: list[SaveJournal] = []  # without their events
        self.saves: list[OpenSave] = []  # in their order
        self.steppers: set[Who] = set()  # threads that train
        self._begun = 0  # how many saves there were
        self._current: dict[SavePath, OpenSave] = {}
        self._last: dict[SavePath, tuple[int, int]] = {}  # by entry: number of its last save, and count at its last writing
        self._open: dict[Who, dict[int, OpenSave]] = {}  # by order, those of which its piece may not be over

    def _unfinished(self, who: Who) -> list[tuple[OpenSave, SavePiece]]:
        """Return the saves of which the piece of this thread is not over, with it."""
        saves = self._open.get(who, {}).values()
        found = [(save, piece) for save in saves if (piece := save.pieces.get(who)) is not None and not piece.over]
        self._open[who] = {save.order: save for save, _ in found}
        return found

    def _follow(self, who: Who, save: OpenSave) -> None:
        self._open.setdefault(who, {})[save.order] = save
        self._note_last(save, save.pieces[who].count)

    def said(self, why: str, who: Who) -> str:
        return why.format(rank=self.journals[who[0]].rank)

    def _save_of(self, place: SavePath, who: Who, event: JournalLine) -> OpenSave:
        """Return the save that a writing to this file belongs to; begin one if it is a new one."""
        entry = place.entry
        current = self._current.get(entry)
        if current is not None and self._belongs_to(current, place.path, who, event):
            return current
        begun = self._begin(entry, dict(current.files) if current is not None else {}, {_name_of(entry)})
        if current is not None:
            current.gone = True
            for each, piece in current.pieces.items():
                if each != who and not (piece.over or piece.failed):  # what another thread still writes is in this entry, too
                    begun.pieces[each], begun.begins[each[0]] = piece, current.begins.get(each[0], piece.count)
                    self._follow(each, begun)
        return begun

    def _belongs_to(self, current: OpenSave, path: str, who: Who, event: JournalLine) -> bool:
        if not current.is_over(event.steps):
            writer, count = current.files.get(path, (None, 0))
            own = writer == who and path in current.written and who in self.steppers
            return not (own and count < event.steps)  # the thread that trains writes its own file again
        if path not in current.files and not current.cut:  # more of it: a thread that begins late, a marker
            return event.steps <= current.count or pattern_of(path) not in map(pattern_of, current.files)
        # A rank may come to its part when others are through. It is not past the save's count, so that is not proved.
        return event.steps <= current.count and all(number != who[0] for number, _ in current.pieces)

    def _begin(self, entry: SavePath, files: dict[str, tuple[Who, int]], names: set[str]) -> OpenSave:
        number, since = self._last.get(entry, (-1, -1))
        begun = self._current[entry] = OpenSave(self._begun, SaveName(entry, number + 1, since), files, names)
        self._begun += 1
        self.saves.append(begun)
        return begun

    def _note_last(self, save: OpenSave, count: int) -> None:
        """count: at a writing of it."""
        number, last = self._last.pop(save.entry, (-1, -1))
        self._last[save.entry] = save.name.number, max(count, last) if number == save.name.number else count
        if len(self._last) > MOST_NAMES:
            del self._last[next(iter(self._last))]

    def forget(self, proved: Collection[int]) -> None:
        """Let go of what was removed or written again. An event that is taken back brings it here again. proved: their order."""
        unproved = [each for each in self.saves if each.gone and each.order not in proved]
        kept = {each.order for each in unproved[-MOST_GONE:]}
        self.saves = [each for each in self.saves if not each.gone or each.order in kept]

    def _as_it_is(self, *entries: SavePath) -> Callable[[], None]:
        """Return what makes these entries what they are now. What other threads write to them meanwhile is lost."""
        saves = {entry: self._current.get(entry) for entry in entries}
        copies = [(save, save.copy()) for save in saves.values() if save is not None]
        number = self._begun

        def restore() -> None:
            for save in self.saves:
                if save.order >= number and save.entry in entries:
                    save.pieces.clear()
            for save, copied in copies:
                save.restore(copied)
                self._restore(save)
                for who in save.pieces:
                    self._follow(who, save)
            for entry, current in saves.items():
                self._current.pop(entry, None)
                if current is not None:
                    self._current[entry] = current

        return restore

    def _restore(self, save: OpenSave) -> None:
        if not any(each is save for each in self.saves):
            self.saves = sorted([*self.saves, save], key=lambda each: each.order)


class SaveFold(_Entries):
    """Takes the events of a round one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[EntryRead] = []
        self.removed: dict[SavePath, None] = {}  # entries that a worker was seen to remove or to move away; the last ones
        self.left: set[int] = set()  # journals whose script has ended without an exception
        self.left_in_handler: set[int] = set()  # the same, of those that a signal has ended: they may have had more to write
        # By the old place of an entry: the new one, count, host. It grows by one a save where each has a temporary name of its
        # own: 43,000 in 30 days, 17 MB, of one a minute. By count none can go: a journal may begin late, with lines of any count.
        self._renames: dict[SavePath, tuple[SavePath, int, str]] = {}
        self._undo: dict[Who, Callable[[], None]] = {}  # by thread: takes back what it did last

    def ranks_left(self, in_handler: bool) -> frozenset[int]:
        """Return the ranks whose script has ended without an exception. in_handler: also those that a signal has ended."""
        left = self.left | self.left_in_handler if in_handler else self.left
        return frozenset(self.journals[number].rank for number in left if not self.journals[number].parent)

    def open(self, journal: SaveJournal) -> int:
        """Return the number of a journal, whose events come one after the other."""
        number = len(self.journals)
        self.journals.append(replace(journal, events=()))
        if not journal.parent:
            self.steppers.add((number, 0))
        return number

    def add(self, who: Who, event: JournalLine) -> None:
        """Take the next event."""
        if event.kind in ("d", "m") and event.place == event.place.entry != event.to.entry:
            self._takes_away(event.place)
        if event.kind in ("w", "p", "l"):
            save = self._write(who, event, event.place)
            save.unseen |= event.kind == "l"  # written to by another name, too
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
            self._settle(who, STEP, event)
        elif event.kind == "x":
            (self.left_in_handler if event.in_handler else self.left).add(who[0])
            self._settle(who, LEFT, event)
        elif event.kind in ("e", "f"):
            self._settle(who, ENDED, event)
            self._undo.pop(who, None)
            if not self._unfinished(who):
                del self._open[who]
        elif event.kind == "k":
            self._report(who, event.number)

    def _takes_away(self, entry: SavePath) -> None:
        self.removed.pop(entry, None)
        self.removed[entry] = None
        while len(self.removed) > MOST_GONE:
            del self.removed[next(iter(self.removed))]

    def _settle(self, who: Who, why: str, event: JournalLine) -> None:
        for save, piece in self._unfinished(who):
            if event.kind == "f":
                piece.failed = True
            elif not (event.kind == "s" and event.number > save.begins.get(who[0], 0)) and not (
                event.kind == "x" and event.in_handler and piece.outside_handler
            ):
                piece.over = self.said(why, who)

    def _write(self, who: Who, event: JournalLine, place: SavePath) -> OpenSave:
        place = self._renamed_since(place, who, event)
        before = self._current.get(place.entry)
        save = self._save_of(place, who, event)
        piece = save.pieces.get(who)
        added = place.path not in save.files and event.kind != "p"
        self._undo[who] = lambda: self._unwrite(who, save, place.path if added else "", before, piece)
        self._touch(save, who, event)
        if event.kind == "p":
            save.names.clear()
        else:
            save.files[place.path] = who, event.steps
            save.written.add(place.path)
        if not event.in_handler:
            self._next_save(who, save)
        return save

    def _renamed_since(self, place: SavePath, who: Who, event: JournalLine) -> SavePath:
        """Return the place where this file is now. Events of one count on two hosts may come in the wrong order."""
        to, count, host = self._renames.get(place.entry, (place.entry, -1, ""))
        if event.steps > count or host == self.journals[who[0]].host:
            return place
        return SavePath(to.at, to.path + place.path[len(place.entry.path) :])

    def _unwrite(self, who: Who, save: OpenSave, path: str, before: OpenSave | None, piece: SavePiece | None) -> None:
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
                self._restore(before)

    def _touch(self, save: OpenSave, who: Who, event: JournalLine) -> None:
        before = save.pieces.get(who)
        outside_handler = not event.in_handler or (before is not None and before.outside_handler)
        save.pieces[who] = SavePiece(event.steps, outside_handler=outside_handler)
        self._follow(who, save)
        save.begins.setdefault(who[0], event.steps)
        save.commit = ""
        save.changes += 1

    def _next_save(self, who: Who, save: OpenSave) -> None:
        """A thread has begun this save: it is through with those of the same directory, and of the same name but for digits."""
        name = _name_of(save.entry)
        for each, piece in self._unfinished(who):
            if each.entry != save.entry and _name_of(each.entry) == name:
                piece.over = self.said(NEXT, who)

    def _remove(self, who: Who, event: JournalLine) -> None:
        save = self._current.get(event.place.entry)
        if save is None:
            return
        is_first = not save.cut
        inside = [event.place.path] if event.kind == "d" else [each for each in save.files if _is_in(each, event.place)]
        if self._drop(save, who, event, inside) and is_first:
            self._rotate(who, save, event)
        if event.place == save.entry or not save.files:
            save.gone = True
            del self._current[save.entry]

    def _drop(self, save: OpenSave, who: Who, event: JournalLine, paths: Collection[str]) -> bool:
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
            save.changes += 1
            if was_over:
                save.cut += 1
            else:
                save.written.discard(path)
        return was_over

    def _rotate(self, who: Who, older: OpenSave, event: JournalLine) -> None:
        for save, piece in self._unfinished(who):
            known = any(each is older for each in piece.removed)
            cut_in = event.in_handler and piece.outside_handler
            if save.order > older.order and not (known or cut_in) and save.inside >= older.inside:
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

    def _move(self, who: Who, event: JournalLine, source: OpenSave, moved: dict[str, tuple[Who, int]]) -> None:
        is_whole = len(moved) == len(source.files)
        names = {path: event.to.path + path[len(event.place.path) :] for path in moved}
        renamed = {names[path]: of for path, of in moved.items()}
        writers = {of for of, _ in moved.values()}
        pieces = {of: piece for of, piece in source.pieces.items() if is_whole or of in writers}
        if event.to == event.to.entry:
            save = self._renamed(who, event, source, renamed, pieces)
            save.written = {names[path] for path in moved if path in source.written}
        else:
            save = self._save_of(event.to, who, event)
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
        self, who: Who, event: JournalLine, source: OpenSave, files: dict[str, tuple[Who, int]], pieces: dict[Who, SavePiece]
    ) -> OpenSave:
        """Return the save that gets its final name now, with these files and pieces of `source`."""
        replaced = self._current.get(event.to)
        if replaced is not None:
            replaced.gone = True
        names = {*source.names, _name_of(event.to)} if source.names else set()
        self._renames[event.place] = event.to, event.steps, self.journals[who[0]].host
        save = self._begin(event.to, files, names)
        save.pieces, save.begins = pieces, dict(source.begins)
        save.unseen, save.cut = source.unseen, source.cut
        save.name = replace(save.name, was=event.place.path if event.place == event.place.entry else "")
        by_step = any(each.over in (self.said(STEP, of), self.said(REMOVED, of)) for of, each in pieces.items())
        if event.number == 0 and not by_step:  # else it is an older one that makes room
            save.commit = self.said(RENAMED, who)
            if who in pieces and not pieces[who].over:
                pieces[who].over = save.commit
        for each in pieces:
            self._follow(each, save)
        return save

    def _report(self, who: Who, step: int) -> None:
        """The script has reported a save as complete: the newest that has this step in its name, or that no thread still writes.

        step: -1 if it is unknown.
        """
        number = who[0]
        of_rank = [each for each in self.saves if not each.gone and any(of[0] == number for of in each.pieces)]
        named = [each for each in of_rank if step in map(int, _DIGITS.findall(each.entry.path))]
        for save in (named or [each for each in of_rank if _is_through(each, who)])[-1:]:
            save.commit = REPORTED


def _is_through(save: OpenSave, who: Who) -> bool:
    """Return whether no other thread of the same process still writes it."""
    return all(of == who or of[0] != who[0] or piece.over for of, piece in save.pieces.items())
