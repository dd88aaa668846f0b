"""Find the checkpoint to resume from in a local directory or fsspec URL: the newest complete one, or the one asked for.

`selection` decides among listed entries. This module does the I/O for it: it lists and checks the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.setting_sources import compile_pattern
from elastic_ext.checkpoints.choice import evidence
from elastic_ext.checkpoints.choice.selection import Choice, PassedOver, choose, families, or_oldest
from elastic_ext.checkpoints.directory import MARKERS, marks
from elastic_ext.checkpoints.formats import dcp, detect
from elastic_ext.checkpoints.formats.inspection import DCP, UNKNOWN, Format, Inspection, is_candidate, is_hidden
from elastic_ext.checkpoints.formats.layouts import is_part
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import grouped, step_of
from elastic_ext.checkpoints.formats.verify import Mode, verify
from elastic_ext.checkpoints.storage import Entry, Storage, open_parent, open_storage, split_path

NONE = "none"


@dataclass(frozen=True)
class Wanted:
    """Which checkpoint to look for.

    Attributes:
        resume_from: "" for the newest complete one; "none" for no checkpoint, so that the job begins from nothing; else a step,
            a name in the directory, or a path or URL.
        pattern: a glob in which {step} and {epoch} stand for a number; only names that match it, and our own, are checkpoints.
            "": any directory, and files with a known suffix.
        verify: how to verify the content before choosing a checkpoint.
        since: consider only checkpoints written after this time, in seconds since the epoch by the clock of the storage.
        without: name of one that is left out.
    """

    resume_from: str = ""
    pattern: str = ""
    verify: Mode = Mode.OFF
    since: float | None = None
    without: str = ""


def newest_complete(checkpoint_dir: str, wanted: Wanted = Wanted()) -> Choice:
    """Choose among the checkpoints directly in `checkpoint_dir`, a local path or fsspec URL.

    Raises as `newest_in` does, and UsageError if the protocol of the URL is unknown or not installed.
    """
    return newest_in(open_storage(checkpoint_dir), wanted)


def newest_in(storage: Storage, wanted: Wanted = Wanted()) -> Choice:
    """Choose among the checkpoints of a directory. A directory that does not exist yet has none.

    Raises:
        UsageError: the directory is a file or may not be read, or the checkpoint named by `resume_from` is absent or incomplete.
        OSError: the storage does not answer. Its content is then unknown, and it would be wrong to begin from nothing.
    """
    if wanted.resume_from == NONE:
        return Choice(None)
    listed = list_entries(storage)
    trackers = evidence.read_trackers(storage, listed)
    found = evidence.judged(candidates(listed, wanted.pattern, detect.plugins()), listed, trackers)
    if wanted.resume_from and not any(wanted.resume_from == each.name for entry in found for each in (entry, *entry.parts)):
        found += [each for each in listed if each.name == wanted.resume_from and not (each.unusable or is_hidden(each.name))]
    found = [each for each in found if each.name != wanted.without]
    if wanted.since is not None:
        found = [entry for entry in found if entry.mtime is None or entry.mtime > wanted.since]
    inspector = Inspector(storage, wanted, any(entry.name == MARKERS for entry in listed))
    if wanted.resume_from:
        return _asked_for(storage, found, inspector, wanted)
    choice = choose(found, inspector, wanted.pattern, evidence.tracked(found, trackers), inspector.glance)
    if any(entry.name == dcp.METADATA or entry.name.endswith(dcp.SHARD_SUFFIX) for entry in listed):
        hint = PassedOver(storage.address, f"is itself a {DCP} directory: checkpoint_dir must name the directory above it")
        return replace(choice, passed_over=(*choice.passed_over, hint))
    return choice


def list_entries(storage: Storage) -> list[Entry]:
    """Return the entries directly in the directory; none if it does not exist yet. Raises UsageError, OSError."""
    try:
        return list(storage.entries())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise UsageError(
            f"checkpoint_dir {storage.address} is a file, expected a directory: name the directory that contains it"
        ) from error
    except PermissionError as error:
        raise UsageError(
            f"checkpoint_dir {storage.address} cannot be read ({error.strerror or error}): let this user read it, or set another"
        ) from error


def candidates(entries: Iterable[Entry], pattern: str = "", plugins: Sequence[Format] = ()) -> list[Entry]:
    """Return the entries that may be checkpoints, judging by name only; files of which each rank wrote its own as one entry.

    Leave out links to another candidate beside them, and the parts of a model that is saved directly in the directory.
    """
    match = compile_pattern(pattern).fullmatch if pattern else None

    def may_be(entry: Entry) -> bool:
        if is_hidden(entry.name):
            return False
        if match is not None:
            return match(entry.name) is not None or order_of(entry.name) is not None
        return (is_candidate(entry) and not (is_part(entry.name) and not entry.is_dir)) or detect.claimed(entry, plugins)

    found = [each for each in entries if may_be(each) and not (each.sibling and may_be(replace(each, name=each.sibling)))]
    of_plugins = [each for each in found if detect.claimed(each, plugins)]
    return of_plugins + grouped(each for each in found if each not in of_plugins)


@dataclass(frozen=True)
class Inspector:
    """Inspects one candidate: whether it is complete, and whether it may be used.

    marked: whether the directory has any marks. False saves a request per candidate.
    """

    storage: Storage
    wanted: Wanted = Wanted()
    marked: bool = True

    def __call__(self, entry: Entry) -> Inspection:
        """Inspect a candidate.

        Raises:
            UsageError: a plug-in fails, or this user may not read the candidate.
            OSError: the storage does not give it, or a mark. Whether it is complete is then unknown: it is not passed over.
        """
        named = entry.name == self.wanted.resume_from or is_named(entry, self.wanted.pattern)
        found = detect.check(self.storage, entry, detect.plugins(), named)
        if found.unreadable is not None:
            _refuse_unreadable(entry, found.unreadable, self.wanted.pattern)
        if not found.complete:
            return found
        if self.wanted.since is not None and or_oldest(found.written_at) <= self.wanted.since:
            return Inspection(False, UNKNOWN, "it was written before this run began")
        mark = marks.quarantine_of(self.storage, entry.name) if self.marked else None
        if mark is not None and not (mark.written_at and found.written_at and found.written_at > mark.written_at):
            return replace(found, complete=False, reason=f"quarantined: {mark.reason}", distrusted=True)
        try:
            verified = verify(self.storage, entry, self.wanted.verify)
        except FileNotFoundError:
            return replace(found, complete=False, reason="it disappeared while it was verified")
        if verified.unreadable is not None:
            _refuse_unreadable(entry, verified.unreadable, self.wanted.pattern)
        faults = verified.faults
        if faults:
            reason = f"damaged: {faults[0].file}: {faults[0].reason}"
            return replace(found, complete=False, reason=reason, distrusted=True)
        return found

    def glance(self, entry: Entry) -> Inspection:
        """Check a candidate, whatever its marks and its content. One that cannot be read counts as incomplete."""
        return detect.check(self.storage, entry, detect.plugins(), is_named(entry, self.wanted.pattern))


def is_named(entry: Entry, pattern: str) -> bool:
    """Return whether the user's pattern names a candidate, so that it counts although its format is unknown."""
    return bool(pattern) and compile_pattern(pattern).fullmatch(entry.name) is not None


def _refuse_unreadable(entry: Entry, error: OSError, pattern: str) -> None:
    """Raise UsageError or OSError. What this user may not read and is no checkpoint by its name (lost+found) is nothing."""
    if not isinstance(error, PermissionError):
        raise error
    if not entry.is_dir or step_of(entry.name, pattern) is not None:
        raise UsageError(
            f"the checkpoint {entry.path} cannot be read ({error.strerror or error}): let this user read it, or move it away"
        ) from error


def _asked_for(storage: Storage, found: Sequence[Entry], inspect: Callable[[Entry], Inspection], wanted: Wanted) -> Choice:
    """Choose the checkpoint that the user named. Raises UsageError if it cannot be used."""
    text = wanted.resume_from.rstrip("/")
    folder, name = split_path(text)
    if "/" in text and folder != storage.address:
        return newest_in(open_parent(text)[0], replace(wanted, resume_from=name, pattern=""))
    step = int(name) if name.isascii() and name.isdigit() else None
    named = [entry for entry in found if name in (entry.name, *(part.name for part in entry.parts))]
    if not named and step is not None:
        named = [entry for entry in found if step_of(entry.name, wanted.pattern) == step]
    if not named:
        shown = ", ".join(entry.name for family in families(found, wanted.pattern) for entry in family.members[:5]) or "nothing"
        raise UsageError(f"resume_from={text}: no such checkpoint in {storage.address}, which holds {shown[:200]}")
    choice = choose(named, inspect, wanted.pattern)
    if choice.resume is None:
        reasons = choice.question or "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
        raise UsageError(f"resume_from={text} cannot be used: {reasons}; name another one, or leave resume_from out")
    return Choice(replace(choice.resume, reason=f"named by resume_from, {choice.resume.reason}"), choice.passed_over)
