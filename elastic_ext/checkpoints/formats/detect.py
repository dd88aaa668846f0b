"""Detect the format of a candidate and check it, in seconds; or verify that it holds what was written, at the speed of the
storage.

The package docstring describes the interface for custom formats. To verify compares sizes and checksums, several files at once.
Our own checkpoints have a checksum for each file. Other formats are verified by what they contain: the CRC of each record of a
zip archive (a torch.save file, or one tensor in torch.distributed.checkpoint), the header and size of safetensors, the offsets in
`.metadata`. A format without checksums cannot reveal a flipped bit; the notes of the result say so.
"""

from __future__ import annotations

import enum
import functools
import io
import json
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import IO

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, ManifestError, checksum, decode
from elastic_ext.checkpoints.formats import candidates, layouts, single_files
from elastic_ext.checkpoints.formats.candidates import (
    DCP,
    HUGGING_FACE,
    OWN,
    SAVED_MODEL,
    TORCH_SAVE,
    UNKNOWN,
    Content,
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
    reason = f"manifest intact, {len(manifest.files)} files of the right size"
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


# Verify.

SAMPLE = 0.1  # fraction of the files that Mode.SAMPLED reads; at least one file


class Mode(enum.Enum):
    """OFF: verify nothing. SAMPLED: sizes of all files, content of a random sample. FULL: all content."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


Count = Callable[[int], None]
"""Called with the bytes that a thread has read since it called this last."""


@dataclass(frozen=True)
class Remark:
    """A fault or note about one file. file: its name relative to the checkpoint. reason: text for people."""

    file: str
    reason: str


@dataclass(frozen=True)
class Verification:
    faults: tuple[Remark, ...]  # damaged or missing files, by name
    files: int  # number of files in the checkpoint
    size: int  # bytes of the files whose content was read
    notes: tuple[Remark, ...] = ()  # files that could not be verified or do not belong to the checkpoint
    unreadable: OSError | None = None  # why the storage did not give a file, which may be sound; None if it gave all

    @property
    def sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class _File:
    """One file to read. checksum: "" unless the checkpoint is ours. items: where its tensors lie, if it is a shard."""

    name: str
    size: int
    checksum: str = ""
    items: tuple[layouts.Item, ...] = ()


_Plan = tuple[list[_File], list[Remark], list[Remark]]
"""The files to read; and from the listing alone, faults and notes."""


def verify(
    storage: Storage,
    checkpoint: Entry,
    mode: Mode = Mode.FULL,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int | None = None,
) -> Verification:
    """Verify a checkpoint against its manifest, or else by the means of its format.

    Args:
        threads: number of files to read at once; by default one per core.
        progress: called with the bytes done and the total bytes, by one thread at a time.
        seed: seed for the random sample; by default the sample differs each time.

    Raises OSError if the storage does not answer. A missing or unreadable file is a fault.
    """
    if mode is Mode.OFF:
        return Verification((), 0, 0)
    try:
        files, faults, notes = _plan(storage, checkpoint)
    except (ManifestError, single_files.PeekError) as error:
        file = MANIFEST if isinstance(error, ManifestError) else layouts.METADATA
        return Verification((Remark(file, str(error)),), 0, 0)
    chosen = files
    if mode is Mode.SAMPLED and chosen:
        chosen = random.Random(seed).sample(chosen, max(1, round(len(chosen) * SAMPLE)))
    total, done, lock = sum(file.size for file in chosen), 0, threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += size
                progress(done, total)

    with thread_pool(threads) as pool:
        # The largest first, so that no thread is left to read it alone at the end.
        in_order = sorted(chosen, key=lambda file: -file.size)
        results = list(pool.map(lambda file: _read_file(storage, checkpoint, file, count), in_order))
    by_file = [(file.name or checkpoint.name, content) for file, content in zip(in_order, results, strict=True)]
    faults += [Remark(name, content.fault) for name, content in by_file if content.fault]
    notes += [Remark(name, content.note) for name, content in by_file if content.note]
    unreadable = next((content.unreadable for content in results if content.unreadable is not None), None)
    return Verification(tuple(sorted(faults, key=lambda fault: fault.file)), len(files), total, tuple(notes), unreadable)


def _plan(storage: Storage, checkpoint: Entry) -> _Plan:
    """Plan what to read. Raises ManifestError, PeekError, OSError."""
    if not checkpoint.is_dir:
        return [_File(part.name if checkpoint.parts else "", part.size) for part in checkpoint.parts or (checkpoint,)], [], []
    found = dict(files_of(storage, checkpoint.name))
    manifest = read_manifest(storage, checkpoint.name, found)
    return _plan_by_metadata(storage, checkpoint, found) if manifest is None else _plan_by_manifest(manifest, found)


def _plan_by_manifest(manifest: Manifest, found: Mapping[str, Entry]) -> _Plan:
    faults = size_faults(manifest, found)
    files = [_File(file.name, file.size, file.checksum) for file in manifest.files if file.name not in faults]
    known = {MANIFEST, *(file.name for file in manifest.files)}
    notes = [Remark(name, f"not in {MANIFEST}") for name in found if name not in known]
    return files, [Remark(name, f"it {fault}") for name, fault in faults.items()], notes


def _plan_by_metadata(storage: Storage, checkpoint: Entry, found: Mapping[str, Entry]) -> _Plan:
    """Plan by each `.metadata`, which lies beside its shards, maybe in a subdirectory. Read all other files as they are."""
    files = [_File(name, entry.size) for name, entry in found.items() if not name.endswith(layouts.SHARD_SUFFIX)]
    faults = []
    for metadata in sorted(name for name in found if layouts.is_metadata(name.rpartition("/")[2])):
        folder = metadata[: metadata.rfind("/") + 1]
        items, _ = layouts.read_metadata(storage, f"{checkpoint.name}/{folder}", found[metadata])
        for file in sorted({item.file for item in items}):
            name = folder + file
            if name in found:
                files.append(_File(name, found[name].size, items=tuple(item for item in items if item.file == file)))
            else:
                faults.append(Remark(name, "it is missing"))
    planned = {file.name for file in files}
    return files, faults, [Remark(name, f"not in {layouts.METADATA}") for name in found if name not in planned]


def _read_file(storage: Storage, checkpoint: Entry, file: _File, count: Count) -> Content:
    path = f"{checkpoint.name}/{file.name}" if checkpoint.is_dir else file.name or checkpoint.name
    try:
        with storage.open(path) as opened:
            return _read_content(opened, file, path, count)
    except FileNotFoundError:
        return Content("it is missing")
    except OSError as error:
        away = None if storage.means_damage(error) else error
        return Content(f"it cannot be read: {error.strerror or error}", unreadable=away)


def _read_content(opened: IO[bytes], file: _File, path: str, count: Count) -> Content:
    if file.checksum:
        found = checksum(opened, count)
        return Content("" if found == file.checksum else f"its checksum is {found}, expected {file.checksum}")
    if file.items:
        return _read_shard(opened, file, count)
    count(file.size)
    if path.endswith(single_files.SAFETENSORS_SUFFIX):
        note = "safetensors has no checksums: only header and size were checked"
        return Content(single_files.safetensors_fault(file.size, opened), note)
    if path.endswith(".json"):
        try:
            json.loads(opened.read())
        except (ValueError, RecursionError) as error:
            return Content(f"it is not JSON: {error}")
        return Content()
    if opened.read(len(single_files.ZIP_MAGIC)) == single_files.ZIP_MAGIC:
        return single_files.read_torch_save(opened)
    seen = single_files.check(Entry(path, path, False, file.size, None), opened)
    of_torch = path.endswith(candidates.TORCH_SAVE_SUFFIXES) and not path.endswith(".bin")
    # within a directory, other programs use these suffixes, too
    if of_torch and not seen.compared and (seen.format != UNKNOWN or file.name in ("", path)):
        return Content(f"damaged: {seen.reason}")
    return Content(note="no checksum is known: only the size was checked")


def _read_shard(opened: IO[bytes], file: _File, count: Count) -> Content:
    """Read the items of a shard. torch.save wrote each of them."""
    note = ""
    for item in file.items:
        opened.seek(item.offset)
        data = opened.read(item.length)
        count(len(data))
        if len(data) != item.length:
            return Content(f"it ends before byte {item.offset + item.length}")
        content = single_files.read_torch_save(io.BytesIO(data))
        if content.fault:
            return Content(f"at byte {item.offset}: {content.fault}")
        note = note or content.note
    return Content(note=note)
