"""Decide which checkpoints to remove from a directory or the local tier, and remove them.

The last copy is never removed, nor what a job would resume from. A directory keeps the newest complete checkpoint of each family.
The local tier also keeps each checkpoint that is newer than all complete ones in the remote directory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.directory.own_files import UNFINISHED
from elastic_ext.checkpoints.formats.candidates import DCP, HUGGING_FACE, OWN, UNKNOWN, order_of, order_or_oldest, step_of
from elastic_ext.checkpoints.formats.detect import COMMIT_FILES
from elastic_ext.checkpoints.storage import Entry, Storage

# In these formats an incomplete checkpoint is certainly the leftover of a save. A file may have an unknown format.
_CERTAIN_FORMATS = (OWN, DCP, HUGGING_FACE)


@dataclass(frozen=True)
class PruneCandidate:
    """The properties of a checkpoint that pruning needs.

    family: checkpoints of different families do not compare. together: a name for several families whose checkpoints of one step
    belong together (model, ema, optimizer); "" for none. apart: one of these families that a pattern leaves out; "" for none.
    compared: it is incomplete only by comparison with what lies beside it.
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

    Pinned and quarantined ones stay, and what is of no known format. An incomplete one goes only if a newer one of its family is
    complete; otherwise it may still be being written. Of families that belong together, a step counts once, if each that has an
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


@dataclass(frozen=True)
class LocalCopy:
    """A checkpoint in a node's local tier. whole: the node's part is complete. remote: it is complete in the remote directory."""

    name: str
    whole: bool
    remote: bool


def plan_local_prune(newest_first: Sequence[LocalCopy], newest_remote: tuple[int, int] | None) -> list[str]:
    """Return the names of the checkpoints to remove from the local tier. Pure.

    The newest whole one stays. So does each one that is newer than all complete remote ones, because it may be the last copy.
    One that is not whole may still be being written, unless a newer one is whole.

    newest_remote: `order_of` the newest complete checkpoint in the remote directory; None: it has none.
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
    """Remove one of our own checkpoints, commit files first, so that an interrupted removal leaves none. Raises OSError."""
    storage.remove_tree(name, first=COMMIT_FILES)


def delete_entry(storage: Storage, entry: Entry) -> None:
    """Remove a checkpoint of any format. An interrupted removal leaves none: a mark lies beside a directory, and of files of
    ranks the first goes first. Raises OSError.
    """
    for part in entry.parts or (entry,):
        mark = f"{part.name}{UNFINISHED}" if part.is_dir and order_of(part.name) is None else ""
        if mark:
            storage.put(mark, b"")
        storage.remove_tree(part.name, first=COMMIT_FILES)
        if mark:
            storage.remove(mark)
