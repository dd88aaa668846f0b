"""Detect the format of a candidate and check it, in seconds. The package docstring describes the interface for custom formats."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import entry_points

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, ManifestError, decode
from elastic_ext.checkpoints.formats import candidates, layouts, single_files
from elastic_ext.checkpoints.formats.candidates import (
    DCP,
    HUGGING_FACE,
    OWN,
    SAVED_MODEL,
    TORCH_SAVE,
    UNKNOWN,
    Format,
    Inspection,
)
from elastic_ext.checkpoints.storage import Entry, Storage, files_of, thread_pool

ENTRY_POINTS = "elastic_ext.formats"
NOT_KNOWN = "not a checkpoint of a known format: if it is one, set checkpoint_pattern to its name"
SEVERAL = "it holds checkpoints of several steps: to resume from the newest of them, set checkpoint_dir to it"
_ZIP = b"PK"  # the first bytes of every zip record


# Files that make a directory count as complete. A copy writes them last, in this order; a removal deletes them first.
COMMIT_FILES = (MANIFEST, layouts.METADATA, layouts.STATE)


# Our own directories: those of torch, and a manifest (`directory/own_files.py`), written last.


def is_own(name: str, names: Sequence[str]) -> bool:
    """Return whether a directory is ours, complete or not.

    `manifest.json` is a common name. If it lies beside shards it is ours, even in a renamed directory.
    """
    return candidates.order_of(name) is not None or (MANIFEST in names and layouts.has_shards(names))


def check_own(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check that every file in the manifest exists with the right size. Raises OSError."""
    found = {item.name: item for item in content}
    if MANIFEST not in found:
        return Inspection(False, OWN, f"no {MANIFEST}, the save did not finish")
    try:
        manifest = decode(storage.read(f"{entry.name}/{MANIFEST}"))
    except ManifestError as error:
        return Inspection(False, OWN, str(error))
    for folder in sorted({file.name.rpartition("/")[0] for file in manifest.files} - {""}):
        found |= {f"{folder}/{item.name}": item for item in storage.listed(f"{entry.name}/{folder}")}
    faults = [f"{file} {fault}" for file, fault in size_faults(manifest, found).items()]
    if faults:
        return Inspection(False, OWN, layouts.summary(faults))
    reason = f"manifest intact, {counted(len(manifest.files), 'file')} of the right size"
    return Inspection(True, OWN, reason, found[MANIFEST].mtime, manifest.step, manifest.epoch, manifest.size)


def size_faults(manifest: Manifest, found: Mapping[str, Entry]) -> dict[str, str]:
    """Return the faults of a manifest's files by name: "is missing" or "has ... bytes". Pure."""
    faults = {}
    for file in manifest.files:
        there = found.get(file.name)
        if there is None:
            faults[file.name] = "is missing"
        elif there.is_dir or there.size != file.size:
            faults[file.name] = f"has {there.size} bytes, expected {file.size}"
    return faults


def read_manifest(storage: Storage, name: str, files: Collection[str]) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it is not ours. Other programs also write a manifest.json.

    files: names of the checkpoint's files.

    Raises ManifestError if the manifest is ours and damaged, OSError.
    """
    if MANIFEST not in files:
        return None
    data = storage.read(f"{name}/{MANIFEST}")
    return decode(data) if b'"generation"' in data or layouts.has_shards(files) else None


def check(storage: Storage, entry: Entry, named: bool = False) -> Inspection:
    """Check one candidate. An unreadable one is incomplete, with the reason. Raises UsageError if a plug-in fails.

    named: the user's checkpoint_pattern names it, so that it counts although its format is unknown.
    """
    format = DCP if entry.is_dir else TORCH_SAVE
    try:
        for plugin in plugins():
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
    if named and found.compared and not entry.is_dir:  # in a form that does not show its end
        found = replace(found, complete=True)
    return replace(found, complete=False, reason=entry.torn, compared=True) if entry.torn and found.complete else found


def _check_directory(storage: Storage, entry: Entry, named: bool) -> Inspection:
    # Links to directories are not followed, see `files_of`. Unusable entries do not count.
    content = [item for item in storage.entries(entry.name) if not item.unusable and not (item.is_link and item.is_dir)]
    names = [item.name for item in content]
    if layouts.UNFINISHED in names:
        return Inspection(False, HUGGING_FACE, f"{layouts.UNFINISHED} is there: the save did not finish")
    if is_own(entry.name, names):  # it also contains the files of torch.distributed.checkpoint
        return check_own(storage, entry, content)
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
    steps = sorted({each.step for each in found if each.step is not None})
    mixed = layouts.of_two_saves(steps) if len(steps) > 1 else ""
    if not mixed and candidates.step_of(entry.name) is None:
        mixed = layouts.two_moments(entry.parts)
    if mixed:
        return replace(found[0], complete=False, reason=mixed, distrusted=True, compared=True)
    reason = f"the files of all {len(found)} ranks are there, {found[0].reason}"
    kinds = candidates.kinds_of(part.name for part in entry.parts)
    return replace(found[0], reason=reason, written_at=entry.mtime, size=entry.size, kinds=kinds)


def _check_file(storage: Storage, entry: Entry) -> Inspection:
    if entry.size == 0:
        return Inspection(False, TORCH_SAVE, "the file is empty")
    with storage.open(entry.name) as file:
        if entry.name.endswith(single_files.SAFETENSORS_SUFFIX):
            return single_files.check(entry, file)
        by_suffix = entry.name.endswith(candidates.TORCH_SAVE_SUFFIXES)
        if by_suffix or file.read(len(_ZIP)) == _ZIP:
            found = single_files.check(entry, file)
            if by_suffix or found.format != UNKNOWN:
                return replace(found, format=TORCH_SAVE) if found.format == UNKNOWN else found
    return _unknown([entry])  # only a file that matches the user's checkpoint_pattern gets here


def claimed(entry: Entry) -> bool:
    """Return whether a plug-in claims this name. Raises UsageError if a plug-in fails."""
    return any(_claims(plugin, entry) for plugin in plugins())


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
