"""The state of a whole job at one moment: read from its store, and shown as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import counted, shown
from elastic_ext.etcd import EtcdClient, EtcdError
from elastic_ext.failures.ledger import JobVerdict, Ledger
from elastic_ext.failures.policy import NO_LIMIT, Action
from elastic_ext.rendezvous import run_id as run_ids
from elastic_ext.rendezvous.job_records import nodes_in
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, RecordReader, State


class NoSuchJob(UsageError):
    """There are no records of such a job."""


@dataclass(frozen=True)
class NodeText:
    """What a node reports of itself for people (`status.status_records`), as it was read.

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


def read(client: EtcdClient, run_id: str) -> JobStatus:
    """Return the state of a job. Raises NoSuchJob; UsageError: etcd does not answer."""
    keys = JobKeys(run_ids.checked(run_id))
    try:
        kvs = client.get_prefix(keys.prefix).kvs
    except EtcdError as error:
        raise UsageError(f"the job {run_id}: {error}") from error
    if not kvs:
        raise NoSuchJob(f"no job with --rdzv-id={run_id} in this store: it never ran there, or it ended successfully")
    faults: list[str] = []
    reader = RecordReader(faults.append)
    by_key = {kv.key: kv for kv in kvs}
    found, judged = by_key.get(keys.header.encode()), by_key.get(keys.ledger.encode())
    header = (reader.header(found) if found is not None else None) or Header()
    ledger = (reader.ledger(judged) if judged is not None else None) or Ledger()
    assignments, nodes = reader.assignments(keys.assignments, kvs), nodes_in(kvs, keys, reader)
    refused = {host: kv.text for host, kv in reader.named(keys.refusals, kvs).items()}
    reports = {id_: NodeText(kv.text, kv.mod_revision) for id_, kv in reader.named(keys.reports, kvs).items()}
    spent = {host: kv.text for host, kv in reader.named(keys.goodput, kvs).items()}
    for drain in (each for each in header.drains if not each.released):  # the refusal stands for a released one, until --undo
        refused.setdefault(drain.host, f"to leave at the next checkpoint: {drain.reason}")
    return JobStatus(run_id, header, nodes, assignments, ledger, refused, tuple(faults), reports, spent)


def lines(job: JobStatus) -> Iterator[str]:
    """Return lines that are safe on a terminal: a writer to etcd must not be able to do more there than to be read."""
    return map(shown, _lines(job))


def _lines(job: JobStatus) -> Iterator[str]:
    header = job.header
    yield f"job {job.run_id}: {header.state.value}" + (f", round {header.round}" if header.round else "")
    if header.reason:
        yield f"  because: {header.reason}"
    if header.state is State.RUNNING:
        yield f"  {counted(header.nodes, 'node')}, {counted(header.world, 'worker')}"
    for id_, node in sorted(job.nodes.items(), key=lambda item: (_rank(job, item[0]), item[0])):
        assignment = job.assignments.get(id_)
        runs = header.state is State.RUNNING and assignment is not None and assignment.of(header) and node.after < header.round
        place = (
            f"node rank {assignment.rank}, worker ranks from {assignment.base_rank}"
            if runs and assignment is not None
            else "waits"
        )
        yield f"  {id_}: {counted(node.workers, 'worker')} at {node.address}, {place}"
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
