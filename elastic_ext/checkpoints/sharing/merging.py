"""Which entries of all nodes are one, and what they lack. Pure.

Invariants:

- An entry that one node has is as it is there.
- A save of several parts is one entry if each part is on some node, each is vouched for by its own node, the records fit each
  other, and no node has other files of that name. Its files are those that count by the records.
- Anything else that several nodes have is torn, with the reason. Its record says so, too.
- If several nodes have the same part, that of the lowest group rank counts.
- A mirrored part stands in for one that no node has itself, of the newest save of that name that any node knows of. It does so
  only while no node has the directory that it is of: else its script has removed or changed what was there. If it does not make
  the save whole, the nodes have what they have without it.
- A node that vouches for an older save of that name is left out: ranks move between nodes, and its files are of that save. So is
  one that has noted, when the save was recorded, that what it has is older.
- Of two files with one name, that which a rank of this round was seen to write counts, and of two such, that of the lower part.
  The other may be left from a round in which the nodes had other ranks.
- What one node of several has, and no node has a record of, is torn: files that were on a lost node would not be missed.
- What one node has, and no record vouches for, is torn if saves of its kind (of its name without digits) are of several nodes,
  or of several ranks, each with an entry of its own.
- Clocks of machines are never compared. All files of a merged save, and its record, have one time: that of the newest file of
  part 0, by the clock of its node.
- A name that any node has quarantined is quarantined, by a mark without a time.
- Where several ranks have saved an entry of their own at one moment, by the record, those of all these ranks must be there.
- Where each rank has written a file of its own, by its name and by the record, the files of all ranks must be there. A node that
  is lost has taken its records along, so nothing else would miss them.

A job on one node goes by formats where it has no record of a kind, as on one machine.

The last rule also refuses what rank 0 has saved alone under a name with its rank. Nothing tells that from a lost node.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base import records
from elastic_ext.checkpoints.directory.own_files import Mark
from elastic_ext.checkpoints.formats.candidates import rank_name
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordedFile, StoredSave
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, FilePath, FilePathOrEmpty, NodeEntry, NodeFile, Size

NOT_VOUCHED = "no record vouches for it, and other nodes may have had files of it"
NOT_PROVED = "its files are on several nodes, and its save was not proved"
OF_RANKS = ("rank", "global_rank", "shard")  # words before the number of a rank among all ranks of a job
_NUMBER = re.compile(r"\d+")


def path_in(name: str, file: str) -> str:
    """Return the path of a file of an entry; "": the entry is the file."""
    return f"{name}/{file}" if file else name


@dataclass(frozen=True)
class SharedFile:
    """A file of a save that a node has.

    name: relative to the local directory. node: the group rank. at: where it is there, if not by that name, as it is mirrored.
    """

    name: FilePath
    size: Size
    node: records.Count
    at: FilePathOrEmpty = ""

    @property
    def place(self) -> str:
        return self.at or self.name


@dataclass(frozen=True)
class SharedEntry:
    """What all nodes have of one name.

    Attributes:
        files: that count, by their paths in the entry, each with the node that it is read from; none if it has gone.
        at: where those are on their nodes that are mirrored, by their paths in the entry.
        own: the files of that save that nodes keep as they have them, also those that do not count.
        torn: why it cannot be used, for people; "": nothing says so.
        known: its recorded save. record: the content of that record's file.
    """

    name: str
    is_there: bool = False
    is_dir: bool = False
    mtime: float = 0.0
    files: Mapping[str, tuple[int, NodeFile]] = field(default_factory=dict)
    at: Mapping[str, str] = field(default_factory=dict)
    own: tuple[SharedFile, ...] = ()
    torn: str = ""
    known: KnownSave | None = None
    record: str = ""
    mark: Mark | None = None

    @property
    def shared_files(self) -> Iterator[SharedFile]:
        """The files that count, and then those of the same names that other nodes have of this save."""
        files = self.files.items()
        counting = [SharedFile(path_in(self.name, path), of.size, node, self.at.get(path, "")) for path, (node, of) in files]
        yield from counting
        yield from (each for each in self.own if each not in counting)


@dataclass(frozen=True)
class _Part:
    """What one node has of an entry. save: None if none is recorded. mirrored: where its files are; "": it is the node's own."""

    node: int
    entry: NodeEntry
    save: StoredSave | None
    mirrored: str = ""

    def is_of(self, known: KnownSave | None) -> bool:
        """Return whether this is a recorded part of that save, as it was recorded."""
        return self.save is not None and self.entry.vouched and self.entry.known == known


@dataclass(frozen=True)
class _Vouched:
    """A part that its node vouches for."""

    node: int
    entry: NodeEntry
    save: StoredSave
    mirrored: str = ""


def merged(catalogues: Mapping[int, Catalogue]) -> dict[str, SharedEntry]:
    """Return the entries of all nodes by name. catalogues: by group rank."""
    rows: defaultdict[str, dict[int, NodeEntry]] = defaultdict(dict)
    for node, catalogue in sorted(catalogues.items()):
        for entry in catalogue.entries:
            rows[entry.name][node] = entry
    parts = {name: [_Part(node, each, _save_of(node, each)) for node, each in of.items()] for name, of in sorted(rows.items())}
    mirrored = _mirrored_parts(catalogues)
    known = {name: [*parts.get(name, []), *mirrored.get(name, [])] for name in sorted({*parts, *mirrored})}
    of_several = {pattern_of(name) for name, of in known.items() if any(_is_of_several(each.save) for each in of)}
    unknown = {name for name, of in known.items() if len(catalogues) > 1 and not any(each.save for each in of)}
    may_be_part = {name for name in known if pattern_of(name) in of_several or name in unknown}
    entries = {name: _with_mirrored(name, parts.get(name, []), mirrored.get(name, []), name in may_be_part) for name in known}
    return _with_ranks({name: each for name, each in entries.items() if each is not None})


def _mirrored_parts(catalogues: Mapping[int, Catalogue]) -> dict[str, list[_Part]]:
    """Return by name the mirrored parts of directories that no node has."""
    there, found = {each.directory for each in catalogues.values()}, defaultdict[str, list[_Part]](list)
    for node, catalogue in sorted(catalogues.items()):
        for part in catalogue.mirrored:
            save = stored.save_of(part.record.encode(), f"the record of {part.name}, mirrored by node {node}")
            if part.origin not in there and save is not None and save.proved and not save.arriving and save.files:
                files = tuple(NodeFile(file.name, file.size, file.mtime) for file in save.files)
                time = max(file.mtime for file in files)
                entry = NodeEntry(part.name, part.is_dir, time, files, part.attempt, part.order, part.record, True)
                found[part.name].append(_Part(node, entry, save, part.files))
    return found


def _with_mirrored(name: str, parts: Sequence[_Part], mirrored: Sequence[_Part], may_be_part: bool) -> SharedEntry | None:
    """Return the entry; None if there is none. may_be_part: see `_merged_entry`."""
    lacking = _lacking_parts(parts, mirrored)
    found = _merged_entry(name, [*parts, *lacking], may_be_part) if lacking else None
    if found is not None and not found.torn:
        return found
    return _merged_entry(name, parts, may_be_part) if parts else None


def _lacking_parts(parts: Sequence[_Part], mirrored: Sequence[_Part]) -> list[_Part]:
    """Return the mirrored parts that no node has itself, of the newest save that is known of this name; one of each."""
    known = max((each.entry.known for each in (*parts, *mirrored) if each.entry.known is not None), default=None)
    held = {each.save.part for each in parts if each.save is not None and each.is_of(known)}
    found: dict[int, _Part] = {}
    for each in mirrored:
        if each.save is not None and each.is_of(known) and each.save.part not in held:
            found.setdefault(each.save.part, each)
    return list(found.values())


def _is_of_several(save: StoredSave | None) -> bool:
    """Return whether other nodes may have more of it: parts, or what their ranks have saved then."""
    return save is not None and (save.parts > 1 or len(save.moment) > 1)


def _merged_entry(name: str, parts: Sequence[_Part], may_be_part: bool) -> SharedEntry:
    """may_be_part: what no record vouches for may lack files that other nodes had."""
    full = _without_older([each for each in parts if each.entry.files or each.entry.more])
    there = full or [each for each in parts if each.entry.is_there][:1] or _newest(parts)
    marks = (each.entry.mark for each in parts if each.entry.mark is not None and _bars(each, parts))
    mark = next((replace(each, written_at=0.0) for each in marks), None)
    if not there:
        return SharedEntry(name, mark=mark)
    found = _decided(name, there)
    if may_be_part and found.is_there and not (found.torn or there[0].entry.vouched):
        found = _torn(name, there, NOT_VOUCHED)
    return replace(found, mark=mark)


def _without_older(parts: Sequence[_Part]) -> list[_Part]:
    last = max((each.entry.known for each in parts if each.entry.known is not None and each.entry.vouched), default=None)
    if last is None:
        return [*parts]
    older = [each for each in parts if each.entry.vouched and each.entry.known != last]
    older += [each for each in parts if not each.entry.vouched and 0 < each.entry.older_than <= last.number]
    return [each for each in parts if each not in older]


def _bars(part: _Part, parts: Sequence[_Part]) -> bool:
    """Return whether the mark of a node holds. One that knows the number of the save holds for that, and for older ones."""
    mark = part.entry.mark
    if mark is None:
        return False
    newest = next(iter(_newest(parts)), None)
    known = newest.entry.known if newest is not None else None
    return not (mark.save_number and known is not None and known.number > mark.save_number)


def _save_of(node: int, entry: NodeEntry) -> StoredSave | None:
    return stored.save_of(entry.record.encode(), f"the record of {entry.name} of node {node}") if entry.record else None


def _newest(parts: Sequence[_Part]) -> list[_Part]:
    """Return the part with the newest record."""
    known = [(each.entry.known, -each.node, each) for each in parts if each.entry.known is not None]
    return [max(known, key=lambda each: each[:2])[2]] if known else []


def _decided(name: str, there: Sequence[_Part]) -> SharedEntry:
    first, newest = there[0], next(iter(_newest(there)), None)
    if not first.entry.is_there:
        gone = _as_it_is(first)
        return _refused(gone, first.save, "it has gone") if first.save is not None and first.save.parts > 1 else gone
    cut = next((each for each in there if each.entry.more), None)
    if cut is not None:
        return _torn(name, there, f"node {cut.node} has more files than it can list")
    if len(there) == 1 and (first.save is None or first.save.parts == 1):
        return _as_it_is(first)
    if newest is None or newest.save is None or not newest.save.proved:
        return _torn(name, there, NOT_PROVED)
    known = newest.entry.known
    whole = [_Vouched(of.node, of.entry, of.save, of.mirrored) for of in there if of.save and of.is_of(known)]
    held = {each.save.part: each for each in reversed(whole)}
    rest = [each for each in there if not each.is_of(known)]
    why = _others(rest, newest) or _absent(held, newest.save.parts) or _misfit(held, whole)
    return _torn(name, there, why) if why else _joined(name, held, whole)


def _others(rest: Sequence[_Part], newest: _Part) -> str:
    """Return which of the other nodes has files of that name that are not of the newest save; "": none has."""
    for each in rest:
        if each.entry.known != newest.entry.known or each.save is None:
            return f"node {each.node} has other files of that name"
        if not each.save.proved:
            return NOT_PROVED
        recorded = {(file.name, file.size, file.mtime) for file in each.save.files}
        if any((file.name, file.size, file.mtime) not in recorded for file in each.entry.files):
            return f"node {each.node} has written its part again since it was recorded"
    return ""


def _absent(held: Mapping[int, _Vouched], parts: int) -> str:
    lacking = next((number for number in range(parts) if number not in held), None)
    return f"part {lacking + 1} of {parts} is on no node" if lacking is not None else ""


def _misfit(held: Mapping[int, _Vouched], whole: Sequence[_Vouched]) -> str:
    """Return which record is of another save than the rest, as where two nodes have counted rounds on their own; "": none is."""
    counting = {number: _sizes(each.save.counting) for number, each in held.items()}
    for each in whole:
        others = set[tuple[str, int]]().union(*(files for number, files in counting.items() if number != each.save.part))
        same_kind = (each.save.parts, each.entry.is_dir) == (len(held), held[0].entry.is_dir)
        if not same_kind or counting[each.save.part] != _sizes(each.save.counting) or others != _sizes(each.save.elsewhere):
            return f"the record of node {each.node} does not fit those of the other parts"
    return ""


def _sizes(files: Iterable[RecordedFile]) -> set[tuple[str, int]]:
    return {(file.name, file.size) for file in files}


def _as_it_is(part: _Part) -> SharedEntry:
    entry = part.entry
    files = {file.name: (part.node, file) for file in entry.files}
    at = {file: f"{part.mirrored}/{path_in(entry.name, file)}" for file in files} if part.mirrored else {}
    record = entry.record if part.save else ""
    return SharedEntry(entry.name, entry.is_there, entry.is_dir, entry.mtime, files, at, known=entry.known, record=record)


def _torn(name: str, there: Sequence[_Part], why: str) -> SharedEntry:
    files: dict[str, tuple[int, NodeFile]] = {}
    for part in there:
        for file in part.entry.files:
            files.setdefault(file.name, (part.node, file))
    entry = there[0].entry
    found = SharedEntry(name, True, entry.is_dir, entry.mtime, files)
    newest = next(iter(_newest(there)), None)
    return _refused(replace(found, known=newest.entry.known), newest.save, why) if newest else replace(found, torn=why)


def _refused(entry: SharedEntry, save: StoredSave | None, why: str) -> SharedEntry:
    """Return the entry as torn, so that neither its format nor its record vouches for it."""
    if save is None:
        return replace(entry, torn=why, known=None, record="")
    ranks = {*save.ranks, *(file.rank for file in (*save.files, *save.elsewhere) if file.rank >= 0)}  # of all parts
    refused = replace(save, proved=False, arriving=True, why=why, ranks=tuple(sorted(ranks)), part=0, parts=1, elsewhere=())
    return replace(entry, torn=why, record=records.encode(refused, stored.SCHEMA))


def _joined(name: str, held: Mapping[int, _Vouched], whole: Sequence[_Vouched]) -> SharedEntry:
    first, parts = held[0], [each for _, each in sorted(held.items())]
    saves = [each.save for each in parts]
    time = max(file.mtime for file in first.save.files)
    counting: dict[str, tuple[_Vouched, RecordedFile]] = {}
    for part in parts:
        for file in part.save.files:
            if file.name not in counting or counting[file.name][1].rank < 0 <= file.rank:
                counting[file.name] = part, file
    files = {path: (part.node, NodeFile(path, file.size, time)) for path, (part, file) in counting.items()}
    at = {path: f"{part.mirrored}/{path_in(name, path)}" for path, (part, _) in counting.items() if part.mirrored}
    save = replace(
        saves[0],
        proved=all(each.proved for each in saves),
        ranks=tuple(sorted({rank for each in saves for rank in each.ranks})),
        written=max(each.written for each in saves),
        kept=max(each.kept for each in saves),
        usual=max(each.usual for each in saves),
        files=tuple(replace(file, mtime=time) for _, file in counting.values()),
        part=0,
        parts=1,
        elsewhere=(),
    )
    record = records.encode(save, stored.SCHEMA)
    written = ((each.node, file) for each in whole if not each.mirrored for file in each.save.files if file.rank >= 0)
    own = tuple(SharedFile(path_in(name, file.name), file.size, node) for node, file in written)
    found = SharedEntry(name, True, first.entry.is_dir, time, files, at, own, "", first.entry.known, record)
    if len(record) > records.MAX_BYTES:
        why = f"its record has {len(record)} bytes, expected {records.MAX_BYTES} at most"
        return _refused(found, replace(save, files=()), why)
    return found


# Files of which each rank has written its own.


def _with_ranks(entries: dict[str, SharedEntry]) -> dict[str, SharedEntry]:
    """Return the entries, all files of a moment as torn if those of some ranks are missing, or one of them is torn."""
    moments: defaultdict[tuple[str, KnownSave], dict[str, StoredSave]] = defaultdict(dict)
    worlds: dict[str, tuple[KnownSave, int]] = {}  # number of ranks at the last save of a kind
    for name, entry in entries.items():
        save = _save_of_rank(entry)
        if save is not None and entry.known is not None:
            kind = pattern_of(name)
            moments[kind, KnownSave(entry.known.attempt, save.count, "")][name] = save
            worlds[kind] = max(worlds.get(kind, (entry.known, 0)), (entry.known, save.world))
    why = _absent_of_moment(entries)
    for saves in moments.values():
        ranks = {each.ranks[0] for each in saves.values()}
        lacking = _lacking(ranks, max(each.world for each in saves.values()))
        if lacking and (len(ranks) > 1 or any(map(_names_rank, saves))):
            why |= dict.fromkeys(saves, lacking)
    for group in _named_alike(entries):
        torn = next((text for each in group if (text := why.get(each.name) or each.torn)), "")
        kind = pattern_of(group[0].name)
        if not torn and kind in worlds and not any(each.known for each in group):
            named = [rank for each in group if (of := rank_name(each.name)) is not None for rank in of.ranks]
            torn = _lacking(named, worlds[kind][1]) if _names_rank(group[0].name) else ""
        why |= dict.fromkeys((each.name for each in group if torn), torn)
    found = {name: _refused(entries[name], _record_of(entries[name]), text) for name, text in why.items()}
    return {**entries, **found}


def _absent_of_moment(entries: Mapping[str, SharedEntry]) -> dict[str, str]:
    """Return by name what is missing of what several ranks have saved at one moment, each an entry of its own."""
    there: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
    saves: dict[str, tuple[tuple[str, int, int], StoredSave]] = {}
    for name, entry in entries.items():
        save = _record_of(entry) if entry.is_there and entry.known is not None else None
        if save is not None and entry.known is not None and save.moment:
            saves[name] = (pattern_of(name), entry.known.attempt, save.count), save
            there[saves[name][0]] |= {*save.ranks}
    lacking = {name: sorted({*save.moment} - there[of]) for name, (of, save) in saves.items()}
    return {name: f"what rank {ranks[0]} has saved then is on no node" for name, ranks in lacking.items() if ranks}


def _lacking(ranks: Collection[int], world: int) -> str:
    lacking = next((rank for rank in range(world) if rank not in ranks), None)
    return f"the file of rank {lacking} is on no node" if lacking is not None else ""


def _named_alike(entries: Mapping[str, SharedEntry]) -> Iterable[Sequence[SharedEntry]]:
    """Return the files whose names differ in their ranks only."""
    groups: defaultdict[str, list[SharedEntry]] = defaultdict(list)
    for name, entry in entries.items():
        named = rank_name(name) if not entry.is_dir and entry.is_there else None
        if named is not None:
            groups[named.pattern].append(entry)
    return groups.values()


def _record_of(entry: SharedEntry) -> StoredSave | None:
    return stored.save_of(entry.record.encode(), f"the record of {entry.name}") if entry.record else None


def _save_of_rank(entry: SharedEntry) -> StoredSave | None:
    """Return the save of a file that one rank has written and named after itself; None: it is another one."""
    named = rank_name(entry.name)
    if entry.is_dir or not entry.is_there or (named is not None and not _names_rank(entry.name)):
        return None
    save = _record_of(entry)
    if save is None or len(save.ranks) != 1 or save.world < 2:
        return None
    return save if save.ranks[0] in map(int, _NUMBER.findall(entry.name)) else None


def _names_rank(name: str) -> bool:
    named = rank_name(name)
    return named is not None and len(named.ranks) == 1 and named.words[0] in OF_RANKS
