"""Which checkpoint to resume from, where the job's saves are recorded (`record/stored.py`). Pure, but for callables that do I/O.

The newest save counts that is proved, or that is not and whose format says that it is whole. Newest is what the job saved last,
by the record: no clock and no number decides. Of several kinds, by names without their digits:

- what is known to hold an optimizer goes before what is known to hold none, but what the job's scripts were seen to load;
- what a round has saved after its first step goes before what it has saved earlier;
- what is as it was recorded goes before what was written again since;
- what the script has made by copying an older save is no newer than that;
- kinds of the same moment (two models with an optimizer each) are a question for the user, as without a record.

What is not recorded counts only if its name differs from a recorded one in its number, and has a greater one: the agent was
killed before it could write, or the job ran without it. So copies that people make, links, data and results of others are never
chosen. If such a checkpoint was written later, the choice says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic_ext.checkpoints.choice import decisions
from elastic_ext.checkpoints.choice.decisions import Choice, Contender, PassedOver, Resume, Sight
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.formats.candidates import UNKNOWN, Inspection, numbers_of
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordBook, RecordVerdict, Trust
from elastic_ext.checkpoints.storage import Entry, Storage

_NUMBER = re.compile(r"([0-9]+)")
MOST_FOREIGN = 4  # kinds that are looked at only to say that they are there
MOST_COMPARED = 32  # saves, the last ones
FOREIGN = "it was written later, but no save of it is recorded: if this job is to go on from it, set resume_from to its name"


@dataclass(frozen=True)
class _Usable:
    """The newest save of a kind that can be used."""

    entry: Entry
    known: KnownSave  # itself, or the last recorded one of its kind
    inspection: Inspection
    verdict: RecordVerdict

    @property
    def moment(self) -> tuple[int, int]:
        """The round, and the steps that it had made."""
        return self.known.attempt, self.verdict.count


def choose(entries: Sequence[Entry], book: RecordBook, sight: Sight) -> Choice:
    """Choose among the candidates of a directory.

    The newest of each kind is looked at first, only as far as needed. Where the record does not decide, because it has none that
    can be resumed from, `decisions.choose` does, among those that the record does not refuse.
    """
    kinds = _kinds(entries, book)
    passed_over: list[PassedOver] = []
    recorded = {kind: members for kind, members in kinds.items() if any(map(book.known, members))}
    found = [_newest(members, book, sight, passed_over) for members in recorded.values()]
    usable = sorted((each for each in found if each is not None), key=lambda each: each.known, reverse=True)
    left = [each for each in usable if each.inspection.training is not False or pattern_of(each.entry.name) in book.loads]
    for holds in (_has_optimizer, _has_trained, _is_certain):
        left = list(filter(holds, left)) or left
    left = [each for each in left if not _is_copy(each, recorded, book, sight.alike)] or left
    if not left:
        refused = {each.path for each in passed_over}
        choice = decisions.choose([each for each in entries if each.path not in refused], sight)
        return replace(choice, passed_over=(*passed_over, *choice.passed_over))
    best, question = _of_one_moment([each for each in left if each.moment == left[0].moment])
    if question:
        return Choice(None, tuple(passed_over), question)
    others = [members for kind, members in kinds.items() if kind not in recorded]
    passed_over += _foreign(others, best.inspection, sight.inspect)
    step = decisions.step_in(best.entry, best.inspection, sight.pattern)
    return Choice(Resume(best.entry.path, step, _reason(best)), tuple(passed_over))


def _kinds(entries: Sequence[Entry], book: RecordBook) -> dict[str, list[Entry]]:
    """Return the usable entries by their names with "#" for digits; one stands for all files that the ranks wrote for a save.

    The names may not say so. But by the record, each rank has written its own file, and no other number in their names differs.
    """
    kinds: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.unusable:
            kinds[pattern_of(entry.name)].append(entry)
    for kind, members in kinds.items():
        places = _places_of_ranks(members, book) if kind.count("#") > 1 else ()
        groups: defaultdict[str, list[Entry]] = defaultdict(list)
        for each in members if places else ():
            text = _NUMBER.split(each.name)
            groups["".join(candidates.ANY if at in places else part for at, part in enumerate(text))].append(each)
        kinds[kind] = [candidates.join(*each) for each in groups.items()] or members
    return dict(kinds)


def _places_of_ranks(members: Sequence[Entry], book: RecordBook) -> tuple[int, ...]:
    """Return where names of one moment differ that two ranks have written, as places in `_NUMBER.split`; none if none have."""
    single = [each for each in members if not (each.is_dir or each.parts)]
    recorded = sorted(((known, each.name) for each in single if (known := book.known(each)) is not None), reverse=True)
    for (known, name), (older, other) in pairwise(recorded[:3]):
        one, two = book.read(known), book.read(older)
        if one is None or two is None or (known.attempt, one.count) != (older.attempt, two.count):
            continue
        if len(one.ranks) == len(two.ranks) == 1 and one.ranks != two.ranks:
            pairs = zip(_NUMBER.split(name), _NUMBER.split(other), strict=True)
            return tuple(at for at, (first, second) in enumerate(pairs) if first != second)
    return ()


def files_by_rank(storage: Storage, name: str) -> dict[int, str]:
    """Return by rank the paths of a checkpoint's files, see `candidates.files_by_rank`; by the record where names do not say it.

    Raises OSError.
    """
    found = candidates.files_by_rank(storage, name)
    entry = candidates.entry_of(storage, name) if candidates.ANY in name and not found else None
    if entry is None or candidates.rank_name(entry.parts[0].name) is not None:
        return found
    book = RecordBook(storage)
    saved = [(book.saved(part), part.path) for part in entry.parts]
    return {save.ranks[0]: path for save, path in saved if save is not None and len(save.ranks) == 1}


def _has_optimizer(each: _Usable) -> bool:
    return each.inspection.training is True


def _has_trained(each: _Usable) -> bool:
    """Return whether its round had made a step by then: what it saves before that is no newer than what it has resumed from."""
    return each.verdict.save is None or each.verdict.save.count > 0


def _is_certain(each: _Usable) -> bool:
    """Return whether it is not one that was written again after it was recorded: then it may be of two saves."""
    return each.verdict.trust is not Trust.CHANGED


def _is_copy(
    each: _Usable, recorded: Mapping[str, Sequence[Entry]], book: RecordBook, alike: Callable[[Entry, Entry], bool]
) -> bool:
    """Return whether the script has made it from an older save of another kind."""
    others = [entry for kind, members in recorded.items() if kind != pattern_of(each.entry.name) for entry in members]
    older = sorted(((known, entry) for entry in others if (known := book.known(entry)) and known < each.known), reverse=True)
    return any(alike(each.entry, entry) for _, entry in older[:MOST_COMPARED] if book.size(entry) == book.size(each.entry))


def _newest(
    members: Sequence[Entry],
    book: RecordBook,
    sight: Sight,
    passed_over: list[PassedOver],
) -> _Usable | None:
    """Return the newest usable save of one kind. Add those that are passed over."""
    recorded = sorted(((known, each) for each in members if (known := book.known(each)) is not None), reverse=True)
    last, newest = recorded[0][0], numbers_of(recorded[0][1].name)
    later = [(last, each) for each in members if book.known(each) is None and numbers_of(each.name) > newest]
    later = [each for each in later if not any(sight.alike(each[1], entry) for _, entry in recorded[:MOST_COMPARED])]
    later.sort(key=lambda each: numbers_of(each[1].name), reverse=True)
    in_order = [*later, *recorded]
    for at, (known, entry) in enumerate(in_order):
        inspection, verdict = _judged(entry, sight.inspect(entry), book)
        reason = "" if inspection.complete else inspection.reason
        if not reason and verdict.trust is Trust.TORN:
            reason = verdict.why
        elif not reason and verdict.trust is not Trust.PROVED:
            proved = (book.proved_files(each) for _, each in in_order[at:])
            reason = verdict.lacks(next(filter(None, proved), Counter()))
        if not reason:
            return _Usable(entry, known, inspection, verdict)
        if inspection.format != UNKNOWN or inspection.distrusted:
            mixed = inspection.complete and verdict.trust is Trust.TORN  # it was whole
            passed_over.append(PassedOver(entry.path, reason, inspection.distrusted or mixed))
    return None


def _judged(entry: Entry, inspection: Inspection, book: RecordBook) -> tuple[Inspection, RecordVerdict]:
    """Return what its format and the record say. A proof goes before what others beside it have, and times of its files.

    But not before a file in which a tool, or a person, names an older one as the newest.
    """
    if not (inspection.complete or inspection.compared):
        return inspection, RecordVerdict(Trust.UNPROVED, inspection.reason)
    verdict = book.verdict(entry)
    if inspection.compared and not entry.torn and verdict.trust is Trust.PROVED:
        inspection = replace(inspection, complete=True, distrusted=False)
    return inspection, verdict


def _of_one_moment(left: Sequence[_Usable]) -> tuple[_Usable, str]:
    """Return what was saved last of several kinds of the same moment; or a question."""
    best = left[0]
    if len(left) == 1:
        return best, ""
    contenders = [Contender(decisions.families([each.entry])[0], each.entry, each.inspection, False) for each in left]
    chosen, question = decisions.resolve(contenders)
    return next(each for each in left if each.entry is chosen.entry), question


def _foreign(kinds: Sequence[Sequence[Entry]], best: Inspection, inspect: Callable[[Entry], Inspection]) -> list[PassedOver]:
    """Return the checkpoints of other kinds that were written after the chosen one."""
    found = []
    for members in sorted(kinds, key=lambda each: max(decisions.or_oldest(of.mtime) for of in each), reverse=True)[:MOST_FOREIGN]:
        entry = max(members, key=lambda each: (numbers_of(each.name), decisions.or_oldest(each.mtime)))
        if decisions.or_oldest(entry.mtime) > decisions.or_oldest(best.written_at):
            seen = inspect(entry)
            if seen.complete and seen.training and decisions.or_oldest(seen.written_at) > decisions.or_oldest(best.written_at):
                found.append(PassedOver(entry.path, FOREIGN))
    return found


def _reason(best: _Usable) -> str:
    if best.verdict.save is None:
        return f"newest by its number, not recorded, {best.inspection.reason}"
    if best.verdict.trust is Trust.PROVED:
        return f"last proved save: {best.verdict.why}; {best.inspection.reason}"
    return f"last save, not proved, but whole: {best.inspection.reason}"
