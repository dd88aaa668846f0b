"""Which saves of a round are proved to be whole, by what its workers have noted. Pure: it reads no file and asks no clock.

A save is what was written to one entry until that was over. Proved are those of which all of this holds:

(a) Each piece of writing is over. That of the thread that trains is, when this thread has since made a step with an optimizer
    that had made one before the save; or has removed an older proved save of no more files; or has left the script without an
    exception. That of another thread, work item or child is, when it has ended. Each is, when it has begun the next save. A file
    below a URL is a work item of its own, too: it has ended when it was closed, and failed when that, or the upload, has.
(b) Every rank of the round has made more steps than the save has, or has left the script so, or is through with its own pieces.
(c) It has no fewer files than the last proved save before it with a name that differs in digits only; or the same ones as
    another one since.

A rename of closed files onto the name of the entry proves (b), and (a) for the thread that has written and renamed them. A script
that reports a save as complete proves both. The order of saves is that of the record: two optimizers count twice, each start
begins at 0, and a script may begin again. Events of two hosts are ordered by their counts of steps alone.

A child that was forked without `multiprocessing` proves nothing: whether it ended well is not known here.

The last thing that a killed worker has noted may not have happened: a save that was renamed then may still have its old name.

Proved says that the save is whole, not that it can be resumed from: logs are proved, too. The choice of a checkpoint compares
what lies on the storage with what was there at the proof, and asks the format, which overrules a proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.record import fold
from elastic_ext.checkpoints.record.fold import EntryRead, OpenSave, SaveFold, SavePiece, Who, pattern_of
from elastic_ext.checkpoints.record.journal import JournalLine, SaveJournal, SavePath

MOST_HELD = 200_000
"""Events that wait for the others of their count, about 100 MB. Beyond that, those of hosts may be taken in the wrong order."""

OrderKey = tuple[int, str, int, str, int]  # count, host, ns, name and line of the journal


@dataclass(frozen=True)
class RecordedSave:
    """A save, as the workers of a round have noted it.

    Attributes:
        order: of its first writing among those of the round.
        entry: the name in its directory.
        files: of the entry, relative to the directory, each with the rank that wrote it last; not what another process wrote for
            DCP.
        written: those of them that this save wrote.
        count: optimizer steps of the rank that was furthest as it began to write.
        ranks: those that have written it.
        proved: whether it is proved to be whole.
        why: what proves it, or what is missing.
        gone: it has been removed, or written again, since.
        changes: another number than before: something of it was written or removed.
        usual: number of files that the last proved save of its name had written; 0: none was proved.
        was: the name from which it was renamed; "": it was not.
        number: how often this name was saved before in this round. since: the count at the last writing of the one before; -1:
            there was none.
    """

    order: int
    entry: SavePath
    files: Mapping[str, int]
    written: frozenset[str]
    count: int
    ranks: tuple[int, ...]
    proved: bool
    why: str
    gone: bool = False
    changes: int = 0
    usual: int = 0
    was: str = ""
    number: int = 0
    since: int = -1

    @property
    def kind(self) -> str:
        """Names of the entry and of its files, with "#" for digits."""
        return kind_of(self.entry, self.files)


@dataclass(frozen=True)
class RoundRecord:
    """The saves of a round in their order, also the last ones that are gone; what it has read; and what it has removed last.

    removed: also what earlier rounds have saved. Something else may have that name since.
    """

    saves: tuple[RecordedSave, ...] = ()
    reads: tuple[EntryRead, ...] = ()
    removed: tuple[SavePath, ...] = ()


def prove(
    journals: Sequence[SaveJournal],
    counts: Mapping[int, int],
    broken: Collection[int] = (),
    before: Mapping[str, int] = MappingProxyType({}),
    world: int = 0,
) -> RoundRecord:
    """Return the record of a round that is over. See `RoundProof`."""
    proof = RoundProof(before, world)
    proof.take(journals, counts, broken)
    proof.release()
    return proof.record()


class RoundProof:
    """What is proved of the saves of one round, while its journals grow.

    Events are taken in the order of their counts. So those of a count wait until each rank that has a journal is past it; and
    all wait until each rank was heard of, since journals are read one after the other.
    """

    def __init__(
        self,
        before: Mapping[str, int] = MappingProxyType({}),
        world: int = 0,
        apart: bool = False,
    ) -> None:
        """before: see `know`, of the first directory.

        world: number of ranks. One that was not heard of has made no step; 0: only those that were heard of count.

        apart: all directories but the first are of one node each.
        """
        self._fold = SaveFold()
        self._judge = _Judge(self._fold, {}, apart=apart)
        self.know(0, before)
        self._judge.steps = dict.fromkeys(range(world), 0)
        self._journals: dict[str, _Journal] = {}  # by name
        self._heard: set[int] = set()  # ranks of which a count is known
        self._held: list[tuple[OrderKey, Who, JournalLine]] = []
        self._seen: dict[int, RecordedSave] = {}  # by order: what `record` has returned last

    def know(self, at: int, before: Mapping[str, int]) -> None:
        """Take what is known of a directory from earlier rounds with as many ranks, before anything of it is proved.

        before: files of the last proved save, by its name with "#" for digits.
        """
        self._judge.files |= {f"{at}/{name}": count for name, count in before.items()}

    def take(self, journals: Sequence[SaveJournal], counts: Mapping[int, int], broken: Collection[int] = ()) -> None:
        """Take what is new in the journals of workers and of their forked children.

        counts: steps of ranks, read before the journals were. broken: ranks whose journal is incomplete.
        """
        for number, journal in enumerate(journals):
            name = f"{journal.host} {journal.name or number}"
            known = self._journals.get(name)
            if known is None:
                known = self._journals[name] = _Journal(self._fold.open(journal), journal.rank)
            for event in journal.events:
                known.follow(event)
                key = known.count, journal.host, known.ns, name, known.lines
                self._held.append((key, (known.number, event.who), event))
            self._judge.steps[journal.rank] = max(self._judge.steps.get(journal.rank, 0), known.count)
        for rank, count in counts.items():
            self._judge.steps[rank] = max(self._judge.steps.get(rank, 0), count)
        incomplete = {*broken, *(each.rank for each in journals if each.damaged)}
        if incomplete:
            self.lose(f"the record of rank {min(incomplete)} is incomplete")
        self._heard |= {*counts, *(each.rank for each in journals)}
        past = min((self._judge.steps[each.rank] for each in self._journals.values()), default=0)
        if not self._judge.steps.keys() <= self._heard:
            past = 0
        self.release(past, MOST_HELD)

    def lose(self, why: str) -> None:
        """Some of what was noted is missing: from now on nothing of this round is proved. The first reason stays."""
        self._judge.lost = self._judge.lost or why

    def release(self, below: float = float("inf"), most_held: int = 0) -> None:
        """Let events of smaller counts take effect; by default all, as no more come. At most `most_held` go on to wait."""
        self._held.sort(key=lambda each: each[0])
        at = max(len(self._held) - most_held, 0)
        while at < len(self._held) and self._held[at][0][0] < below:
            at += 1
        for _, who, event in self._held[:at]:
            self._fold.add(who, event)
        del self._held[:at]

    @property
    def waits(self) -> bool:
        """Whether steps of other ranks could still prove something."""
        if self._judge.lost:
            return False
        return bool(self._held) or any(not each.gone and each.order not in self._judge.proofs for each in self._fold.saves)

    def may_change(self, entry: SavePath) -> bool:
        """Return whether an event that waits is about this entry."""
        return any(entry in (event.place.entry, event.to.entry) for _, _, event in self._held)

    def record(self) -> RoundRecord:
        """Return what is known now."""
        saves = [self._seen_as(save) for save in self._fold.saves if save.pieces]  # others were taken back, or moved on
        self._seen = {each.order: each for each in saves}
        self._fold.forget(self._judge.proofs)
        return RoundRecord(tuple(saves), tuple(self._fold.reads), tuple(self._fold.removed))

    def _seen_as(self, save: OpenSave) -> RecordedSave:
        proved, why = self._judge.of(save)
        seen = self._seen.get(save.order)
        now = (save.changes, save.gone, why)
        return seen if seen is not None and (seen.changes, seen.gone, seen.why) == now else self._judge.seen(save, proved, why)


@dataclass
class _Journal:
    """How far a journal is known. A line of another thread may be late: its count and time are those of the line before."""

    number: int
    rank: int
    count: int = 0
    ns: int = 0
    lines: int = 0

    def follow(self, event: JournalLine) -> None:
        self.count, self.ns, self.lines = max(self.count, event.steps), max(self.ns, event.ns), self.lines + 1


def kind_of(entry: SavePath, files: Collection[str]) -> str:
    """Return the names with "#" for digits, without repetition."""
    inside = sorted({pattern_of(each.removeprefix(f"{entry.path}/")) for each in files if each != entry.path})
    return pattern_of(entry.path) + (f": {', '.join(inside)}" if inside else "")


@dataclass
class _Judge:
    """Says what is missing for a proof of each save; ask it of the older ones first, because a newer one may rest on an older."""

    saves: SaveFold
    files: dict[str, int]  # how many the last proved save has, by what those of its kind have in common
    fewer: dict[str, tuple[int, Counter[str]]] = field(default_factory=dict)  # the same: count and files of the last with fewer
    steps: dict[int, int] = field(default_factory=dict)  # of each rank, at least
    lost: str = ""  # why nothing is proved any more; empty: all that was noted is known
    apart: bool = False  # see `RoundProof`
    proofs: dict[int, tuple[int, str]] = field(default_factory=dict)  # by order: `changes` at the proof, and why

    def of(self, save: OpenSave) -> tuple[bool, str]:
        """Return whether it is proved, and what proves it, or what is missing.

        It stays proved until it is written again, or might be without a sign of that.
        """
        if self.lost:
            return False, self.lost
        changes, proof = self.proofs.get(save.order, (-1, ""))
        if changes != save.changes:
            over = {who: self._over(who, piece) for who, piece in save.pieces.items()}
            missing = self._lacks(save, over)
            if missing:
                return False, missing
            reasons = [*over.values(), save.commit] if save.commit != fold.REPORTED else [save.commit]
            proof = "; ".join(dict.fromkeys(filter(None, reasons)))
            self.proofs[save.order] = save.changes, proof
            self.files |= dict.fromkeys(save.names, len(save.written))
        # what rests on it had seen it whole
        return (False, f"{save.cut} of its files have been removed since") if save.cut else (True, proof)

    def _lacks(self, save: OpenSave, over: Mapping[Who, str]) -> str:
        if save.unseen:
            return "not all of it was seen to be written"
        open_ones = [self._not_over(who, save.pieces[who]) for who, why in over.items() if not why]
        if open_ones and save.commit != fold.REPORTED:
            return open_ones[0]
        if not save.commit or (self.apart and save.entry.at > 0):
            missing = self._behind(save)
            if missing:
                return missing
        written, before = len(save.written), max((self.files.get(each, 0) for each in save.names), default=0)
        if written < before and not self._is_usual(save):
            return f"it has {counted(written, 'file')}, and the last proved save of this name has {before}"
        return ""

    def _is_usual(self, save: OpenSave) -> bool:
        """Return whether the save before it was refused as well, because it had no other files."""
        found, inside = [self.fewer.get(name) for name in save.names], save.inside
        usual = any(each is not None and each[0] != save.count and each[1] == inside for each in found)
        if not usual:
            self.fewer |= dict.fromkeys(save.names, (save.count, inside))
        return usual

    def _over(self, who: Who, piece: SavePiece) -> str:
        """Return why this piece is over; empty: it is not."""
        if not piece.over and any(each.order in self.proofs for each in piece.removed):
            return self.saves.said(fold.REMOVED, who)
        return piece.over

    def _not_over(self, who: Who, piece: SavePiece) -> str:
        if piece.failed:
            return self.saves.said("what wrote it beside the training of rank {rank} has failed", who)
        if who in self.saves.steppers:
            return self.saves.said("rank {rank} has made no step since with an optimizer that trained before", who)
        if self.saves.journals[who[0]].parent:
            return self.saves.said("the child of rank {rank} that wrote it has not ended its work", who)
        return self.saves.said("the thread of rank {rank} that wrote it has neither ended nor begun another save", who)

    def _behind(self, save: OpenSave) -> str:
        """Return which rank may still write; empty: none."""
        known = any(name in self.files for name in save.names)  # then a piece that was never begun would be missed
        left = self.saves.ranks_left(in_handler=known)
        through = {self.saves.journals[who[0]].rank for who in save.pieces if who in self.saves.steppers}
        for rank, count in sorted(self.steps.items()):
            if count <= save.count and rank not in left and rank not in through:
                return f"rank {rank} has made {counted(count, 'step')}, not more than the {save.count} of the save"
        return ""

    def seen(self, save: OpenSave, proved: bool, why: str) -> RecordedSave:
        rank_of = [each.rank for each in self.saves.journals]
        return RecordedSave(
            order=save.order,
            entry=save.entry,
            files={path: rank_of[number] for path, ((number, _), _) in sorted(save.files.items())},
            written=frozenset(save.written),
            count=save.count,
            ranks=tuple(sorted({rank_of[number] for number, _ in save.pieces})),
            proved=proved,
            why=why,
            gone=save.gone,
            changes=save.changes,
            usual=max((self.files.get(each, 0) for each in save.names), default=0),
            was=save.name.was,
            number=save.name.number,
            since=save.name.since,
        )
