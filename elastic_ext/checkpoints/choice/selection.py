"""Choose the newest complete checkpoint among listed entries: how to order them, and how far to look.

Pure: a check, which costs I/O, is a callable, called only if its result can still change the choice. A healthy directory of
10,000 checkpoints costs one check.

Our own checkpoints are ordered by generation and step, which name and manifest both give. Others are ordered by the numbers in
their names, or by time if the names have no numbers or do not compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.formats.inspection import UNKNOWN, Inspection
from elastic_ext.checkpoints.formats.names import family_of, is_exact, numbers_of, step_of
from elastic_ext.checkpoints.storage import Entry


@dataclass(frozen=True)
class Resume:
    """The checkpoint to resume from.

    Attributes:
        path: absolute local path or URL.
        step: from its content, else from its name; None if neither has one.
        format: for people.
        reason: why this one, for people.
    """

    path: str
    step: int | None
    format: str
    reason: str


@dataclass(frozen=True)
class PassedOver:
    """A candidate that was checked but not chosen. distrusted: its save finished, but it is quarantined or damaged."""

    path: str
    reason: str
    distrusted: bool = False


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, or None, and the candidates that were passed over before it.

    Checkpoints older than the chosen one are not included, because they were not checked.
    """

    resume: Resume | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def all_bad(self) -> bool:
        """Whether finished checkpoints exist but none may be used. Beginning from nothing would lose the user's work."""
        return self.resume is None and any(passed.distrusted for passed in self.passed_over)


@dataclass(frozen=True)
class Family:
    """Candidates whose names differ only in digits.

    Attributes:
        pattern: what their names have in common.
        members: newest first.
        newest: no member was written after this time, in seconds since the epoch.
    """

    pattern: str
    members: tuple[Entry, ...]
    newest: float


def choose(candidates: Iterable[Entry], inspect: Callable[[Entry], Inspection], pattern: str = "") -> Choice:
    """Choose the newest complete candidate.

    `families` gives the order within a family. Numbers of different families do not compare (an epoch and a step), so the family
    whose newest complete member was written last wins. All entries of a directory have the clock of its filesystem.

    Args:
        inspect: called for the newest first, only as far as needed, and at most once per candidate.
        pattern: the setting checkpoint_pattern.
    """
    listed = list(candidates)
    passed_over = [PassedOver(entry.path, entry.unusable) for entry in listed if entry.unusable]
    found = families([entry for entry in listed if not entry.unusable], pattern)
    resume, written_at = None, float("-inf")
    for family in found:
        if resume is not None and family.newest <= written_at:
            break  # families are sorted newest first, so none of the rest can have been written later
        for entry in family.members:
            inspection = inspect(entry)
            if inspection.complete:
                if resume is None or or_oldest(inspection.written_at) > written_at:
                    resume, written_at = _resume(entry, inspection, family, pattern), or_oldest(inspection.written_at)
                break
            if inspection.format != UNKNOWN or inspection.distrusted or step_of(entry.name) is not None:
                passed_over.append(PassedOver(entry.path, inspection.reason, inspection.distrusted))
            # otherwise it is a directory such as "logs" and not worth reporting
    return Choice(_of_several(resume, len(found)), tuple(passed_over))


def _resume(entry: Entry, inspection: Inspection, family: Family, pattern: str) -> Resume:
    reason = f"newest complete of {len(family.members)} named {family.pattern}, {inspection.reason}"
    return Resume(entry.path, step_in(entry, inspection, pattern), inspection.format, reason)


def _of_several(resume: Resume | None, family_count: int) -> Resume | None:
    if resume is None or family_count == 1:
        return resume
    return replace(resume, reason=f"{resume.reason}; written last among {family_count} families of names")


def step_in(entry: Entry, inspection: Inspection, pattern: str) -> int | None:
    """Return the step of a checkpoint, from its content or else from its name."""
    return inspection.step if inspection.step is not None else step_of(entry.name, pattern)


def families(entries: Iterable[Entry], pattern: str = "") -> tuple[Family, ...]:
    """Group candidates by family. The family that may contain the newest checkpoint comes first."""
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[family_of(entry.name, pattern)].append(entry)
    found = [Family(name, _newest_first(members, pattern), _latest(members)) for name, members in groups.items()]
    # Of two families with the same time, the one whose names have numbers goes first: it gives a step.
    return tuple(sorted(found, key=lambda family: (-family.newest, not numbers_of(family.members[0].name), family.pattern)))


def _newest_first(members: list[Entry], pattern: str) -> tuple[Entry, ...]:
    """Sort by step, or by time if other numbers in the names contradict the steps (epoch_1_step_900, epoch_2_step_5)."""
    numbers = {entry.name: numbers_of(entry.name, pattern) for entry in members}
    by_numbers = sorted(members, key=lambda entry: (numbers[entry.name], or_oldest(entry.mtime), entry.name), reverse=True)
    steps = [each[-1] if each else 0 for each in (numbers[entry.name] for entry in by_numbers)]
    if is_exact(members[0].name, pattern) or steps == sorted(steps, reverse=True):
        return tuple(by_numbers)
    return tuple(sorted(members, key=lambda entry: (or_oldest(entry.mtime), step_of(entry.name), entry.name), reverse=True))


def _latest(members: Sequence[Entry]) -> float:
    # A directory's mtime is the last change to its list of names, not the time of the save. Only a check can tell that.
    if any(entry.is_dir or entry.mtime is None for entry in members):
        return float("inf")
    return max(or_oldest(entry.mtime) for entry in members)


def or_oldest(seconds: float | None) -> float:
    """Return the time, or for None a time before all others."""
    return float("-inf") if seconds is None else seconds
