"""Detect the format of a candidate and check it. The package docstring describes the interface for custom formats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.formats import dcp, layouts, single_files
from elastic_ext.checkpoints.formats.inspection import (
    DCP,
    SAVED_MODEL,
    TORCH_SAVE,
    TORCH_SAVE_SUFFIXES,
    UNKNOWN,
    Format,
    Inspection,
    thread_pool,
)
from elastic_ext.checkpoints.formats.manifest import MANIFEST
from elastic_ext.checkpoints.formats.names import parts_of
from elastic_ext.checkpoints.storage import Entry, Storage, files_of

ENTRY_POINTS = "elastic_ext.formats"
NOT_KNOWN = "not a checkpoint of a known format: if it is one, set checkpoint_pattern to its name"
SEVERAL = "it holds checkpoints of several steps: to resume from the newest of them, set checkpoint_dir to it"
_ZIP = b"PK"  # the first bytes of every zip record


@dataclass(frozen=True)
class _DirectoryFormat:
    """One directory format. matches: gets the directory's name and the names in it. check: gets the usable entries in it."""

    matches: Callable[[str, Sequence[str]], bool]
    check: Callable[[Storage, Entry, Sequence[Entry]], Inspection]


# The first match wins: our own format and Lightning's also contain the files of torch.distributed.checkpoint.
_DIRECTORY_FORMATS = (
    _DirectoryFormat(dcp.is_own, dcp.check_own),
    _DirectoryFormat(dcp.is_lightning, dcp.check_lightning),
    _DirectoryFormat(dcp.matches, layouts.check_shards),
)

# Files that make a directory count as complete. A copy writes them last, in this order; a removal deletes them first.
COMMIT_FILES = (MANIFEST, dcp.METADATA, layouts.STATE)


def check(storage: Storage, entry: Entry, plugins: Sequence[Format] = (), named: bool = False) -> Inspection:
    """Check one candidate. An unreadable one is incomplete, with the reason. Raises UsageError if a plug-in fails.

    named: the user's checkpoint_pattern names it, so that it counts although its format is unknown.
    """
    format = DCP if entry.is_dir else TORCH_SAVE
    try:
        for plugin in plugins:
            if _claims(plugin, entry):
                format = type(plugin).__name__
                with _naming(plugin, entry):
                    return plugin.check(storage, entry)
        found = _check_directory(storage, entry, named) if entry.is_dir else _check_files(storage, entry)
    except FileNotFoundError:
        return Inspection(False, format, "it disappeared after it was listed")
    except OSError as error:
        away = None if storage.means_damage(error) else error
        return Inspection(False, format, f"it cannot be read: {error.strerror or error}", unreadable=away)
    return replace(found, complete=False, reason=entry.torn, compared=True) if entry.torn and found.complete else found


def _check_directory(storage: Storage, entry: Entry, named: bool) -> Inspection:
    # Links to directories are not followed, see `files_of`. Unusable entries do not count.
    content = [item for item in storage.entries(entry.name) if not item.unusable and not (item.is_link and item.is_dir)]
    names = [item.name for item in content]
    for format in _DIRECTORY_FORMATS:
        if format.matches(entry.name, names):
            return format.check(storage, entry, content)
    layout = layouts.layout_of(entry.name, layouts.top_names(content))
    found = layouts.check(storage, entry, content, layout) if layout is not None else None
    if named and (found is None or (not found.complete and found.format in (UNKNOWN, SAVED_MODEL))):
        return _unknown(dict(files_of(storage, entry.name)).values())
    several = layouts.holds_several(entry.name, layouts.top_names(content))
    return found or Inspection(False, UNKNOWN, SEVERAL if several else NOT_KNOWN)


def _unknown(files: Iterable[Entry]) -> Inspection:
    """Return the result for what only the user knows to be a checkpoint."""
    listed = list(files)
    if not any(file.size for file in listed):
        return Inspection(False, UNKNOWN, "it is empty")
    times = [file.mtime for file in listed if file.mtime is not None]
    size = sum(file.size for file in listed)
    return Inspection(True, UNKNOWN, "not empty; its format is unknown", max(times, default=None), size=size)


def _check_files(storage: Storage, entry: Entry) -> Inspection:
    """Check a file, or the files of all ranks."""
    if not entry.parts:
        return _check_file(storage, entry)
    with thread_pool() as pool:
        found = list(pool.map(lambda part: _check_file(storage, part), entry.parts))
    bad = next((index for index, each in enumerate(found) if not each.complete), None)
    if bad is not None:
        return replace(found[bad], reason=f"{entry.parts[bad].name}: {found[bad].reason}")
    reason = f"the files of all {len(found)} ranks are there, {found[0].reason}"
    return replace(
        found[0], reason=reason, written_at=entry.mtime, size=entry.size, parts=parts_of(part.name for part in entry.parts)
    )


def _check_file(storage: Storage, entry: Entry) -> Inspection:
    if entry.size == 0:
        return Inspection(False, TORCH_SAVE, "the file is empty")
    with storage.open(entry.name) as file:
        if entry.name.endswith(single_files.SAFETENSORS_SUFFIX):
            return single_files.check(entry, file)
        start = file.read(single_files.LEGACY_START)
        by_suffix = entry.name.endswith(TORCH_SAVE_SUFFIXES)
        if by_suffix or start.startswith(_ZIP) or single_files.is_legacy(start):
            found = single_files.check(entry, file)
            if by_suffix or found.format != UNKNOWN:
                return replace(found, format=TORCH_SAVE) if found.format == UNKNOWN else found
    return _unknown([entry])  # only a file that matches the user's checkpoint_pattern gets here


def claimed(entry: Entry, plugins: Sequence[Format]) -> bool:
    """Return whether a plug-in claims this name. Raises UsageError if a plug-in fails."""
    return any(_claims(plugin, entry) for plugin in plugins)


@functools.cache
def plugins() -> tuple[Format, ...]:
    """Return the user-defined formats from the entry points. Raises UsageError if one cannot be loaded."""
    found: list[Format] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
        try:
            value = point.load()
            found.append(value() if isinstance(value, type) else value)
        except Exception as error:
            raise UsageError(f"{where} cannot be loaded: {error!r}") from error
        missing = [name for name in ("claims", "check") if not callable(getattr(found[-1], name, None))]
        if missing:
            raise UsageError(f"{where} has no method {missing[0]}; see elastic_ext.checkpoints.formats.Format")
    return tuple(found)


def _claims(plugin: Format, entry: Entry) -> bool:
    with _naming(plugin, entry):
        return plugin.claims(entry)


@contextmanager
def _naming(plugin: Format, entry: Entry) -> Iterator[None]:
    """Turn an exception of a plug-in into a UsageError that names the plug-in. OSError passes: the storage failed."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise UsageError(f"the checkpoint format {type(plugin).__name__} failed on {entry.name}: {error!r}") from error
