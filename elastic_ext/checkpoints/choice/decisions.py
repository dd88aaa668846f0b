"""What is decided about the checkpoint to resume from. Pure. Between candidates of one directory: how to order them, how far to
look, and between which families. Between the nodes of a round: what they offer each other, and what node 0 answers.

A check, which costs I/O, is a callable, called only if its result can still change the choice. A healthy directory of 10,000
checkpoints costs one check, or two where the one before it shows what a whole one has.

Our own checkpoints are ordered by generation and step, which name and manifest both give. Others are ordered by the numbers in
their names, or by time if the names have no numbers or do not compare.

Some families of names belong together: model, ema and optimizer of the same steps; the best beside the latest. Of these the one
that holds the state of an optimizer is the one that training resumes from. If that does not decide, only the user can say which:
`checkpoint_pattern`.

The messages between nodes, which `base.contracts.Exchange` carries:

    every node -> node 0        Offers      the checkpoints in its local directory and its memory, newest first
    node 0 -> every other node  Agreement   the checkpoint that the round resumes from, or why node 0 has none

A message is one JSON object: `schema` (SCHEMA) and the fields of its class; an offer is the JSON object of a `tiers.Offer`. A
reader refuses any other schema and ignores unknown fields.

A message gives a checkpoint's name in a directory that each node knows from its own settings, never a path. So an intruder in the
exchange can make the nodes load another of the job's checkpoints, but never a file of the intruder's.

A copy in memory is whole if each part is on some node. Its workers send each other the parts that they need.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from elastic_ext.base import records
from elastic_ext.base.errors import BadCheckpoints, StorageAway, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.checkpoints.directory.tiers import Offer, missing_ranks
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Inspection, family_of, numbers_of, step_of, words_of
from elastic_ext.checkpoints.storage import Entry

MOST_BY_CONTENT = 8  # members of a family that are all looked at, to order them by the steps that they say themselves
OLDER = 3  # how many older checkpoints to look at, to know what a whole one has


@dataclass(frozen=True)
class Resume:
    path: str  # absolute local path or URL
    step: int | None  # from its content, else from its name; None if neither has one
    reason: str  # why this one, for people


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
        return self.training is False and not self.family.steps and _ROLES.isdisjoint(words_of(self.entry.name))

    @property
    def is_full(self) -> bool:
        """Whether it is a file of Lightning, which holds all that training needs."""
        return self.inspection.format == candidates.LIGHTNING and self.training is True


def choose(
    entries: Iterable[Entry],
    inspect: Callable[[Entry], Inspection],
    pattern: str = "",
    tracked: Collection[str] = (),
    glance: Callable[[Entry], Inspection] | None = None,
    alike: Callable[[Entry, Entry], bool] = lambda one, other: False,
) -> Choice:
    """Choose the newest complete candidate.

    `families` gives the order within a family. Numbers of different families do not compare (an epoch and a step), so the family
    whose newest complete member was written last wins. All entries of a directory have the clock of its filesystem. `are_kin` has
    the exceptions: families that belong together.

    Args:
        inspect: called for the newest first, only as far as needed, and at most once per candidate.
        pattern: the setting checkpoint_pattern.
        tracked: names that a tool's own file names as its newest.
        glance: the same as `inspect`, without reading the content; to compare with an older one.
        alike: returns whether two candidates have the same bytes, so that the second one of a person's hand is no newer.
    """
    inspect = functools.cache(inspect)
    listed = list(entries)
    passed_over = [PassedOver(entry.path, entry.unusable) for entry in listed if entry.unusable]
    found = families([entry for entry in listed if not entry.unusable], pattern)
    contenders: list[Contender] = []
    for family in found:
        if contenders and not _may_matter(family, contenders):
            continue
        members, question = _by_content(family, inspect)
        if question:
            return Choice(None, tuple(passed_over), question)
        for older, entry in enumerate(members, 1):
            before = map(glance or inspect, members[older : older + OLDER])
            inspection = beside_older(entry, inspect(entry), before, entry.name in tracked)
            if inspection.complete:
                if not _is_copy(entry, step_in(entry, inspection, ""), family, found, alike):
                    contenders.append(Contender(family, entry, inspection, entry.name in tracked))
                break
            if inspection.format != UNKNOWN or inspection.distrusted or step_of(entry.name) is not None:
                passed_over.append(PassedOver(entry.path, inspection.reason, inspection.distrusted))
            # otherwise it is a directory such as "logs" and not worth reporting
    if not contenders:
        return Choice(None, tuple(passed_over))
    best, question = resolve(contenders)
    if question:
        return Choice(None, tuple(passed_over), question)
    return Choice(_resume(best, pattern, len(found)), tuple(passed_over))


def _by_content(family: NameFamily, inspect: Callable[[Entry], Inspection]) -> tuple[Sequence[Entry], str]:
    """Return the members, newest first, and a question. Steps that they say themselves go before numbers without a word."""
    members = family.members
    if family.unit or not 1 < len(members) <= MOST_BY_CONTENT:
        return members, ""
    found = {entry: inspection for entry in members if (inspection := inspect(entry)).complete}
    steps = {inspection.step for inspection in found.values()}
    if len(found) < len(members) or None in steps:
        return members, ""
    if len(steps) == 1:
        names = ", ".join(sorted(entry.name for entry in members))
        return members, f"{names} are all of step {steps.pop()}, so their numbers count no steps: set resume_from to one of them"
    return sorted(members, key=lambda each: (found[each].step or 0, or_oldest(found[each].written_at)), reverse=True), ""


def _is_copy(
    entry: Entry, step: int | None, family: NameFamily, found: Sequence[NameFamily], alike: Callable[[Entry, Entry], bool]
) -> bool:
    """Return whether an entry has the same bytes as one of another family that has more members, or was written before."""
    rank = len(family.members), -or_oldest(entry.mtime)
    others = [each for each in found if each is not family and (len(each.members), -or_oldest(each.members[0].mtime)) > rank]
    return any(alike(entry, member) for each in others for member in each.members if step_of(member.name) in (step, None))


def beside_older(entry: Entry, inspection: Inspection, older: Iterable[Inspection], tracked: bool = False) -> Inspection:
    """Return the inspection; as incomplete if it lacks what the complete one before it has: ranks, files, or the optimizer.

    Ranks that are fewer from now on make one checkpoint look torn, and not the one after it. tracked: a tool's own file names it
    as its newest, so no rank or file is missing, however few there are.
    """
    bare = entry.is_dir and inspection.training is False
    parts = {} if tracked else inspection.parts
    if not inspection.complete or not (parts or bare):
        return inspection
    before = next((each for each in older if each.complete), inspection)
    if bare and before.training:
        reason = "the optimizer is missing that is in the one before it"
    else:
        reason = candidates.lacks(parts, before.parts) if parts else ""
    return replace(inspection, complete=False, reason=reason, compared=True) if reason else inspection


def _may_matter(family: NameFamily, contenders: Sequence[Contender]) -> bool:
    """Return whether a family may still change the choice. Families come with the one first that may contain the newest."""
    best = max(contenders, key=lambda each: each.written_at)
    if family.newest >= best.written_at:
        return True
    if best.inspection.training is False or is_copy(best.family.pattern):  # it may have to give way
        return True
    return are_kin(family, best.family) and not is_copy(family.pattern)


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


# Words by which parts and copies of the same state differ. One of _COPIES is a copy of an earlier or of the same state.
_COPIES = frozenset({"best", "backup", "bak", "copy", "old"})
_NEWEST = frozenset({"last", "latest", "final", "current", "newest"})
_PARTS = frozenset(
    (
        *("model", "models", "weights", "params", "state", "dict", "ema", "averaged", "avg", "net", "head", "backbone"),
        *("opt", "optim", "optimizer", "optimizers", "sched", "scheduler", "adapter", "lora", "text", "unet", "vae"),
        *("g", "d", "gen", "disc", "generator", "discriminator", "encoder", "decoder", "teacher", "student"),
        *("actor", "critic", "policy", "value", "reward"),
    )
)
_FIRST = frozenset({"model", "checkpoint", "ckpt"})  # in an example for people
_VERSION = re.compile(r"[-_]v[0-9]+(?![0-9])")
_ROLES = _COPIES | _NEWEST | _PARTS | {"checkpoint", "ckpt", "trainer", "training"}


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
    family = [each for each in left if each is last or are_kin(each.family, last.family)]
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
    """Return whether two families belong together: they share a step, or have no steps and names that differ in their roles.

    Two runs of a job, one after the other, do not.
    """
    if candidates.OWN_FAMILY in (one.pattern, other.pattern):
        return False
    if one.times and other.times and max(one.times[0], other.times[0]) > min(one.times[1], other.times[1]):
        return False
    if one.steps or other.steps:
        return one.unit == other.unit and not one.steps.isdisjoint(other.steps)
    return words_of(one.pattern) ^ words_of(other.pattern) <= _ROLES


def _line(pattern: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return what the names of the same state have in common, whether it is called the last, the best or a number.

    A number that stays in a family, such as a seed, is one of another run; but Lightning's -v1 is another save of the same.
    """
    pattern = _VERSION.sub("", pattern)
    return words_of(pattern) - _COPIES - _NEWEST, tuple(re.findall(r"[0-9]+", pattern))


def _question(family: Sequence[Contender]) -> str:
    names = sorted(each.entry.name for each in family)
    known = "each holds an optimizer" if family[0].training else "none is known to hold both an optimizer and what it trains"
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    example = max(family, key=lambda each: not _FIRST.isdisjoint(words_of(each.entry.name))).family.pattern
    return (
        f"{listed} belong together, and {known}: set checkpoint_pattern to the names to resume from, "
        f"e.g. checkpoint_pattern={example.replace('#', '{step}', 1).replace('#', '*')}"
    )


# Between the nodes of a round.

NEEDED = "each node needs a tmpfs at /dev/shm, and the same memory_every and memory_limit"


@dataclass(frozen=True)
class NewestSaved:
    """The newest checkpoint that a node knows of."""

    round: records.Count = 0  # the last round of the node; 0: it has been in none
    step: int = 0  # the greatest step that this round resumed from or that its workers have seen committed; 0: none


NONE_SAVED = NewestSaved()


class Tier(str, Enum):
    """Where a checkpoint is. Each node has a part of one in MEMORY or LOCAL."""

    MEMORY = "memory"
    LOCAL = "local_dir"
    SHARED = "checkpoint_dir"
    NAMED = "resume_from"  # in the directory that this setting names


SCHEMA = 2
MAX_TEXT = 2000  # characters of a reason or an error
MAX_OFFERS = 16  # per node, the newest
MAX_NAME = 1024  # characters of a checkpoint's name: the longest key in S3


@dataclass(frozen=True)
class Offers:
    """The checkpoints in one node's own tiers."""

    usable: bool = False  # the node has a local tier, and rounds may resume from it
    offers: tuple[Offer, ...] = ()  # in its local directory
    memory: tuple[Offer, ...] = ()  # copies in its memory
    refused: tuple[records.Name, ...] = ()  # names of copies in memory, on any node, that this node knows to be bad
    # The node has memory for copies, even if it holds none; without it, no round of it may resume from one.
    has_memory: bool = False
    saved: NewestSaved | None = None  # the newest checkpoint that the node knows of; None: it cannot know


@dataclass(frozen=True)
class Agreement:
    """The checkpoint that a round resumes from."""

    name: str  # name of the checkpoint; "": begin from nothing
    step: int | None = None  # None if neither its content nor its name gives one
    reason: str = ""  # why this one, for people
    tier: Tier = Tier.SHARED  # where it is
    # There is no name, but some entries may be checkpoints: a script that knows them may resume from one.
    passed_over: bool = False
    error: str = ""  # why node 0 has no answer, for people; "" if it has one
    bad: bool = False  # the error is that checkpoints exist, but none may be used
    away: bool = False  # the error is that the storage does not answer


def encode(message: Offers | Agreement) -> str:
    return records.encode(message, SCHEMA)


def failure(error: Exception) -> Agreement:
    """Return the message for an error that keeps node 0 from choosing a checkpoint."""
    bad, away = isinstance(error, BadCheckpoints), isinstance(error, StorageAway)
    return Agreement("", error=str(error)[:MAX_TEXT], bad=bad, away=away)


def read_offers(text: str) -> Offers:
    """Parse the message of a node to node 0. Raises RecordError."""
    return records.read(Offers, text, "what a node has in its local_dir", SCHEMA)


def read_agreement(text: str) -> Agreement:
    """Parse the message of node 0.

    Raises:
        BadCheckpoints: node 0 found that no checkpoint may be used.
        StorageAway: the storage does not answer node 0.
        UsageError: node 0 failed in another way, or this is not a message from node 0.
    """
    try:
        found = records.read(Agreement, text, "the message of group rank 0 about the checkpoint to resume from", SCHEMA)
    except records.RecordError as error:
        raise UsageError(printable(str(error))) from error
    if found.error:
        kind = BadCheckpoints if found.bad else StorageAway if found.away else UsageError
        raise kind(f"group rank 0 could not choose a checkpoint: {printable(found.error[:MAX_TEXT])}")
    name = found.name
    if not (candidates.order_of(name) is not None if found.tier in (Tier.MEMORY, Tier.LOCAL) else _is_name(name)):
        raise UsageError(
            f"group rank 0 sent {printable(name[:200])!r} as the checkpoint to resume from, expected a name: check whether "
            "another program writes to the rendezvous store"
        )
    return found


def _is_name(name: str) -> bool:
    """Return whether this is the name of an entry directly in a directory, or "" for nothing."""
    return len(name) <= MAX_NAME and name not in (".", "..") and "/" not in name and "\0" not in name


@dataclass(frozen=True)
class MemoryChoice:
    offer: Offer | None  # None: no copy is whole
    lost: tuple[tuple[str, str], ...] = ()  # the newer ones, which cannot be loaded, with the reason for each; newest first


def newest_whole(nodes: Sequence[Offers], refused: Collection[str] = ()) -> MemoryChoice:
    """Choose among the copies in memory of these nodes, which are in the order of their ranks. refused: names not to use."""
    without = next((number for number, node in enumerate(nodes) if not node.has_memory), None)
    lost: list[tuple[str, str]] = []
    copies = missing_ranks(node.memory for node in nodes)
    for copy in sorted(copies, key=lambda each: (candidates.order_or_oldest(each.name), each.digest), reverse=True):
        if copy.name in refused:
            continue
        if without is not None:
            lost.append((copy.name, f"node {without} has no memory for copies: {NEEDED}"))
        elif copies[copy]:
            lost.append((copy.name, f"no node has the part of rank {copies[copy][0]}"))
        else:
            return MemoryChoice(copy, tuple(lost))
    return MemoryChoice(None, tuple(lost))


def needs_no_storage(copy: Offer | None, local: Offer | None, nodes: Sequence[Offers]) -> bool:
    """Return whether a whole copy is at least as new as any checkpoint that the nodes know of.

    If so, a round resumes from it although the storage of the checkpoints does not answer. Else the storage is waited for: to
    resume from an older copy would supersede what was saved later.

    A round resumes from the newest of all tiers. So only what its workers have saved can be newer than that, and their agents see
    each commit. Steps are enough to compare: within a round they only grow, and workers that load remove the copies of other
    groups. A node that was not in the last round may still have those. What a script saves and does not report
    (`elastic_ext.report_saved`), and what only nodes that are lost have seen, no node knows of.

    copy: the newest whole copy; None: no copy is whole. local: the newest checkpoint in the nodes' local directories.
    """
    known = [node.saved for node in nodes if node.saved is not None]
    if (
        copy is None
        or len(known) < len(nodes)
        or (local is not None and candidates.order_or_oldest(local.name) > candidates.order_or_oldest(copy.name))
    ):
        return False
    last = max(saved.round for saved in known)
    held_by = {saved.round for saved, node in zip(known, nodes, strict=True) if node.memory}
    return held_by == {last} and copy.step >= max(saved.step for saved in known if saved.round == last)
