"""Which files the ranks wrote for one save, each rank its own, where the saves of the job are recorded.

The names may not say so. But by the record, different ranks have written them at one moment: the same round, and the same count
of optimizer steps. Numbers in which such names differ stand for the rank, in all names of the kind. A kind is all names that
differ only in digits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from elastic_ext.checkpoints.choice.decisions import OWN_FILES
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordBook
from elastic_ext.checkpoints.storage import Entry, Storage

MOST_READ = 8  # of the last saves of a kind
ENOUGH = 4  # of these, where one rank has written each, at moments of their own: it saves for all
MOST_SHOWN = 4  # names in a message
ONE_MOMENT = "are of one moment, and nothing says which of them to resume from: set resume_from to one of them"
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class RankSave:
    """A recorded save, as far as it says who writes the files of its kind. ranks: which wrote it."""

    name: str
    moment: tuple[int, int]  # the round, and the steps that it had made
    ranks: tuple[int, ...]
    proved: bool


@dataclass(frozen=True)
class SaveKind:
    """The checkpoints whose names differ only in digits. question: why the user must say which is meant; "": no need."""

    members: tuple[Entry, ...]
    question: str = ""


def places_of_ranks(saves: Sequence[RankSave], are_directories: bool) -> tuple[tuple[int, ...], str]:
    """Return which numbers of the names stand for the rank, as places in `_NUMBER.split`; and a question. Pure.

    saves: the last ones of a kind, newest first. No place: each is a checkpoint of its own, or there is a question.
    """
    alone = [each for each in saves if len(each.ranks) == 1]
    if len({each.ranks for each in alone}) < 2 or (are_directories and len(alone) < len(saves)):
        return (), ""
    moments: defaultdict[tuple[int, int], list[RankSave]] = defaultdict(list)
    for each in alone:
        moments[each.moment].append(each)
    shared = [of for of in moments.values() if len({each.ranks for each in of}) > 1]
    writers = {(each.moment[0], each.ranks) for each in alone}
    if not shared and all(each.proved for each in alone) and len(writers) == len({number for number, _ in writers}):
        return (), ""  # one rank saves for all, but in each round another one: the last one of a pipeline
    if are_directories or not shared:
        return (), f"{_shown(each.name for each in (shared or [alone])[0])} were saved by several ranks: {OWN_FILES}"
    moment = max(shared, key=lambda of: len({each.ranks for each in of}))  # the last one may have been cut
    differing = [_differing(one.name, other.name) for one, other in combinations(moment, 2) if one.ranks != other.ranks]
    # Here a rank comes again with its next part, or, where the optimizer is not seen and all counts are 0, with the next save.
    is_twice = len({each.ranks for each in moment}) < len(moment)
    of_rank: set[int] = min(differing, key=len) if is_twice else set().union(*differing)
    return tuple(sorted(of_rank)), ""


def _differing(one: str, other: str) -> set[int]:
    pairs = zip(_NUMBER.split(one), _NUMBER.split(other), strict=True)
    return {at for at, (first, second) in enumerate(pairs) if first != second}


def kinds_of(entries: Iterable[Entry], book: RecordBook, pattern: str) -> dict[str, SaveKind]:
    """Return the usable entries by kind, with one in place of all files that the ranks wrote for a save.

    pattern: the setting checkpoint_pattern, which may leave files of ranks out. Raises OSError.
    """
    usable = [each for each in entries if not each.unusable]
    by_record = {kind for kind in {_kind_of_parts(each) for each in usable if each.parts} if _knows_ranks(book, kind)}
    kinds: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in usable:
        for each in entry.parts if entry.parts and _kind_of_parts(entry) in by_record else (entry,):
            kinds[pattern_of(each.name)].append(each)
    saves: defaultdict[str, dict[str, KnownSave]] = defaultdict(dict)
    for known in book.saves:
        saves[pattern_of(known.name)][known.name] = known
    found = {}
    for kind, members in kinds.items():
        names = {each.name for each in members}
        of_kind = {name: known for name, known in saves[kind].items() if name in names or not pattern}
        found[kind] = _kind(members, of_kind, book)
    return found


def joined(entries: Sequence[Entry], book: RecordBook, pattern: str) -> list[Entry]:
    """Return the entries as `kinds_of` does, in one list, and those that cannot be used. Raises OSError."""
    kinds = kinds_of(entries, book, pattern).values()
    return [*(each for each in entries if each.unusable), *(each for kind in kinds for each in kind.members)]


def _kind_of_parts(entry: Entry) -> str:
    return pattern_of(entry.parts[0].name)


def _knows_ranks(book: RecordBook, kind: str) -> bool:
    """Return whether the record says which numbers of such names stand for the rank. Then the words in them do not count."""
    return bool(places_of_ranks(_last((each for each in book.saves if pattern_of(each.name) == kind), book), False)[0])


def _kind(members: Sequence[Entry], saves: Mapping[str, KnownSave], book: RecordBook) -> SaveKind:
    """saves: those of the kind by name, also of entries that have gone."""
    rows = _last(saves.values(), book)
    places, question = places_of_ranks(rows, any(each.is_dir for each in members))
    found = [replace_parts(each, own_parts(each.parts, book)) if each.parts else each for each in members]
    if places:
        groups: defaultdict[str, list[Entry]] = defaultdict(list)
        for each in members:
            groups[_group(each.name, places)].append(each)
        sizes = Counter(_group(name, places) for name in {*saves, *(each.name for each in members)})
        owned = {name: own_parts(parts, book) for name, parts in groups.items()}
        found = [candidates.join(name, parts) if sizes[name] > 1 else parts[0] for name, parts in owned.items()]
    return SaveKind(tuple(found), question or _parts_question(found, book, 1 if places else 2))


def _group(name: str, places: Sequence[int]) -> str:
    return "".join(candidates.ANY if at in places else part for at, part in enumerate(_NUMBER.split(name)))


def _last(known: Iterable[KnownSave], book: RecordBook, of_any: bool = False) -> list[RankSave]:
    """Return the last saves, newest first, as many as say who writes such files. of_any: by any rank."""
    found: list[RankSave] = []
    for each in sorted(known, reverse=True)[:MOST_READ]:
        save = book.read(each)
        if save is not None:
            found.append(RankSave(each.name, (each.attempt, save.count), save.ranks, save.proved))
        is_one = of_any or len({row.ranks for row in found}) == 1
        if len(found) == ENOUGH == len({row.moment for row in found}) and is_one:
            break
    return found


def _parts_question(found: Sequence[Entry], book: RecordBook, least: int) -> str:
    """Return a question if as many moments as `least` have several checkpoints: each save is of several parts."""
    known = {save: each for each in found if (save := book.known(each)) is not None}
    last = known[max(known)].parts if known and least == 1 else ()
    writers = [(of.attempt, by.ranks) for each in last if (of := book.known(each)) and (by := book.read(of))]
    if len(set(writers)) < len(writers):  # a rank has written two of them
        return f"{_shown(each.name for each in last)} {ONE_MOMENT}"
    names = {save.name: each.name for save, each in known.items()}
    rows = _last(known, book, of_any=True)
    several = [moment for moment, count in Counter(row.moment for row in rows).items() if count > 1 and moment[1] > 0]
    if len(several) < least:
        return ""
    return f"{_shown(names[row.name] for row in rows if row.moment == several[0])} {ONE_MOMENT}"


def _shown(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:MOST_SHOWN])


def own_parts(parts: Sequence[Entry], book: RecordBook) -> tuple[Entry, ...]:
    """Return the files that the last recorded save of a checkpoint is of; all of them, if none is recorded. Raises OSError.

    Copies that people made are not recorded. When a job has shrunk, older files of ranks that it no longer has are left over.
    """
    saves = {each: known for each in parts if (known := book.known(each)) is not None}
    if not saves:
        return tuple(parts)
    last = max(saves.values())
    newest = book.read(last)

    def is_left_over(known: KnownSave) -> bool:
        save = book.read(known) if newest is not None and known.attempt < last.attempt else None
        return save is not None and newest is not None and min(save.ranks, default=0) >= newest.world

    return tuple(each for each, known in saves.items() if not is_left_over(known))


def replace_parts(entry: Entry, parts: Sequence[Entry]) -> Entry:
    """Return an entry of the files of ranks with only these. No rank is missing only because another's file was a copy."""
    if len(parts) == len(entry.parts):
        return entry
    by_names = candidates.grouped(entry.parts)[0].torn
    torn = candidates.grouped(parts)[0].torn if entry.torn == by_names else entry.torn
    return replace(candidates.join(entry.name, parts), torn=torn)


def own_entry(storage: Storage, name: str, book: RecordBook | None = None) -> Entry | None:
    """Return the current entry of a checkpoint, of files of ranks only its `own_parts`; None if it is gone. Raises OSError."""
    entry = candidates.entry_of(storage, name)
    if entry is None or not entry.parts:
        return entry
    book = book or RecordBook(storage)
    parts = own_parts(entry.parts, book)
    return candidates.join(name, parts) if _knows_ranks(book, _kind_of_parts(entry)) else replace_parts(entry, parts)


def files_by_rank(storage: Storage, name: str) -> dict[int, str]:
    """Return by rank the paths of a checkpoint's files: by the record if each rank has one, else as `candidates.files_by_rank`.

    Raises OSError.
    """
    if candidates.ANY not in name:
        return {}
    book = RecordBook(storage)
    entry = own_entry(storage, name, book)
    parts = entry.parts if entry is not None else ()
    saves = [(book.saved(part), part.path) for part in parts]
    recorded = {save.ranks[0]: path for save, path in saves if save is not None and len(save.ranks) == 1}
    worlds = {save.world for save, _ in saves if save is not None}
    if worlds == {len(recorded)} == {len(parts)} or (parts and candidates.rank_name(parts[0].name) is None):
        return recorded
    own = {each.path for each in parts}
    return {rank: path for rank, path in candidates.files_by_rank(storage, name).items() if path in own}
