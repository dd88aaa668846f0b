"""Find the checkpoint in a local directory or fsspec URL that a job resumes from: the newest complete one, or the one asked for.

`recorded` and `decisions` decide among listed entries. This module does the I/O for them: it lists and checks the candidates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings, compile_pattern
from elastic_ext.checkpoints import verifying
from elastic_ext.checkpoints.choice import decisions, rank_files, recorded
from elastic_ext.checkpoints.choice.decisions import Choice
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.formats import candidates, detect, layouts
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Inspection, is_candidate, is_hidden, order_of, step_of
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import RecordBook, Trust, files_at
from elastic_ext.checkpoints.storage import Entry, Storage, open_parent, open_storage, split_path

NONE = "none"

# What other files of a job are called. No checkpoint has such a suffix.
OTHER_SUFFIXES = (
    *(".txt", ".log", ".out", ".err", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".csv", ".tsv", ".md", ".py", ".sh"),
    *(".png", ".svg", ".pdf", ".html", ".lock", ".pid", ".gz", ".parquet"),
)


@dataclass(frozen=True)
class Wanted:
    # "" for the newest complete one; "none" for no checkpoint, so that the job begins from nothing; else a step, a name in the
    # directory, or a path or URL.
    resume_from: str = ""
    # A glob in which {step} and {epoch} stand for a number; only names that match it, and our own, are checkpoints. "": any
    # directory, and files with a known suffix.
    pattern: str = ""
    verify: verifying.Mode = verifying.Mode.OFF  # how to verify the content before choosing a checkpoint
    # Consider only checkpoints written after this time, in seconds since the epoch by the clock of the storage.
    since: float | None = None
    without: str = ""  # name of one that is left out
    of_scripts: bool = False  # leave out those of `Checkpointer`


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
    trackers = read_trackers(storage, listed)
    found = judged(candidates_among(listed, wanted.pattern), listed, trackers)
    if wanted.resume_from and not any(wanted.resume_from == each.name for entry in found for each in (entry, *entry.parts)):
        found += [each for each in listed if each.name == wanted.resume_from and not (each.unusable or is_hidden(each.name))]
    found = [
        each for each in found if each.name != wanted.without and not (wanted.of_scripts and order_of(each.name) is not None)
    ]
    if wanted.since is not None:
        # of a directory that is written over in place the time does not change
        found = [entry for entry in found if entry.is_dir or entry.mtime is None or entry.mtime > wanted.since]
    marked = any(entry.name == own_files.MARKERS for entry in listed)
    # our own checkpoints say on their own which is the newest, without the record
    ours = any(order_of(each.name) for each in found)
    book = RecordBook(storage) if marked and (wanted.resume_from or not ours) else None
    loaded = _loaded(book, listed) if book is not None and not ours else []
    inspector = Inspector(storage, wanted, marked, frozenset(each.name for each in loaded))
    found += loaded
    if wanted.resume_from:
        found = rank_files.joined(found, book, wanted.pattern) if book is not None else found
        return _asked_for(storage, found, lambda each: _by_record(each, inspector(each), book), wanted)

    def alike(one: Entry, other: Entry) -> bool:
        return _have_same_bytes(storage, one, other)

    left_out = decisions.families(left_out_of(found, listed)) if wanted.pattern else ()
    sight = decisions.Sight(inspector, wanted.pattern, left_out, tracked(found, trackers), inspector.glance, alike)
    choice = recorded.choose(found, book, sight) if book is not None else decisions.choose(found, sight)
    if any(entry.name == layouts.METADATA or entry.name.endswith(layouts.SHARD_SUFFIX) for entry in listed):
        reason = f"is itself a {candidates.DCP} directory: checkpoint_dir must name the directory above it"
        hint = decisions.PassedOver(storage.address, reason)
        return replace(choice, passed_over=(*choice.passed_over, hint))
    return choice


def _loaded(book: RecordBook, listed: Iterable[Entry]) -> list[Entry]:
    """Return the files of unknown formats that the job has saved, of a kind that its scripts were seen to load."""
    return [
        each
        for each in listed
        if book.known(each) is not None
        and pattern_of(each.name) in book.loads
        and not (each.is_dir or each.unusable or is_hidden(each.name) or is_candidate(each) or each.name.endswith(OTHER_SUFFIXES))
    ]


TAIL = 1 << 16  # bytes at the end of a file: of torch.save, those with the checksums of all tensors


def _have_same_bytes(storage: Storage, one: Entry, other: Entry) -> bool:
    """Return whether two candidates have the same files, by names, sizes and ends. Raises OSError."""
    if one.parts or other.parts:
        pairs = zip(*(sorted(each.parts, key=lambda part: part.name) for each in (one, other)), strict=False)
        return len(one.parts) == len(other.parts) and all(_have_same_bytes(storage, *each) for each in pairs)
    if one.is_link or other.is_link or one.is_dir != other.is_dir:
        return False  # a link may lead anywhere
    if not one.is_dir and one.size != other.size:
        return False
    first, second = files_at(storage, one.name), files_at(storage, other.name)
    if {name: each.size for name, each in first.items()} != {name: each.size for name, each in second.items()}:
        return False

    def end(entry: Entry, name: str, size: int) -> bytes:
        with storage.open(f"{entry.name}/{name}" if name else entry.name) as file:
            file.seek(max(0, size - TAIL))
            return file.read(TAIL)

    return all(end(one, name, each.size) == end(other, name, each.size) for name, each in first.items())


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


def candidates_among(entries: Iterable[Entry], pattern: str = "") -> list[Entry]:
    """Return the entries that may be checkpoints, judging by name only; files of which each rank wrote its own as one entry.

    Leave out links to another candidate beside them, and the parts of a model that is saved directly in the directory.
    """
    match = compile_pattern(pattern).fullmatch if pattern else None

    def may_be(entry: Entry) -> bool:
        if is_hidden(entry.name):
            return False
        if match is not None:
            return match(entry.name) is not None or order_of(entry.name) is not None
        return (is_candidate(entry) and (entry.is_dir or not candidates.is_part(entry.name))) or detect.claimed(entry)

    found = [each for each in entries if may_be(each) and not (each.sibling and may_be(replace(each, name=each.sibling)))]
    of_plugins = [each for each in found if detect.claimed(each)]
    return of_plugins + candidates.grouped(each for each in found if each not in of_plugins)


def left_out_of(found: Iterable[Entry], listed: Iterable[Entry]) -> list[Entry]:
    """Return the candidates that the user's pattern leaves out. found: those that it names."""
    names = {entry.name for entry in found}
    return [entry for entry in candidates_among(listed) if entry.name not in names]


@dataclass(frozen=True)
class Inspector:
    """Inspects one candidate: whether it is complete, and whether it may be used.

    marked: whether the directory has any marks. False saves a request per candidate. named: names that count in any format.
    """

    storage: Storage
    wanted: Wanted = Wanted()
    marked: bool = True
    named: Collection[str] = ()
    _checked: dict[Entry, Inspection] = field(default_factory=dict)

    def __call__(self, entry: Entry) -> Inspection:
        """Inspect a candidate.

        Raises:
            UsageError: a plug-in fails, or this user may not read the candidate.
            OSError: the storage does not give it, or a mark. Whether it is complete is then unknown: it is not passed over.
        """
        found = self.glance(entry)
        if found.unreadable is not None:
            _refuse_unreadable(entry, found.unreadable, self.wanted.pattern)
        if not (found.complete or found.compared):
            return found
        if self.wanted.since is not None and decisions.or_oldest(found.written_at) <= self.wanted.since:
            return Inspection(False, UNKNOWN, "it was written before this run began")
        mark = own_files.quarantine_of(self.storage, entry.name) if self.marked else None
        if mark is not None and mark.holds(found.written_at):
            reason = f"quarantined: {mark.reason}"
            return replace(found, complete=False, compared=False, reason=reason, distrusted=not mark.from_nothing)
        try:
            verified = verifying.verify(self.storage, entry, self.wanted.verify)
        except FileNotFoundError:
            return replace(found, complete=False, compared=False, reason="it disappeared while it was verified")
        if verified.unreadable is not None:
            _refuse_unreadable(entry, verified.unreadable, self.wanted.pattern)
        faults = verified.faults
        if faults:
            reason = f"damaged: {faults[0].file}: {faults[0].reason}"
            return replace(found, complete=False, compared=False, reason=reason, distrusted=True)
        return found

    def glance(self, entry: Entry) -> Inspection:
        """Check a candidate, once, without its marks and without reading all of it. What cannot be read counts as incomplete."""
        if entry not in self._checked:
            asked_for = entry.name in self.named or entry.name == self.wanted.resume_from
            named = asked_for or is_named(entry, self.wanted.pattern)
            self._checked[entry] = detect.check(self.storage, entry, named)
        return self._checked[entry]


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


def _by_record(entry: Entry, inspection: Inspection, book: RecordBook | None) -> Inspection:
    """Return the inspection of what the user names; as incomplete if the record says that it is of two saves."""
    if not inspection.complete or book is None or book.known(entry) is None:
        return inspection
    verdict = book.verdict(entry)
    torn = verdict.trust is Trust.TORN
    return replace(inspection, complete=False, reason=verdict.why, distrusted=True) if torn else inspection


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
        present = decisions.families(found, wanted.pattern)
        shown = ", ".join(entry.name for family in present for entry in family.members[:5]) or "nothing"
        raise UsageError(f"resume_from={text}: no such checkpoint in {storage.address}, which holds {shown[:200]}")
    choice = decisions.choose(named, decisions.Sight(inspect, wanted.pattern))
    if choice.resume is None:
        reasons = choice.question or "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
        raise UsageError(f"resume_from={text} cannot be used: {reasons}; name another one, or leave resume_from out")
    return Choice(replace(choice.resume, reason=f"named by resume_from, {choice.resume.reason}"), choice.passed_over)


# What lies beside checkpoints and says which of them are whole: files in which a tool names its newest, and marks of saves.
# DeepSpeed writes `latest`, Megatron `latest_checkpointed_iteration.txt`, nanotron `latest.txt`, detectron2 and mmengine
# `last_checkpoint`, each once the save is done. NeMo 2 keeps a file NAME-unfinished beside a checkpoint until then.

MAX_TRACKER = 4096  # bytes: a path, or a number
_TRACKER = re.compile(r"(latest|last)([-_.](checkpoint|checkpointed|ckpt|iteration|iter|step|epoch|tag|txt))*")


def read_trackers(storage: Storage, listed: Iterable[Entry]) -> dict[str, str]:
    """Return by name the text of the files in which a tool names its newest checkpoint. One that may not be read says nothing.

    Raises OSError.
    """
    found = {}
    for entry in listed:
        if _TRACKER.fullmatch(entry.name) and not (entry.is_dir or entry.unusable) and 0 < entry.size <= MAX_TRACKER:
            try:
                found[entry.name] = storage.read(entry.name).decode().strip()
            except (FileNotFoundError, PermissionError, UnicodeDecodeError):
                continue
    return found


def judged(found: Sequence[Entry], listed: Iterable[Entry], trackers: Mapping[str, str]) -> list[Entry]:
    """Return the candidates, each with what the files beside it say of it. Pure.

    What is newer than the one that a tracker names is not whole, if it is of several files: a single file itself shows its end.
    """
    names = {entry.name for entry in listed}
    return [each if each.torn else replace(each, torn=_torn(each, found, names, trackers)) for each in found]


def tracked(found: Sequence[Entry], trackers: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the candidates that trackers name. Pure."""
    named = (_named(found, text) for text in trackers.values())
    return frozenset(entry.name for entry in named if entry is not None)


def _torn(entry: Entry, found: Sequence[Entry], names: Collection[str], trackers: Mapping[str, str]) -> str:
    for stem in {entry.name, entry.name.removesuffix(".ckpt"), entry.name.removesuffix(".nemo")}:
        if f"{stem}{own_files.UNFINISHED}" in names:
            return f"{stem}{own_files.UNFINISHED} is there: the save did not finish"
    if not (entry.is_dir or entry.parts) or order_of(entry.name) is not None:  # our own say it themselves
        return ""
    for tracker, text in trackers.items():
        newest = _named(found, text)
        is_same_family = newest is not None and candidates.family_of(newest.name) == candidates.family_of(entry.name)
        if newest is not None and is_same_family and candidates.numbers_of(entry.name) > candidates.numbers_of(newest.name):
            return f"{tracker} still names {newest.name}: the save did not finish"
    return ""


def _named(found: Sequence[Entry], text: str) -> Entry | None:
    """Return the candidate that the text of a tracker names: by its name, its path, or its step."""
    name = text.rstrip("/").rpartition("/")[2]
    for entry in found:
        if name in (entry.name, *(part.name for part in entry.parts)):
            return entry
    step = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else None
    return next((entry for entry in found if entry.is_dir and step is not None and step_of(entry.name) == step), None)


def newest_checkpoint(settings: Settings) -> str | None:
    """Return the path of the newest complete checkpoint in `checkpoint_dir`, or None. Any thread may call this."""
    if settings.checkpoint_dir is None:
        return None
    newest = newest_complete(settings.checkpoint_dir, Wanted(pattern=settings.checkpoint_pattern)).resume
    return newest.path if newest is not None else None
