"""All checkpoints of a directory, for `elastic-ext checkpoints ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.checkpoints.choice import decisions, rank_files
from elastic_ext.checkpoints.choice.listing import (
    candidates_among,
    is_named,
    judged,
    left_out_of,
    list_entries,
    read_trackers,
    tracked,
)
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Inspection, numbers_of, order_of, step_of
from elastic_ext.checkpoints.record.stored import RecordBook, RecordVerdict, Trust
from elastic_ext.checkpoints.storage import Entry, Storage

THREADS = 16  # concurrent checks; each mostly waits for the storage


class Known(str, Enum):
    """How a checkpoint is known to be one of a job, the best way first."""

    PROVED = "proved"  # the job saved it, and training went on after that
    RECORDED = "recorded"  # the job saved it; whether it is whole, its format says
    CONTENT = "content"  # it says its step itself
    NAME = "name"


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint(upkeep.PruneCandidate):
    entry: Entry  # the listed entry
    state: str  # "complete", with a note if no optimizer is in it, or why it is not, for people
    epoch: int | None  # from its content; None if unknown
    generation: int | None  # generation of the group of workers that wrote it; None if it is not ours
    size: int | None  # bytes; None if unknown
    known: Known  # how it is known
    ranks: int | None  # number of ranks that wrote it, by the record; None if it is not recorded
    foreign: bool = False  # the job has saved others, and this is none of them: see `choice.recorded`

    @property
    def prune_candidate(self) -> upkeep.PruneCandidate:
        """The input for `plan_prune`. What families have in common are the steps in their names, for any pattern."""
        return replace(self, family=candidates.family_of(self.name), step=step_of(self.name)) if self.together else self


def list_checkpoints(
    storage: Storage, pattern: str = "", progress: Callable[[int, int], None] | None = None
) -> tuple[ListedCheckpoint, ...]:
    """List and check all checkpoints, newest first within each family. Raises UsageError, OSError.

    pattern: the setting checkpoint_pattern. progress: called with the number of checkpoints done and the total.
    """
    listed = list_entries(storage)
    trackers = read_trackers(storage, listed)
    present = judged(candidates_among(listed, pattern), listed, trackers)
    beside = _beside(storage, listed)
    foreign = _foreign(present, beside.book, pattern)
    others = left_out_of(present, listed) if pattern else []
    if beside.book is not None:
        present = rank_files.joined(present, beside.book, pattern)
    together = _together(decisions.families([*present, *others]))
    apart = {together[each]: each for each in {candidates.family_of(entry.name) for entry in others} if each in together}
    ordered = [(family, at) for family in decisions.families(present, pattern) for at in range(len(family.members))]

    inspections = _inspect_all(storage, [family.members[at] for family, at in ordered], pattern, progress)
    sight = decisions.Sight(inspections.__getitem__, pattern, decisions.families(others), tracked(present, trackers))
    found = []
    for family, at in ordered:
        entry, inspection = family.members[at], inspections[family.members[at]]
        if inspection.format == UNKNOWN and not inspection.complete and step_of(entry.name, pattern) is None:
            continue
        verdict = beside.verdict(entry)
        seen = sight.seen(at, family.members) if verdict is None else inspection
        if verdict is not None and verdict.trust is Trust.TORN and seen.complete:
            seen = replace(seen, complete=False, reason=verdict.why)
        group = together.get(candidates.family_of(entry.name), "")
        row = _row(entry, seen, inspection, verdict, pattern)
        row = replace(row, family=family.pattern, together=group, apart=apart.get(group, ""), linked=beside.is_linked(entry))
        mark = own_files.quarantine_of(storage, entry.name) if entry.name in beside.quarantined else None
        bad = mark is not None and mark.holds(inspection.written_at)
        row = replace(row, pinned=entry.name in beside.pinned, quarantined=bad, foreign=entry.name in foreign)
        found.append(row)
    return tuple(found)


def _foreign(present: Sequence[Entry], book: RecordBook | None, pattern: str) -> frozenset[str]:
    """Return the names of what no job resumes from while it has a save of its own: not recorded, nor newer by its number."""
    found, recorded = set[str](), False
    if book is None:
        return frozenset()
    for members in (kind.members for kind in rank_files.kinds_of(present, book, pattern).values()):
        known = [(save, numbers_of(each.name)) for each in members if (save := book.known(each)) is not None]
        recorded = recorded or bool(known)
        newest = max(known)[1] if known else None
        others = (each for each in members if book.known(each) is None)
        found |= {each.name for each in others if newest is None or numbers_of(each.name) <= newest}
    return frozenset(found) if recorded else frozenset()


def _row(entry: Entry, seen: Inspection, alone: Inspection, verdict: RecordVerdict | None, pattern: str) -> ListedCheckpoint:
    """Return what is known of one checkpoint. seen, alone: with, and without what lies beside it."""
    return ListedCheckpoint(
        name=entry.name,
        entry=entry,
        family="",
        format=seen.format,
        complete=seen.complete,
        state="complete" + f", {candidates.NO_OPTIMIZER}" * (seen.training is False) if seen.complete else seen.reason,
        step=decisions.step_in(entry, seen, pattern),
        epoch=seen.epoch,
        generation=order[0] if (order := order_of(entry.name)) else None,
        size=seen.size,
        known=_known(verdict, alone, entry),
        own=verdict is not None or order_of(entry.name) is not None,
        ranks=len(verdict.save.ranks) if verdict is not None and verdict.save is not None else None,
        compared=seen.compared,
    )


@dataclass(frozen=True)
class _Beside:
    """What our own files say of checkpoints, by name; and which names links point to. book: None if there are no such files."""

    linked: frozenset[str]
    pinned: frozenset[str] = frozenset()
    quarantined: frozenset[str] = frozenset()
    book: RecordBook | None = None

    def is_linked(self, entry: Entry) -> bool:
        return not self.linked.isdisjoint({entry.name, *(part.name for part in entry.parts)})

    def verdict(self, entry: Entry) -> RecordVerdict | None:
        return self.book.verdict(entry) if self.book is not None and self.book.known(entry) is not None else None


def _beside(storage: Storage, listed: Sequence[Entry]) -> _Beside:
    linked = frozenset(entry.sibling for entry in listed)
    if not any(entry.name == own_files.MARKERS for entry in listed):
        return _Beside(linked)
    return _Beside(linked, own_files.pinned_names(storage), own_files.quarantined_names(storage), RecordBook(storage))


def _known(verdict: RecordVerdict | None, inspection: Inspection, entry: Entry) -> Known:
    if verdict is not None:
        return Known.PROVED if verdict.trust is Trust.PROVED else Known.RECORDED
    return Known.CONTENT if inspection.step is not None or order_of(entry.name) is not None else Known.NAME


def _inspect_all(
    storage: Storage, entries: Sequence[Entry], pattern: str, progress: Callable[[int, int], None] | None
) -> dict[Entry, Inspection]:
    def inspect(entry: Entry) -> Inspection:
        unusable = Inspection(False, UNKNOWN, entry.unusable)
        return unusable if entry.unusable else detect.check(storage, entry, is_named(entry, pattern))

    found: dict[Entry, Inspection] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for entry, inspection in zip(entries, pool.map(inspect, entries), strict=True):
            found[entry] = inspection
            if progress is not None:
                progress(len(found), len(entries))
    return found


def _together(found: Sequence[decisions.NameFamily]) -> dict[str, str]:
    """Return a name for each set of families that have steps in common, by their patterns. The best is kept for itself."""
    sets: list[list[decisions.NameFamily]] = []
    for family in found:
        if family.steps and not decisions.is_copy(family.pattern):
            near = [each for each in sets if any(decisions.are_kin(family, other) for other in each)]
            sets = [each for each in sets if each not in near] + [[family, *(other for each in near for other in each)]]
    return {family.pattern: each[0].pattern for each in sets if len(each) > 1 for family in each}
