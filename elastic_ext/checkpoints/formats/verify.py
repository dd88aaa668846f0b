"""Verify that a checkpoint holds what was written: sizes and checksums, several files at once, at the speed of the storage.

Our own checkpoints have a checksum for each file. Other formats are verified by what they contain: the CRC of each record of a
zip archive (a torch.save file, or one tensor in torch.distributed.checkpoint), the header and size of safetensors, the offsets in
`.metadata`. A format without checksums cannot reveal a flipped bit; the notes of the result say so.
"""

from __future__ import annotations

import enum
import io
import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from elastic_ext.checkpoints.formats import dcp, single_files
from elastic_ext.checkpoints.formats.inspection import TORCH_SAVE_SUFFIXES, UNKNOWN, Content, thread_pool
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, checksum
from elastic_ext.checkpoints.formats.peek import PeekError
from elastic_ext.checkpoints.storage import Entry, Storage, files_of

SAMPLE = 0.1  # fraction of the files that Mode.SAMPLED reads; at least one file


class Mode(enum.Enum):
    """OFF: verify nothing. SAMPLED: sizes of all files, content of a random sample. FULL: all content."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True)
class Remark:
    """A fault or note about one file. file: its name relative to the checkpoint. reason: text for people."""

    file: str
    reason: str


@dataclass(frozen=True)
class Verification:
    """The result of verifying a checkpoint.

    Attributes:
        faults: damaged or missing files, by name.
        files: number of files in the checkpoint.
        size: bytes of the files whose content was read.
        notes: files that could not be verified or do not belong to the checkpoint.
        unreadable: why the storage did not give a file, which may be sound; None if it gave all.
    """

    faults: tuple[Remark, ...]
    files: int
    size: int
    notes: tuple[Remark, ...] = ()
    unreadable: OSError | None = None

    @property
    def sound(self) -> bool:
        """Whether no damage was found."""
        return not self.faults


@dataclass(frozen=True)
class _File:
    """One file to read. checksum: "" unless the checkpoint is ours. items: where its tensors lie, if it is a shard."""

    name: str
    size: int
    checksum: str = ""
    items: tuple[dcp.Item, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """The files to read, and the remarks from the listing alone."""

    files: list[_File]
    faults: list[Remark]
    notes: list[Remark]


class _Progress:
    """Adds up the bytes that the threads have read."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._lock, self._total, self._report = threading.Lock(), total, report
        self._done = 0

    def add(self, count: int) -> None:
        if self._report is None:
            return
        with self._lock:
            self._done += count
            self._report(self._done, self._total)


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
        plan = _plan(storage, checkpoint)
    except (ManifestError, PeekError) as error:
        file = MANIFEST if isinstance(error, ManifestError) else dcp.METADATA
        return Verification((Remark(file, str(error)),), 0, 0)
    chosen = plan.files
    if mode is Mode.SAMPLED and chosen:
        chosen = random.Random(seed).sample(chosen, max(1, round(len(chosen) * SAMPLE)))
    total = sum(file.size for file in chosen)
    counted = _Progress(total, progress)
    with thread_pool(threads) as pool:
        # The largest first, so that no thread is left to read it alone at the end.
        in_order = sorted(chosen, key=lambda file: -file.size)
        results = list(pool.map(lambda file: _read_file(storage, checkpoint, file, counted), in_order))
    by_file = [(file.name or checkpoint.name, content) for file, content in zip(in_order, results, strict=True)]
    faults = plan.faults + [Remark(name, content.fault) for name, content in by_file if content.fault]
    notes = plan.notes + [Remark(name, content.note) for name, content in by_file if content.note]
    unreadable = next((content.unreadable for content in results if content.unreadable is not None), None)
    return Verification(tuple(sorted(faults, key=lambda fault: fault.file)), len(plan.files), total, tuple(notes), unreadable)


def _plan(storage: Storage, checkpoint: Entry) -> _Plan:
    """Plan what to read. Raises ManifestError, PeekError, OSError."""
    if not checkpoint.is_dir:
        return _Plan(
            [_File(part.name if checkpoint.parts else "", part.size) for part in checkpoint.parts or (checkpoint,)], [], []
        )
    found = dict(files_of(storage, checkpoint.name))
    manifest = dcp.read_manifest(storage, checkpoint.name, found)
    return _plan_by_metadata(storage, checkpoint, found) if manifest is None else _plan_by_manifest(manifest, found)


def _plan_by_manifest(manifest: Manifest, found: Mapping[str, Entry]) -> _Plan:
    faults = dcp.size_faults(manifest, found)
    files = [_File(file.name, file.size, file.checksum) for file in manifest.files if file.name not in faults]
    known = {MANIFEST, *(file.name for file in manifest.files)}
    notes = [Remark(name, f"not in {MANIFEST}") for name in found if name not in known]
    return _Plan(files, [Remark(name, f"it {fault}") for name, fault in faults.items()], notes)


def _plan_by_metadata(storage: Storage, checkpoint: Entry, found: Mapping[str, Entry]) -> _Plan:
    """Plan by each `.metadata`, which lies beside its shards, maybe in a subdirectory. Read all other files as they are."""
    files = [_File(name, entry.size) for name, entry in found.items() if not name.endswith(dcp.SHARD_SUFFIX)]
    faults = []
    for folder in sorted(name.removesuffix(dcp.METADATA) for name in found if f"/{name}".endswith(f"/{dcp.METADATA}")):
        items = dcp.items(storage, f"{checkpoint.name}/{folder}", found[folder + dcp.METADATA])
        for file in sorted({item.file for item in items}):
            name = folder + file
            if name in found:
                files.append(_File(name, found[name].size, items=tuple(item for item in items if item.file == file)))
            else:
                faults.append(Remark(name, "it is missing"))
    planned = {file.name for file in files}
    return _Plan(files, faults, [Remark(name, f"not in {dcp.METADATA}") for name in found if name not in planned])


def _read_file(storage: Storage, checkpoint: Entry, file: _File, progress: _Progress) -> Content:
    path = f"{checkpoint.name}/{file.name}" if checkpoint.is_dir else file.name or checkpoint.name
    try:
        with storage.open(path) as opened:
            return _read_content(opened, file, path, progress)
    except FileNotFoundError:
        return Content("it is missing")
    except OSError as error:
        away = None if storage.means_damage(error) else error
        return Content(f"it cannot be read: {error.strerror or error}", unreadable=away)


def _read_content(opened: IO[bytes], file: _File, path: str, progress: _Progress) -> Content:
    if file.checksum:
        found = checksum(opened, progress.add)
        return Content("" if found == file.checksum else f"its checksum is {found}, expected {file.checksum}")
    if file.items:
        return _read_shard(opened, file, progress)
    progress.add(file.size)
    if path.endswith(single_files.SAFETENSORS_SUFFIX):
        return single_files.read_safetensors(file.size, opened)
    if path.endswith(".json"):
        return _read_json(opened)
    start = opened.read(single_files.LEGACY_START)
    if start.startswith(single_files.ZIP_MAGIC) or single_files.is_legacy(start):
        return single_files.read_torch_save(opened)
    of_torch = path.endswith(TORCH_SAVE_SUFFIXES) and not path.endswith(".bin")
    if of_torch and file.name not in ("", path):  # within a directory, other programs use these suffixes, too
        of_torch = single_files.check(Entry(path, path, False, file.size, None), opened).format != UNKNOWN
    if of_torch:
        return single_files.read_torch_save(opened)
    return Content(note="no checksum is known: only the size was checked")


def _read_json(opened: IO[bytes]) -> Content:
    try:
        json.loads(opened.read())
    except (ValueError, RecursionError) as error:
        return Content(f"it is not JSON: {error}")
    return Content()


def _read_shard(opened: IO[bytes], file: _File, progress: _Progress) -> Content:
    """Read the items of a shard. torch.save wrote each of them."""
    note = ""
    for item in file.items:
        opened.seek(item.offset)
        data = opened.read(item.length)
        progress.add(len(data))
        if len(data) != item.length:
            return Content(f"it ends before byte {item.offset + item.length}")
        content = single_files.read_torch_save(io.BytesIO(data))
        if content.fault:
            return Content(f"at byte {item.offset}: {content.fault}")
        note = note or content.note
    return Content(note=note)
