"""The course of a job from its status at one moment: less than the events tell, and what is missing is said. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime

from elastic_ext.base import goodput
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.base.printable import shown
from elastic_ext.observe import families
from elastic_ext.observe.status_records import ENDED_STATES, GONE, Document, Failure, NodeStatus
from elastic_ext.observe.timeline import course
from elastic_ext.observe.timeline.course import BETWEEN, RUNNING, UNTOLD, Course, Mark, Row, Span, Start, merged

# What a node does now, by the state of its agent.
NOW = {
    "rendezvous": course.RENDEZVOUS,
    families.STARTING: course.START,
    families.RUNNING: RUNNING,
    "stop": course.STOPPING,
    "verdict": course.VERDICT,
    families.BACKOFF: course.BACKOFF,
    GONE: course.GONE,
}
SHORTEST_S = 1.0
JUDGED = "%Y-%m-%d %H:%M:%S%z"  # as verdicts have it
WITHOUT_EVENTS = "What each node did before, and the checkpoints, only events tell (setting events_file)."
BY_JUDGES = "No agent tells when the rounds were: failures stand where the clocks of the agents that judged them were."


def of_document(document: Document, now_unix: float) -> Course:
    """Return the course. now_unix: the reader's clock; all ages count back from it."""
    oldest = max(
        [
            *(each.began_s for each in document.rounds),
            *(each.age_s for each in document.goodput_points),
            *(each.state_s or 0.0 for each in document.nodes if each.state != GONE),
            0.0,
        ]
    )
    began = now_unix - oldest
    if not document.rounds and (judged := [at for each in document.failures if (at := _judged(each)) is not None]):
        began, oldest = min(judged), max(judged) - min(judged)
    length = max(oldest, SHORTEST_S)
    job = _job(document, length)
    above = _job_rows(document, length)
    nodes = {each.name: len(above) + number for number, each in enumerate(document.nodes)}
    spent = {each.state: each.seconds for each in document.goodput}
    total = sum(spent.values())
    known, state = document.job, document.job.state
    limit = f" of {known.restarts_limit}" if known.restarts_limit is not None else ""
    return Course(
        run_id=shown(known.run_id),
        began_unix=began,
        length=length,
        end=f"{'ended: ' if state in ENDED_STATES and state != 'ended' else ''}{shown(state)}",
        restarts=f"round {known.round}, {known.restarts_charged}{limit} restarts charged",
        rows=(*above, *(_node(each, length) for each in document.nodes)),
        nodes=len(document.nodes),
        spent={state: seconds / total for state, seconds in spent.items() if state in course.STATES} if total else {},
        job=job,
        trained=spent.get(goodput.PRODUCTIVE, 0.0) / total if total else None,
        trained_is="Goodput {} of all nodes' time since the job began",
        rounds=tuple(Start(length - each.began_s, each.round) for each in document.rounds),
        marks=tuple(_mark(each, document, nodes.get(each.host), (began, length)) for each in document.failures),
        notes=_notes(document),
    )


def _job(document: Document, length: float) -> tuple[Span, ...]:
    """Return when the workers ran, as the node saw it that tells of the rounds."""
    found: list[Span] = []
    for each in document.rounds:
        begin, end = length - each.began_s, length - (each.ended_s or 0.0)
        if found:
            found.append(Span(found[-1].end, begin, BETWEEN))
        found.append(Span(begin, end, RUNNING))
    if found and found[-1].end < length and document.job.state not in ENDED_STATES:
        found.append(Span(found[-1].end, length, BETWEEN))
    return merged(found)


def _job_rows(document: Document, length: float) -> list[Row]:
    """Return the rows of the job as a whole: its goodput over time, each stretch divided by states."""
    points = [(length - each.age_s, each.goodput) for each in document.goodput_points]
    points.append((length, document.goodput))
    spans: list[Span] = []
    for (begin, before), (end, after) in itertools.pairwise(points):
        spans += _divided(begin, end, before, after)
    return [Row("goodput, all nodes", tuple(spans))] if spans else []


def _divided(begin: float, end: float, before: Sequence[StateSeconds], after: Sequence[StateSeconds]) -> list[Span]:
    earlier = {each.state: each.seconds for each in before}
    spent = {each.state: max(0.0, each.seconds - earlier.get(each.state, 0.0)) for each in after}
    total, low = sum(spent.values()), 0.0
    found = []
    for state in course.STATES:
        share = spent.get(state, 0.0) / total if total else 0.0
        if share > 0 and end > begin:
            found.append(Span(begin, end, state, low, low + share))
            low += share
    return found


def _node(node: NodeStatus, length: float) -> Row:
    state_s = min(length, node.state_s or 0.0)
    rank = f"rank {node.node_rank}: " if node.node_rank >= 0 else ""
    state = NOW.get(node.state, UNTOLD)
    spans = [Span(0.0, length - state_s, UNTOLD), Span(length - state_s, length, state)]
    return Row(shown(f"{rank}{node.name or node.id}"), tuple(each for each in spans if each.end > each.begin))


def _mark(failure: Failure, document: Document, row: int | None, of: tuple[float, float]) -> Mark:
    """row: of its host. of: when the picture begins, Unix seconds, and its length."""
    began, length = of
    ended = next((each.ended_s for each in document.rounds if each.round == failure.round), None)
    judged = _judged(failure)
    at = length - ended if ended is not None else judged - began if judged is not None and not document.rounds else None

    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    return Mark(
        at=at,
        row=row,
        node=shown(failure.host),
        rank=failure.rank if failure.rank >= 0 else None,
        round=failure.round,
        kind=shown(failure.kind),
        decision=shown(failure.decision) + code,
        reason=shown(failure.reason),
        after="" if at is not None or not failure.at else f"at {shown(failure.at)}",
    )


def _judged(failure: Failure) -> float | None:
    try:
        return datetime.strptime(failure.at, JUDGED).timestamp()
    except ValueError:
        return None


def _notes(document: Document) -> tuple[str, ...]:
    found = [WITHOUT_EVENTS]
    if document.rounds_by:
        found.append(f"Rounds are as {document.rounds_by} saw them, {len(document.rounds)} of them.")
    if document.failures and not document.rounds:
        found.append(BY_JUDGES)
    found += [f"Not known: {each.what}: {each.why}." for each in document.unknown]
    found += [f"{each.host} may not come back yet: {each.why}" for each in document.refused]
    return tuple(map(shown, found))
