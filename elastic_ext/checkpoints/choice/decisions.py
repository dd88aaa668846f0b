"""Which checkpoint of a directory to resume from, where no record says it: how to order candidates, how far to look, and between
which families. Pure.

A check, which costs I/O, is a callable, called only if its result can still change the choice. A healthy directory of 10,000
checkpoints costs one check, or 1 + OLDER where older ones show what a whole one has.

Our own checkpoints are ordered by generation and step, which name and manifest both give. Others are ordered by the numbers in
their names, or by time if the names have no numbers or do not compare.

Some families of names belong together: model, ema and optimizer of the same steps; the best beside the latest. Of these the one
that holds the state of an optimizer is the one that training resumes from. If that does not decide, only the user can say which:
`checkpoint_pattern`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elastic_ext.checkpoints.formats import candidates, layouts
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Inspection, family_of, numbers_of, step_of, words_of
from elastic_ext.checkpoints.storage import Entry

LOOKED = 3  # members of a family, the newest by their names and by their times, that are looked at where these may differ
MOMENT_S = 60.0  # between the files of one save; most jobs save more rarely
LEAST_PAUSE = 4  # times as long as a save is the time to the next one, where files are taken as of one save
MOST_SHOWN = 4  # names in a question
OWN_FILES = "each rank has saved a file of its own, and the names do not say which: have them say it, as in step_200_rank1.pt"
OLDER = 3  # how many older checkpoints to look at, to know what a whole one has


@dataclass(frozen=True)
class Resume:
    path: str  # absolute local path or URL
    step: int | None  # from its content, else from its name; None if neither has one
    reason: str  # why this one, for people
    save_number: int | None = None  # in the record of saves; None: it is not recorded, or its round had made no step before


@dataclass(frozen=True)
class PassedOver:
    """A candidate that was checked but not chosen. distrusted: its save finished, but it is quarantined or damaged."""

    path: str
    reason: str
    distrusted: bool = False


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, or None, and the candidates that were passed over before it.

    Checkpoints older than the chosen one are not included, because they were not checked.

    question: why none was chosen although some are complete, and what to set; "" if that is not so.
    """

    resume: Resume | None
    passed_over: tuple[PassedOver, ...] = ()
    question: str = ""

    @property
    def all_bad(self) -> bool:
        """Whether finished checkpoints exist but none may be used. Beginning from nothing would lose the user's work."""
        return self.resume is None and any(passed.distrusted for passed in self.passed_over)


@dataclass(frozen=True)
class NameFamily:
    """Candidates whose names differ only in digits."""

    pattern: str  # what their names have in common
    members: tuple[Entry, ...]  # newest first
    newest: float  # no member was written after this time, in seconds since the epoch

    @cached_property
    def unit(self) -> str:
        """What their numbers count, see `unit_of`."""
        return candidates.unit_of(self.members[0].name)

    @cached_property
    def steps(self) -> frozenset[int]:
        return frozenset(step for entry in self.members if (step := step_of(entry.name)) is not None)

    @cached_property
    def times(self) -> tuple[float, float] | None:
        """When the first and the last of several were written; None if there is one, or if a time is unknown."""
        times = [entry.mtime for entry in self.members if entry.mtime is not None]
        return (min(times), max(times)) if len(times) == len(self.members) > 1 else None


@dataclass(frozen=True)
class Contender:
    """The newest complete member of a family. tracked: a tool's own file names it as the newest."""

    family: NameFamily
    entry: Entry
    inspection: Inspection
    tracked: bool

    @property
    def written_at(self) -> float:
        """When it was written; minus infinity if unknown."""
        return or_oldest(self.inspection.written_at)

    @property
    def step(self) -> int:
        """Its step; -1 if unknown."""
        step = step_in(self.entry, self.inspection, "")
        return -1 if step is None else step

    @property
    def training(self) -> bool | None:
        return self.inspection.training

    @property
    def is_aside(self) -> bool:
        """Whether it is known to hold no optimizer, and its name has no step and no word of a checkpoint: args.pt."""
        return self.training is False and not self.family.steps and candidates.NAMES.isdisjoint(words_of(self.entry.name))

    @property
    def is_full(self) -> bool:
        """Whether it is a file of Lightning, which holds all that training needs."""
        return self.inspection.format == candidates.LIGHTNING and self.training is True


@dataclass(frozen=True)
class Sight:
    """What is known of the candidates of a directory, and how to look at them.

    inspect: called for the newest first, and only as far as needed. pattern: the setting checkpoint_pattern. left_out: families
    that it leaves out. tracked: names that a tool's own file names as its newest. glance: the same as `inspect`, without marks
    and content, to compare with an older one. alike: returns whether two candidates have the same bytes: then one is a copy.
    """

    inspect: Callable[[Entry], Inspection]
    pattern: str = ""
    left_out: Sequence[NameFamily] = ()
    tracked: Collection[str] = ()
    glance: Callable[[Entry], Inspection] | None = None
    alike: Callable[[Entry, Entry], bool] = lambda one, other: False

    def seen(self, at: int, members: Sequence[Entry]) -> Inspection:
        """Return the inspection of a member, as incomplete if it lacks what older ones have. members: newest first."""
        entry, older = members[at], members[at + 1 : at + 1 + OLDER]
        found = _beside_older(entry, self.inspect(entry), map(self.glance or self.inspect, older), entry.name in self.tracked)
        if not found.complete:
            return found
        missing = _missing_beside(entry, older, self.left_out)
        alone = None if entry.parts or entry.is_dir or self.pattern else candidates.rank_name(entry.name)
        if alone is not None and any(alone.ranks):
            missing = "the file of rank 0 is missing"
        return replace(found, complete=False, reason=missing, compared=True) if missing else found


def choose(entries: Iterable[Entry], sight: Sight) -> Choice:
    """Choose the newest complete candidate.

    `families` gives the order within a family. Numbers of different families do not compare (an epoch and a step), so the family
    whose newest complete member was written last wins. All entries of a directory have the clock of its filesystem. `are_kin` has
    the exceptions: families that belong together.
    """
    sight = replace(sight, inspect=functools.cache(sight.inspect))
    listed = list(entries)
    passed_over = [PassedOver(entry.path, entry.unusable) for entry in listed if entry.unusable]
    found = families([entry for entry in listed if not entry.unusable], sight.pattern)
    contenders: list[Contender] = []
    questions: dict[str, str] = {}  # by family; asked if it is the one that would be chosen
    for family in found:
        if contenders and not _may_matter(family, contenders):
            continue
        exact = candidates.is_exact(family.members[0].name, sight.pattern)
        members, questions[family.pattern] = _in_order(family, sight) if not exact else (family.members, "")
        for at, entry in enumerate(members):
            inspection = sight.seen(at, members)
            if inspection.complete:
                if not _is_copy(entry, step_in(entry, inspection, ""), family, found, sight):
                    contenders.append(Contender(family, entry, inspection, entry.name in sight.tracked))
                break
            if inspection.format != UNKNOWN or inspection.distrusted or step_of(entry.name) is not None:
                passed_over.append(PassedOver(entry.path, inspection.reason, inspection.distrusted))
            # otherwise it is a directory such as "logs" and not worth reporting
    if not contenders:
        return Choice(None, tuple(passed_over))
    best, question = resolve(contenders)
    question = question or questions[best.family.pattern]
    if question:
        return Choice(None, tuple(passed_over), question)
    return Choice(_resume(best, sight.pattern, len(found)), tuple(passed_over))


def _in_order(family: NameFamily, sight: Sight) -> tuple[Sequence[Entry], str]:
    """Return the members, newest first, and a question.

    What they say themselves goes before their names. Where the newest by its name was also written last, and says nothing else,
    no other one is looked at.
    """
    members, look = family.members, functools.cache(sight.glance or sight.inspect)
    pieces = [each for each in _pieces(members) if look(each).complete]
    if len(pieces) > 1 and not _are_apart([look(each) for each in pieces]):
        return members, f"{', '.join(sorted(each.name for each in pieces)[:MOST_SHOWN])} are of one save: {OWN_FILES}"
    by_time = sorted(members, key=lambda each: or_oldest(each.mtime), reverse=True)
    agrees = look(members[0]).step in (None, step_of(members[0].name))
    if len(members) == 1 or (agrees and or_oldest(members[0].mtime) >= or_oldest(by_time[0].mtime)):
        return members, ""
    looked = [each for each in members if each in {*members[:LOOKED], *by_time[:LOOKED]}]
    seen = {each: found for each in looked if (found := look(each)).complete}
    renamed = [each for each, found in seen.items() if found.step not in (None, step_of(each.name))]
    copies = [each for each in renamed if _has_twin(each, seen[each].step, members, sight)]
    whole = {each: found for each, found in seen.items() if each not in copies}
    if not whole:
        return members, ""
    ordered = _by_what_they_say(whole)
    same = [each for each in ordered if (step := whole[each].step) is not None and step == whole[ordered[0]].step]
    if len(same) > 1:
        names = ", ".join(sorted(each.name for each in same))
        said = f"{names} are all of step {whole[same[0]].step}, so their numbers count no steps"
        return members, f"{said}: set resume_from to one of them"
    question = _contradicted(ordered[0], whole, len(members))
    if question and (named := [each for each in ordered if each.name in sight.tracked]):
        ordered, question = [*named, *(each for each in ordered if each not in named)], ""
    torn = [each for each in looked if each not in seen and members.index(each) < members.index(ordered[0])]
    left = [each for each in members if each not in (*torn, *ordered)]
    return [*torn, *ordered, *left], question


def _by_what_they_say(whole: Mapping[Entry, Inspection]) -> list[Entry]:
    """Return them by the steps, or else the epochs, that all of them say; else as they are, by their names."""
    said = [each.step for each in whole.values()]
    if None in said:
        said = [each.epoch for each in whole.values()]
        if None in said or len({*said}) < len(said):
            return list(whole)
    by = dict(zip(whole, said, strict=True))
    return sorted(whole, key=lambda each: (by[each] or 0, or_oldest(whole[each].written_at)), reverse=True)


def _progress(found: Inspection) -> int | None:
    return found.step if found.step is not None else found.epoch


def _are_apart(found: Sequence[Inspection]) -> bool:
    """Return whether all say a step or an epoch, each another one."""
    said = [_progress(each) for each in found]
    return None not in said and len({*said}) == len(said)


def _contradicted(top: Entry, whole: Mapping[Entry, Inspection], count: int) -> str:
    """Return a question if another one was written long after the one of the greatest step or number, else "".

    To copy all takes a while, in any order: see `layouts.SLOWEST`. count: of members.
    """
    last = max(whole, key=lambda each: or_oldest(whole[each].written_at))
    after = or_oldest(whole[last].written_at) - or_oldest(whole[top].written_at)
    if not after > layouts.GRACE_S + count * (whole[top].size or 0) / layouts.SLOWEST:
        return ""
    return (
        f"{top.name} is further than {last.name}, which was written {after / 3600:.1f} h later, as by another run: "
        "set resume_from to one of them"
    )


def _pieces(members: Sequence[Entry]) -> Sequence[Entry]:
    """Return the members that one save seems to have written, as each rank its own file; none if no number is seen to say so.

    It is a number that no word explains. It takes no other value beside other numbers, and its files were written in one moment:
    see `LEAST_PAUSE`. Where no other save is there, it counts from 0 or 1.
    """
    numbers = {each: candidates.counted(each.name) for each in members}
    first = numbers[members[0]]
    for place in (at for at, (_, unit) in enumerate(first) if not unit):
        groups: defaultdict[tuple[int, ...], dict[int, Entry]] = defaultdict(dict)
        for each, found in numbers.items():
            values = [value for value, _ in found]
            groups[tuple(values[:place] + values[place + 1 :])][values[place]] = each
        seen = set[int]().union(*groups.values())
        largest = max(groups.values(), key=len)
        times = [[each.mtime for each in group.values()] for group in groups.values()]
        alone = len(groups) == 1 and seen not in ({*range(len(seen))}, {*range(1, len(seen) + (len(first) > 1))})
        if len(seen) == len(largest) > 1 and not alone and _is_moment(times):
            return tuple(largest.values())
    return ()


def _is_moment(saves: Iterable[Sequence[float | None]]) -> bool:
    """Return whether the files of the last save that has several were written in one moment, as far as their times are known."""
    known = sorted(sorted(time for time in times if time is not None) for times in saves)
    if not all(known):
        return True
    last = max(times for times in known if len(times) > 1)
    apart = min((abs(times[0] - last[0]) for times in known if times is not last), default=MOMENT_S / 2)
    return last[-1] - last[0] <= min(MOMENT_S, apart / LEAST_PAUSE)


def _has_twin(entry: Entry, step: int | None, others: Iterable[Entry], sight: Sight) -> bool:
    """Return whether one of the others has the same bytes, and a name that gives this step or none."""
    return any(sight.alike(entry, each) for each in others if each is not entry and step_of(each.name) in (step, None))


def _is_copy(entry: Entry, step: int | None, family: NameFamily, found: Sequence[NameFamily], sight: Sight) -> bool:
    """Return whether an entry has the same bytes as one of another family that has more members, or was written before."""
    rank = len(family.members), -or_oldest(entry.mtime)
    others = [each for each in found if each is not family and (len(each.members), -or_oldest(each.members[0].mtime)) > rank]
    return any(_has_twin(entry, step, each.members, sight) for each in others)


def _beside_older(entry: Entry, inspection: Inspection, older: Iterable[Inspection], tracked: bool = False) -> Inspection:
    """Return the inspection; as incomplete if it lacks what the complete one before it has: ranks, files, or the optimizer.

    Ranks that are fewer from now on make one checkpoint look torn, and not the one after it. tracked: a tool's own file names it
    as its newest, so no rank or file is missing, however few there are.
    """
    bare = entry.is_dir and inspection.training is False
    kinds = Counter[str]() if tracked else inspection.kinds
    if not inspection.complete or not (kinds or bare):
        return inspection
    before = [each for each in older if each.complete]
    if bare and any(each.training for each in before):
        reason = "the optimizer is missing that is in one before it"
    else:
        reason = candidates.lacking(kinds, [each.kinds for each in before]) if kinds else ""
    return replace(inspection, complete=False, reason=reason, compared=True) if reason else inspection


def _missing_beside(entry: Entry, older: Sequence[Entry], left_out: Sequence[NameFamily]) -> str:
    """Return what is missing beside an entry that all older ones have, for people: the pattern names one of a save's files."""
    step, steps = step_of(entry.name), {step_of(each.name) for each in older}
    if step is None or not steps:
        return ""
    for family in left_out:
        if steps <= family.steps and max(family.steps) < step and not is_copy(family.pattern):
            return f"no {family.pattern} of its step, which older ones have beside them: the save did not finish"
    return ""


def _may_matter(family: NameFamily, contenders: Sequence[Contender]) -> bool:
    """Return whether a family may still change the choice. Families come with the one first that may contain the newest."""
    best = max(contenders, key=lambda each: each.written_at)
    if family.newest >= best.written_at:
        return True
    if best.inspection.training is False or is_copy(best.family.pattern):  # it may have to give way
        return True
    of_moment = not (family.steps or best.family.steps) and best.written_at - family.newest <= MOMENT_S
    return (of_moment or are_kin(family, best.family)) and not is_copy(family.pattern)


def _resume(chosen: Contender, pattern: str, family_count: int) -> Resume:
    entry, inspection, family = chosen.entry, chosen.inspection, chosen.family
    reason = f"newest complete of {len(family.members)} named {family.pattern}, {inspection.reason}"
    if family_count > 1:
        reason += f"; chosen among {family_count} families of names"
    return Resume(entry.path, step_in(entry, inspection, pattern), reason)


def step_in(entry: Entry, inspection: Inspection, pattern: str) -> int | None:
    """Return the step of a checkpoint, from its content or else from its name."""
    return inspection.step if inspection.step is not None else step_of(entry.name, pattern)


def families(entries: Iterable[Entry], pattern: str = "") -> tuple[NameFamily, ...]:
    """Group candidates by family. The family that may contain the newest checkpoint comes first."""
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[family_of(entry.name, pattern)].append(entry)
    found = []
    for name, members in groups.items():
        # A directory's mtime is the last change to its list of names, not the time of the save. Only a check finds that.
        times = [float("inf") if entry.is_dir or entry.mtime is None else entry.mtime for entry in members]
        found.append(NameFamily(name, _newest_first(members, pattern), max(times)))
    # Of two families with the same time, the one whose names have numbers goes first: it gives a step.
    return tuple(sorted(found, key=lambda family: (-family.newest, not numbers_of(family.members[0].name), family.pattern)))


def _newest_first(members: list[Entry], pattern: str) -> tuple[Entry, ...]:
    """Sort by step, or by time if other numbers in the names contradict the steps (epoch_1_step_900, epoch_2_step_5)."""
    numbers = {entry.name: numbers_of(entry.name, pattern) for entry in members}
    by_numbers = sorted(members, key=lambda entry: (numbers[entry.name], or_oldest(entry.mtime), entry.name), reverse=True)
    steps = [each[-1] if each else 0 for each in (numbers[entry.name] for entry in by_numbers)]
    if candidates.is_exact(members[0].name, pattern) or steps == sorted(steps, reverse=True):
        return tuple(by_numbers)
    return tuple(sorted(members, key=lambda entry: (or_oldest(entry.mtime), step_of(entry.name), entry.name), reverse=True))


def or_oldest(seconds: float | None) -> float:
    """Return the time, or for None a time before all others."""
    return float("-inf") if seconds is None else seconds


# Words for the best or an older state, and for the newest.
_COPIES = frozenset({"best", "backup", "bak", "copy", "old", "prev", "previous"})
_NEWEST = frozenset({"last", "latest", "final", "current", "newest"})
_FIRST = frozenset({"model", "checkpoint", "ckpt"})  # in an example for people
_VERSION = re.compile(r"[-_]v[0-9]+(?![0-9])")


def resolve(contenders: Sequence[Contender]) -> tuple[Contender, str]:
    """Return the one to resume from; and, if that is not decided, a question for the user: why, and what to set.

    Of those written at the same time the one of the greatest step wins, then the first. What is known to hold an optimizer goes
    before what is known to hold none. The best only counts where it is further than all others. The rest goes by the time, unless
    what was written last belongs together with others that are as good.
    """
    left = list(contenders)
    if any(each.training for each in left):
        left = [each for each in left if each.training is not False]
    left = [each for each in left if not each.is_aside] or left
    others = [each for each in left if not is_copy(each.family.pattern)]
    best = max((each.step for each in left if each not in others), default=0)
    if others and not all(0 <= each.step < best for each in others):  # the best is not known to have done more steps than all
        left = others
    last = max(left, key=lambda each: (each.written_at, each.step))
    family = [each for each in left if each is last or are_kin(each.family, last.family) or _is_of_moment(each, last)]
    for better in ([each for each in family if each.training], [each for each in family if each.tracked]):
        family = better or family
    lines = {_line(each.family.pattern) for each in family}
    if len(lines) > 1 and len({numbers for _, numbers in lines}) == 1 and all(each.is_full for each in family):
        return max(family, key=lambda each: (each.step, each.written_at)), ""
    if len(lines) > 1:
        return last, _question(family)
    return last if last in family else max(family, key=lambda each: each.written_at), ""


def is_copy(pattern: str) -> bool:
    """Return whether a family is of copies: of the best state, or of an old one."""
    return not _COPIES.isdisjoint(words_of(pattern))


def are_kin(one: NameFamily, other: NameFamily) -> bool:
    """Return whether two families share a step, and were written in the same time. Two runs, one after the other, do not."""
    if candidates.OWN_FAMILY in (one.pattern, other.pattern):
        return False
    if one.times and other.times and max(one.times[0], other.times[0]) > min(one.times[1], other.times[1]):
        return False
    return one.unit == other.unit and not one.steps.isdisjoint(other.steps)


def _is_of_moment(one: Contender, other: Contender) -> bool:
    """Return whether two that give no steps in their names may be of one save: each holds a part only, or their times agree."""
    if one.family.steps or other.family.steps:
        return False
    if one.training is False and other.training is False:
        return True
    return not _are_apart((one.inspection, other.inspection)) and abs(one.written_at - other.written_at) <= MOMENT_S


def _line(pattern: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return what the names of the same state have in common, whether it is called the last, the best or a number.

    A number that stays in a family, such as a seed, is one of another run; but Lightning's -v1 is another save of the same.
    """
    pattern = _VERSION.sub("", pattern)
    return words_of(pattern) - _COPIES - _NEWEST, tuple(re.findall(r"[0-9]+", pattern))


def _question(family: Sequence[Contender]) -> str:
    names = sorted(each.entry.name for each in family)
    known = "each holds an optimizer" if family[0].training else "none is known to hold both an optimizer and what it trains"
    listed = ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")
    example = max(family, key=lambda each: not _FIRST.isdisjoint(words_of(each.entry.name))).family.pattern
    return (
        f"{listed} belong together, and {known}: set checkpoint_pattern to the names to resume from, "
        f"e.g. checkpoint_pattern={example.replace('#', '{step}', 1).replace('#', '*')}"
    )
