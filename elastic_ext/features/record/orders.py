"""The record of saves of which each node has a part in its own `local_dir`: what the agent of group rank 0 has all nodes do.

With a question (`watch`), it tells them which saves are proved, and each node lists what it has of those before it reads its
journals again. When all have answered, and nothing has changed since, it tells them to record what they have listed, each node
its own part (`checkpoints/record/parts.py` says when parts are one save).

Invariant: a node records only what it has listed itself, so its record speaks of its own files, with the times of its own clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic_ext.base import records
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.directory import upkeep
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.record import parts
from elastic_ext.checkpoints.record.fold import EntryRead
from elastic_ext.checkpoints.record.journal import SavePath
from elastic_ext.checkpoints.record.parts import LOCAL, KindFiles, ProvedPart, RemovedPart, Size, WholeSave
from elastic_ext.checkpoints.record.proof import RecordedSave, RoundRecord
from elastic_ext.checkpoints.record.stored import (
    AttemptRecord,
    KnownSave,
    RecordedFile,
    Trust,
    changed_at,
    files_at,
    known_saves,
    read_save,
    trust,
)
from elastic_ext.checkpoints.storage import Entry, LocalStorage
from elastic_ext.features.record.pauses import EVERY_S, Due

logger = logging.getLogger(__name__)

LOOKS = 10  # after a worker has noted that it removes an entry: it does so then


@dataclass(frozen=True)
class SizedFile:
    """name: relative to the entry. size: in bytes. rank: which wrote it for this save; -1: none was seen to."""

    name: str
    size: Size
    rank: records.Rank = -1


@dataclass(frozen=True)
class PartList:
    """What a node has of a save. order: of the save. node: its group rank. fault: why it cannot say that."""

    node: records.Count
    order: records.Count
    files: tuple[SizedFile, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class ListOrder:
    """List the files of a save. parts: of the nodes that have some."""

    order: records.Count
    name: str
    parts: tuple[ProvedPart, ...]


@dataclass(frozen=True)
class WriteOrder:
    """Record what was listed of a save. lists: of all nodes that have files. moment: see `StoredSave`."""

    order: records.Count
    name: str
    lists: tuple[PartList, ...]
    moment: tuple[records.Count, ...] = ()


@dataclass(frozen=True)
class Orders:
    """What goes with a question.

    attempt: number of the round in the record of saves. remove: saves whose parts are to be removed, because a worker has removed
    that of another node. loads: what scripts have read before their first step. end: there will be no more.
    """

    attempt: records.Count
    lists: tuple[ListOrder, ...] = ()
    writes: tuple[WriteOrder, ...] = ()
    remove: tuple[RemovedPart, ...] = ()
    loads: tuple[str, ...] = ()
    end: bool = False

    @property
    def says_something(self) -> bool:
        return bool(self.lists or self.writes or self.remove or self.end)


class NodeRecord:
    """The record in this node's own directory. Any storage error costs the save that it hits, and is logged once."""

    def __init__(
        self,
        local: LocalStorage,
        node: int,
        world: int,
        ranks: int,
        rounds: int = 0,
        recorded: Callable[[Orders], None] = lambda orders: None,
    ) -> None:
        """node: group rank. world: number of ranks, ranks: of this node. rounds: see `Resumption`. recorded: see `AgentSide`.

        Raises OSError.
        """
        self._local, self._node, self._recorded = local, node, recorded
        self._attempt = AttemptRecord(local, world, rounds + 1, ranks)
        notes.forget_older(local)
        self._listed: dict[int, tuple[RecordedSave, Mapping[str, Entry]]] = {}  # by order
        self._older: dict[str, float] = {}  # by name: when entries of earlier rounds were changed last, as they were listed
        self._removing: dict[str, tuple[int, bool]] = {}  # by name: how many more looks to take; it is removed, not moved
        self._removed: list[RemovedPart] = []
        self.seen_to_be_used = False
        self._fault = ""  # the last one

    @property
    def attempt(self) -> int:
        return self._attempt.attempt

    def begin(self, attempt: int) -> bool:
        """See `AttemptRecord.begin`."""
        return self._attempt.begin(attempt)

    @property
    def before(self) -> tuple[KindFiles, ...]:
        """What is known of the last saves in earlier rounds with as many ranks."""
        files, sizes = self._attempt.before, self._attempt.sizes.last
        return tuple(KindFiles(kind, files[kind], sizes[kind]) for kind in files)

    def carry_out(self, orders: Orders) -> tuple[PartList, ...]:
        """Do what is asked for; return what was to be listed."""
        if not self._attempt.begin(orders.attempt):
            self._warn(f"its number is {self._attempt.attempt}, and that of the round {orders.attempt}")
            return tuple(PartList(self._node, each.order, fault=self._fault) for each in orders.lists)
        for write in orders.writes:
            self._tried(lambda write=write: self._write(write, orders.loads))  # type: ignore[misc]
        for removed in orders.remove:
            self._tried(lambda removed=removed: self._remove(removed))  # type: ignore[misc]
        if orders.writes:
            self._recorded(orders)
        return tuple(self._list(each) for each in orders.lists)

    def _list(self, order: ListOrder) -> PartList:
        found: Mapping[str, Entry] = {}
        ranks: Mapping[str, int] = {}
        doubt = ""

        def look() -> None:
            nonlocal found, ranks, doubt
            part = next((each for each in order.parts if each.node == self._node), None)
            if part is None:
                found = self._others(order.name)
            else:
                save = part.save(order.name, order.order)
                found, begin = without_others(self._attempt.listed(save), part, order.parts), len(order.name) + 1
                unseen = self._attempt.unseen(order.name, found, [path[begin:] for path in save.files])
                doubt = unseen if len(order.parts) > 1 else ""  # no format can say of a part whether it is whole
                ranks = {path[begin:]: rank for path, rank in save.files.items() if path in save.written}
                self._listed[order.order] = save, found

        fault = self._tried(look) or doubt
        files = tuple(SizedFile(name, each.size, ranks.get(name, -1)) for name, each in sorted(found.items()))
        return PartList(self._node, order.order, files, fault)

    def _others(self, name: str) -> Mapping[str, Entry]:
        """Return the files of an entry of which this round has written none here; none if they are known to be older."""
        changed = changed_at(self._local, name)
        found = files_at(self._local, name)
        known = known_saves(self._local).get(name) if found else None
        save = read_save(self._local, known) if known is not None else None
        if save is not None and trust(save.as_whole, found)[0] is Trust.PROVED:
            return {}
        if found and notes.is_of_earlier_round(self._local, name):
            self._older[name] = changed
            return {}
        return found

    def _write(self, order: WriteOrder, loads: Iterable[str]) -> None:
        changed = self._older.pop(order.name, None)
        if changed is not None:
            notes.note_older(self._local, order.name, KnownSave(self.attempt, order.order, order.name).number, changed)
        listed = self._listed.pop(order.order, None)
        if listed is None or not listed[1]:
            return
        save, found = listed
        of = replace(parts.part_of(listed_by(order.lists), self._node), moment=order.moment)
        self._attempt.write(save, found, reads_of(loads), of)

    def _remove(self, removed: RemovedPart) -> None:
        """Remove this node's part of a save, if it is as it was recorded."""
        name = removed.name
        known = known_saves(self._local).get(name)
        if known is None or known != KnownSave(removed.attempt, removed.order, name):
            return
        save, entry = read_save(self._local, known), candidates.entry_of(self._local, name)
        whole = save is not None and save.parts > 1 and trust(save.as_whole, files_at(self._local, name))[0] is Trust.PROVED
        if entry is not None and whole:
            upkeep.delete_entry(self._local, entry)
            self._attempt.forget(name)
            logger.info("removed %s, as the script has removed what another node had of it", self._local.path(name))

    def removed(self, removed: Iterable[str], moved: Iterable[str] = ()) -> None:
        """Workers of this node have removed these entries or moved them away, or are about to: call it again at each look."""
        self._removing |= dict.fromkeys(removed, (LOOKS, True)) | dict.fromkeys(moved, (LOOKS, False))
        for name, (left, is_removal) in list(self._removing.items()):
            self._removing[name] = left - 1, is_removal
            self._tried(lambda name=name, is_removal=is_removal: self._note_removed(name, is_removal))  # type: ignore[misc]
        self._removing = {name: (left, is_removal) for name, (left, is_removal) in self._removing.items() if left > 0}

    def _note_removed(self, name: str, is_removal: bool) -> None:
        if self._local.stat(name) is None:
            known = self._attempt.known(name)
            save = read_save(self._local, known) if known is not None and is_removal else None
            if known is not None and save is not None and save.parts > 1:
                self._removed.append(RemovedPart(known.attempt, known.order, name))
            notes.note_removed(self._local, name, known is not None)
            self._attempt.forget(name)  # last: the copier looks when the record changes
            self._removing[name] = 0, is_removal

    def take_removed(self) -> tuple[RemovedPart, ...]:
        """Return of which saves of several nodes workers have removed this node's part, once."""
        found, self._removed = tuple(self._removed), []
        return found

    @property
    def is_used(self) -> bool:
        """Whether a script saves here, or in the directory of another node, as far as that is known."""
        try:
            return self.seen_to_be_used or notes.is_used(self._local)
        except OSError:
            return True

    def write_unproved(self, record: RoundRecord) -> None:
        """Record what only this node has, and is not proved at the end of the round. On group rank 0.

        Only if the last save of its kind was of this node alone: else other nodes may have a part, and have not said so.
        """
        for of_nodes in parts.current_parts(record.saves).values():
            save = of_nodes.get(0)
            is_alone = save is not None and len(of_nodes) == 1 and self._attempt.is_of_one_node(save.entry.path)
            if save is not None and is_alone and not (save.proved or candidates.is_hidden(save.entry.path)):
                self._tried(lambda save=save: self._attempt.write_unproved(save, reads_of(loads_of(record))))  # type: ignore[misc]

    def _tried(self, act: Callable[[], None]) -> str:
        """Return why it failed, and log that."""
        try:
            act()
        except OSError as error:
            self._warn(error.strerror or str(error))
            return self._fault
        return ""

    def _warn(self, fault: str) -> None:
        if fault != self._fault:
            logger.warning("saves in %s cannot be recorded now: %s", self._local.address, fault)
        self._fault = fault


def listed_by(lists: Iterable[PartList]) -> parts.Listed:
    return {each.node: {file.name: RecordedFile(file.name, file.size, 0.0, file.rank) for file in each.files} for each in lists}


def without_others(found: Mapping[str, Entry], part: ProvedPart, parts_of_save: Iterable[ProvedPart]) -> dict[str, Entry]:
    """Return the files of a part without those that another node was seen to write in this save, and this one was not.

    They are left from a round in which the nodes had other ranks. found: by their paths relative to the entry.
    """
    own = {each.path for each in part.files}
    others = {each.path.partition("/")[2] for of in parts_of_save for each in of.files if each.written and each.path not in own}
    return {path: entry for path, entry in found.items() if path not in others}


def loads_of(record: RoundRecord) -> tuple[str, ...]:
    """Return the entries in the nodes' own directories that scripts have read before their first step."""
    names = (each.place.entry.path for each in record.reads if each.count == 0 and each.place.at >= LOCAL)
    return tuple(dict.fromkeys(names))


def reads_of(loads: Iterable[str]) -> list[EntryRead]:
    return [EntryRead(SavePath(LOCAL, name), 0, 0) for name in loads]


@dataclass
class _Listed:
    save: WholeSave
    question: int
    lists: dict[int, PartList] = field(default_factory=dict)  # by node


@dataclass
class WholeRecord:
    """On group rank 0: says what all nodes are to list, record and remove. `now` is monotonic seconds; infinity: the last time.

    It does no I/O. nodes: of the round. attempt: number of the round.
    """

    nodes: int
    attempt: int
    _listed: dict[int, _Listed] = field(default_factory=dict)  # by order
    _recorded: dict[str, parts.Parts] = field(default_factory=dict)  # by name
    _due: dict[str, Due] = field(default_factory=dict)  # by name
    removals: parts.RemovedSaves = field(default_factory=parts.RemovedSaves)
    _left: parts.LeftParts = field(default_factory=parts.LeftParts)
    _refused: dict[str, str] = field(default_factory=dict)  # by name: why it was refused last
    _names: set[str] = field(default_factory=set)  # that were recorded in this round
    usual: parts.UsualFiles = field(default_factory=parts.UsualFiles)

    def take(self, lists: Iterable[PartList]) -> None:
        for each in lists:
            if each.order in self._listed and each.node < self.nodes:
                self._listed[each.order].lists[each.node] = each

    @property
    def waits(self) -> bool:
        """Whether something was listed and not yet recorded."""
        return bool(self._listed)

    def next(self, record: RoundRecord, asked: int, answered: int, now: float, unsure: Callable[[SavePath], bool]) -> Orders:
        """Return what is to be done now.

        asked: the last question. answered: the last one that all have answered. unsure: whether an entry may have changed.
        """
        current = parts.current_parts(record.saves)
        self._left.look(record.removed, current)
        writes = tuple(self._writes(current, answered, now, unsure))
        lists = tuple(self._lists(current, asked, now))
        return Orders(self.attempt, lists, writes, self.removals.take_due(), loads_of(record) if writes else ())

    def _writes(
        self, current: Mapping[str, Mapping[int, RecordedSave]], answered: int, now: float, unsure: Callable[[SavePath], bool]
    ) -> Iterable[WriteOrder]:
        for order, listed in sorted(self._listed.items()):
            save = listed.save
            same = WholeSave(save.name, current.get(save.name, {}))
            places = [SavePath(LOCAL + node, save.name) for node in range(self.nodes)]
            if same.parts.keys() != save.parts.keys() or same.changes != save.changes or any(map(unsure, places)):
                del self._listed[order]
                logger.debug("the save %s is listed again: a node has written to it, or may have", save.name)
                self._put_off(save.name, now)
            elif answered >= listed.question:
                del self._listed[order]
                sizes = listed_by(listed.lists.values())
                fault = next((each.fault for each in listed.lists.values() if each.fault), "")
                fault = fault or parts.refused(save, sizes, self.nodes)
                size = parts.size_of(sizes)
                if not fault and sum(map(bool, sizes.values())) > 1:  # one node compares it itself
                    fault = self.usual.cut_short(save, size)
                if fault:
                    self._refuse(save.name, fault, now)
                    continue
                self._recorded[save.name], self._due[save.name] = save.changes, Due(now + EVERY_S)
                self._names.add(save.name)
                self.removals.saved()
                self.usual.recorded(save, size)
                lists = tuple(each for _, each in sorted(listed.lists.items()) if each.files)
                yield WriteOrder(order, save.name, lists, parts.ranks_of_moment(save, current))

    def _lists(self, current: Mapping[str, Mapping[int, RecordedSave]], asked: int, now: float) -> Iterable[ListOrder]:
        self._recorded = {name: known for name, known in self._recorded.items() if name in current}
        self._due = {name: due for name, due in self._due.items() if name in current}
        self._refused = {name: why for name, why in self._refused.items() if name in current}
        for save in parts.proved_saves(current, self._recorded, self._left.orders, self._names):
            if save.order in self._listed or self._due.get(save.name, Due()).at > now:
                continue
            lacks = save.doubt or self.usual.lacks(save)
            if lacks:
                self._refuse(save.name, lacks, now)
            else:
                self._listed[save.order] = _Listed(save, asked + 1)
                yield ListOrder(save.order, save.name, save.messages())

    def _refuse(self, name: str, why: str, now: float) -> None:
        self._put_off(name, now)
        if self._refused.get(name) != why:
            logger.info("the save %s is not recorded now: %s", name, why)
        self._refused[name] = why

    def _put_off(self, name: str, now: float) -> None:
        self._due[name] = self._due.get(name, Due()).later(now)
