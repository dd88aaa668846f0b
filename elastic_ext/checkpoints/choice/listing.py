"""List and check all checkpoints of a directory, for `elastic-ext checkpoints ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.choice import discovery, evidence, kin
from elastic_ext.checkpoints.choice.selection import OLDER, Family, beside_older, families, names_of, step_in
from elastic_ext.checkpoints.directory import MARKERS, marks
from elastic_ext.checkpoints.directory.pruning import PruneCandidate
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.inspection import NO_OPTIMIZER, UNKNOWN, Format, Inspection
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import family_of, step_of
from elastic_ext.checkpoints.storage import Entry, Storage

THREADS = 16  # concurrent checks; each mostly waits for the storage


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint of a directory.

    Attributes:
        entry: the listed entry.
        family: pattern that its name shares with others.
        format: for people.
        complete: whether training can resume from it.
        state: "complete", with a note if no optimizer is in it, or why it is not, for people.
        step, epoch: from its content, or for the step from its name; None if unknown.
        generation: generation of the group of workers that wrote it; None if it is not ours.
        size: bytes; None if unknown.
        pinned, quarantined: whether it has this mark.
        together: names the families that belong together, if its own is one of several; else "".
        apart: one of these that the pattern leaves out; "" for none.
        compared: it is incomplete only by comparison with what lies beside it.
    """

    entry: Entry
    family: str
    format: str
    complete: bool
    state: str
    step: int | None
    epoch: int | None
    generation: int | None
    size: int | None
    pinned: bool
    quarantined: bool
    together: str = ""
    apart: str = ""
    compared: bool = False

    @property
    def name(self) -> str:
        """The name in the directory."""
        return self.entry.name

    @property
    def prune_candidate(self) -> PruneCandidate:
        """The input for `plan_prune`."""
        family, step = self.family, self.step
        if self.together:  # what they have in common are the steps in their names, whatever a pattern says
            family, step = family_of(self.name), step_of(self.name)
        others = self.pinned, self.quarantined, self.together, self.apart, self.compared
        return PruneCandidate(self.name, family, step, self.format, self.complete, *others)


def list_checkpoints(
    storage: Storage, pattern: str = "", progress: Callable[[int, int], None] | None = None
) -> tuple[ListedCheckpoint, ...]:
    """List and check all checkpoints, newest first within each family. Raises UsageError, OSError.

    Args:
        pattern: the setting checkpoint_pattern.
        progress: called with the number of checkpoints done and the total.
    """
    listed = discovery.list_entries(storage)
    plugins = detect.plugins()
    trackers = evidence.read_trackers(storage, listed)
    candidates = evidence.judged(discovery.candidates(listed, pattern, plugins), listed, trackers)
    tracked = evidence.tracked(candidates, trackers)
    marked = any(entry.name == MARKERS for entry in listed)
    pinned: Collection[str] = marks.pinned_names(storage) if marked else ()
    quarantined: Collection[str] = marks.quarantined_names(storage) if marked else ()
    by_family = families(candidates, pattern)
    names = {entry.name for entry in candidates}
    others = [entry for entry in discovery.candidates(listed, "", plugins) if entry.name not in names] if pattern else []
    together = _together(families([*candidates, *others]))
    apart = {together[each]: each for each in {family_of(entry.name) for entry in others} if each in together}
    ordered = [(entry, family) for family in by_family for entry in family.members]
    inspections: list[Inspection] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for inspection in pool.map(lambda each: _inspect(storage, each[0], pattern, plugins), ordered):
            inspections.append(inspection)
            if progress is not None:
                progress(len(inspections), len(ordered))
    found = []
    for at, ((entry, family), inspection) in enumerate(zip(ordered, inspections, strict=True)):
        if inspection.format != UNKNOWN or inspection.complete or step_of(entry.name, pattern) is not None:
            after = range(at + 1, min(at + 1 + OLDER, len(ordered)))
            before = (inspections[each] for each in after if ordered[each][1] is family)
            seen = beside_older(entry, inspection, before, entry.name in tracked)
            row = _listed(
                entry, family.pattern, seen, step_in(entry, seen, pattern), entry.name in pinned, entry.name in quarantined
            )
            group = together.get(family_of(entry.name), "")
            found.append(replace(row, together=group, apart=apart.get(group, ""), compared=seen.compared))
    return tuple(found)


def _inspect(storage: Storage, entry: Entry, pattern: str, plugins: tuple[Format, ...]) -> Inspection:
    if entry.unusable:
        return Inspection(False, UNKNOWN, entry.unusable)
    return detect.check(storage, entry, plugins, discovery.is_named(entry, pattern))


def _together(found: Sequence[Family]) -> dict[str, str]:
    """Return a name for each set of families that have steps in common, by their patterns. The best is kept for itself."""
    sets: list[list[kin.Names]] = []
    for names in map(names_of, found):
        if names.steps and not kin.is_copy(names.pattern):
            near = [each for each in sets if any(kin.are_kin(names, other) for other in each)]
            sets = [each for each in sets if each not in near] + [[names, *(other for each in near for other in each)]]
    return {names.pattern: each[0].pattern for each in sets if len(each) > 1 for names in each}


def _state(inspection: Inspection) -> str:
    if not inspection.complete:
        return inspection.reason
    return f"complete, {NO_OPTIMIZER}" if inspection.training is False else "complete"


def _listed(
    entry: Entry, family: str, inspection: Inspection, step: int | None, pinned: bool, quarantined: bool
) -> ListedCheckpoint:
    order = order_of(entry.name)
    return ListedCheckpoint(
        entry,
        family,
        inspection.format,
        inspection.complete,
        _state(inspection),
        step,
        inspection.epoch,
        order[0] if order else None,
        inspection.size,
        pinned,
        quarantined,
    )
