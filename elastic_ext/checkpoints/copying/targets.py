"""Which save all nodes copy now. Pure.

Each node has only a part of a save in its own local directory. Saves may come faster than they can be copied, and all nodes must
work on the same one. Of each kind, the leader of a save decides: the node that has part 0, or the file of rank 0. It keeps its
target until that is complete, or has made no progress for STALLED_S; then it takes the newest. The others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.copying.held import LocalSave
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.formats import candidates, detect
from elastic_ext.checkpoints.formats.candidates import ANY, step_of
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave

HEARTBEATS = f"{MARKERS}/copying_from"  # see `replicate`
STALLED_S = 60.0
ALONE_S = 30.0  # that files of some ranks wait for those of other nodes, where not each rank here has written one
MOST_HELD = 3  # saves of a kind


@dataclass(frozen=True, order=True)
class RankMoment:
    """What the files have in common of which each rank wrote its own for one save. label: their names without the rank."""

    attempt: int
    count: int
    label: str


def moment_of(known: KnownSave, save: StoredSave) -> RankMoment:
    named = candidates.rank_name(known.name)
    return RankMoment(known.attempt, save.count, named.pattern if named is not None else pattern_of(known.name))


@dataclass(frozen=True)
class OneSave:
    """What a node copies of one save: an entry, its part of one, or the files of which each of its ranks wrote its own.

    of_ranks: ranks of other nodes may have written files of the same save.
    """

    entries: tuple[LocalSave, ...]
    of_ranks: bool = False

    @property
    def name(self) -> str:
        return self.entries[0].name

    @property
    def kind(self) -> str:
        return pattern_of(self.name)

    @property
    def known(self) -> KnownSave:
        return max(each.known for each in self.entries)

    @property
    def proved(self) -> bool:
        return all(each.save.proved for each in self.entries)

    @property
    def is_part(self) -> bool:
        return self.entries[0].save.parts > 1

    @property
    def moment(self) -> RankMoment:
        return moment_of(self.entries[0].known, self.entries[0].save)

    @property
    def shared_name(self) -> str:
        """What all nodes call this save, each by its own record."""
        moment = self.moment
        return self.known.file if self.is_part else f"{moment.attempt} {moment.count} {moment.label}"

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for each in self.entries for rank in each.save.ranks)

    @property
    def is_of_each_rank(self) -> bool:
        """Whether each wanted rank wrote a file: the record says so, or each rank of this node did."""
        save = self.entries[0].save
        return save.is_of_moment or len(self.ranks) >= save.here

    @property
    def wanted(self) -> frozenset[int]:
        """The ranks of which files are wanted, of which each rank wrote its own."""
        save = self.entries[0].save
        return frozenset(save.moment if save.is_of_moment else range(save.world))

    @property
    def leads(self) -> bool:
        save = self.entries[0].save
        return save.part == 0 if self.is_part else save.leader in self.ranks


def newest_of_each_kind(saves: Iterable[LocalSave], fits: Callable[[LocalSave], bool] = lambda each: True) -> list[OneSave]:
    """Return what is worth copying, oldest first.

    Files of different ranks are of one save if they are of one kind and moment: of a round, and its count of steps. fits: asked
    only of what may be the newest.
    """
    newest: dict[str, dict[tuple[int, ...], LocalSave]] = {}
    for each in sorted(saves, key=lambda each: each.known, reverse=True):
        together = newest.get(pattern_of(each.name), {})
        first = next(iter(together.values()), each)
        is_new = each.save.ranks not in together and (each.known.attempt, each.save.count) == (
            first.known.attempt,
            first.save.count,
        )
        if is_new and fits(each):
            newest.setdefault(pattern_of(each.name), {})[each.save.ranks] = each
    return sorted((OneSave(tuple(of.values())) for of in newest.values()), key=lambda one: one.known)


def shared_by_kind(saves: Iterable[LocalSave]) -> tuple[list[LocalSave], dict[str, list[OneSave]]]:
    """Return the saves that are on one node only; and by kind, newest first, those of which other nodes have something, too.

    A file that one rank wrote is of the latter if its name says so, or another rank wrote one at the same moment.
    """
    listed = sorted(set(saves), key=lambda each: each.known, reverse=True)
    ranks: dict[RankMoment, set[tuple[int, ...]]] = {}
    for each in filter(_is_of_one_rank, listed):
        ranks.setdefault(moment_of(each.known, each.save), set()).add(each.save.ranks)
    alone: list[LocalSave] = []
    parts: list[OneSave] = []
    files: dict[RankMoment, dict[tuple[int, ...], LocalSave]] = {}
    for each in listed:
        moment = moment_of(each.known, each.save)
        if each.save.parts > 1:
            parts.append(OneSave((each,)))
        elif _is_of_one_rank(each) and (
            ANY in moment.label or each.save.is_of_moment or (len(ranks[moment]) > 1 and moment.count > 0)
        ):
            files.setdefault(moment, {}).setdefault(each.save.ranks, each)
        else:
            alone.append(each)
    shared: dict[str, list[OneSave]] = {}
    of_ranks = [OneSave(tuple(each.values()), of_ranks=True) for each in files.values()]
    for one in sorted([*parts, *of_ranks], key=lambda one: one.known, reverse=True):
        shared.setdefault(one.kind, []).append(one)
    return alone, shared


def _is_of_one_rank(each: LocalSave) -> bool:
    save = each.save
    return save.parts == 1 and 0 < save.here < save.world and len(save.ranks) == 1


def may_be_resumed_from(save: StoredSave) -> bool:
    """Return whether a save with parts may be a checkpoint: the parts of logs and caches are proved, too.

    Judged by the names of all its files, so that all nodes come to the same answer.
    """
    names = [each.name for each in (*save.files, *save.elsewhere)]
    suffixes = (*candidates.CHECKED_SUFFIXES, ".distcp")
    return any(name.endswith(suffixes) or name.rpartition("/")[2] in detect.COMMIT_FILES for name in names)


def next_target(newest: OneSave | None, current: OneSave | None, stalled: bool) -> OneSave | None:
    """Return what the leader copies next of a kind.

    Args:
        newest: that is still to be copied; None: none is.
        current: what the leader has announced; None: nothing that it still has.
        stalled: it has made no progress for STALLED_S.
    """
    if current is not None and newest is not None and newest.known < current.known:
        return current
    return newest if current is None or (stalled and newest is not None) else current


def released(held: Sequence[OneSave], kept: Collection[KnownSave], passed: KnownSave | None) -> list[OneSave]:
    """Return which held saves of a kind are let go.

    Args:
        kept: the newest, and the target of all nodes.
        passed: what all nodes copy now, or have copied last: the leader takes nothing older; None: nothing yet.
    """
    older = [each for each in held if each.known not in kept and passed is not None and each.known < passed]
    others = sorted((each for each in held if each.known not in kept and each not in older), key=lambda each: each.known)
    room = max(0, MOST_HELD - sum(each.known in kept for each in held))
    return older + others[: max(0, len(others) - room)]


def newer_names(one: OneSave, there: Mapping[str, KnownSave]) -> list[str]:
    """Return the names of a save that a newer one has in the remote directory. there: the record of that, by name."""
    return [each.name for each in one.entries if each.name in there and there[each.name] > each.known]


def may_be_newest(name: str, arrived: Iterable[str]) -> bool:
    """Return whether an entry without a record may be newer than what has arrived of its kind, as far as names say."""
    step, steps = step_of(name), [step_of(each) for each in arrived]
    return step is None or all(each is None or each < step for each in steps)
