"""Saves of several nodes, each of which saves in a `local_dir` of its own: which parts are one save. Pure.

In the proof of a round (`proof.RoundProof`, apart=True) the directory of each node has a proof of its own. Here the parts of one
name are put together. A part that is whole says nothing of the others. So a save is whole only if

(a) each node has either a proved part of that name, or nothing of that name in its directory but what is known as an older save;
(b) since the save of that name that was put together last, each part was written again, or none was and there is more of it;
(c) all parts have the same count of steps, or the name has a number and is new, or this is the same save of that name on each
    node, by their number in the round, and all of the one before was over first: what is saved beside the training may begin a
    few steps late, but an old part of one node and a new one of another would look alike where a name comes again;
(d) all parts together have no fewer files than the last save of that kind that was put together, or that was recorded in an
    earlier round with as many ranks; or the same ones as another save since. Nor have they less than half its bytes, but where
    another save since had as few. Ranks move between nodes, so no node can say that of its own part;
(e) no worker has removed a part of it meanwhile: what is left of it on other nodes is no save (`LeftParts`);
(f) if a part was renamed to that name, no other node has one of its old name that is not older: a rank may rename for all, as in
    a directory of all.

All nodes list their parts after they are proved. The lists count once every node has read its journals again (`features/record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.formats.candidates import is_hidden, order_of
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.journal import JournalLine, SavePath
from elastic_ext.checkpoints.record.proof import RecordedSave
from elastic_ext.checkpoints.record.stored import NodePart, RecordedFile, UsualSizes

LEFT = "a worker has removed a part of it"
NOT_ALL_AGAIN = "not all nodes have written their part again"
SEVERAL_COUNTS = (
    "the nodes have written their parts at different steps, and the name came before: give each save a name with its step"
)
LOCAL = 1
"""The number of the `local_dir` of group rank 0 in the proof of a round; those of the other nodes follow."""


@dataclass(frozen=True)
class FileOfRank:
    """A file of a part. path: relative to the directory. rank: which wrote it last. written: by this save."""

    path: str
    rank: records.Count
    written: bool


@dataclass(frozen=True)
class ProvedPart:
    """What the proof says of one node's part, in a message. See `proof.RecordedSave`."""

    node: records.Count
    order: records.Count
    files: tuple[FileOfRank, ...]
    count: records.Count
    ranks: tuple[records.Count, ...]
    why: str
    usual: records.Count

    def save(self, name: str, order: int) -> RecordedSave:
        """Return it as a save in the directory of its node. order: of the whole save."""
        files = {each.path: each.rank for each in self.files}
        written = frozenset(each.path for each in self.files if each.written)
        return RecordedSave(
            order, SavePath(LOCAL, name), files, written, self.count, self.ranks, True, self.why, usual=self.usual
        )


@dataclass(frozen=True)
class WholeSave:
    """Parts of one name that are all proved.

    parts: by node. doubt: why they are not one save, for people; "": nothing says so. changes: other values than before:
    something was written since.
    """

    name: str
    parts: Mapping[int, RecordedSave]
    doubt: str = ""

    @property
    def order(self) -> int:
        """That of its lowest part."""
        return self.parts[min(self.parts)].order

    @property
    def changes(self) -> Parts:
        return {node: (each.order, each.changes) for node, each in self.parts.items()}

    @property
    def inside(self) -> Counter[str]:
        """How many different files it has, by their names within the entry, without digits."""
        begin = len(self.name)
        return Counter(pattern_of(path) for path in {path[begin:] for each in self.parts.values() for path in each.files})

    def messages(self) -> tuple[ProvedPart, ...]:
        return tuple(_message(node, each) for node, each in sorted(self.parts.items()))


def _message(node: int, save: RecordedSave) -> ProvedPart:
    files = tuple(FileOfRank(path, rank, path in save.written) for path, rank in sorted(save.files.items()))
    return ProvedPart(node, save.order, files, save.count, save.ranks, save.why, save.usual)


Size = Annotated[int, records.Within(0, 1 << 62)]
Parts = Mapping[int, tuple[int, int]]
"""By node, `order` and `changes` of its part."""


def current_parts(saves: Sequence[RecordedSave]) -> dict[str, dict[int, RecordedSave]]:
    """Return by name and node what the nodes have now in their own directories, as far as the round has written it.

    Temporary names are among them.
    """
    found: dict[str, dict[int, RecordedSave]] = {}
    for each in saves:
        name = each.entry.path
        if each.entry.at >= LOCAL and not (each.gone or order_of(name) is not None):
            found.setdefault(name, {})[each.entry.at - LOCAL] = each
    return found


def proved_saves(
    current: Mapping[str, Mapping[int, RecordedSave]],
    last: Mapping[str, Parts],
    left: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
    names: Collection[str] = (),
) -> list[WholeSave]:
    """Return what is new and of which each known part is proved, with the reason if (b), (c), (e) or (f) does not hold.

    last: what was put together last. left: see `LeftParts.orders`. names: that were put together before.
    """
    found = [WholeSave(name, parts) for name, parts in current.items() if not is_hidden(name)]
    found = [each for each in found if all(part.proved for part in each.parts.values()) and not _is_known(each, last)]
    doubts = (_doubt(each, current, last.get(each.name, {}), each.name not in names) for each in found)
    return [
        replace(each, doubt=LEFT if _is_left(each, left.get(each.name, {})) else doubt)
        for each, doubt in zip(found, doubts, strict=True)
    ]


def _is_known(save: WholeSave, last: Mapping[str, Parts]) -> bool:
    """Return whether it was put together already."""
    return all(last.get(save.name, {}).get(node) == now for node, now in save.changes.items())


def _is_left(save: WholeSave, left: Mapping[int, int]) -> bool:
    return any(left.get(node) == each.order for node, each in save.parts.items())


def _doubt(save: WholeSave, current: Mapping[str, Mapping[int, RecordedSave]], last: Parts, is_new: bool) -> str:
    parts = save.parts
    if len({last[node][0] == each.order for node, each in parts.items() if node in last}) > 1:
        return NOT_ALL_AGAIN
    for node, each in parts.items():
        others = [of for other, of in current.get(each.was, {}).items() if other != node and of.count >= each.count]
        if others:
            return f"node {node} has renamed its part, and another node has a part of the old name, {each.was}"
    counts = {each.count for each in parts.values()}
    is_numbered = is_new and pattern_of(save.name) != save.name
    return "" if len(counts) == 1 or is_numbered or _is_same_time(save) else SEVERAL_COUNTS


def _is_same_time(save: WholeSave) -> bool:
    """Return whether each node has saved that name as often, and the last time before was over on all."""
    since = max(each.since for each in save.parts.values())
    return len({each.number for each in save.parts.values()}) == 1 and all(each.count > since for each in save.parts.values())


@dataclass(frozen=True)
class KindFiles:
    """The last proved save of a kind on all nodes, as one of them has recorded it.

    kind: all names that differ only in digits; "#" stands for these. files: how many it had. size: their bytes.
    """

    kind: str
    files: records.Count
    size: Size


@dataclass
class UsualFiles:
    """How many files and bytes saves of a kind have, for (d)."""

    _last: dict[str, int] = field(default_factory=dict)  # by kind
    _fewer: dict[str, tuple[int, Counter[str]]] = field(default_factory=dict)  # by kind: order and files of the last with fewer
    _sizes: UsualSizes = field(default_factory=UsualSizes)

    def know(self, before: Iterable[KindFiles]) -> None:
        """Take what a node knows from earlier rounds."""
        for each in before:
            self._last[each.kind] = max(each.files, self._last.get(each.kind, 0))
            self._sizes.last[each.kind] = max(each.size, self._sizes.last.get(each.kind, 0))

    def lacks(self, save: WholeSave) -> str:
        """Return what it lacks, for people; "": nothing."""
        kind, inside = pattern_of(save.name), save.inside
        there, usual = inside.total(), self._last.get(kind, 0)
        order, fewer = self._fewer.get(kind, (save.order, Counter[str]()))
        if there >= usual or (order != save.order and fewer == inside):
            return ""
        self._fewer[kind] = save.order, inside
        return f"all nodes together have {counted(there, 'file')} of it, and the last one of this name had {usual}"

    def cut_short(self, save: WholeSave, size: int) -> str:
        """Return whether it has too few bytes, for people; "": no. size: bytes on all nodes."""
        kind = pattern_of(save.name)
        if not self._sizes.is_short(kind, save.order, size):
            return ""
        return f"all nodes together have {size} bytes of it, and the last one of this name had {self._sizes.last[kind]}"

    def recorded(self, save: WholeSave, size: int) -> None:
        self._last[pattern_of(save.name)] = save.inside.total()
        self._sizes.last[pattern_of(save.name)] = size


Listed = Mapping[int, Mapping[str, RecordedFile]]
"""By node, the files in its directory of one name, by their paths relative to the entry; without times."""


def size_of(listed: Listed) -> int:
    """Return the bytes on all nodes. A file that several have counts once."""
    return sum({name: file.size for files in listed.values() for name, file in files.items()}.values())


def refused(save: WholeSave, listed: Listed, nodes: int) -> str:
    """Return why (a) does not hold, for people; "": it does. listed: what each node has of that name."""
    for node in range(nodes):
        if node not in listed:
            return f"node {node} has not listed its files"
        if node in save.parts and not listed[node]:
            return f"node {node} does not have all files that were seen to be written"
        if node not in save.parts and listed[node]:
            return f"node {node} has files of that name, and none of them was seen to be written in this round"
    return ""


def ranks_of_moment(save: WholeSave, current: Mapping[str, Mapping[int, RecordedSave]]) -> tuple[int, ...]:
    """Return the ranks that have saved entries of this kind at this count; none if this is the only such entry."""
    kind, counts = pattern_of(save.name), {each.count for each in save.parts.values()}
    alike = {name: of for name, of in current.items() if pattern_of(name) == kind}
    of_moment = [(name, each) for name, of in alike.items() for each in of.values() if each.count in counts]
    if len({name for name, _ in of_moment}) < 2:
        return ()
    return tuple(sorted({rank for _, each in of_moment for rank in each.ranks}))


def part_of(listed: Listed, node: int) -> NodePart:
    """Return which part a node has of what all nodes have of one name. It has files.

    Of two files with one name that counts which this save has written, and then that of the lower part.
    """
    holders = sorted(each for each, files in listed.items() if files)
    counts: dict[str, int] = {}  # by name, the node whose file counts
    for holder in reversed(holders):
        for name, file in listed[holder].items():
            if name not in counts or file.rank >= 0 or listed[counts[name]][name].rank < 0:
                counts[name] = holder
    others = sorted((name, holder) for name, holder in counts.items() if holder != node)
    return NodePart(holders.index(node), len(holders), tuple(listed[holder][name] for name, holder in others))


def of_node(event: JournalLine, node: int) -> JournalLine:
    """Return an event of a node's journal with that node's own number for its `local_dir`."""
    if node == 0 or (event.place.at != LOCAL and event.to.at != LOCAL):
        return event
    place, to = (each._replace(at=LOCAL + node) if each.at == LOCAL else each for each in (event.place, event.to))
    return event._replace(place=place, to=to)


@dataclass
class LeftParts:
    """The parts of saves of which a worker has removed the part of another node, as they were then.

    A trainer may remove a save before it was recorded. orders: by name and node, `order` of the part; another one is a new save.
    """

    orders: dict[str, dict[int, int]] = field(default_factory=dict)
    _seen: set[SavePath] = field(default_factory=set)

    def look(self, removed: Collection[SavePath], current: Mapping[str, Mapping[int, RecordedSave]]) -> None:
        """Take what the nodes have now. removed: see `proof.RoundRecord`."""
        of_nodes = [each for each in removed if each.at >= LOCAL]
        there = {each for each in of_nodes if each.at - LOCAL in current.get(each.path, {})}  # written again since
        for each in of_nodes:
            parts = current.get(each.path, {})
            if parts and each not in there and each not in self._seen:
                self.orders.setdefault(each.path, {}).update({node: part.order for node, part in parts.items()})
        self._seen = {*of_nodes} - there
        self.orders = {name: orders for name, orders in self.orders.items() if name in current}


LATER = 2  # saves after a removal, before the other parts are removed


@dataclass(frozen=True)
class RemovedPart:
    """A part, by its record, that a worker has removed from its node: of which save it was. See `stored.KnownSave`."""

    attempt: records.Count
    order: records.Count
    name: str


@dataclass
class RemovedSaves:
    """The saves of which a worker has removed the part of one node.

    Many trainers have one rank remove old saves, as in a directory of all. The agents then remove the other parts, but later:
    workers there may be about to remove them, too, and would fail if a file has gone.
    """

    _left: dict[RemovedPart, int] = field(default_factory=dict)  # how many saves are still to come

    def removed(self, parts: Iterable[RemovedPart]) -> None:
        for each in parts:
            self._left.setdefault(each, LATER)

    def saved(self) -> None:
        """Another save was recorded."""
        self._left = {each: left - 1 for each, left in self._left.items()}

    def take_due(self) -> tuple[RemovedPart, ...]:
        """Return those whose other parts are to be removed now, once."""
        due = tuple(each for each, left in self._left.items() if left <= 0)
        self._left = {each: left for each, left in self._left.items() if left > 0}
        return due
