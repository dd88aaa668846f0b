"""The upkeep of directories: decide which checkpoints to remove, remove them, and copy checkpoints from one directory to another.

The last copy is never removed, nor what a job would resume from. A directory keeps the newest complete checkpoint of each family.
The local tier also keeps each checkpoint that is newer than all complete ones in the remote directory.

A copy is verified on the way, and an interrupted one resumed. The files that make a checkpoint complete are copied last, so a
partial copy never counts as a checkpoint. Each file appears whole, so a file that an earlier attempt sent is not sent again. The
bytes are hashed as they are sent and compared with the manifest; a file that already exists is read back. Without a manifest only
sizes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.checkpoints.directory.own_files import MANIFEST, UNFINISHED, StoredFile, checksum
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import DCP, HUGGING_FACE, OWN, UNKNOWN, order_of, order_or_oldest, step_of
from elastic_ext.checkpoints.storage import Entry, Storage, files_of

NOT_OWN = "no record says that a job has saved it: give its name to have it removed"
# In these formats an incomplete checkpoint is certainly the leftover of a save. A file may have an unknown format.
_CERTAIN_FORMATS = (OWN, DCP, HUGGING_FACE)


@dataclass(frozen=True)
class PruneCandidate:
    """The properties of a checkpoint that pruning needs.

    family: checkpoints of different families do not compare. together: a name for several families whose checkpoints of one step
    belong together (model, ema, optimizer); "" for none. apart: one of these families that a pattern leaves out; "" for none.
    compared: it is incomplete only by comparison with what lies beside it. own: the job has saved it, by its record or its
    manifest; or the user names it. linked: a link beside it points to it.
    """

    name: str
    family: str
    step: int | None
    format: str
    complete: bool
    pinned: bool = False
    quarantined: bool = False
    together: str = ""
    apart: str = ""
    compared: bool = False
    own: bool = True
    linked: bool = False


@dataclass(frozen=True)
class PruneDecision:
    """Whether to remove a checkpoint, and why. reason: for people."""

    name: str
    remove: bool
    reason: str


def plan_prune(
    newest_first: Iterable[PruneCandidate], keep_last: int, keep_every: int = 0, resumed: Collection[str] = ()
) -> tuple[PruneDecision, ...]:
    """Decide which checkpoints to remove. Pure.

    Only what the job has saved goes, or what the user names. Pinned and quarantined ones stay, what a link points to, and what is
    of no known format. An incomplete one goes only if a newer one of its family is complete; otherwise it may still be being
    written. Of families that belong together, a step counts once, if each that has an
    older one has it, and all is complete.

    Args:
        newest_first: all checkpoints, newest first within each family.
        keep_last: number of complete checkpoints to keep in each family; at least one stays.
        keep_every: keep checkpoints whose step is a multiple of this; 0: no such rule.
        resumed: names of what a job would resume from: these stay, and what other families have of the same step.
    """
    listed = list(newest_first)
    whole = _whole_steps(listed)
    of_pinned = {(each.together, each.step) for each in listed if each.pinned and each.together}
    of_resumed = {step_of(each.name): each.family for each in listed if each.name in resumed}
    newer_complete: dict[str, int] = {}
    decisions = []
    for candidate in listed:
        newer = newer_complete.get(candidate.family, 0)
        if candidate.together and (step := candidate.step) is not None:
            newer = sum(other > step for group, other in whole if group == candidate.together)
        step, kept = step_of(candidate.name), ""
        if candidate.name in resumed:
            kept = "a job would resume from it"
        elif step is not None and of_resumed.get(step, candidate.family) != candidate.family:
            kept = "of the step that a job would resume from"
        elif (candidate.together, candidate.step) in of_pinned and not candidate.pinned:
            kept = "of a step that is pinned"
        remove, reason = (False, kept) if kept else _decide(candidate, newer, max(1, keep_last), keep_every)
        if remove and not candidate.own:
            remove, reason = False, f"{reason}, but {NOT_OWN}"
        decisions.append(PruneDecision(candidate.name, remove, reason))
        if candidate.complete and not candidate.quarantined:
            newer_complete[candidate.family] = newer + 1
    return tuple(decisions)


def _whole_steps(listed: Sequence[PruneCandidate]) -> set[tuple[str, int]]:
    """Return the steps of which all is there and complete, each with the name of the families that belong together."""
    groups: dict[str, dict[str, dict[int, bool]]] = {}  # whether each is good, by `together`, family and step
    for each in listed:
        if each.together and each.step is not None:
            good = each.complete and not each.quarantined
            of_family = groups.setdefault(each.together, {}).setdefault(each.family, {})
            of_family[each.step] = good and of_family.get(each.step, True)
    return {
        (group, step)
        for group, found in groups.items()
        for step in {step for of_family in found.values() for step in of_family}
        if all(of_family.get(step, step < min(of_family)) for of_family in found.values())
    }


def _decide(candidate: PruneCandidate, newer: int, keep_last: int, keep_every: int) -> tuple[bool, str]:
    """Return whether to remove a checkpoint, and why. newer: number of newer complete ones in its family, not quarantined."""
    if candidate.quarantined:
        return False, "quarantined: a person must inspect it"
    if candidate.pinned:
        return False, "pinned"
    if candidate.linked:
        return False, "a link points to it"
    if candidate.format == UNKNOWN:
        return False, "its format is unknown"
    if candidate.apart:
        return False, f"it belongs together with {candidate.apart}, which the pattern leaves out"
    if not candidate.complete:
        if candidate.compared or candidate.format not in _CERTAIN_FORMATS:
            return False, "incomplete, but maybe not the leftover of a save"
        if not newer:
            return False, "incomplete and newer than every complete one: a save may still be writing it"
        return True, "incomplete, and older than a complete one"
    if newer < keep_last:
        return False, f"among the newest {keep_last}"
    if keep_every and candidate.step is not None and candidate.step % keep_every == 0:
        return False, f"step {candidate.step} is a multiple of {keep_every}"
    return True, f"{newer} newer ones are complete"


def plan_local_prune(
    newest_first: Iterable[str], whole: Collection[str], remote: Collection[str], newest_remote: tuple[int, int] | None
) -> list[str]:
    """Return the names of the checkpoints to remove from the local tier. Pure.

    The newest whole one stays. So does each one that is newer than all complete remote ones, because it may be the last copy.
    One that is not whole may still be being written, unless a newer one is whole.

    Args:
        newest_first: all checkpoints in a node's local tier.
        whole: those of which the node's part is complete.
        remote: those that are complete in the remote directory.
        newest_remote: `order_of` the newest complete checkpoint there; None: it has none.
    """
    removed = []
    newer_whole = False
    for name in newest_first:
        safe = name in remote or (newest_remote is not None and newest_remote > order_or_oldest(name))
        if newer_whole and (safe or name not in whole):
            removed.append(name)
        newer_whole = newer_whole or name in whole
    return removed


def delete(storage: Storage, name: str) -> None:
    """Remove one of our own checkpoints, commit files first, so that an interrupted removal leaves none. Raises OSError."""
    storage.remove_tree(name, first=detect.COMMIT_FILES)


def delete_entry(storage: Storage, entry: Entry) -> None:
    """Remove a checkpoint of any format. An interrupted removal leaves none: a mark lies beside a directory, and of files of
    ranks the first goes first. Raises OSError.
    """
    for part in entry.parts or (entry,):
        mark = f"{part.name}{UNFINISHED}" if part.is_dir and order_of(part.name) is None else ""
        if mark:
            storage.put(mark, b"")
        storage.remove_tree(part.name, first=detect.COMMIT_FILES)
        if mark:
            storage.remove(mark)


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

    def copy(self, path: str, size: int, there: int | None, expected: str, by_content: bool = False) -> int:
        """Copy a file unless the target has it; return the number of bytes sent.

        there: size of the target file; None: there is none. expected: the checksum; "" if unknown. by_content: without one,
        compare the content of this small file. Raises CopyError if it changes meanwhile or does not have the expected checksum.
        """
        if there == size and self._is_same(path, expected, by_content):
            return 0
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
        return size

    def _is_same(self, path: str, expected: str, by_content: bool) -> bool:
        if not expected:
            return not by_content or self.target.read(path) == self.source.read(path)
        with self.target.open(path) as file:
            return checksum(file, self.compared) == expected


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
    for file in sorted(found, key=commit_order):
        path, size, expected = (f"{name}/{file}" if checkpoint.is_dir else file), found[file].size, checksums.get(file, "")
        sent += work.copy(path, size, there.get(file), expected, by_content=_commit_rank(file) > 0)
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
        sent += work.copy(path, file.size, there.size if there is not None else None, file.checksum)
    return sent


def send(source: Storage, target: Storage, path: str, entry: Entry, throttle: Throttle) -> None:
    """Copy a file, whatever the target has there. entry: as it is. throttle: see `copy`.

    Raises CopyError if it is written again meanwhile: then it does not appear; OSError.
    """

    def check(size: int) -> None:
        throttle(size)
        now = source.stat(path)
        if now is None or (now.size, now.mtime) != (entry.size, entry.mtime):
            raise CopyError(f"{source.path(path)} was written again while it was copied")

    _Copy(source, target, check).copy(path, entry.size, None, "")


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


def commit_order(file: str) -> tuple[int, str]:
    """Return a sorting key: what makes a checkpoint complete comes last."""
    return _commit_rank(file), file


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
