"""Files of which each rank wrote its own: which belong together, and whether one is missing. Pure, but for `stat`.

A checkpoint of a file per rank is one entry, whose name has a "*" for the rank: ckpt_step100_rank*.pt.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from elastic_ext.checkpoints.formats.names import ANY, RankName, family_of, rank_name
from elastic_ext.checkpoints.storage import Entry, Storage

MAX_RANKS = 1 << 20  # a grid with more is a mistake in a name

# States of random number generators: a load can do without one.
_OF_RANDOM = ("rng_state", "rng_states", "random_state", "random_states")
_ZERO = "zero_pp_rank"  # DeepSpeed's
_OF_ALL = ("rank", "global_rank", _ZERO)


def grouped(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries, with one in place of all files that the ranks wrote for the same checkpoint.

    A single file that names a rank stays as it is, unless another checkpoint of its family has several: rank 0 wrote for all.
    """
    listed = list(entries)
    groups: defaultdict[str, list[tuple[Entry, RankName]]] = defaultdict(list)
    for entry in listed:
        found = None if entry.is_dir or entry.unusable else rank_name(entry.name)
        if found is not None:
            groups[found.pattern].append((entry, found))
    several = {family_of(pattern) for pattern, members in groups.items() if len(members) > 1}
    joined = {pattern: members for pattern, members in groups.items() if family_of(pattern) in several}
    alone = {entry.name for members in joined.values() for entry, _ in members}
    return [entry for entry in listed if entry.name not in alone] + [_join(*each) for each in joined.items()]


def _join(pattern: str, members: Sequence[tuple[Entry, RankName]]) -> Entry:
    in_order = sorted(members, key=lambda each: each[1].ranks)
    parts = tuple(entry for entry, _ in in_order)
    times = [part.mtime for part in parts if part.mtime is not None]
    path = parts[0].path.removesuffix(parts[0].name) + pattern
    size, missing = sum(part.size for part in parts), missing_rank([name for _, name in in_order])
    torn = f"the file of rank {missing} is missing: {len(parts)} are there" if missing else ""
    return Entry(pattern, path, False, size, max(times, default=None), parts=parts, torn=torn)


def missing_rank(names: Sequence[RankName]) -> str:
    """Return the first rank whose file is missing among those of one checkpoint, for people; "" if none is seen to be.

    A last rank that is missing shows only if the names say how many there are. The ranks of a node may begin at 0, or where those
    of the node before it end.
    """
    numbers = [number for number, word in enumerate(names[0].words) if word != "node"]
    seen = {tuple(name.ranks[number] for number in numbers) for name in names}
    axes = [_axis(names, number) for number in numbers]
    if not all(axes) or math.prod(map(len, axes)) > MAX_RANKS:
        return ""
    gap = next((ranks for ranks in itertools.product(*axes) if ranks not in seen), ())
    return ", ".join(map(str, gap))


def _axis(names: Sequence[RankName], number: int) -> Sequence[int]:
    """Return all values that one number of the rank must take."""
    values = {name.ranks[number] for name in names}
    totals = {name.totals[number] for name in names if name.totals[number] is not None}
    # A stage of a pipeline writes what only it has: its files lie beside those of other stages under other names.
    if len(values) == 1 and names[0].words[number].startswith("pp"):
        return sorted(values)
    total = max((total for total in totals if total is not None), default=max(values) + 1)
    from_one = names[0].words[number] == "of" and 0 not in values  # model-00001-of-00002
    return range(1, total + 1) if from_one else range(max(total, max(values) + 1))


def too_few(families: Mapping[str, Sequence[RankName]]) -> str:
    """Return which files of a checkpoint fewer ranks wrote than must have, for people; "" if none are seen. families: by pattern.

    The random states of all processes show how many there are, else files alike, in the same folder or above. One group of ranks
    may write for all (rank 0, or with MiCS the first that shares a model): then its size divides their number. DeepSpeed has such
    groups only where they write the model, too. Names that say how many there are do not count here.
    """
    groups: defaultdict[tuple[str, tuple[str, ...]], dict[str, int]] = defaultdict(dict)
    for pattern, names in sorted(families.items()):
        if names[0].totals[0] is None:
            groups[pattern[: pattern.rfind("/") + 1], names[0].words][pattern] = len(names)
    for (folder, words), counts in groups.items():
        near = [(each, count) for (above, each), found in groups.items() if folder.startswith(above) for count in found.values()]
        alike = [count for each, count in near if each == words]
        total = max([count for each, count in near if each[0] in _OF_RANDOM] or alike)
        for pattern, count in counts.items() if words[0] in _OF_ALL else ():
            each_writes = words[0] == _ZERO and (len(alike) == 1 or count < max(alike))
            if count < total and (each_writes or total % count):
                return f"{pattern}: the files of {total - count} of {total} ranks are missing"
    return ""


def by_pattern(paths: Iterable[str]) -> dict[str, list[RankName]]:
    """Return the names of files below a directory that name a rank, those of the same pattern together."""
    groups: defaultdict[str, list[RankName]] = defaultdict(list)
    for path in paths:
        found = rank_name(path)
        if found is not None:
            groups[found.pattern].append(found)
    return dict(groups)


def parts_of(paths: Iterable[str]) -> dict[str, frozenset[tuple[int, ...]]]:
    """Return what the files of a checkpoint are called, with "#" for other numbers than a rank's, and which ranks wrote each.

    The ranks do not count where the names say how many there are, nor those of random states.
    """
    found: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for path in paths:
        name = rank_name(path)
        counts = name is not None and None in name.totals and not set(name.words) <= {*_OF_RANDOM}
        found[re.sub(r"[0-9]+", "#", name.pattern if name is not None else path)].add(name.ranks if name and counts else ())
    return {pattern: frozenset(ranks) for pattern, ranks in found.items()}


def lacks(parts: Mapping[str, frozenset[tuple[int, ...]]], older: Mapping[str, frozenset[tuple[int, ...]]]) -> str:
    """Return what a checkpoint lacks that an older whole one has, for people; "" for nothing, or if it has others instead."""
    for pattern in sorted(older):
        if parts.get(pattern, older[pattern]) < older[pattern]:
            counts = f"{len(parts[pattern])}, not {len(older[pattern])}"
            unsaid = "the save did not finish, or the job has shrunk, and nothing in it says which"
            return f"it has fewer files of ranks than the one before it ({counts}): {unsaid}"
    missing = sorted(older.keys() - parts.keys()) if parts.keys() <= older.keys() else []
    return f"no {missing[0]}, which the one before it has: the save did not finish" if missing else ""


def stat(storage: Storage, name: str) -> Entry | None:
    """Return the current entry of a checkpoint, also of one with a file per rank; None if it does not exist. Raises OSError."""
    found = storage.stat(name)
    if found is not None or ANY not in name:
        return found
    try:
        return next((entry for entry in grouped(storage.entries()) if entry.name == name), None)
    except (FileNotFoundError, NotADirectoryError):
        return None


def files_by_rank(storage: Storage, name: str) -> dict[int, str]:
    """Return by rank the paths of a checkpoint's files; none if it is one entry, or if no file is that of one rank.

    The files of a grid, as by tp and pp, of local ranks, and the numbered parts of one model are not. Raises OSError.
    """
    entry = stat(storage, name) if ANY in name else None
    named = [(rank_name(part.name), part.path) for part in entry.parts] if entry is not None else []
    return {found.ranks[0]: path for found, path in named if found is not None and _is_of_one_rank(found)}


def _is_of_one_rank(name: RankName) -> bool:
    return len(name.ranks) == 1 and name.words[0] in ("rank", "global_rank", "shard")
