"""What all agents of a job share about its failures: reports, the ledger, and one verdict for all. Pure, standard library only.

A failure flows one way: each node whose workers failed reports its own root cause; the leader of the rendezvous judges all
reports of a round together, over the ledger of the job, and publishes one verdict, which every agent carries out.

The ledger outlives agents, pods and a requeue under the same run id. Its times are for people only: clocks of two machines are
not compared, and what must end by itself has a lease.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from elastic_ext.base import kinds, records
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.records import Count, NameOrEmpty, Rank, RecordError, Within
from elastic_ext.failures import history, policy
from elastic_ext.failures.classify import Diagnosis, root_cause
from elastic_ext.failures.policy import Action

SCHEMA = 1
MOST_FAILURES = 64  # of the ledger: what decides is the last few; a record is some 200 bytes
MOST_VERDICTS = 64
MOST_TEXT = 2000  # characters of a message or reason in a record
MOST_STACKS = 1500  # of what a verdict keeps of them: a ledger holds 64 verdicts
MOST_CHARGED = 10**6  # restarts


@dataclass(frozen=True)
class Report:
    """What one node tells of its failed workers: its own root cause.

    Attributes:
        host: where it was.
        diagnosis: of the worker that explains the others of this node.
        resumed_at: step of the checkpoint that the round started from, 0 for the beginning; None: not known.
        stacks: where the workers were that did not end when they were told to.
        resumed_from: path or URL of it; "": none.
    """

    host: NameOrEmpty
    diagnosis: Diagnosis
    resumed_at: int | None = None
    stacks: str = ""
    resumed_from: str = ""

    @property
    def follows(self) -> bool:
        """The cause is elsewhere: root_cause() of one node makes a failure of the network of it, for want of another."""
        return self.diagnosis.decision is kinds.Response.FOLLOW

    @property
    def waits_for_others(self) -> bool:
        """No verdict on it before those nodes have told that have not: it follows from something else, or the job hung."""
        return self.follows or self.diagnosis.evidence.hang is True


@dataclass(frozen=True)
class JobVerdict:
    """What all agents do about the end of a round, and why.

    Attributes:
        decision: see `policy.Decision`; its exit code is that of every agent that leaves because of it.
        round: which round it is about.
        node: id of the node with the cause; it alone leaves if the verdict is replace_node.
        host, rank: of the cause.
        restarts: charged to the budget of the job so far, this one included.
        limit: the budget; policy.NO_LIMIT for none.
        at: the wall clock of who judged, for people; nothing is decided by it.
        stacks: of the reports, for people, too.
    """

    decision: policy.Decision
    round: Count
    node: NameOrEmpty = ""
    host: NameOrEmpty = ""
    rank: Rank = -1
    restarts: Count = 0
    limit: Annotated[int, Within(policy.NO_LIMIT, 2**63 - 1)] = policy.NO_LIMIT
    at: str = ""
    stacks: str = ""

    def for_node(self, node: str) -> policy.Decision:
        """What the agent of this node does: a node that is to be replaced leaves, the others go on without it."""
        if self.decision.verdict is kinds.Response.REPLACE_NODE and node != self.node:
            return replace(self.decision, action=Action.RESTART, exit_code=None)
        return self.decision

    @property
    def ends_job(self) -> bool:
        return self.decision.action is Action.STOP and self.decision.verdict is not kinds.Response.REPLACE_NODE

    @property
    def keeps_ledger(self) -> bool:
        """The job is to be started again under this run id by a scheduler, not by somebody who has changed something."""
        return not self.ends_job or self.decision.verdict is kinds.Response.REQUEUE


class JobStopped(ElasticExtError):
    """The job has ended for all nodes; `verdict` says why."""

    def __init__(self, verdict: JobVerdict) -> None:
        super().__init__(verdict.decision.reason)
        self.verdict = verdict


@dataclass(frozen=True)
class Ledger:
    """Of one run id. charged: restarts since the job last made progress that a checkpoint kept."""

    failures: tuple[history.PastFailure, ...] = ()
    charged: Annotated[int, Within(0, MOST_CHARGED)] = 0
    verdicts: tuple[JobVerdict, ...] = field(default=())


@dataclass(frozen=True)
class Rules:
    """What a judgement needs besides reports and ledger.

    Attributes:
        nodes: that are here now, those of the reports and spares included.
        lost: nodes of the round that are gone or were cut off: what else has failed in it then failed of that.
        charges: restarts charged within the budget's window; None: it has none, all count.
        at: see Verdict.
        kind_limits, backoff, jitter: see policy.decide.
    """

    max_restarts: int
    exit_codes: str = "design"
    nodes: int | None = None
    min_nodes: int | None = None
    lost: tuple[str, ...] = ()
    charges: int | None = None
    at: str = ""
    kind_limits: Mapping[str, int] = field(default_factory=dict)
    backoff: policy.Backoff = policy.NO_BACKOFF
    jitter: float = 0.0


def judge(reports: Mapping[str, Report], ledger: Ledger, rules: Rules, round_: int) -> tuple[Ledger, JobVerdict]:
    """Return the ledger after it, and what all agents do.

    Args:
        reports: by id of the node, at least one.
        ledger: before it.
        round_: that has ended.
    """
    cause = root_cause([report.diagnosis for report in reports.values()])
    node, report = next((node, report) for node, report in reports.items() if report.diagnosis.evidence is cause.evidence)
    if rules.lost and report.diagnosis.decision is kinds.Response.FOLLOW:
        reason = f"{report.diagnosis.reason}: node {rules.lost[0]} was lost or cut off"
        cause = replace(cause, decision=kinds.Response.RESTART_FREE, reason=reason)
    now = history.record(cause, report.resumed_at, report.resumed_from)
    saved = _saved_since(ledger.failures, now)
    charged = 0 if saved else ledger.charged if rules.charges is None else min(ledger.charged, rules.charges)
    # The last of them: those before were refunded, or their time is over.
    kinds_charged = Counter([failure.kind for failure in reversed(ledger.failures) if failure.charged][:charged])
    past = history.seen_from(now, ledger.failures)
    decision = policy.decide(
        cause,
        charged,
        rules.max_restarts,
        past,
        rules.nodes,
        rules.min_nodes,
        rules.exit_codes,
        kind_limits=rules.kind_limits,
        kinds_charged=kinds_charged,
        backoff=rules.backoff,
        jitter=rules.jitter,
    )
    charged += decision.charged
    now = replace(now, charged=decision.charged)
    stacks = "\n".join(f"on {each.host}: {each.stacks}" for each in reports.values() if each.stacks)[:MOST_STACKS]
    verdict = JobVerdict(decision, round_, node, report.host, cause.evidence.rank, charged, rules.max_restarts, rules.at, stacks)
    return (
        Ledger((*ledger.failures, now)[-MOST_FAILURES:], charged, (*ledger.verdicts, verdict)[-MOST_VERDICTS:]),
        verdict,
    )


def _saved_since(earlier: Sequence[history.PastFailure], now: history.PastFailure) -> bool:
    """Whether this round began at a later checkpoint than any before: what the earlier restarts were charged for has paid."""
    if now.resumed_at is None or not earlier:
        return False
    before = [failure.resumed_at for failure in earlier]
    return all(at is not None and at < now.resumed_at for at in before)


# As JSON.


def encode_report(report: Report) -> str:
    diagnosis = report.diagnosis
    evidence = replace(diagnosis.evidence, stderr_tail="", history=())
    if evidence.exception is not None:
        exception = evidence.exception
        evidence = replace(
            evidence, exception=replace(exception, message=exception.message[:MOST_TEXT], frames=exception.frames[-20:])
        )
    told = replace(diagnosis, evidence=evidence, reason=diagnosis.reason[:MOST_TEXT])
    record = {
        "schema": SCHEMA,
        "host": report.host,
        "resumed_at": report.resumed_at,
        "stacks": report.stacks[:MOST_STACKS],
        "resumed_from": report.resumed_from,
        "diagnosis": {**asdict(told), "decision": diagnosis.decision.value},
    }
    return json.dumps(record, separators=(",", ":"))


def decode_report(text: str | bytes, order: int = 0) -> Report:
    """order: when the job learnt of it, e.g. an etcd revision. Raises RecordError."""
    report = records.read(Report, text, "a node's report", SCHEMA)
    return replace(report, diagnosis=replace(report.diagnosis, order=order))


def encode_verdict(verdict: JobVerdict) -> str:
    return json.dumps({"schema": SCHEMA, **_plain(verdict)}, separators=(",", ":"))


def decode_verdict(text: str | bytes) -> JobVerdict:
    """Raises RecordError. Whatever it is, it never has an agent leave with 0."""
    return _sound(records.read(JobVerdict, text, "a verdict", SCHEMA))


def encode_ledger(ledger: Ledger) -> str:
    record = {
        "schema": SCHEMA,
        "charged": ledger.charged,
        "failures": [asdict(failure) for failure in ledger.failures],
        "verdicts": [_plain(verdict) for verdict in ledger.verdicts],
    }
    return json.dumps(record, separators=(",", ":"))


def decode_ledger(text: str | bytes) -> Ledger:
    """Raises RecordError."""
    ledger = records.read(Ledger, text, "the job's ledger", SCHEMA)
    verdicts = tuple(map(_sound, ledger.verdicts[-MOST_VERDICTS:]))
    return replace(ledger, failures=ledger.failures[-MOST_FAILURES:], verdicts=verdicts)


def _plain(verdict: JobVerdict) -> dict[str, Any]:
    decision = verdict.decision
    asked = decision.verdict.value if decision.verdict is not None else None
    told = {**asdict(decision), "action": decision.action.value, "verdict": asked, "reason": decision.reason[:MOST_TEXT]}
    return {**asdict(verdict), "decision": told}


def _sound(verdict: JobVerdict) -> JobVerdict:
    """The same, if an agent may carry it out. Raises RecordError."""
    decision = verdict.decision
    codes: frozenset[int | None] = policy.STOP_CODES if decision.action is Action.STOP else frozenset({None})
    if decision.exit_code not in codes:
        raise RecordError(f"a verdict to {decision.action.value} with exit code {decision.exit_code}: it is none of elastic_ext")
    if decision.verdict is not None and policy.ACTIONS.get(decision.verdict) is not decision.action:
        raise RecordError(f"a verdict to {decision.verdict.value} and {decision.action.value}: it is none of elastic_ext")
    return verdict
