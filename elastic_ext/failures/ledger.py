"""The records that all agents of a job share about its failures, and their JSON. Pure functions, standard library only.

A failure flows one way: each node whose workers failed sends a Report of its own root cause; the leader of the rendezvous judges
all reports of a round together with the job's Ledger (`judgement`), and publishes one JobVerdict, which every agent carries out.

The ledger outlives agents, pods and a requeue under the same run id. Its times are for people only: the clocks of two machines
are never compared, and everything that must expire has a lease.

Wire format: one JSON object per record with `"schema": SCHEMA`; the other keys are the field names, except that
`Diagnosis.response` is `decision` and `Decision.response` is `verdict`. `verdict_file` also holds a JobVerdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.diagnosis import NUMERIC, Collective, Response
from elastic_ext.base.errors import EX_TRY_AGAIN, ElasticExtError
from elastic_ext.base.printable import cut
from elastic_ext.base.records import Count, NameOrEmpty, Rank, RecordError, Within
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import TRAITS, Precedent, Traits
from elastic_ext.failures.history import may_be_of_a_node, of_lost_node
from elastic_ext.failures.joint_evidence import NOTHING_KNOWN, Ended, Hashed, Reach
from elastic_ext.failures.policy import ACTIONS, NO_LIMIT, STOP_CODES, Action, Decision, exit_code_for


@dataclass(frozen=True)
class PastFailure(Traits):
    """The ledger's record of a failure."""

    fingerprint: str
    steps: int | None = None  # optimizer steps that the worker had done since it started; None if unknown
    resumed_at: int | None = None  # step of the checkpoint that the worker started from, 0 for the beginning; None if unknown
    first_step_done: bool | None = None
    node: str | None = None  # None if unknown, or if it was on several
    charged: bool = False  # whether the restart after it counted against the budget
    resumed_from: str = ""  # path or URL of that checkpoint; "" if there was none
    # step of the newest checkpoint, if that was tried next as only copies in memory were refused; else None
    gone_back_to: int | None = None
    saved_at: int | None = None  # step of the newest checkpoint then; None: unknown
    rank: Rank = -1  # of the worker; -1: unknown
    rule: str = ""  # of its diagnosis; "": unknown
    save_number: int | None = None  # see `Report`; 0: it started from nothing

    @property
    def step(self) -> int | None:
        """The step of the job; None if unknown."""
        return None if self.steps is None or self.resumed_at is None else self.steps + self.resumed_at


def past_failure(
    diagnosis: Diagnosis,
    resumed_at: int | None,
    resumed_from: str = "",
    saved_at: int | None = None,
    save_number: int | None = None,
) -> PastFailure:
    """Return the ledger's record of a root cause."""
    evidence, from_nothing = diagnosis.evidence, resumed_at == 0 and not resumed_from
    return PastFailure(
        diagnosis.fingerprint,
        evidence.step,
        resumed_at,
        evidence.first_step_done,
        evidence.node if not evidence.shared else None,
        kind=diagnosis.kind,
        resumed_from=resumed_from,
        saved_at=saved_at,
        warm=evidence.warm,
        cut=evidence.cut,
        of_node=may_be_of_a_node(diagnosis),
        lost_node=of_lost_node(diagnosis),
        rank=evidence.rank,
        rule=diagnosis.rule,
        save_number=0 if from_nothing else save_number,
    )


def precedents(
    now: PastFailure, earlier: Sequence[PastFailure], charged: int = 0, ranks: Sequence[int] = ()
) -> tuple[Precedent, ...]:
    """Compare the earlier failures, oldest first, with this one, for `policy.decide`.

    The same failure after copies in memory were refused is not yet a bug: the cause may be older than the checkpoint that was
    tried then. So progress is unknown, and the checkpoint before that one is tried, too. At the very same step again, more than
    SHOWN_WITHIN after that checkpoint, it is a bug.

    charged: restarts that still count against the budget. If any does, the last failure is no older than it: no clock is needed.
    ranks: those of the node of this failure; (): unknown.
    """
    return tuple(
        Precedent(
            past.fingerprint == now.fingerprint,
            _progress_since(past, earlier[number + 1 :], now),
            past.node,
            past.first_step_done,
            bool(now.resumed_from) and past.resumed_from == now.resumed_from,
            recent=charged > 0 and number == len(earlier) - 1,
            charged=past.charged,
            same_rank=past.rank == now.rank >= 0,
            rank_here=past.rank in ranks,
            same_step=None if None in (past.step, now.step) else past.step == now.step,
            no_further=_no_further(past, now),
            **{name: getattr(past, name) for name in TRAITS},
        )
        for number, past in enumerate(earlier)
    )


def _progress_since(past: PastFailure, between: Sequence[PastFailure], now: PastFailure) -> bool | None:
    values = {progress(past, each) for each in (*between, now)}
    exactly = past.step is not None and past.step == now.step and (now.steps or 0) > SHOWN_WITHIN
    unknown = None in values or (past.gone_back_to is not None and not exactly)
    return True if True in values else None if unknown else False


def progress(past: PastFailure, later: PastFailure) -> bool | None:
    """Return whether the later try got further than the past one; None if unknown.

    Users number checkpoints in steps or in epochs. So a lower step than at the past failure means "no progress" only if both
    tries began at the same checkpoint: a script may also choose a place to resume from, which is unknown.

    Some scripts do two optimizer steps in what their checkpoints call one. A try that has gone back to an earlier checkpoint
    after a NaN has more of them behind it at the same place, so that it got further shows by a later checkpoint only.
    """
    since = began_after(past, later)
    if later.first_step_done is False:
        # Steps of non-torch optimizers are not counted; then only checkpoints show progress.
        return past.first_step_done is False and (since or 0) > 0
    if past.steps is None or later.steps is None:
        return None
    in_steps = None not in (past.resumed_at, later.resumed_at)
    gained = later.steps - past.steps + (since or 0 if in_steps else 0)
    if gained > 0:
        saved = None not in (past.saved_at, later.saved_at) and (later.saved_at or 0) > (past.saved_at or 0)
        return True if saved or not _may_have_gone_back(past, later) else None
    if not in_steps and (since or 0) > 0:
        return True if gained == 0 else None
    return False if gained == 0 or since == 0 else None


def _no_further(past: PastFailure, later: PastFailure) -> bool:
    """Return whether the later try made no more steps, and no checkpoint or report says where the two began: see `progress`."""
    unknown = began_after(past, later) is None and past.resumed_from == later.resumed_from and past.gone_back_to is None
    return unknown and past.steps is not None and later.steps is not None and later.steps <= past.steps


def began_after(past: PastFailure, later: PastFailure) -> int | None:
    """Return how many steps later than the past try the later one began; None if unknown.

    Where checkpoints have no step, the record of saves shows which was saved later. Then only the sign of the result counts.
    """
    for then, now in ((past.resumed_at, later.resumed_at), (past.save_number, later.save_number)):
        if then is not None and now is not None:
            return now - then
    return None


def _may_have_gone_back(past: PastFailure, later: PastFailure) -> bool:
    if past.kind != NUMERIC:  # no other failure after a step takes a job back to an earlier checkpoint
        return False
    since = began_after(past, later)
    return since < 0 if since is not None else past.resumed_from != later.resumed_from


SCHEMA = 1
# Steps within which a script looks whether its loss is a number: 1, 10 or 100, mostly. A checkpoint with a NaN in it fails by
# then, and at the same step each time.
SHOWN_WITHIN = 100
MAX_FAILURES = 64  # in the ledger: only the last few matter; a record takes about 200 bytes
MAX_VERDICTS = 64
MAX_TEXT = 2000  # characters of a message or reason in a record
MAX_FRAMES = 20  # of an exception in a report, the innermost
MAX_STACKS = 1500  # characters of stacks in a verdict: a ledger holds 64 verdicts
MAX_CHARGED = 10**6  # restarts
_Gone = Annotated[str, lambda text: len(text) <= 60]  # what became of a node


@dataclass(frozen=True)
class Report:
    """A node's report of the root cause among its own failed workers."""

    host: NameOrEmpty  # the node's name
    diagnosis: Diagnosis  # the diagnosis of the worker that explains the others of this node
    resumed_at: int | None = None  # step of the checkpoint that the round started from, 0 for the beginning; None if unknown
    stacks: str = ""  # the stacks of workers that did not end when asked to
    resumed_from: str = ""  # path or URL of that checkpoint; "" if there was none
    reach: Reach = NOTHING_KNOWN  # the hosts that did not answer its workers when the job hung
    copied_at: int | None = None  # step of the newest copy in its memory; None: there is none
    saved_at: int | None = None  # step of the newest checkpoint that it knows of; 0: there is none, None: unknown
    ranks: tuple[Rank, ...] = ()  # of its workers
    collectives: tuple[Collective, ...] = ()  # those in which its workers waited when the job hung
    hashed: tuple[Hashed, ...] = ()  # the hashes of their replicas; see `joint_evidence`
    counts_from: int | None = None  # step of the job at which their workers have begun to count; None: unknown
    # Of the checkpoint that the round started from, in the record of the job's saves: the greater was saved later. None: it is
    # not recorded, or its round had made no step before.
    save_number: int | None = None
    ended: tuple[Ended, ...] = ()  # of its workers, those whose scripts had ended with 0

    @property
    def follows(self) -> bool:
        """Whether the cause is elsewhere; root_cause() for this node alone knows no cause and would assume the network."""
        return self.diagnosis.response is Response.FOLLOW

    @property
    def only_ended(self) -> bool:
        """Whether its worker's script had ended with 0, which explains no failure of others, even if its process then crashed."""
        return self.diagnosis.evidence.rank in {each.rank for each in self.ended}

    @property
    def links(self) -> tuple[str, ...]:
        """Those of this node that went down shortly before."""
        return self.diagnosis.evidence.links

    @property
    def waits_for_others(self) -> bool:
        """Whether a verdict must wait for the other nodes' reports: this one may not have the cause, or not say why."""
        return self.follows or self.diagnosis.evidence.hang is True or self.diagnosis.lacks_reason or self.only_ended


@dataclass(frozen=True)
class JobVerdict:
    """The job's verdict at the end of a round, which all agents carry out."""

    decision: Decision  # see `policy.Decision`; its exit code is that of every agent that leaves because of it
    round: Count  # the round that has ended
    node: NameOrEmpty = ""  # id of the node with the cause; it alone leaves if the response is replace_node
    # host, rank: host and rank of the cause; rank -1: it is no worker, but the node was lost, say
    host: NameOrEmpty = ""
    rank: Rank = -1
    restarts: Count = 0  # restarts charged to the job's budget so far, including this one
    limit: Annotated[int, Within(NO_LIMIT, 2**63 - 1)] = NO_LIMIT  # the budget; policy.NO_LIMIT for none
    at: str = ""  # wall clock of the agent that judged; for people only, no decision depends on it
    stacks: str = ""  # the stacks from the reports, also for people only
    cut: tuple[NameOrEmpty, ...] = ()  # the names of two hosts that cannot reach each other, if that is the cause
    refuse_copies: bool = False  # no round may resume from a copy in memory that exists now, on any node
    # id of the node that logs the failure in full: its report shows the cause, which may be another node's loss
    shown_by: NameOrEmpty = ""
    # no round may resume from a checkpoint or copy of a later step that exists now; None: all may be used
    refuse_newer: int | None = None
    refused_by: NameOrEmpty = ""  # id of the node that marks these checkpoints, or the one that is to blame; "": as `node`
    # ids of the nodes to replace where the job ends because it cannot run without them; (): as `decision` says, for all nodes
    bad: tuple[NameOrEmpty, ...] = ()
    # what became of the node with the cause, as in "was lost"; "": it is there, or an older version judged
    gone: _Gone = ""

    def for_node(self, node: str, preset: str) -> Decision:
        """Return the decision for this node's agent. preset: a key of policy.EXIT_CODES.

        A node to be replaced leaves, and the others continue without it; or, where they cannot, are to be started again: a
        scheduler that keeps bad nodes out must not keep out all of the job.
        """
        if self.decision.response is Response.REPLACE_NODE and node != self.node:
            return replace(self.decision, action=Action.RESTART, exit_code=None)
        if self.bad and node not in self.bad:
            return replace(self.decision, exit_code=exit_code_for(EX_TRY_AGAIN, preset))
        return self.decision

    def replaces(self, node: str) -> bool:
        """Return whether this node, if it leaves, is to be replaced, rather than started again."""
        return node in self.bad if self.decision.response is Response.STOP else node == self.node

    @property
    def ends_job(self) -> bool:
        """Whether all agents leave."""
        return self.decision.action is Action.STOP and self.decision.response is not Response.REPLACE_NODE

    @property
    def keeps_ledger(self) -> bool:
        """Whether the job continues, or a scheduler starts it again under this run id without any change by the user."""
        return not self.ends_job or self.decision.response is Response.REQUEUE or bool(self.bad)


class JobStopped(ElasticExtError):
    """The job has ended on all nodes; `verdict` says why."""

    def __init__(self, verdict: JobVerdict) -> None:
        super().__init__(verdict.decision.reason)
        self.verdict = verdict


@dataclass(frozen=True)
class Ledger:
    """The history of one run id. charged: restarts since the last progress that a checkpoint saved."""

    failures: tuple[PastFailure, ...] = ()
    charged: Annotated[int, Within(0, MAX_CHARGED)] = 0
    verdicts: tuple[JobVerdict, ...] = ()
    done: Count = 0  # the last round, in which all workers have finished; 0 while the job has not

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good: what follows under its run id is another job, with a budget of its own."""
        return bool(self.done or (self.verdicts and not self.verdicts[-1].keeps_ledger))


def given_back(ledger: Ledger, node: str) -> Ledger:
    """Return the ledger after this node was repaired and given back: the rule `bad-node` counts its failures from now on."""
    own = [past.of_node and node in (past.node, *past.cut) for past in ledger.failures]
    failures = (replace(past, before_repair=past.before_repair or here) for past, here in zip(ledger.failures, own, strict=True))
    return replace(ledger, failures=tuple(failures))


# The JSON format.


def encode_report(report: Report) -> str:
    """Return a report as JSON, within the bounds above."""
    diagnosis = report.diagnosis
    evidence = replace(diagnosis.evidence, stderr_tail="", history=())
    if (exception := evidence.exception) is not None:
        message, frames = exception.message[:MAX_TEXT], exception.frames[-MAX_FRAMES:]
        exception = replace(exception, message=message, frames=frames, causes=(), wrapped=())
        evidence = replace(evidence, exception=exception)
    diagnosis = replace(diagnosis, evidence=evidence, reason=cut(diagnosis.reason, MAX_TEXT))
    return records.encode(replace(report, diagnosis=diagnosis, stacks=report.stacks[:MAX_STACKS]), SCHEMA)


def decode_report(text: str | bytes, order: int = 0) -> Report:
    """Read a report. order: when the job learned of it, e.g. an etcd revision. Raises RecordError."""
    report = records.read(Report, text, "a node's report", SCHEMA)
    return replace(report, diagnosis=replace(report.diagnosis, order=order))


def encode_verdict(verdict: JobVerdict) -> str:
    """Return a verdict as JSON, its reason cut to MAX_TEXT."""
    return records.encode(_truncated(verdict), SCHEMA)


def decode_verdict(text: str | bytes) -> JobVerdict:
    """Read a verdict. None makes an agent leave with 0. Raises RecordError."""
    return _validated(records.read(JobVerdict, text, "a verdict", SCHEMA))


def encode_ledger(ledger: Ledger) -> str:
    """Return a ledger as JSON."""
    return records.encode(replace(ledger, verdicts=tuple(map(_truncated, ledger.verdicts))), SCHEMA)


def decode_ledger(text: str | bytes) -> Ledger:
    """Read a ledger; if it is too long, keep only the newest entries. Raises RecordError."""
    ledger = records.read(Ledger, text, "the job's ledger", SCHEMA)
    verdicts = tuple(map(_validated, ledger.verdicts[-MAX_VERDICTS:]))
    return replace(ledger, failures=ledger.failures[-MAX_FAILURES:], verdicts=verdicts)


def _truncated(verdict: JobVerdict) -> JobVerdict:
    decision = verdict.decision
    return replace(verdict, decision=replace(decision, reason=cut(decision.reason, MAX_TEXT)))


def _validated(verdict: JobVerdict) -> JobVerdict:
    """Return the verdict if an agent may carry it out. Raises RecordError."""
    decision = verdict.decision
    codes: frozenset[int | None] = STOP_CODES if decision.action is Action.STOP else frozenset({None})
    if decision.exit_code not in codes:
        raise RecordError(
            f"a verdict to {decision.action.value} with exit code {decision.exit_code}, which elastic_ext never writes"
        )
    if decision.response is not None and ACTIONS.get(decision.response) is not decision.action:
        raise RecordError(
            f"a verdict to {decision.response.value} with action {decision.action.value}, which elastic_ext never writes"
        )
    return verdict
