"""The state of a whole job at one moment, and the lines that show it. Plain values, no store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_ext.base import printable
from elastic_ext.failures.ledger import JobVerdict, Ledger
from elastic_ext.failures.policy import NO_LIMIT, Action
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State


@dataclass(frozen=True)
class NodeText:
    """What a node reports of itself for people (`status.job_status`), as it was read.

    version: another number means that the node has reported again; the same number, that it has not.
    """

    text: str
    version: int


@dataclass(frozen=True)
class JobStatus:
    """The state at one moment."""

    run_id: str
    header: Header
    # nodes, assignments: records and assignments, by node id.
    nodes: dict[str, Node]
    assignments: dict[str, Assignment]
    ledger: Ledger
    refused: dict[str, str]  # the reason, by host
    faults: tuple[str, ...] = ()  # one line for each unreadable record
    reports: dict[str, NodeText] = field(default_factory=dict)  # what each node reports of itself, by node id
    goodput: dict[str, str] = field(default_factory=dict)  # the records of `base.goodput`, as they were read, by host
    unknown: dict[str, str] = field(default_factory=dict)  # why, by what this rendezvous cannot know

    @classmethod
    def nothing(cls, run_id: str, why: str) -> JobStatus:
        """Return the state of a job of which nothing is known yet."""
        return cls(run_id, Header(), {}, {}, Ledger(), {}, unknown={"other nodes": why})


def lines(job: JobStatus) -> Iterator[str]:
    """Return lines that are safe on a terminal: a writer to etcd must not be able to do more there than to be read."""
    return map(printable.shown, _lines(job))


def _lines(job: JobStatus) -> Iterator[str]:
    header = job.header
    round_, state = header.round or job.ledger.done, header.state
    if not header.round and not job.nodes and job.ledger.ended:  # the header has expired
        state = State.DONE if job.ledger.done else State.CLOSED
    yield f"job {job.run_id}: {state.value}" + (f", round {round_}" if round_ else "")
    if header.reason:
        yield f"  because: {header.reason}"
    if header.state is State.RUNNING:
        yield f"  {printable.counted(header.nodes, 'node')}, {printable.counted(header.world, 'worker')}"
    for id_, node in sorted(job.nodes.items(), key=lambda item: (_rank(job, item[0]), item[0])):
        assignment = job.assignments.get(id_)
        runs = header.state is State.RUNNING and assignment is not None and assignment.of(header) and node.after < header.round
        place = (
            f"node rank {assignment.rank}, worker ranks from {assignment.base_rank}"
            if runs and assignment is not None
            else "waits"
        )
        yield f"  {id_}: {printable.counted(node.workers, 'worker')} at {node.address}, {place}"
    for host, why in sorted(job.refused.items()):
        yield f"  {host} may not come back yet: {why}"
    if not job.ledger.verdicts:
        yield "no failures recorded"
    for verdict in job.ledger.verdicts:
        yield from _verdict_lines(verdict)


def _rank(job: JobStatus, id_: str) -> int:
    assignment = job.assignments.get(id_)
    return assignment.rank if assignment is not None and assignment.of(job.header) else len(job.assignments)


def _verdict_lines(verdict: JobVerdict) -> Iterator[str]:
    decision = verdict.decision
    ends = f", exit code {decision.exit_code}" if decision.action is Action.STOP else ""
    yield f"{verdict.at}{', ' if verdict.at else ''}round {verdict.round}: {decision.word}{ends}"
    yield f"  {f'rank {verdict.rank} on ' if verdict.rank >= 0 else ''}{verdict.host}: {decision.reason}"
    limit = "(no limit)" if verdict.limit == NO_LIMIT else f"of {verdict.limit}"
    yield f"  kind {decision.kind}, rule {decision.rule}; restarts charged: {verdict.restarts} {limit}"
    yield from (f"    {line}" for line in verdict.stacks.splitlines())
