"""Which part of a save a node keeps for another one, and what it lets go. Pure.

Invariants:

- Only what the other node's record vouches for is fetched.
- What is kept goes only once all of a newer save is kept, or to make room for a third save: so at most two are there.
- A save of several entries, as where each rank has written one, is kept or let go as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, MirroredPart, NodeEntry

MOST_KEPT = 2  # saves, also while one of them is fetched


def mirrored_node(node: int, nodes: int) -> int | None:
    """Return the group rank of the node whose parts this one keeps, the next one; None: there is no other."""
    return (node + 1) % nodes if nodes > 1 else None


@dataclass(frozen=True)
class MirrorPlan:
    """What to do now. free: before anything is fetched. waits: the other node has yet to record what it was told to."""

    why: str
    fetch: tuple[MirroredPart, ...] = ()
    free: tuple[MirroredPart, ...] = ()
    waits: bool = False

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(file.size for each in self.fetch for file in files_of_part(each))


@dataclass(frozen=True)
class _Known:
    """A part with what its record says."""

    part: MirroredPart
    save: StoredSave

    @property
    def group(self) -> _Group:
        """The same for all entries of one save."""
        part, save = self.part, self.save
        return part.attempt, save.count if save.moment else part.order, pattern_of(part.name) if save.moment else ""


_Group = tuple[int, int, str]


def files_of_part(part: MirroredPart) -> tuple[stored.RecordedFile, ...]:
    """Return the recorded files; none if the record cannot be read."""
    save = _save_of(part)
    return save.files if save is not None else ()


def next_step(
    there: Catalogue, wanted: Collection[KnownSave], kept: Sequence[MirroredPart], may_be: Callable[[NodeEntry], bool]
) -> MirrorPlan:
    """Return what to do.

    Args:
        there: what the other node has.
        wanted: what it was told to record.
        kept: what this node keeps, of whichever node.
        may_be: whether an entry may be a checkpoint, by its name.
    """
    if not there.directory:
        return MirrorPlan("the directory of the other node has no name: it does not mirror")
    offered = list(_offered(there, may_be))
    late = sorted(each.name for each in wanted if not _is_recorded(each, there))
    if late:
        return MirrorPlan(f"the other node has yet to record {late[0]}", waits=True)
    if not offered:
        return MirrorPlan("the other node has no part of a save")
    newest, groups = max(offered, key=lambda each: each.part.known).group, _groups(kept)
    wholly = [each.part for each in offered if each.group == newest]
    missing = tuple(each for each in wholly if each not in kept)
    if not missing:
        return MirrorPlan(f"{wholly[0].name} is kept", free=_older_than_whole(groups))
    others = [group for group in groups if group != newest]
    stays = next((group for group in others if _is_whole(groups[group])), others[0] if others else None)
    free = tuple(each.part for group in others if group != stays for each in groups[group])
    return MirrorPlan(f"{missing[0].name} is newer than what is kept", missing, free)


def is_unchanged(part: MirroredPart, there: Catalogue) -> bool:
    """Return whether the other node's record still vouches for this part: then what was fetched since was of it."""
    return there.directory == part.origin and any(_part_of(each, there.directory) == part for each in there.entries)


def _part_of(entry: NodeEntry, directory: str) -> MirroredPart | None:
    """Return the part that a node's record vouches for; None: for none."""
    if not (entry.vouched and entry.record):
        return None
    return MirroredPart(directory, entry.name, entry.is_dir, entry.attempt, entry.order, entry.record)


def _offered(there: Catalogue, may_be: Callable[[NodeEntry], bool]) -> Iterable[_Known]:
    for entry in there.entries:
        part = _part_of(entry, there.directory) if may_be(entry) else None
        known = _known(part) if part is not None else None
        if known is not None and known.save.proved and not known.save.arriving:
            listed = {(file.name, file.size, file.mtime) for file in entry.files}
            if {(file.name, file.size, file.mtime) for file in known.save.files} <= listed:  # names that were checked
                yield known


def _is_recorded(wanted: KnownSave, there: Catalogue) -> bool:
    known = (each.known for each in there.entries if each.name == wanted.name)
    return any(each is not None and each >= wanted for each in known)


def _save_of(part: MirroredPart) -> StoredSave | None:
    return stored.save_of(part.record.encode(), f"the record of {part.name} of another node")


def _known(part: MirroredPart) -> _Known | None:
    save = _save_of(part)
    return _Known(part, save) if save is not None else None


def _groups(kept: Sequence[MirroredPart]) -> dict[_Group, list[_Known]]:
    """Return what is kept by saves, the newest first."""
    found = defaultdict[_Group, list[_Known]](list)
    for each in kept:
        known = _known(each)
        if known is not None:
            found[known.group].append(known)
    return dict(sorted(found.items(), key=lambda item: max(each.part.known for each in item[1]), reverse=True))


def _is_whole(group: Sequence[_Known]) -> bool:
    """Return whether all entries of a save are there: where each rank has one, those of all ranks of the other node."""
    save = group[0].save
    return not save.moment or len({rank for each in group for rank in each.save.ranks}) >= save.here


def _older_than_whole(groups: dict[_Group, list[_Known]]) -> tuple[MirroredPart, ...]:
    stay: list[_Group] = []
    for group in groups:
        stay.append(group)
        if _is_whole(groups[group]) or len(stay) == MOST_KEPT:
            break
    return tuple(each.part for group, of in groups.items() if group not in stay for each in of)
