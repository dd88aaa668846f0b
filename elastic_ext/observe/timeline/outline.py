"""The outline of a job's life from its status (`observe.job_document`): rounds and verdicts, all that it tells. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ext.observe.job_document import ENDED_STATES, Document, Failure
from elastic_ext.observe.node_report import RoundSpan
from elastic_ext.observe.timeline.story import BETWEEN, RUNNING, Mark, Row, Span, Story

NOTE = "from the job's status: give the files of events_file for each node, steps and checkpoints"


def of_status(document: Document, now: float) -> Story:
    """Return what a status tells of the job's past. now: Unix seconds at which it was read."""
    rounds = document.rounds
    over = document.job.state in ENDED_STATES
    ends = [now - each.ended_s if each.ended_s is not None else now for each in rounds]
    begin = now - rounds[0].began_s if rounds else now
    end = max(ends) if over and ends else now
    spans: list[Span] = []
    for each, ended in zip(rounds, ends, strict=True):
        began = now - each.began_s
        if spans and began > spans[-1].end:
            spans.append(Span(BETWEEN, spans[-1].end, began))
        spans.append(Span(RUNNING, began, ended))
    if spans and end > spans[-1].end:
        spans.append(Span(BETWEEN, spans[-1].end, end))
    began_at = tuple(now - each.began_s for each in rounds)
    of_round = {each.round: ended for each, ended in zip(rounds, ends, strict=True)}
    marks = [Mark(of_round[each.round], each.host, _text(each)) for each in document.failures if each.round in of_round]
    row = (Row(f"rounds, as {document.rounds_by or 'one node'} saw them", tuple(spans)),) if spans else ()
    runs = tuple((each.begin, each.end) for each in spans if each.state == RUNNING)
    notes = (NOTE, *_missing(document.failures, rounds), *(f"not known: {each.what}: {each.why}" for each in document.unknown))
    restarts = sum(1 for each in rounds if each.round > 1)
    return Story(document.job.run_id, begin, end, row, runs, began_at, tuple(marks), restarts, notes)


def _text(failure: Failure) -> str:
    who = f"rank {failure.rank}: " if failure.rank >= 0 else ""
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    return f"{who}{failure.kind} -> {failure.decision}{code}: {failure.reason}"


def _missing(failures: Sequence[Failure], rounds: Sequence[RoundSpan]) -> list[str]:
    """Say which verdicts are of rounds that no one who still runs has seen."""
    seen = {each.round for each in rounds}
    unseen = [each for each in failures if each.round not in seen]
    return [f"before that ({each.at or 'time unknown'}), round {each.round}: {_text(each)}" for each in unseen[-5:]]
