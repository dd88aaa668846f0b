"""All checkpoints of a directory, each checked: what `ls` shows and `prune` decides on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.directory import catalog
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.checks import UNKNOWN, Inspection
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import step_of
from elastic_ext.checkpoints.storage import Entry, Storage

THREADS = 16  # checks at once; each waits for the storage most of its time


@dataclass(frozen=True)
class Row:
    """One checkpoint. `state`: "complete", or why not. size: bytes, None where it is not known."""

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
        return self.entry.name

    @property
    def kept(self) -> catalog.Kept:
        """As `plan_prune` takes it."""
        return catalog.Kept(self.name, self.family, self.step, self.format, self.complete, self.pinned, self.quarantined)


def rows(storage: Storage, pattern: str = "", progress: Callable[[int, int], None] | None = None) -> tuple[Row, ...]:
    """List and check; of each family the newest first. progress: checkpoints done, and all. Raises UsageError, OSError."""
    listed = discovery.list_entries(storage)
    plugins = detect.plugins()
    found = discovery.candidates(listed, pattern, plugins)
    marked = any(entry.name == catalog.MARKERS for entry in listed)
    pins, quarantines = (catalog.pinned(storage), catalog.in_quarantine(storage)) if marked else (frozenset(), frozenset())
    ordered = [(entry, family.pattern) for family in discovery.families(found, pattern) for entry in family.members]
    told = []
    with ThreadPoolExecutor(THREADS) as pool:
        checks = pool.map(lambda each: _check(storage, each[0], plugins), ordered)
        for (entry, family), verdict in zip(ordered, checks, strict=True):
            if verdict.format != UNKNOWN or verdict.complete or step_of(entry.name, pattern) is not None:
                step = verdict.step if verdict.step is not None else step_of(entry.name, pattern)
                told.append(_row(entry, family, verdict, step, entry.name in pins, entry.name in quarantines))
            if progress is not None:
                progress(len(told), len(ordered))
    return tuple(told)


def _check(storage: Storage, entry: Entry, plugins: tuple[detect.Format, ...]) -> Inspection:
    return Inspection(False, UNKNOWN, entry.unusable) if entry.unusable else detect.check(storage, entry, plugins)


def _row(entry: Entry, family: str, verdict: Inspection, step: int | None, pinned: bool, quarantined: bool) -> Row:
    order = order_of(entry.name)
    return Row(
        entry,
        family,
        verdict.format,
        verdict.complete,
        "complete" if verdict.complete else verdict.reason,
        step,
        verdict.epoch,
        order[0] if order else None,
        verdict.size,
        pinned,
        quarantined,
    )
