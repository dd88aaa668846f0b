"""What lies in a directory that has no checkpoint to resume from: some further down, or of an unknown format.

A job that begins from nothing beside them loses work, so it says where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.choice.listing import OTHER_SUFFIXES, Wanted, list_entries, newest_in
from elastic_ext.checkpoints.formats import candidates, detect, layouts
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, is_candidate, is_hidden, says_step, step_of
from elastic_ext.checkpoints.storage import Entry, Storage, files_of, open_storage

MAX_DEPTH = 4
MAX_FOLDERS = 50  # listed at most
MAX_NAMES = 2000  # in one of them: a directory with more is one of data
MAX_SHOWN = 3
FROM_SCRATCH = "a script that trusts resume_from() begins from scratch"

_WORDS = frozenset({"checkpoint", "checkpoints", "ckpt", "model", "state", "weights", "latest", "last"})


def seen_in(storage: Storage, pattern: str = "") -> str:
    """Return what lies there, with paths, and what to set, for people; "" if nothing looks like a checkpoint.

    For a directory in which nothing was chosen. Reads names, and of candidates below it what a check reads.
    """
    try:
        listed = list_entries(storage)
        itself = _itself(storage, listed)
        if itself:
            return itself
        below, unknown_below = _below(storage, listed, pattern)
        seen = (*below, *unknown_below)
        named = [entry for entry in listed if _may_hold(entry) and step_of(entry.name) is not None][:MAX_FOLDERS]
        unread = [  # directories with a step in their names and files of no known format
            entry.path
            for entry in named
            if detect.check(storage, entry).format == UNKNOWN
            and next(files_of(storage, entry.name), None) is not None
            and not any(each.startswith(f"{entry.path}/") for each in seen)
        ]
        unknown = [*unread, *_unknown(listed), *unknown_below]
    except (OSError, UsageError) as error:
        return f"what lies there cannot be looked at: {error}"
    said = []
    if below:
        said.append(f"checkpoints lie further down: {_shown(below)}; set checkpoint_dir to the directory that holds them")
    if unknown:
        said.append(f"of an unknown format: {_shown(unknown)}; if they are checkpoints, set checkpoint_pattern to their names")
    return "; ".join(said)


def _itself(storage: Storage, listed: Sequence[Entry]) -> str:
    layout = layouts.layout_of("", layouts.top_names([each for each in listed if not each.unusable]))
    if layout is None or layout.needs is None or any(is_candidate(each) and says_step(each.name) for each in listed):
        return ""  # a tool leaves some of these files above its checkpoints, too
    below = (f"{each.name}/{path}" for each in listed if _may_hold(each) for path, _ in files_of(storage, each.name))
    if not any(re.fullmatch(layout.needs[1], path) for path in chain((each.name for each in listed), below)):
        return ""
    what = f"{storage.address} looks like a checkpoint of {layout.format} itself"
    return f"{what}: set checkpoint_dir to the directory above it"


def _unknown(listed: Sequence[Entry]) -> list[str]:
    """Return the paths of files that are no candidates of a known format, but by their names may be checkpoints."""

    def may_be(entry: Entry) -> bool:
        if is_hidden(entry.name) or is_candidate(entry) or entry.unusable or not entry.size:
            return False
        if entry.name.endswith(OTHER_SUFFIXES) or "tfevents" in entry.name:
            return False
        return step_of(entry.name) is not None or not _WORDS.isdisjoint(candidates.words_of(entry.name))

    return [entry.path for entry in listed if may_be(entry)]


def _below(storage: Storage, listed: Sequence[Entry], pattern: str) -> tuple[list[str], list[str]]:
    """Return the paths of checkpoints below the directories in a directory, the newest of each, what was written last first.

    The second list has those of an unknown format, of directories without others. Only names that say a step count there.
    """
    found: list[tuple[float, str]] = []
    unknown: list[str] = []
    for folder, content in _folders(storage, listed):
        try:
            choice = newest_in(open_storage(storage.path(folder)), Wanted(pattern=pattern))
        except (OSError, UsageError):
            continue  # only what can be read is worth a hint
        times = {entry.path: entry.mtime or 0.0 for entry in content}
        if choice.resume is not None:
            found.append((-times.get(choice.resume.path, 0.0), choice.resume.path))
        elif choice.question:
            newest = max((entry.path for entry in content if is_candidate(entry)), key=lambda path: (times[path], path))
            found.append((-times[newest], newest))
        else:
            named = [entry for entry in content if not entry.is_dir and says_step(entry.name)]
            unknown += _unknown(sorted(named, key=lambda entry: candidates.numbers_of(entry.name)))[-1:]
    return [path for _, path in sorted(found)], unknown


def _folders(storage: Storage, listed: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield path and content of the directories below that are no checkpoints themselves, those nearer to the top first."""
    waiting = [(entry.name, 1) for entry in listed if _may_hold(entry)]
    for _ in range(MAX_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.pop(0)
        try:
            content = list(islice(storage.entries(folder), MAX_NAMES))
        except (FileNotFoundError, PermissionError):
            continue
        is_one = layouts.layout_of(folder.rpartition("/")[2], layouts.top_names(content)) is not None
        if is_one or len(content) in (0, MAX_NAMES):
            continue
        yield folder, content
        if depth < MAX_DEPTH:
            waiting += [(f"{folder}/{entry.name}", depth + 1) for entry in content if _may_hold(entry)]


def _may_hold(entry: Entry) -> bool:
    return entry.is_dir and not (entry.is_link or is_hidden(entry.name) or entry.unusable)


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_SHOWN} more" if len(paths) > MAX_SHOWN else ""
    return ", ".join(paths[:MAX_SHOWN]) + more
