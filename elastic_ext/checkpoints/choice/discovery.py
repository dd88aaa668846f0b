"""Find the checkpoint to resume from in a directory, local or on any fsspec URL: the newest complete one, or the one asked for.

`families` and `choose` decide over plain listed entries; `detect` and `verify` read. A check costs I/O, so `choose` asks for one
only where the answer can still change the choice: a healthy directory of 10,000 checkpoints costs one listing and one check.

What is newest: our own checkpoints by generation and step, which their names say as their manifests do; others by the numbers in
their names; by time where names say nothing or do not compare. The step that is told is the content's, where that says one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory import catalog
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.checks import (
    DCP,
    DCP_METADATA,
    DCP_SHARD_SUFFIX,
    UNKNOWN,
    Inspection,
    is_candidate,
    is_hidden,
)
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import compiled, is_exact, numbers_of, pattern_of, step_of
from elastic_ext.checkpoints.formats.verify import Mode, verify
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage

NONE = "none"


@dataclass(frozen=True)
class Wanted:
    """Which checkpoint is asked for.

    Attributes:
        resume_from: "" the newest complete one; "none": none, the job begins from nothing; a step; a name in the directory,
            or the path or URL of one.
        exclude: names of checkpoints that must not be used.
        back: pass over so many of those that would be chosen: 1 after a failure that the newest is to blame for.
        pattern: only names that it matches, and our own, are checkpoints: a glob, in which {step} and {epoch} stand for a
            number. "": names by suffix, and directories.
        verify: how the content is checked before it is chosen.
        since: only those that were written later, in seconds since the epoch by the clock of the storage.
    """

    resume_from: str = ""
    exclude: frozenset[str] = frozenset()
    back: int = 0
    pattern: str = ""
    verify: Mode = Mode.OFF
    since: float | None = None


@dataclass(frozen=True)
class Resume:
    """The checkpoint to resume from.

    Attributes:
        path: absolute local path, or URL.
        step: from the content, else from the name; None if neither has one.
    """

    path: str
    step: int | None
    format: str
    reason: str


@dataclass(frozen=True)
class PassedOver:
    """A candidate that was looked at and not taken. distrusted: whole, but quarantined, excluded or found damaged."""

    path: str
    reason: str
    distrusted: bool = False


@dataclass(frozen=True)
class Choice:
    """``resume`` is None when there is nothing to resume from. What is older than it was not looked at and is not listed."""

    resume: Resume | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def all_bad(self) -> bool:
        """There are finished checkpoints, and none may be used: beginning from nothing would lose the user's work."""
        return self.resume is None and any(passed.distrusted for passed in self.passed_over)


@dataclass(frozen=True)
class Family:
    """Candidates whose names differ in digits only, newest first. ``newest``: no member was written after this time."""

    pattern: str
    members: tuple[Entry, ...]
    newest: float


def newest_complete(checkpoint_dir: str, wanted: Wanted = Wanted()) -> Choice:
    """Choose among the checkpoints directly under ``checkpoint_dir`` (a local path or a fsspec URL).

    A directory that does not exist yet holds nothing to resume from. Raises UsageError when ``checkpoint_dir`` is a file, may
    not be read or has an unknown or not installed protocol, and when `resume_from` names what is not there or not complete;
    OSError when the storage does not answer: then nobody knows what there is, and starting again from nothing would be the
    wrong guess.
    """
    if wanted.resume_from == NONE:
        return Choice(None)
    storage = open_storage(checkpoint_dir)
    listed = list_entries(storage)
    found = candidates(listed, wanted.pattern, detect.plugins())
    if wanted.since is not None:
        found = [entry for entry in found if entry.mtime is None or entry.mtime > wanted.since]
    look = Look(storage, wanted, any(entry.name == catalog.MARKERS for entry in listed))
    if wanted.resume_from:
        return _asked_for(storage, found, look, wanted)
    choice = choose(found, look, wanted.back, wanted.pattern)
    if any(entry.name == DCP_METADATA or entry.name.endswith(DCP_SHARD_SUFFIX) for entry in listed):
        hint = PassedOver(storage.address, f"is itself a {DCP} directory: checkpoint_dir must name the directory above it")
        return Choice(choice.resume, (*choice.passed_over, hint))
    return choice


def list_entries(storage: Storage) -> list[Entry]:
    """What is directly in the directory; nothing where there is none yet. Raises UsageError, OSError."""
    try:
        return list(storage.entries())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise UsageError(
            f"checkpoint_dir {storage.address} is a file, expected a directory: name the directory it is in"
        ) from error
    except PermissionError as error:
        raise UsageError(
            f"checkpoint_dir {storage.address} may not be read ({error.strerror or error}): let this user read it, or change it"
        ) from error


def candidates(entries: Iterable[Entry], pattern: str = "", plugins: Sequence[detect.Format] = ()) -> list[Entry]:
    """Those that may be checkpoints, by their names alone."""
    match = compiled(pattern).fullmatch if pattern else None

    def may_be(entry: Entry) -> bool:
        if is_hidden(entry.name):
            return False
        if match is not None:
            return match(entry.name) is not None or order_of(entry.name) is not None
        return is_candidate(entry) or detect.claimed(entry, plugins)

    return [each for each in entries if may_be(each) and not (each.sibling and may_be(replace(each, name=each.sibling)))]


@dataclass(frozen=True)
class Look:
    """Checks one candidate: is it complete, and may it be used? marked: the directory holds markers of ours."""

    storage: Storage
    wanted: Wanted = Wanted()
    marked: bool = True

    def __call__(self, entry: Entry) -> Inspection:
        """Raises UsageError where a plug-in fails; OSError where the marker of a quarantine cannot be read."""
        if entry.name in self.wanted.exclude:
            return Inspection(False, UNKNOWN, "it was used before the job failed, and is excluded", distrusted=True)
        verdict = detect.check(self.storage, entry, detect.plugins())
        if not verdict.complete:
            return verdict
        if self.wanted.since is not None and _or_oldest(verdict.written_at) <= self.wanted.since:
            return Inspection(False, UNKNOWN, "it was written before")
        mark = catalog.quarantined(self.storage, entry.name) if self.marked else None
        if mark is not None and not (mark.written_at and verdict.written_at and verdict.written_at > mark.written_at):
            return replace(verdict, complete=False, reason=f"quarantined: {mark.reason}", distrusted=True)
        try:
            faults = verify(self.storage, entry, self.wanted.verify).faults
        except FileNotFoundError:
            return replace(verdict, complete=False, reason="it vanished while it was verified")
        if faults:
            reason = f"damaged: {faults[0].file}: {faults[0].reason}"
            return replace(verdict, complete=False, reason=reason, distrusted=True)
        return verdict


def _asked_for(storage: Storage, found: Sequence[Entry], look: Callable[[Entry], Inspection], wanted: Wanted) -> Choice:
    """One checkpoint that the user has named. Raises UsageError where it cannot be used."""
    text = wanted.resume_from
    if "/" in text and text.rstrip("/").rpartition("/")[0] != storage.address:
        folder, _, name = text.rstrip("/").rpartition("/")  # in another directory than this one
        return newest_complete(folder or "/", replace(wanted, resume_from=name, pattern=""))
    name = text.rstrip("/").rpartition("/")[2]
    step = int(name) if name.isascii() and name.isdigit() else None
    named = [entry for entry in found if entry.name == name] or [
        entry for entry in found if step == step_of(entry.name, wanted.pattern)
    ]
    if not named or (step is None and named[0].name != name):
        shown = ", ".join(entry.name for family in families(found, wanted.pattern) for entry in family.members[:5]) or "nothing"
        raise UsageError(f"resume_from={text}: there is no such checkpoint in {storage.address}, which holds {shown[:200]}")
    choice = choose(named, look, 0, wanted.pattern)
    if choice.resume is None:
        reasons = "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
        raise UsageError(f"resume_from={text} cannot be used: {reasons}; name another one, or leave resume_from out")
    return Choice(replace(choice.resume, reason=f"asked for by resume_from, {choice.resume.reason}"), choice.passed_over)


def choose(candidates: Iterable[Entry], inspect: Callable[[Entry], Inspection], back: int = 0, pattern: str = "") -> Choice:
    """Choose among candidates; ``inspect`` is called newest first, no further than needed, and once for each.

    Inside a family the order is that of `families`. Between families the one whose best complete member was written last
    wins: an epoch number and a step number do not compare. The entries of one directory lie on one filesystem, so their times
    come from one clock. Of what would be chosen `back` are passed over.
    """
    listed = list(candidates)
    passed_over = {entry.name: PassedOver(entry.path, entry.unusable) for entry in listed if entry.unusable}
    usable = [entry for entry in listed if not entry.unusable]
    seen: dict[str, Inspection] = {}

    def look(entry: Entry) -> Inspection:
        if entry.name not in seen:
            seen[entry.name] = inspect(entry)
        return seen[entry.name]

    for _ in range(back):
        entry, _ = _best(families(usable, pattern), look, passed_over)
        if entry is None:
            break
        passed_over[entry.name] = PassedOver(entry.path, "complete; passed over to go back past it")
        usable.remove(entry)
    found = families(usable, pattern)
    entry, family = _best(found, look, passed_over)
    resume = None
    if entry is not None and family is not None:
        resume = _resume(entry, seen[entry.name], family, len(found), pattern)
    return Choice(resume, tuple(passed_over.values()))


def _best(
    found: Sequence[Family], look: Callable[[Entry], Inspection], passed_over: dict[str, PassedOver]
) -> tuple[Entry | None, Family | None]:
    """The one to take, and what it belongs to; the others that were looked at go to `passed_over`."""
    best: tuple[Entry | None, Family | None] = None, None
    best_at = float("-inf")
    for family in found:
        if best[0] is not None and family.newest <= best_at:
            break  # families come newest first: none of the rest can have been written later
        for entry in family.members:
            verdict = look(entry)
            if not verdict.complete:
                # "logs" beside the checkpoints is no news
                if verdict.format != UNKNOWN or verdict.distrusted or step_of(entry.name) is not None:
                    passed_over[entry.name] = PassedOver(entry.path, verdict.reason, verdict.distrusted)
                continue
            written_at = _or_oldest(verdict.written_at)
            if best[0] is None or written_at > best_at:
                best, best_at = (entry, family), written_at
            break
    return best


def _resume(entry: Entry, verdict: Inspection, family: Family, family_count: int, pattern: str) -> Resume:
    reason = f"newest complete of {len(family.members)} named {family.pattern}, {verdict.reason}"
    if family_count > 1:
        reason += f"; written last among {family_count} kinds of names"
    step = verdict.step if verdict.step is not None else step_of(entry.name, pattern)
    return Resume(entry.path, step, verdict.format, reason)


def families(entries: Iterable[Entry], pattern: str = "") -> tuple[Family, ...]:
    """Group candidates by `pattern_of` their names. The family that may hold the newest comes first."""
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[pattern_of(entry.name, pattern)].append(entry)
    found = [Family(name, _newest_first(members, pattern), _latest(members)) for name, members in groups.items()]
    # At the same time a name with a number goes first: it tells the step.
    return tuple(sorted(found, key=lambda family: (-family.newest, not numbers_of(family.members[0].name), family.pattern)))


def _newest_first(members: list[Entry], pattern: str) -> tuple[Entry, ...]:
    """By step. Where the other numbers of the names contradict the steps (epoch_1_step_900, epoch_2_step_5), by time."""
    numbers = {entry.name: numbers_of(entry.name, pattern) for entry in members}
    by_numbers = sorted(members, key=lambda entry: (numbers[entry.name], _or_oldest(entry.mtime), entry.name), reverse=True)
    if is_exact(members[0].name, pattern):
        return tuple(by_numbers)
    steps = [each[-1] if each else 0 for each in (numbers[entry.name] for entry in by_numbers)]
    if steps == sorted(steps, reverse=True):
        return tuple(by_numbers)
    by_time = sorted(members, key=lambda entry: (_or_oldest(entry.mtime), step_of(entry.name), entry.name), reverse=True)
    return tuple(by_time)


def _latest(members: list[Entry]) -> float:
    # The time of a directory is that of the last change of its list of names, not that of the save: only a check can tell.
    if any(entry.is_dir or entry.mtime is None for entry in members):
        return float("inf")
    return max(_or_oldest(entry.mtime) for entry in members)


def _or_oldest(seconds: float | None) -> float:
    return float("-inf") if seconds is None else seconds
