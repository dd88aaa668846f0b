"""List and check all checkpoints of a directory, for `elastic-ext checkpoints ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.choice.selection import families, step_in
from elastic_ext.checkpoints.directory import marks
from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.directory.pruning import PruneCandidate
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.inspection import UNKNOWN, Format, Inspection
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import step_of
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
        state: "complete", or why it is not, for people.
        step, epoch: from its content, or for the step from its name; None if unknown.
        generation: generation of the group of workers that wrote it; None if it is not ours.
        size: bytes; None if unknown.
        pinned, quarantined: whether it has this mark.
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

    @property
    def name(self) -> str:
        """The name in the directory."""
        return self.entry.name

    @property
    def prune_candidate(self) -> PruneCandidate:
        """The input for `plan_prune`."""
        return PruneCandidate(self.name, self.family, self.step, self.format, self.complete, self.pinned, self.quarantined)


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
    candidates = discovery.candidates(listed, pattern, plugins)
    marked = any(entry.name == MARKERS for entry in listed)
    pinned: Collection[str] = marks.pinned_names(storage) if marked else ()
    quarantined: Collection[str] = marks.quarantined_names(storage) if marked else ()
    ordered = [(entry, family.pattern) for family in families(candidates, pattern) for entry in family.members]
    found = []
    with ThreadPoolExecutor(THREADS) as pool:
        inspections = pool.map(lambda each: _inspect(storage, each[0], plugins), ordered)
        for done, ((entry, family), inspection) in enumerate(zip(ordered, inspections, strict=True), 1):
            if inspection.format != UNKNOWN or inspection.complete or step_of(entry.name, pattern) is not None:
                step = step_in(entry, inspection, pattern)
                found.append(_listed(entry, family, inspection, step, entry.name in pinned, entry.name in quarantined))
            if progress is not None:
                progress(done, len(ordered))
    return tuple(found)


def _inspect(storage: Storage, entry: Entry, plugins: tuple[Format, ...]) -> Inspection:
    return Inspection(False, UNKNOWN, entry.unusable) if entry.unusable else detect.check(storage, entry, plugins)


def _listed(
    entry: Entry, family: str, inspection: Inspection, step: int | None, pinned: bool, quarantined: bool
) -> ListedCheckpoint:
    order = order_of(entry.name)
    return ListedCheckpoint(
        entry,
        family,
        inspection.format,
        inspection.complete,
        "complete" if inspection.complete else inspection.reason,
        step,
        inspection.epoch,
        order[0] if order else None,
        inspection.size,
        pinned,
        quarantined,
    )
