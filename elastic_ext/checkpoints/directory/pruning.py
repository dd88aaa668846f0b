"""Decide which checkpoints to remove, from a directory and from the local tier, and remove them.

The last copy is never removed. In a directory the newest complete checkpoint of each family stays; in the local tier so does
each checkpoint that is newer than all complete ones of the remote directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.formats.detect import COMMIT_FILES
from elastic_ext.checkpoints.formats.inspection import DCP, HUGGING_FACE, OWN
from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from elastic_ext.checkpoints.storage import Storage

# In these formats an unfinished checkpoint is certain to be the leftover of a save. A file may be of an unknown format.
_CERTAIN_FORMATS = (OWN, DCP, HUGGING_FACE)


@dataclass(frozen=True)
class PruneCandidate:
    """A checkpoint, as far as pruning must know it. family: checkpoints of different families do not compare."""

    name: str
    family: str
    step: int | None
    format: str
    complete: bool
    pinned: bool = False
    quarantined: bool = False


@dataclass(frozen=True)
class PruneDecision:
    """Whether to remove a checkpoint, and why. reason: for people."""

    name: str
    remove: bool
    reason: str


def plan_prune(newest_first: Iterable[PruneCandidate], keep_last: int, keep_every: int = 0) -> tuple[PruneDecision, ...]:
    """Decide which checkpoints to remove. Pure.

    Pinned and quarantined ones stay. An unfinished one goes only if a newer one of its family is complete: else it may still be
    written.

    Args:
        newest_first: all there are, of each family the newest first.
        keep_last: number of complete checkpoints that stay in each family; at least one stays, whatever this is.
        keep_every: checkpoints whose step is a multiple of this stay; 0: none for this reason.
    """
    newer_complete: dict[str, int] = {}
    decisions = []
    for candidate in newest_first:
        newer = newer_complete.get(candidate.family, 0)
        decisions.append(_decide(candidate, newer, max(1, keep_last), keep_every))
        if candidate.complete and not candidate.quarantined:
            newer_complete[candidate.family] = newer + 1
    return tuple(decisions)


def _decide(candidate: PruneCandidate, newer: int, keep_last: int, keep_every: int) -> PruneDecision:
    """newer: number of complete checkpoints of its family that are newer and not quarantined."""

    def keep(reason: str) -> PruneDecision:
        return PruneDecision(candidate.name, False, reason)

    if candidate.quarantined:
        return keep("quarantined: somebody must look at it")
    if candidate.pinned:
        return keep("pinned")
    if not candidate.complete:
        if candidate.format not in _CERTAIN_FORMATS:
            return keep("not complete, and perhaps no leftover of a save")
        if not newer:
            return keep("not complete; newer than each complete one, so perhaps still being written")
        return PruneDecision(candidate.name, True, "not complete, and older than a complete one")
    if newer < keep_last:
        return keep(f"among the newest {keep_last}")
    if keep_every and candidate.step is not None and candidate.step % keep_every == 0:
        return keep(f"step {candidate.step} is a multiple of {keep_every}")
    return PruneDecision(candidate.name, True, f"{newer} newer ones are complete")


@dataclass(frozen=True)
class LocalCopy:
    """A checkpoint in the local tier of a node. whole: the node's part is complete; remote: the remote directory has it whole."""

    name: str
    whole: bool
    remote: bool


def plan_local_prune(newest_first: Sequence[LocalCopy], newest_remote: tuple[int, int] | None) -> list[str]:
    """Return the names of the checkpoints to remove from the local tier. Pure.

    The newest whole one stays, and each one that is newer than all complete ones of the remote directory: it may be the last
    copy. One that is not whole may still be written, unless a newer one is whole.

    newest_remote: `order_of` the newest complete checkpoint of the remote directory; None: it has none.
    """
    removed = []
    newer_whole = False
    for copy in newest_first:
        safe = copy.remote or (newest_remote is not None and newest_remote > order_or_oldest(copy.name))
        if newer_whole and (safe or not copy.whole):
            removed.append(copy.name)
        newer_whole = newer_whole or copy.whole
    return removed


def delete(storage: Storage, name: str) -> None:
    """Remove a checkpoint, first what makes it complete: a removal that is cut off leaves no checkpoint. Raises OSError."""
    storage.remove_tree(name, first=COMMIT_FILES)
