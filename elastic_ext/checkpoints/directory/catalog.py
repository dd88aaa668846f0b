"""What is done with checkpoints: mark, list, prune, copy.

A mark is a small file below `.elastic_ext/` in the directory of checkpoints, so each process that can read the checkpoints sees
it, whichever run it belongs to. A mark never removes data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.checkpoints.formats.checks import DCP, DCP_METADATA, HUGGING_FACE, OWN
from elastic_ext.checkpoints.formats.huggingface import STATE
from elastic_ext.checkpoints.formats.manifest import MANIFEST, StoredFile
from elastic_ext.checkpoints.formats.verify import checksum, files_of, read_manifest
from elastic_ext.checkpoints.storage import Entry, Storage

MARKERS = ".elastic_ext"
QUARANTINE = f"{MARKERS}/quarantine"
PIN = f"{MARKERS}/pin"

# What makes a directory count as complete: copied last, removed first.
COMMITS = (MANIFEST, DCP_METADATA, STATE)

COPY_BLOCK = 8 << 20  # bytes


class CopyError(ElasticExtError):
    """A copy that does not hold what the original held; the target does not count as complete."""


@dataclass(frozen=True)
class Mark:
    """Why a checkpoint is quarantined or pinned.

    Attributes:
        by: who said so; at: seconds since the epoch by their clock, for people.
        written_at: of the checkpoint that is meant, by the clock of the storage. One written later under the same name is
            another. 0: whichever has the name.
    """

    reason: str
    by: str = ""
    at: float = 0.0
    written_at: float = 0.0


def quarantine(storage: Storage, name: str, reason: str, by: str = "", written_at: float | None = None) -> None:
    """From now on this checkpoint is not resumed from. A second time changes the mark. written_at: see Mark. Raises OSError."""
    _mark(storage, f"{QUARANTINE}/{name}.json", reason, by, written_at or 0.0)


def unquarantine(storage: Storage, name: str) -> None:
    """Raises FileNotFoundError where it was not quarantined."""
    storage.remove(f"{QUARANTINE}/{name}.json")


def quarantined(storage: Storage, name: str) -> Mark | None:
    """The mark, None without one. One that cannot be understood still holds. Raises OSError."""
    return _marked(storage, f"{QUARANTINE}/{name}.json")


def pin(storage: Storage, name: str, reason: str = "", by: str = "") -> None:
    """From now on this checkpoint is not pruned. Raises OSError."""
    _mark(storage, f"{PIN}/{name}.json", reason, by)


def unpin(storage: Storage, name: str) -> None:
    """Raises FileNotFoundError where it was not pinned."""
    storage.remove(f"{PIN}/{name}.json")


def pinned(storage: Storage) -> frozenset[str]:
    """Names of checkpoints. Raises OSError."""
    return _names(storage, PIN)


def in_quarantine(storage: Storage) -> frozenset[str]:
    """Names of checkpoints. Raises OSError."""
    return _names(storage, QUARANTINE)


def _mark(storage: Storage, path: str, reason: str, by: str, written_at: float = 0.0) -> None:
    storage.put(path, json.dumps(asdict(Mark(reason, by, time.time(), written_at))).encode())


def _marked(storage: Storage, path: str) -> Mark | None:
    try:
        data = storage.read(path)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data)
        at, written_at = float(record.get("at", 0)), float(record.get("written_at", 0))
        return Mark(str(record["reason"]), str(record.get("by", "")), at, written_at)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Mark(f"its mark {storage.path(path)} cannot be understood")


def _names(storage: Storage, folder: str) -> frozenset[str]:
    try:
        return frozenset(entry.name.removesuffix(".json") for entry in storage.entries(folder) if entry.name.endswith(".json"))
    except FileNotFoundError:
        return frozenset()


# Pruning.


@dataclass(frozen=True)
class Kept:
    """A checkpoint, as far as pruning must know it."""

    name: str
    family: str  # checkpoints of different families do not compare
    step: int | None
    format: str
    complete: bool
    pinned: bool = False
    quarantined: bool = False


@dataclass(frozen=True)
class Pruning:
    """What is to become of a checkpoint, and why."""

    name: str
    remove: bool
    reason: str


# Which unfinished ones are certain to be leftovers of a save. A single file may be of a format that is not known here.
_TORN_FORMATS = (OWN, DCP, HUGGING_FACE)


def plan_prune(newest_first: Iterable[Kept], keep_last: int, keep_every: int = 0) -> tuple[Pruning, ...]:
    """Decide which checkpoints to remove. Pure.

    Args:
        newest_first: all there are; of each family the newest first.
        keep_last: so many complete ones of each family stay; the newest stays whatever this is.
        keep_every: one whose step is a multiple of it stays; 0: none for this.

    A pinned or quarantined one stays. An unfinished one goes if a newer one of its family is complete: else it may be in work.
    """
    whole: dict[str, int] = {}
    return tuple(_decide(each, whole, max(1, keep_last), keep_every) for each in newest_first)


def _decide(found: Kept, whole: dict[str, int], keep_last: int, keep_every: int) -> Pruning:
    """whole: how many usable ones of each family are newer; counts this one."""
    newer = whole.get(found.family, 0)
    if found.quarantined:
        return Pruning(found.name, False, "quarantined: somebody must look at it")
    if found.complete:
        whole[found.family] = newer + 1
    if found.pinned:
        return Pruning(found.name, False, "pinned")
    if not found.complete:
        if found.format not in _TORN_FORMATS:
            return Pruning(found.name, False, "not complete, and perhaps no leftover of a save")
        if not newer:
            return Pruning(found.name, False, "not complete; newer than each complete one, so perhaps in work")
        return Pruning(found.name, True, "not complete, and older than a complete one")
    if newer < keep_last:
        return Pruning(found.name, False, f"among the newest {keep_last}")
    if keep_every and found.step is not None and found.step % keep_every == 0:
        return Pruning(found.name, False, f"step {found.step} is a multiple of {keep_every}")
    return Pruning(found.name, True, f"{newer} newer ones are complete")


def delete(storage: Storage, name: str) -> None:
    """Remove a checkpoint: first what makes it complete, so that one half removed is seen to be so. Raises OSError."""
    storage.remove_tree(name, first=COMMITS)


# Copying.


def copy(
    source: Storage,
    target: Storage,
    checkpoint: Entry,
    progress: Callable[[int, int], None] | None = None,
    throttle: Callable[[int], None] | None = None,
) -> int:
    """Copy a checkpoint to another directory under the same name; return the bytes that were sent.

    What makes it complete is copied last. Files that are there already, of an attempt that was cut off, are not sent again:
    each file appears whole. Checksums are those of the manifest, taken from the bytes on their way, and read back for what was
    there already; without a manifest the sizes must do.

    Args:
        progress: called with the bytes done, skipped ones among them, and those of all.
        throttle: called with the bytes of each block before it is sent; may wait, or raise to give up.

    Raises CopyError for a checksum that does not fit, ManifestError, UsageError when the target holds another checkpoint of
    this name, OSError.
    """
    name = checkpoint.name
    found = dict(files_of(source, name)) if checkpoint.is_dir else {"": checkpoint}
    manifest = read_manifest(source, name, found) if checkpoint.is_dir else None
    checksums = {file.name: file.checksum for file in manifest.files} if manifest else {}
    missing = sorted(checksums.keys() - found.keys())
    if missing:
        raise CopyError(f"{source.path(name)} is not complete: {missing[0]} is missing; nothing was copied")
    order = sorted(found, key=lambda file: (_commit_rank(file), file))
    there = _sizes(target, checkpoint)
    if manifest is not None and MANIFEST in there and target.read(f"{name}/{MANIFEST}") != source.read(f"{name}/{MANIFEST}"):
        raise UsageError(f"{target.path(name)} is another checkpoint of the same name: remove or rename one of the two")
    total, done, sent = sum(entry.size for entry in found.values()), 0, 0
    for file in order:
        path, size, expected = (f"{name}/{file}" if file else name), found[file].size, checksums.get(file, "")
        if there.get(file) != size or not _same(source, target, path, expected, _commit_rank(file) > 0):
            _send(source, target, path, expected, size, throttle)
            sent += size
        done += size
        if progress is not None:
            progress(done, total)
    return sent


def copy_files(
    source: Storage,
    target: Storage,
    name: str,
    files: Iterable[StoredFile],
    throttle: Callable[[int], None] | None = None,
    compared: Callable[[int], None] | None = None,
) -> int:
    """Copy some files of a checkpoint of ours, not what makes it complete; return the bytes that were sent. As `copy`.

    compared: called with the bytes of each block that is read back, of a file that is there already.
    """
    sent = 0
    for file in files:
        path = f"{name}/{file.name}"
        there = target.stat(path)
        if there is None or there.size != file.size or not _same(source, target, path, file.checksum, False, compared):
            _send(source, target, path, file.checksum, file.size, throttle)
            sent += file.size
    return sent


def _commit_rank(file: str) -> int:
    """0 for what is copied first."""
    return COMMITS.index(file) + 1 if file in COMMITS else 0


def _sizes(target: Storage, checkpoint: Entry) -> Mapping[str, int]:
    if not checkpoint.is_dir:
        found = target.stat(checkpoint.name)
        return {"": found.size} if found is not None else {}
    try:
        return {file: entry.size for file, entry in files_of(target, checkpoint.name)}
    except FileNotFoundError:
        return {}


def _same(
    source: Storage,
    target: Storage,
    path: str,
    expected: str,
    compare: bool,
    tell: Callable[[int], None] | None = None,
) -> bool:
    """Is what is there already the file that is to be there? compare: by content, where it is small and has no checksum."""
    if not expected:
        return not compare or target.read(path) == source.read(path)
    with target.open(path) as file:
        return checksum(file, tell) == expected


def _send(source: Storage, target: Storage, path: str, expected: str, size: int, throttle: Callable[[int], None] | None) -> None:
    from xxhash import xxh3_64

    digest, count = xxh3_64(), 0
    with source.open(path) as original, target.write(path) as copied:
        while block := original.read(COPY_BLOCK):
            if throttle is not None:
                throttle(len(block))
            digest.update(block)
            count += len(block)
            copied.write(block)
        # Raised inside: what was written then does not appear.
        if count != size:
            raise CopyError(
                f"{source.path(path)} had {size} bytes when it was listed and has {count}: it changes while it is copied"
            )
        if expected and digest.hexdigest() != expected:
            raise CopyError(f"{source.path(path)} has checksum {digest.hexdigest()}, its manifest says {expected}: it is damaged")
