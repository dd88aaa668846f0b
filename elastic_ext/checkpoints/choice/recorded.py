"""Which checkpoint to resume from, where the job's saves are recorded (`record/stored.py`). Pure, but for callables that do I/O.

The newest save counts that is proved, or that is not and whose format says that it is whole. Newest is what the job saved last,
by the record: no clock and no number decides. It has no fewer files of ranks than another of its round: a rank that failed to
save its own may have trained on, which proves what the others saved. Of several kinds, by names without their digits:

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.choice import decisions
from elastic_ext.checkpoints.choice.decisions import Choice, Contender, PassedOver, Resume, Sight
from elastic_ext.checkpoints.choice.rank_files import SaveKind, kinds_of
from elastic_ext.checkpoints.formats import candidates, layouts
from elastic_ext.checkpoints.formats.candidates import ANY, UNKNOWN, Inspection, numbers_of
from elastic_ext.checkpoints.record.stored import KnownSave, RecordBook, RecordVerdict, StoredSave, Trust
from elastic_ext.checkpoints.storage import Entry

MOST_FOREIGN = 4  # kinds that are looked at only to say that they are there
MOST_COMPARED = 32  # saves, the last ones
NO_END = "its save was not proved, nothing in it shows its end, and no earlier save shows what it needs"
OF_ONE_RANK = "no save of it is recorded, and it has fewer files than the one before it, of which each rank has written one"
FOREIGN = "it was written later, but no save of it is recorded: if this job is to go on from it, set resume_from to its name"


@dataclass(frozen=True)
class _Usable:
    """The newest save of a kind that can be used."""

    kind: str
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
    kinds = kinds_of(entries, book, sight.pattern)
    passed_over: list[PassedOver] = []
    recorded = {name: kind for name, kind in kinds.items() if any(map(book.known, kind.members))}
    found = [_newest(name, kind.members, book, sight, passed_over) for name, kind in recorded.items()]
    usable = sorted((each for each in found if each is not None), key=lambda each: each.known, reverse=True)
    left = [each for each in usable if each.inspection.training is not False or each.kind.replace(ANY, "#") in book.loads]
    for holds in (_has_optimizer, _has_trained, _is_certain):
        left = list(filter(holds, left)) or left
    left = [each for each in left if not _is_copy(each, recorded, book, sight.alike)] or left
    if not left:
        paths = {each.path for each in passed_over}
        refused = {
            of.path for kind in kinds.values() for each in kind.members if each.path in paths for of in (each, *each.parts)
        }
        left_over = [each for each in entries if refused.isdisjoint(of.path for of in (each, *each.parts))]
        choice = decisions.choose(left_over, sight)
        return replace(choice, passed_over=(*passed_over, *choice.passed_over))
    best, question = _of_one_moment([each for each in left if each.moment == left[0].moment])
    question = question or kinds[best.kind].question
    if question:
        return Choice(None, tuple(passed_over), question)
    others = [kind.members for name, kind in kinds.items() if name not in recorded]
    passed_over += _foreign(others, best.inspection, sight.inspect)
    step = decisions.step_in(best.entry, best.inspection, sight.pattern)
    number = best.known.number if best.verdict.count > 0 else None
    return Choice(Resume(best.entry.path, step, _reason(best), number), tuple(passed_over))


def _has_optimizer(each: _Usable) -> bool:
    return each.inspection.training is True


def _has_trained(each: _Usable) -> bool:
    """Return whether its round had made a step by then: what it saves before that is no newer than what it has resumed from."""
    return each.verdict.save is None or each.verdict.save.count > 0


def _is_certain(each: _Usable) -> bool:
    """Return whether it is not one that was written again after it was recorded: then it may be of two saves."""
    return each.verdict.trust is not Trust.CHANGED


def _is_copy(each: _Usable, recorded: Mapping[str, SaveKind], book: RecordBook, alike: Callable[[Entry, Entry], bool]) -> bool:
    """Return whether the script has made it from an older save of another kind."""
    others = [entry for name, kind in recorded.items() if name != each.kind for entry in kind.members]
    older = sorted(((known, entry) for entry in others if (known := book.known(entry)) and known < each.known), reverse=True)
    return any(alike(each.entry, entry) for _, entry in older[:MOST_COMPARED] if book.size(entry) == book.size(each.entry))


def _newest(
    kind: str,
    members: Sequence[Entry],
    book: RecordBook,
    sight: Sight,
    passed_over: list[PassedOver],
) -> _Usable | None:
    """Return the newest usable save of one kind. Add those that are passed over."""
    recorded = sorted(((known, each) for each in members if (known := book.known(each)) is not None), reverse=True)
    last, newest = recorded[0][0], numbers_of(recorded[0][1].name)
    later = [(last, each) for each in members if book.known(each) is None and numbers_of(each.name) > newest]
    # Which rank wrote a file is not known where neither its name nor the record says it.
    later = [each for each in later if not each[1].parts or candidates.rank_name(each[1].parts[0].name) is not None]
    later = [each for each in later if not any(sight.alike(each[1], entry) for _, entry in recorded[:MOST_COMPARED])]
    later.sort(key=lambda each: numbers_of(each[1].name), reverse=True)
    in_order = [*later, *recorded]
    usual_there: dict[int, int] = {}  # by round: files of ranks
    for known, entry in recorded:
        usual_there[known.attempt] = max(len(entry.parts), usual_there.get(known.attempt, 0))
    for at, (known, entry) in enumerate(in_order):
        inspection, verdict = _judged(entry, sight.inspect(entry), book)
        reason = "" if inspection.complete else inspection.reason
        there, most = len(entry.parts or (entry,)), usual_there[known.attempt]
        if not reason and verdict.trust is Trust.TORN:
            reason = verdict.why
        elif not reason and verdict.save is None and not entry.parts and any(each.parts for _, each in recorded):
            reason = OF_ONE_RANK
        elif not reason and there < most:
            reason = f"it has fewer files than another save of its round: {there}, not {most}"
        elif not reason and verdict.trust is not Trust.PROVED:
            older = [each for _, each in in_order[at : at + MOST_COMPARED]]
            is_only = sum(each.attempt == known.attempt for each, _ in recorded) == 1
            usual = next((each for each in older if book.proved_files(each) or _is_of_all_ranks(each, book)), None)
            save = verdict.save
            shows_end = usual is not None or inspection.format != layouts.FILES or save is None or save.usual > 0
            reason = _lacks(entry, verdict, usual, book, is_only) if shows_end else NO_END
        if not reason:
            return _Usable(kind, entry, known, inspection, verdict)
        if inspection.format != UNKNOWN or inspection.distrusted:
            arriving = verdict.save is not None and verdict.save.arriving
            mixed = inspection.complete and verdict.trust is Trust.TORN and not arriving  # it was whole
            passed_over.append(PassedOver(entry.path, reason, inspection.distrusted or mixed))
    return None


def _is_of_all_ranks(entry: Entry, book: RecordBook, least: int = 2) -> bool:
    """Return whether each rank of the round has written a file of its own, and this many have at least."""
    save, files = book.saved(entry), len(entry.parts or (entry,))
    return save is not None and save.world == files >= least


def _lacks(entry: Entry, verdict: RecordVerdict, usual: Entry | None, book: RecordBook, is_only: bool) -> str:
    """Return what an entry that is not proved lacks, for people; "": nothing is known.

    usual: the last one of its kind that is proved, or of all ranks. is_only: its round has recorded no other of the kind.
    """
    there, save = len(entry.parts or (entry,)), verdict.save
    if save is not None and save.written < save.usual:
        return (
            f"its save was not proved, and it wrote {counted(save.written, 'file')}, not {save.usual} as the proved one before it"
        )
    if usual is None:
        return _lacks_as_first(there, verdict.save) if is_only and verdict.save is not None else ""
    if not _is_of_all_ranks(usual, book, least=1 if there > 1 else 2):
        return verdict.lacks(book.proved_files(usual))
    if verdict.save is not None:
        return _fewer(there, verdict.save.world)
    files = len(usual.parts or (usual,))
    more = "fewer" if there < files else "more"
    return f"no save of it is recorded, and it has {more} files than the one before it" if there != files else ""


def _lacks_as_first(there: int, save: StoredSave) -> str:
    """Return why the first save of a kind may not be whole, for people. there: how many files of ranks it has."""
    if there == len(save.ranks) == 1:
        return f"its save was not proved, and only rank {save.ranks[0]} has written it" if save.ranks != (0,) else ""
    return _fewer(there, save.world) if there > 1 else ""


def _fewer(there: int, world: int) -> str:
    return f"its save was not proved, and it has fewer files than there were ranks: {there}, not {world}" if there < world else ""


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
