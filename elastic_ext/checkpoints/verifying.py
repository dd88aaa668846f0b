"""Verify that a checkpoint holds what was written, at the speed of the storage: sizes and checksums, several files at once.

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

from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, ManifestError, checksum
from elastic_ext.checkpoints.formats import candidates, layouts, single_files
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Content
from elastic_ext.checkpoints.formats.detect import read_manifest, size_faults
from elastic_ext.checkpoints.storage import Entry, Storage, files_of, thread_pool

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
