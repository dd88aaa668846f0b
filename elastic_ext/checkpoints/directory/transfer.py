"""Copy a checkpoint from one directory to another, verify it on the way, and resume an interrupted copy.

The files that make a checkpoint complete are copied last, so a partial copy never counts as a checkpoint. Each file appears
whole, so a file that an earlier attempt sent is not sent again. The bytes are hashed as they are sent and compared with the
manifest; a file that already exists is read back. Without a manifest only sizes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.checkpoints.directory.own_files import MANIFEST, UNFINISHED, StoredFile, checksum
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.storage import Entry, Storage, files_of

BLOCK = 8 << 20  # bytes

Throttle = Callable[[int], None]


@dataclass
class TokenBucket:
    """A rate limit. rate: bytes per second; 0: no limit."""

    rate: float
    paid_until: float = field(default=float("-inf"))

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before sending `size` bytes.

        Over any period it lets through at most rate x time bytes plus one block.
        """
        if self.rate <= 0:
            return 0.0
        begin = max(now, self.paid_until)
        self.paid_until = begin + size / self.rate
        return begin - now


class CopyError(ElasticExtError):
    """The copy would differ from the original. The target does not count as complete."""


@dataclass(frozen=True)
class _Copy:
    """The source and target of a copy. throttle, compared: see `copy_files`."""

    source: Storage
    target: Storage
    throttle: Throttle | None = None
    compared: Throttle | None = None

    def is_there(self, path: str, expected: str, by_content: bool = False) -> bool:
        """Return whether a target file of the right size has the right content.

        expected: its checksum; "" if unknown. by_content: without a checksum, compare the content of this small file.
        """
        if not expected:
            return not by_content or self.target.read(path) == self.source.read(path)
        with self.target.open(path) as file:
            return checksum(file, self.compared) == expected

    def send(self, path: str, size: int, expected: str) -> None:
        """Copy a file. Raises CopyError if it changes meanwhile or does not have the expected checksum."""
        from xxhash import xxh3_64

        digest, count = xxh3_64(), 0
        with self.source.open(path) as original, self.target.write(path) as copied:
            while block := original.read(BLOCK):
                if self.throttle is not None:
                    self.throttle(len(block))
                digest.update(block)
                count += len(block)
                copied.write(block)
            # Raised inside the context, so that the target file does not appear.
            shown = self.source.path(path)
            if count != size:
                raise CopyError(
                    f"{shown} had {size} bytes when it was listed and now has {count}: it changed while it was copied"
                )
            if expected and digest.hexdigest() != expected:
                raise CopyError(f"{shown} has checksum {digest.hexdigest()}, its manifest says {expected}: it is damaged")


def copy(
    source: Storage,
    target: Storage,
    checkpoint: Entry,
    progress: Callable[[int, int], None] | None = None,
    throttle: Throttle | None = None,
) -> int:
    """Copy a checkpoint to another directory under the same name; return the number of bytes sent.

    Args:
        progress: called with the bytes done, including skipped files, and the total bytes.
        throttle: called with the size of each block before it is sent; may wait, or raise to give up.

    Raises:
        CopyError: a file is missing, changes, or has the wrong checksum.
        ManifestError: the manifest is damaged.
        UsageError: the target holds another checkpoint of this name.
        OSError: a storage fails.
    """
    name, work = checkpoint.name, _Copy(source, target, throttle)
    found = dict(files_of(source, name)) if checkpoint.is_dir else {part.name: part for part in checkpoint.parts or (checkpoint,)}
    there = _sizes(target, checkpoint)
    checksums = _checksums(source, target, name, found, there) if checkpoint.is_dir else {}
    mark = f"{name}{UNFINISHED}" if len(found) > 1 and not any(map(_commit_rank, found)) else ""
    if mark:  # nothing in such a checkpoint shows that its last file is there
        target.put(mark, b"")
    total, done, sent = sum(entry.size for entry in found.values()), 0, 0
    for file in sorted(found, key=lambda file: (_commit_rank(file), file)):
        path, size, expected = (f"{name}/{file}" if checkpoint.is_dir else file), found[file].size, checksums.get(file, "")
        if there.get(file) != size or not work.is_there(path, expected, by_content=_commit_rank(file) > 0):
            work.send(path, size, expected)
            sent += size
        done += size
        if progress is not None:
            progress(done, total)
    if mark:
        target.remove(mark)
    return sent


def copy_files(
    source: Storage, target: Storage, name: str, files: Iterable[StoredFile], throttle: Throttle, compared: Throttle
) -> int:
    """Copy some files of one of our checkpoints, but not the manifest; return the number of bytes sent.

    Args:
        throttle: called with the size of each block before it is sent; may wait, or raise to give up.
        compared: called with the size of each block that is read back from an existing file.

    Raises CopyError, OSError.
    """
    work, sent = _Copy(source, target, throttle, compared), 0
    for file in files:
        path = f"{name}/{file.name}"
        there = target.stat(path)
        if there is None or there.size != file.size or not work.is_there(path, file.checksum):
            work.send(path, file.size, file.checksum)
            sent += file.size
    return sent


def _checksums(
    source: Storage, target: Storage, name: str, found: Mapping[str, Entry], there: Mapping[str, int]
) -> Mapping[str, str]:
    """Return the checksums in the manifest; none without a manifest. Raises CopyError, ManifestError, UsageError, OSError."""
    manifest = detect.read_manifest(source, name, found)
    if manifest is None:
        return {}
    checksums = {file.name: file.checksum for file in manifest.files}
    missing = sorted(checksums.keys() - found.keys())
    if missing:
        raise CopyError(f"{source.path(name)} is not complete: {missing[0]} is missing; nothing was copied")
    path = f"{name}/{MANIFEST}"
    if MANIFEST in there and target.read(path) != source.read(path):
        raise UsageError(f"{target.path(name)} is another checkpoint with the same name: remove or rename one of them")
    return checksums


def _commit_rank(file: str) -> int:
    """Return the position of a file in the copy order: 0 for all but the files that make a checkpoint complete."""
    return detect.COMMIT_FILES.index(file) + 1 if file in detect.COMMIT_FILES else 0


def _sizes(target: Storage, checkpoint: Entry) -> Mapping[str, int]:
    if not checkpoint.is_dir:
        there = {part.name: target.stat(part.name) for part in checkpoint.parts or (checkpoint,)}
        return {name: found.size for name, found in there.items() if found is not None}
    try:
        return {file: entry.size for file, entry in files_of(target, checkpoint.name)}
    except FileNotFoundError:
        return {}
