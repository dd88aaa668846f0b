"""The status of a whole job as one document: what the page shows and `elastic-ext status` prints. `build` makes it from the
records of a rendezvous and the reports of its nodes. Pure.

Every time in it is an age in seconds by one clock: that of the reader. Reports carry ages too, so no two machines' clocks are
ever compared; a report's ages grow by as long as the reader has seen it unchanged.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from elastic_ext.base import goodput, records
from elastic_ext.base.printable import counted, cut, shown
from elastic_ext.base.records import Count, NameOrEmpty, Rank, Ratio, RecordError, Seconds, Within
from elastic_ext.failures.ledger import JobVerdict, Ledger
from elastic_ext.failures.policy import NO_LIMIT, Action
from elastic_ext.rendezvous.job_status import JobStatus
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.status import headline
from elastic_ext.telemetry import families

REPORT_SCHEMA = 1
MAX_ROUNDS = 50  # the newest are reported
MAX_WHY = 300  # characters
MAX_GAUGES = 32  # of the script of rank 0
MAX_GAUGE = 64  # characters of its name; Kubeflow Trainer takes as many

Step = Annotated[int, Within(0, 2**63 - 1)]


@dataclass(frozen=True)
class RoundSpan:
    """A round as one agent saw it. began_s, ended_s: ages; ended_s is None while it runs. why: it ended."""

    round: Count
    began_s: Seconds
    ended_s: Seconds | None = None
    why: str = ""


@dataclass(frozen=True)
class ScriptGauge:
    """What the script of rank 0 shows of itself, such as its loss. value: as text, because JSON has no nan."""

    name: NameOrEmpty
    value: str


def gauges_of(values: Mapping[str, float]) -> tuple[ScriptGauge, ...]:
    """Return the first MAX_GAUGES of these values by name."""
    fitting = [ScriptGauge(name, f"{value:.6g}") for name, value in values.items() if len(name) <= MAX_GAUGE]
    return tuple(fitting[:MAX_GAUGES])


@dataclass(frozen=True)
class Straggler:
    """A rank, or a host (rank -1), that is late: it issues the collectives of a step later than the others."""

    node: NameOrEmpty
    rank: Rank
    # late_s, p90_s: per step, median and 90th percentile
    late_s: Seconds
    p90_s: Seconds
    step_s: Seconds
    share: Ratio  # part of a step that it is late by
    error_s: Seconds = 0.0  # by how much late_s may be wrong, because the clocks of hosts differ; 0 within a host

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}" if self.rank >= 0 else f"{self.node}, with all its ranks,"

    @property
    def text(self) -> str:
        clocks = f" (clocks aligned to {self.error_s * 1e3:.2g} ms)" if self.error_s else ""
        return f"{self.who} is late by {_ms(self.late_s)} of a step of {_ms(self.step_s)}: {self.share:.0%}{clocks}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


@dataclass(frozen=True)
class NodeReport:
    name: NameOrEmpty  # of its host
    state: str  # what its agent does, one of `families.STATES`
    state_s: Seconds = 0.0  # for how long
    # node_rank, base_rank: its rank, and that of its first worker; -1 before its first round
    node_rank: Rank = -1
    base_rank: Rank = -1
    workers: Count = 0  # number of its workers
    round: Count = 0
    # optimizer steps of its slowest worker, counted from what the script reports, or from the checkpoint that the round resumed
    # from; None if unknown
    step: Step | None = None
    steps_per_s: Ratio | None = None  # mean since the first step of the round; None before the second
    last_step_s: Seconds | None = None  # age of the last step of the worker whose last step is oldest; None before the first
    # saved_step, saved_s: step and age of the last checkpoint that it saw committed in this round; None before the first
    saved_step: Step | None = None
    saved_s: Seconds | None = None
    standbys: Count = 0  # warm standbys that are ready
    stragglers: tuple[Straggler, ...] = ()  # of the whole job; only the node of rank 0 reports them
    uncompared: str = ""  # why no replicas of one of its workers are compared, though `integrity_every` is set; ""
    at: str = ""  # wall clock of the node at this moment, as text, for people only
    # those that this agent saw, oldest first. Only the node of rank 0 reports them, and its script's gauges
    rounds: tuple[RoundSpan, ...] = ()
    gauges: tuple[ScriptGauge, ...] = ()
    total_steps: Step | None = None  # of the whole job, as its script reported them


def encode_report(report: NodeReport) -> str:
    """Return a report as JSON, without the fields that say nothing."""
    known = {name: value for name, value in records.plain(report).items() if value not in (None, [])}
    return json.dumps({"schema": REPORT_SCHEMA, **known}, separators=(",", ":"))


def decode_report(text: str, what: str) -> NodeReport:
    """Read a report. what: its key, for the message. Raises RecordError."""
    return records.read(NodeReport, text, what, REPORT_SCHEMA)


class RoundHistory:
    """The last MAX_ROUNDS rounds."""

    def __init__(self) -> None:
        self._rounds: deque[RoundSpan] = deque(maxlen=MAX_ROUNDS)  # with monotonic times in place of ages

    def entered(self, state: str, round_: int, now: float) -> None:
        """Note what the agent does from `now` on. state: one of families.STATES."""
        last = self._rounds[-1] if self._rounds else None
        runs = last is not None and last.ended_s is None
        if last is not None and runs and (state != families.RUNNING or round_ != last.round):
            self._rounds[-1] = replace(last, ended_s=now)
            runs = False
        if state == families.RUNNING and not runs:
            self._rounds.append(RoundSpan(round_, now))

    def explain(self, round_: int, why: str) -> None:
        """Note why a round ended, unless that is known."""
        for number, each in enumerate(self._rounds):
            if each.round == round_ and each.ended_s is not None and not each.why:
                self._rounds[number] = replace(each, why=why[:MAX_WHY])

    def spans(self, now: float) -> tuple[RoundSpan, ...]:
        """Return the rounds, oldest first, with ages at `now`."""
        ended = [None if each.ended_s is None else age_s(now, each.ended_s) for each in self._rounds]
        ages = zip(self._rounds, ended, strict=True)
        return tuple(replace(each, began_s=age_s(now, each.began_s), ended_s=at) for each, at in ages)


def age_s(now: float, at: float) -> float:
    return round(max(0.0, now - at), 3)


SCHEMA = 1
SILENT, WAITS, GONE = "silent", "waits", "ended"  # states of a node without a report; others are families.STATES
ENDED_STATES = ("succeeded", "failed", "ended")  # of a job


@dataclass(frozen=True)
class Failure:
    """A verdict of the job. rank, host: of the cause. at: wall clock of the agent that judged, as text, for people only.

    headline: the cause and the decision, in one short sentence. reason: at length.
    """

    round: int
    decision: str
    kind: str
    reason: str
    rule: str
    host: str
    rank: int
    exit_code: int | None
    restarts: int
    limit: int | None
    at: str
    headline: str = ""


@dataclass(frozen=True)
class Job:
    """The job."""

    run_id: str
    backend: str
    state: str  # forming, starting, running, recovering, succeeded, failed, ended (how is unknown)
    reason: str  # what the headline leaves out and no failure says; ""
    round: int
    # nodes, world_size: of the current round, or the last one
    nodes: int
    world_size: int
    # restarts_charged, restarts_limit: of the budget, by the last verdict; the limit is None without one, or if unknown
    restarts_charged: int
    restarts_limit: int | None
    last_verdict: Failure | None  # None before the first
    # step, steps_per_s: of the slowest node in the round; the step, of those that reported last
    step: int | None = None
    steps_per_s: float | None = None
    # saved_step, saved_s: of the newest checkpoint that a node saw committed
    saved_step: int | None = None
    saved_s: float | None = None
    total_steps: int | None = None  # as the script reported them
    headline: str = ""  # what it does now, and why, in one short sentence (`status.headline`); "": an older agent shows it


@dataclass(frozen=True)
class NodeStatus:
    """A node. Ages in seconds; None where unknown."""

    # Where nothing is said here, see NodeReport.
    id: str  # unique within the job
    name: str  # of its host
    state: str  # of its agent (`families.STATES`); "waits" for a round; "silent": in the round, but without a report
    node_rank: int = -1  # -1 outside the round; so is first_rank
    first_rank: int = -1
    workers: int = 0
    state_s: float | None = None
    step: int | None = None
    steps_per_s: float | None = None
    last_step_s: float | None = None
    saved_step: int | None = None
    saved_s: float | None = None
    standbys: int = 0
    # age of its report, as far as the reader can know; 0 for the node that shows this; None: read only once. Then its ages are as
    # of reported_at, or as of that of the newest report if both run in the same round
    seen_s: float | None = None
    reported_at: str = ""  # wall clock of the node at its report, as text, for people only
    total_steps: int | None = None


@dataclass(frozen=True)
class Refusal:
    """A host that may not come back yet."""

    host: str
    why: str


@dataclass(frozen=True)
class Unknown:
    """What this document cannot show, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class GoodputPoint:
    """The goodput of the job at an earlier moment, as far as the node that shows this knew it. age_s: of the moment."""

    age_s: float
    goodput: tuple[goodput.StateSeconds, ...]


@dataclass(frozen=True)
class Document:
    job: Job
    nodes: tuple[NodeStatus, ...] = ()
    rounds: tuple[RoundSpan, ...] = ()
    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    gauges: tuple[ScriptGauge, ...] = ()  # of the script of rank 0, in this round
    refused: tuple[Refusal, ...] = ()
    goodput: tuple[goodput.StateSeconds, ...] = ()  # of all hosts together, over all rounds and agents of the job
    goodput_points: tuple[GoodputPoint, ...] = ()  # earlier values of it, since the agent that shows this started
    unknown: tuple[Unknown, ...] = ()
    shown_by: str = ""  # id of that agent's node; "" for a command
    rounds_by: str = ""  # name of the node that saw the rounds; "" if none did
    read_s: float | None = 0.0  # age of what is shown of the other nodes; None: nothing was read yet
    fault: str = ""  # why nothing newer was read; ""
    schema: int = SCHEMA


def encode(document: Document) -> str:
    return json.dumps(records.plain(document), separators=(",", ":"))


# The document from its sources.

FRESH_S = 1.0  # that the workers of one node may start after those of another
MAX_TEXT = 600  # characters of a reason
MAX_AT = 40  # of a time
MOST_REASONS = 4  # why replicas are not compared


@dataclass(frozen=True)
class Own:
    """What the node that shows the document knows now, of itself and the job. nodes, world: of its round; 0 before the first."""

    id: str
    report: NodeReport
    spent: goodput.Shared
    points: tuple[GoodputPoint, ...] = ()
    nodes: int = 0
    world: int = 0


@dataclass(frozen=True)
class Sources:
    status: JobStatus
    backend: str
    own: Own | None = None  # None for a reader that is not a node of the job
    # returns for how long the reader has known a node's report as it is now; None if it reads only once
    seen_s: Callable[[str], float | None] = lambda id_: None
    read_s: float | None = 0.0  # age of `status`; None: nothing was read yet
    fault: str = ""  # why nothing newer was read; ""


def build(sources: Sources) -> Document:
    status, own = sources.status, sources.own
    faults = [Unknown("records", shown(each)) for each in status.faults]
    reports: dict[str, tuple[NodeReport, float | None]] = {}
    for id_, stored in status.reports.items():
        try:
            reports[id_] = decode_report(stored.text, f"reports/{id_}"), sources.seen_s(id_)
        except RecordError as error:
            faults.append(Unknown(f"node {shown(id_)}", shown(str(error))))
    if own is not None:
        reports[own.id] = own.report, 0.0
    behind = _behind(reports, own.id if own is not None else "")
    found = (_node(status, id_, reports.get(id_), behind.get(id_, 0.0)) for id_ in {*status.nodes, *reports})
    nodes = sorted(found, key=lambda node: (node.node_rank < 0, node.node_rank, node.id))
    rounds, by = _rounds(reports, own)
    failures = tuple(_failure(each) for each in status.ledger.verdicts)
    said = {each.round: each.headline for each in failures}
    spent = own.spent.spent.seconds if own is not None else _spent(status, faults)
    return Document(
        job=_job(sources, failures, nodes, {each.id for each in nodes if behind.get(each.id, 0.0) <= FRESH_S}),
        nodes=tuple(nodes),
        rounds=tuple(replace(each, why=cut(shown(said.get(each.round, each.why)), MAX_TEXT)) for each in rounds),
        failures=failures,
        stragglers=_stragglers(reports),
        gauges=_gauges(reports),
        refused=tuple(Refusal(shown(host), cut(shown(why), MAX_TEXT)) for host, why in sorted(status.refused.items())),
        goodput=tuple(goodput.StateSeconds(each.state, round(each.seconds, 3)) for each in spent),
        goodput_points=own.points if own is not None else (),
        unknown=(
            *(Unknown(what, why) for what, why in status.unknown.items()),
            *_gaps(nodes, rounds, spent),
            *_uncompared([report for report, _ in reports.values()]),
            *faults,
        ),
        shown_by=own.id if own is not None else "",
        rounds_by=shown(by),
        read_s=sources.read_s,
        fault=cut(shown(sources.fault), MAX_TEXT),
    )


def _behind(reports: Mapping[str, tuple[NodeReport, float | None]], own: str) -> dict[str, float]:
    """Return by how many seconds a node's report is older than that of `own`, or else the newest one, by node id.

    For the nodes that run in the last round: its workers started at about the same moment on all of them, so a node that says
    that they have run for less time has said so earlier.
    """
    last = max((report.round for report, _ in reports.values()), default=0)
    runs = {id_: each for id_, each in reports.items() if (each[0].round, each[0].state) == (last, families.RUNNING)}
    ran_s = {id_: report.state_s + (seen_s or 0.0) for id_, (report, seen_s) in runs.items()}
    newest = ran_s.get(own, max(ran_s.values(), default=0.0))
    return {id_: max(0.0, newest - seconds) for id_, seconds in ran_s.items()}


def _job(sources: Sources, failures: tuple[Failure, ...], nodes: list[NodeStatus], fresh: Collection[str]) -> Job:
    """Return the job. fresh: ids of nodes whose accounts are as new as the newest; those of others say an earlier step."""
    status, own = sources.status, sources.own
    header, last = status.header, failures[-1] if failures else None
    left = not header.round and not status.nodes and all(each.state == GONE for each in nodes)
    final = last if last is not None and (left or last.round == header.round) else None
    state, of_round = _state(status, final, nodes, left), [each for each in nodes if each.node_rank >= 0]
    saves = [each for each in nodes if each.saved_step is not None]
    saved = max(saves, key=lambda each: (each.saved_step or 0, -(each.saved_s or 0.0)), default=None)
    return Job(
        run_id=shown(status.run_id),
        backend=sources.backend,
        state=state,
        headline=headline.of_job(_situation(status, state, nodes, saved, final is not None)),
        reason="" if final is not None or _says_it(header) else cut(shown(header.differs or header.reason), MAX_TEXT),
        round=header.round or (own.report.round if own is not None else _last_round(status.ledger)),
        nodes=header.nodes or (own.nodes if own is not None else 0) or len(of_round),
        world_size=header.world or (own.world if own is not None else 0) or sum(each.workers for each in of_round),
        restarts_charged=last.restarts if last is not None else 0,
        restarts_limit=last.limit if last is not None else None,
        last_verdict=last,
        step=min((each.step for each in of_round if each.step is not None and each.id in fresh), default=None),
        total_steps=max((each.total_steps for each in of_round if each.total_steps is not None), default=None),
        steps_per_s=min((each.steps_per_s for each in of_round if each.steps_per_s is not None), default=None),
        saved_step=saved.saved_step if saved is not None else None,
        saved_s=saved.saved_s if saved is not None else None,
    )


def _says_it(header: Header) -> bool:
    """Return whether the headline says what the header's reason does."""
    return bool(header.lost) or header.state in (State.RUNNING, State.DONE)


def _situation(
    status: JobStatus, state: str, nodes: Sequence[NodeStatus], saved: NodeStatus | None, judged: bool
) -> headline.JobNow:
    """Return what the headline depends on. judged: the last verdict is on the round of the header."""
    lost = {shown(id_) for id_ in status.reports} - {shown(id_) for id_ in status.nodes} if status.nodes else set()
    there = [each for each in nodes if each.state != GONE and each.id not in lost]  # a report may outlive its node
    states = [each.state for each in there if each.node_rank >= 0]
    return headline.JobNow(
        state,
        status.header,
        status.ledger.verdicts[-1] if judged else None,
        here=tuple(each.name or each.id for each in there),
        members=len(states),
        training=states.count(families.RUNNING),
        silent=states.count(SILENT),
        saved_step=saved.saved_step if saved is not None else None,
    )


def _last_round(ledger: Ledger) -> int:
    """Return the last round of a job whose header has expired: one has followed each verdict that let the job go on."""
    return ledger.done or max((each.round + (not each.ends_job) for each in ledger.verdicts), default=0)


def _state(status: JobStatus, final: Failure | None, nodes: list[NodeStatus], left: bool) -> str:
    """Return the state of the job.

    final: the verdict on the round of the header or, without a header, the last one, if any. left: header and nodes are gone.
    """
    state = status.header.state
    if state is State.DONE:
        return "succeeded"
    stops = final is not None and final.exit_code is not None and final.decision != "replace_node"
    if state is State.CLOSED or stops:
        return "failed"
    if left:
        return "succeeded" if status.ledger.done else "ended"
    if state is State.BROKEN and all(each.state == GONE for each in nodes):
        return "ended"
    if state is State.BROKEN or (state is State.RUNNING and not nodes):
        return "recovering"
    busy = {each.state for each in nodes if each.node_rank >= 0} - {SILENT}
    if state is State.RUNNING and busy and families.RUNNING not in busy:
        if busy == {families.ENDED}:
            return "ended"
        return "recovering" if status.header.round > 1 else "starting"
    return str(state.value)


def _node(status: JobStatus, id_: str, known: tuple[NodeReport, float | None] | None, behind_s: float) -> NodeStatus:
    """Return a node by its record, its assignment and its report, as far as they are there. behind_s: see `_behind`."""
    node, assignment = status.nodes.get(id_), status.assignments.get(id_)
    in_round = node is not None and assignment is not None and assignment.of(status.header) and node.after < status.header.round
    if known is None:
        rank, first = (assignment.rank, assignment.base_rank) if in_round and assignment is not None else (-1, -1)
        name, workers = (node.address, node.workers) if node is not None else ("", 0)
        state = SILENT if in_round else WAITS
        return NodeStatus(shown(id_), shown(name), state, rank, first, workers)
    report, seen_s = known
    later = (seen_s or 0.0) + behind_s
    if node is not None and not in_round and report.round < status.header.round:  # it was in a round, and now waits for another
        report = replace(report, node_rank=-1, base_rank=-1)
    return NodeStatus(
        id=shown(id_),
        name=shown(report.name),
        state=report.state if report.state in families.STATES else shown(report.state)[:40],
        node_rank=report.node_rank,
        first_rank=report.base_rank,
        workers=report.workers,
        state_s=_older(report.state_s, later),
        step=report.step,
        total_steps=report.total_steps,
        steps_per_s=report.steps_per_s,
        last_step_s=_older(report.last_step_s, later),
        saved_step=report.saved_step,
        saved_s=_older(report.saved_s, later),
        standbys=report.standbys,
        seen_s=round(later, 3) if seen_s is not None else None,
        reported_at=shown(report.at)[:MAX_AT],
    )


def _older(age_s: float | None, by_s: float) -> float | None:
    return None if age_s is None else round(age_s + by_s, 3)


def _rounds(reports: Mapping[str, tuple[NodeReport, float | None]], own: Own | None) -> tuple[tuple[RoundSpan, ...], str]:
    """Return the longest account of the rounds, by one clock, and the name of its node: an agent that came later saw fewer."""
    best: tuple[RoundSpan, ...] = own.report.rounds if own is not None else ()
    by = own.report.name if own is not None else ""
    for report, seen_s in reports.values():
        if report.rounds and (not best or report.rounds[0].round < best[0].round):
            later = seen_s or 0.0
            aged = ((each, _older(each.began_s, later) or 0.0, _older(each.ended_s, later)) for each in report.rounds)
            best, by = tuple(replace(each, began_s=began_s, ended_s=ended_s) for each, began_s, ended_s in aged), report.name
    return best, by


def _failure(verdict: JobVerdict) -> Failure:
    decision = verdict.decision
    return Failure(
        round=verdict.round,
        decision=decision.word,
        kind=shown(decision.kind),
        headline=headline.of_failure(verdict),
        reason=cut(shown(decision.reason), MAX_TEXT),
        rule=shown(decision.rule),
        host=shown(verdict.host),
        rank=verdict.rank,
        exit_code=decision.exit_code if decision.action is Action.STOP else None,
        restarts=verdict.restarts,
        limit=None if verdict.limit == NO_LIMIT else verdict.limit,
        at=shown(verdict.at),
    )


def _stragglers(reports: Mapping[str, tuple[NodeReport, float | None]]) -> tuple[Straggler, ...]:
    """Return those that the node of rank 0 has found. Another node may have had that rank before."""
    found = [report for report, _ in reports.values() if report.node_rank == 0 and report.state == families.RUNNING]
    newest = max(found, key=lambda report: report.round, default=None)
    return tuple(replace(each, node=shown(each.node)) for each in newest.stragglers) if newest is not None else ()


def _gauges(reports: Mapping[str, tuple[NodeReport, float | None]]) -> tuple[ScriptGauge, ...]:
    """Return those of the newest round. Another node may have had rank 0 before."""
    newest = max((report for report, _ in reports.values() if report.gauges), key=lambda report: report.round, default=None)
    found = newest.gauges[:MAX_GAUGES] if newest is not None else ()
    return tuple(ScriptGauge(cut(shown(each.name), MAX_GAUGE), cut(shown(each.value), MAX_GAUGE)) for each in found)


def _uncompared(reports: Sequence[NodeReport]) -> list[Unknown]:
    """Return why replicas are not compared, each reason with the nodes that have it."""
    names: dict[str, list[str]] = {}
    for each in sorted(reports, key=lambda report: report.node_rank):
        if each.uncompared and each.state == families.RUNNING:
            names.setdefault(shown(each.uncompared), []).append(shown(each.name))
    return [
        Unknown("replicas", f"not compared on {of[0]}{f' and {len(of) - 1} more' * (len(of) > 1)}: {why}")
        for why, of in list(names.items())[:MOST_REASONS]
    ]


def _spent(status: JobStatus, faults: list[Unknown]) -> tuple[goodput.StateSeconds, ...]:
    """Return the goodput of the job by its records; add to `faults` what cannot be read."""
    found = {}
    for host, text in status.goodput.items():
        try:
            found[host] = goodput.decode(text, f"goodput/{host}")
        except RecordError as error:
            faults.append(Unknown(f"goodput of {shown(host)}", shown(str(error))))
    return goodput.total(found).seconds


def _gaps(nodes: list[NodeStatus], rounds: tuple[RoundSpan, ...], spent: tuple[goodput.StateSeconds, ...]) -> list[Unknown]:
    """Return what is missing here although it is known in other cases."""
    silent = sum(each.state == SILENT for each in nodes)
    gaps = (
        (silent, "state", f"{counted(silent, 'node')} {'has' if silent == 1 else 'have'} reported nothing yet"),
        (not nodes, "nodes", "no agent is left in the job, and the last reports have expired"),
        (not rounds and not nodes, "rounds", "only agents know when a round began"),
        (not spent, "goodput", "no agent has reported where its time went"),
    )
    return [Unknown(what, why) for is_so, what, why in gaps if is_so]


class ReportAges:
    """For how long this reader has known the report of each node as it is now, by its own clock: no two clocks are compared."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float]] = {}

    def read(self, status: JobStatus, now: float) -> None:
        """Take in the reports that were read at `now`."""
        before = self._first
        self._first = {
            id_: before[id_] if id_ in before and before[id_][0] == report.version else (report.version, now)
            for id_, report in status.reports.items()
        }

    def age_s(self, id_: str, now: float) -> float | None:
        seen = self._first.get(id_)  # at once: another thread may read a newer status
        return round(now - seen[1], 3) if seen is not None else None
