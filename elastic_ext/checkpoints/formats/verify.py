"""Is what a checkpoint holds what was written? Sizes and checksums, all files at once, at the speed of the storage.

Our own checkpoints have a checksum for each file. Of the others each file is held to what its format has: the CRC of each record
of a zip archive (torch.save, and each tensor of torch.distributed.checkpoint is one), the header and size of safetensors, the
places that `.metadata` tells. Where a format has no checksum the result says so in its notes: a flipped bit is not found there.
"""

from __future__ import annotations

import enum
import io
import json
import os
import random
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

from elastic_ext.checkpoints.formats import huggingface
from elastic_ext.checkpoints.formats.checks import (
    DCP_METADATA,
    DCP_SHARD_SUFFIX,
    MOST_DIRECTORY,
    NOT_A_ZIP,
    DcpItem,
    dcp_items,
    open_zip,
)
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, StoredFile, decode
from elastic_ext.checkpoints.formats.peek import MOST_BYTES, PeekError
from elastic_ext.checkpoints.storage import Entry, Storage

BLOCK = 512 << 10  # bytes read at once by each thread: the checksum finds them in the cache of its core
MOST_THREADS = 16
SAMPLE = 0.1  # the share of the files whose content is read when it is sampled; one at least
ZIP_MAGIC = b"PK\x03\x04"

# Signature, size of the rest, versions, two disks, two counts, size, start; then the locator: signature, disk, place, disks.
_END = struct.Struct("<4sQHHIIQQQQ4sIQI")
_END_64, _LOCATOR, _END_64_SIZE = b"PK\x06\x06", b"PK\x06\x07", 44
_FLAGS = 0x0808  # of a zip entry: sizes follow the data, the name is UTF-8


class Mode(enum.Enum):
    """OFF: nothing. SAMPLED: the sizes of all files, the content of some, chosen at random. FULL: all."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True)
class Fault:
    """One bad file; its name is relative to the checkpoint."""

    file: str
    reason: str


@dataclass(frozen=True)
class Verification:
    """What was found. size: bytes of the files whose content was read; notes: what could not be told, or is out of place."""

    faults: tuple[Fault, ...]
    files: int
    size: int
    notes: tuple[Fault, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class _Task:
    """One file to hold against what is known of it. checksum: of our own; items: places of tensors in a shard."""

    name: str
    size: int
    checksum: str = ""
    items: tuple[DcpItem, ...] = ()


class _Progress:
    """Counts what the threads have read."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self._lock, self._total, self._tell = threading.Lock(), total, tell
        self.done = 0

    def add(self, count: int) -> None:
        if self._tell is None:
            return
        with self._lock:
            self.done += count
            self._tell(self.done, self._total)


def verify(
    storage: Storage,
    checkpoint: Entry,
    mode: Mode = Mode.FULL,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int | None = None,
) -> Verification:
    """Hold a checkpoint against its manifest, or against what its format knows of itself.

    Args:
        threads: how many files are read at once; None: one for each core.
        progress: called with the bytes done and the bytes of all; one thread at a time.
        seed: of the choice of a sample; None: another one each time.

    Raises OSError when the storage does not answer; a file that is missing or cannot be read is a fault.
    """
    if mode is Mode.OFF:
        return Verification((), 0, 0)
    try:
        tasks, faults, notes = _plan(storage, checkpoint)
    except (ManifestError, PeekError) as error:
        return Verification((Fault(MANIFEST if isinstance(error, ManifestError) else DCP_METADATA, str(error)),), 0, 0)
    chosen = tasks
    if mode is Mode.SAMPLED and tasks:
        chosen = random.Random(seed).sample(tasks, max(1, round(len(tasks) * SAMPLE)))
    counted = _Progress(sum(task.size for task in chosen), progress)
    with ThreadPoolExecutor(threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        # The largest first: else the last thread reads it alone.
        in_order = sorted(chosen, key=lambda task: -task.size)
        results = list(pool.map(lambda task: _read(storage, checkpoint, task, counted), in_order))
    faults += [fault for fault, _ in results if fault is not None]
    notes += [note for _, note in results if note is not None]
    by_name = sorted(faults, key=lambda fault: fault.file)
    return Verification(tuple(by_name), len(tasks), sum(task.size for task in chosen), tuple(notes))


def _plan(storage: Storage, checkpoint: Entry) -> tuple[list[_Task], list[Fault], list[Fault]]:
    """The files to read; what is wrong, or remarkable, by the listing alone. Raises ManifestError, PeekError, OSError."""
    if not checkpoint.is_dir:
        return [_Task("", checkpoint.size)], [], []
    found = dict(files_of(storage, checkpoint.name))
    manifest = read_manifest(storage, checkpoint.name, found)
    if manifest is not None:
        return _plan_own(manifest, found)
    tasks = []
    for name, entry in found.items():
        if not name.endswith(DCP_SHARD_SUFFIX):
            tasks.append(_Task(name, entry.size))
    faults: list[Fault] = []
    for folder in sorted({name.rpartition(DCP_METADATA)[0] for name in found if ("/" + name).endswith(f"/{DCP_METADATA}")}):
        items = _items(storage, checkpoint, folder, found[folder + DCP_METADATA])
        for file in sorted({item.file for item in items}):
            name = folder + file
            if name in found:
                tasks.append(_Task(name, found[name].size, items=tuple(item for item in items if item.file == file)))
            else:
                faults.append(Fault(name, "it is missing"))
    planned = {task.name for task in tasks}
    notes = [Fault(name, f"not in {DCP_METADATA}") for name in found if name not in planned]
    return tasks, faults, notes


def _items(storage: Storage, checkpoint: Entry, folder: str, metadata: Entry) -> tuple[DcpItem, ...]:
    if metadata.size > MOST_BYTES:
        return ()
    return dcp_items(storage.read(f"{checkpoint.name}/{folder}{DCP_METADATA}"))


def _plan_own(manifest: Manifest, found: dict[str, Entry]) -> tuple[list[_Task], list[Fault], list[Fault]]:
    tasks, faults = [], []
    for file in manifest.files:
        if file.name not in found:
            faults.append(Fault(file.name, "it is missing"))
        elif found[file.name].size != file.size:
            faults.append(Fault(file.name, f"it has {found[file.name].size} bytes, expected {file.size}"))
        else:
            tasks.append(_Task(file.name, file.size, file.checksum))
    known = {MANIFEST, *(file.name for file in manifest.files)}
    return tasks, faults, [Fault(name, f"not in {MANIFEST}") for name in found if name not in known]


def files_of(storage: Storage, name: str) -> Iterator[tuple[str, Entry]]:
    """All files below a directory, by their names relative to it. One listing for each directory. Raises OSError.

    A link to a file counts as the file. One to a directory is not followed: it may lead in a circle, or to all files there are.
    Nor is one to an empty file, which may be one of the kernel's. A pipe or a link to nothing is no file.
    """
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in sorted(storage.entries(f"{name}/{folder}".rstrip("/")), key=lambda each: each.name):
            if entry.unusable or (entry.is_link and (entry.is_dir or entry.size == 0)):
                continue
            if entry.is_dir:
                folders.append(f"{folder}{entry.name}/")
            else:
                yield folder + entry.name, entry


def read_manifest(storage: Storage, name: str, found: dict[str, Entry]) -> Manifest | None:
    """The manifest of a checkpoint of ours; None if it is none of ours: other programs write a manifest.json, too.

    Raises ManifestError for a damaged one of ours, OSError.
    """
    if MANIFEST not in found:
        return None
    data = storage.read(f"{name}/{MANIFEST}")
    if b'"generation"' not in data and not any(each.endswith(DCP_SHARD_SUFFIX) for each in found):
        return None
    return decode(data)


def _read(storage: Storage, checkpoint: Entry, task: _Task, progress: _Progress) -> tuple[Fault | None, Fault | None]:
    """(what is wrong with a file, what could not be told of it)."""
    path = f"{checkpoint.name}/{task.name}" if task.name else checkpoint.name
    shown = task.name or checkpoint.name
    try:
        with storage.open(path) as file:
            fault, note = _check(file, task, shown, progress)
    except FileNotFoundError:
        fault, note = "it is missing", ""
    except OSError as error:
        fault, note = f"it cannot be read: {error.strerror or error}", ""
    return Fault(shown, fault) if fault else None, Fault(shown, note) if note else None


def _check(file: IO[bytes], task: _Task, name: str, progress: _Progress) -> tuple[str, str]:
    if task.checksum:
        found = checksum(file, progress.add)
        return ("", "") if found == task.checksum else (f"its checksum is {found}, expected {task.checksum}", "")
    if task.items:
        return _check_shard(file, task, progress)
    progress.add(task.size)
    if name.endswith(".safetensors"):
        entry = Entry(name, name, False, task.size, None)
        return huggingface.safetensors_fault(entry, file), "safetensors has no checksums: header and size only"
    if name.endswith(".json"):
        return _json_fault(file), ""
    if file.read(len(ZIP_MAGIC)) == ZIP_MAGIC or name.endswith((".pt", ".pth", ".ckpt", ".bin")):
        return zip_fault(file)
    return "", "no checksum is known: size only"


def _json_fault(file: IO[bytes]) -> str:
    try:
        json.loads(file.read())
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"
    return ""


def _check_shard(file: IO[bytes], task: _Task, progress: _Progress) -> tuple[str, str]:
    """Each item of a shard was written by torch.save."""
    note = ""
    for item in task.items:
        file.seek(item.offset)
        data = file.read(item.length)
        progress.add(len(data))
        if len(data) != item.length:
            return f"it ends before byte {item.offset + item.length}", ""
        fault, said = zip_fault(io.BytesIO(data))
        if fault:
            return f"at byte {item.offset}: {fault}", ""
        note = note or said
    return "", note


def zip_fault(file: IO[bytes]) -> tuple[str, str]:
    """(what is wrong with a file of torch.save by the CRCs of its records, what could not be told)."""
    unchecked = 0
    file.seek(0)
    try:
        with open_zip(file) as archive:
            for info in archive.infolist():
                fault = _odd(info) or _record_fault(archive, info)
                if fault:
                    return f"damaged: {info.filename[:100]!r}: {fault}", ""
                unchecked += info.CRC == 0 and info.file_size > 0  # torch.serialization.set_crc32_options(False)
            fault = _end_fault(file, archive)
    except (RuntimeError, *NOT_A_ZIP) as error:  # RuntimeError: a flag says that it is encrypted
        return f"damaged: {error}", ""
    return (f"damaged: {fault}" if fault else ""), (f"{unchecked} records were written without a CRC" if unchecked else "")


def _odd(info: zipfile.ZipInfo) -> str:
    """What torch never writes; Python's zipfile overlooks it, and torch.load fails for it."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return f"{info.compress_size} bytes for {info.file_size}, expected it stored as it is"
    if info.flag_bits & ~_FLAGS or info.comment or info.volume or info.external_attr:
        return "its entry in the zip directory is none of torch's"
    return ""


def _record_fault(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    count = 0
    with archive.open(info) as record:
        if info.CRC == 0:
            record._expected_crc = None  # type: ignore[attr-defined]
        while block := record.read(BLOCK):
            count += len(block)
    return "" if count == info.file_size else f"{count} bytes of {info.file_size}"


def _end_fault(file: IO[bytes], archive: zipfile.ZipFile) -> str:
    """The end of the directory in its 64-bit form, APPNOTE.TXT 4.3.14 and 4.3.15, which torch writes and zipfile half reads."""
    file.seek(archive.start_dir)
    tail = file.read(MOST_DIRECTORY)
    size = tail.rfind(_END_64)
    if size < 0 or len(tail) - size < _END.size:
        return ""
    place = archive.start_dir + size
    count = len(archive.infolist())
    found = _END.unpack_from(tail, size)
    disks, entries, told_size, told_start, locator, told_place = found[4:6], found[6:8], *found[8:11], found[12]
    same = disks == (0, 0) and entries == (count, count) and (told_size, told_start) == (size, archive.start_dir)
    return (
        ""
        if same and locator == _LOCATOR and told_place == place and found[11::2] == (0, 1) and found[1] == _END_64_SIZE
        else "the end of its zip directory"
    )


def checksum(file: IO[bytes], tell: Callable[[int], None] | None = None) -> str:
    """xxh3_64 of a file that was just opened, as a manifest has it. Reading and hashing let other threads run."""
    from xxhash import xxh3_64

    digest = xxh3_64()
    view = memoryview(bytearray(BLOCK))
    unbuffered: Any = getattr(file, "raw", file)  # a second buffer would only cost a copy
    while True:
        count = unbuffered.readinto(view)
        if not count:
            return digest.hexdigest()
        digest.update(view[:count])
        if tell is not None:
            tell(count)


def stored_files(storage: Storage, name: str, files: Sequence[str]) -> tuple[StoredFile, ...]:
    """What a manifest says of files that are there. Raises OSError."""

    def one(file: str) -> StoredFile:
        path = f"{name}/{file}"
        with storage.open(path) as opened:
            found = checksum(opened)
            return StoredFile(file, opened.tell(), found)

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return tuple(pool.map(one, files))
