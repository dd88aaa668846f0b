"""The verdict for the whole job, from its nodes' reports and its ledger. Pure functions, standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.kinds import Response
from elastic_ext.failures import cuts, history, policy
from elastic_ext.failures.classify import Diagnosis, classify, root_cause
from elastic_ext.failures.cuts import NOTHING_KNOWN, Cut, Reach
from elastic_ext.failures.evidence import CERTAIN
from elastic_ext.failures.history import PastFailure
from elastic_ext.failures.ledger import MAX_FAILURES, MAX_STACKS, MAX_VERDICTS, JobVerdict, Ledger, Report
from elastic_ext.failures.rules import HANG_RULE


@dataclass(frozen=True)
class Circumstances:
    """The input of a judgement besides the reports and the ledger.

    Attributes:
        nodes: number of nodes present now, including those with a report and spares.
        min_nodes: minimum number of nodes of the job.
        lost: ids of the round's nodes that are gone, were cut off or were told to leave; they explain any cascade.
        charges: restarts charged within the budget's window; None without a window, when all count.
        reaches: what nodes told of their connections while the job hung, by id, besides what the reports say: connections may be
            gone by the time of a report.
        at: see JobVerdict.
        exit_codes, backoff, jitter: see policy.decide.
        kind_limits: see policy.Budget.
    """

    max_restarts: int
    exit_codes: str = "design"
    nodes: int | None = None
    min_nodes: int | None = None
    lost: tuple[str, ...] = ()
    charges: int | None = None
    reaches: Mapping[str, Reach] = field(default_factory=dict)
    at: str = ""
    kind_limits: Mapping[str, int] = field(default_factory=dict)
    backoff: policy.Backoff = policy.NO_BACKOFF
    jitter: float = 0.0


def judge(reports: Mapping[str, Report], ledger: Ledger, circumstances: Circumstances, round_: int) -> tuple[Ledger, JobVerdict]:
    """Return the ledger after this round, and the verdict that all agents carry out.

    Args:
        reports: the reports by node id, at least one.
        ledger: the job's history before this round.
        round_: the round that has ended.
    """
    node, cause = _cause(reports, ledger, circumstances)
    report = reports[node]
    now = history.record(cause, report.resumed_at, report.resumed_from)
    budget = _budget(ledger, now, circumstances)
    decision = policy.decide(
        cause,
        budget,
        history.precedents(now, ledger.failures, budget.charged),
        policy.Nodes(circumstances.nodes, circumstances.min_nodes),
        circumstances.exit_codes,
        circumstances.backoff,
        circumstances.jitter,
    )
    charged = budget.charged + decision.charged
    now = replace(now, charged=decision.charged)
    stacks = "\n".join(f"on {each.host}: {each.stacks}" for each in reports.values() if each.stacks)[:MAX_STACKS]
    verdict = JobVerdict(
        decision,
        round_,
        node,
        report.host,
        cause.evidence.rank,
        charged,
        circumstances.max_restarts,
        circumstances.at,
        stacks,
        cause.evidence.cut,
    )
    return (
        Ledger((*ledger.failures, now)[-MAX_FAILURES:], charged, (*ledger.verdicts, verdict)[-MAX_VERDICTS:]),
        verdict,
    )


def _cause(reports: Mapping[str, Report], ledger: Ledger, circumstances: Circumstances) -> tuple[str, Diagnosis]:
    """Return the id of the node with the root cause, and its diagnosis."""
    cause = root_cause([report.diagnosis for report in reports.values()])
    node, report = next((node, report) for node, report in reports.items() if report.diagnosis.evidence is cause.evidence)
    certain = cause.evidence.hang_blame[:1] == (CERTAIN,)  # a stopped worker, say: all wait for it, whoever cannot reach whom
    if cause.rule == HANG_RULE and not certain and (found := _cuts(reports, circumstances)):
        now = history.record(cause, report.resumed_at, report.resumed_from)
        past = history.precedents(now, ledger.failures, _budget(ledger, now, circumstances).charged)
        return _cut_off(reports, found, [each.lasting_cut for each in past])
    if circumstances.lost and report.follows:
        reason = f"{report.diagnosis.reason}: node {circumstances.lost[0]} was lost, cut off or told to leave"
        cause = replace(cause, response=Response.RESTART_FREE, reason=reason)
    return node, cause


def _cuts(reports: Mapping[str, Report], circumstances: Circumstances) -> list[Cut]:
    told = circumstances.reaches
    return cuts.cuts({id_: cuts.union(report.reach, told.get(id_, NOTHING_KNOWN)) for id_, report in reports.items()})


def _cut_off(reports: Mapping[str, Report], found: Sequence[Cut], earlier: Sequence[tuple[str, ...]]) -> tuple[str, Diagnosis]:
    """Return what `_cause` returns for a hang between hosts that cannot reach each other: the workers only wait.

    earlier: see `cuts.named`.
    """
    ranks = {id_: report.diagnosis.evidence.rank for id_, report in reports.items()}
    cut, node = cuts.named(found, ranks, {id_: report.host for id_, report in reports.items()}, earlier)
    here, there, silent = reports[cut.node].host, reports[cut.other].host, cut.silent
    who = f"rank {silent.rank} on {here}" if silent.rank != cuts.NO_RANK else here
    reason = f"{who} gets no answer from {there}, the host of rank {ranks[cut.other]} ({silent.address})"
    if silent.for_s:
        reason += f", for {silent.for_s:.3g} s"
    if len(found) > 1:
        reason += f" (and {len(found) - 1} more between hosts of the job)"
    evidence = reports[node].diagnosis.evidence
    apart = any(node not in each.pair for each in found)
    return node, classify(replace(evidence, hang=True, hang_reason=reason, cut=tuple(sorted((here, there))), cuts_apart=apart))


def _budget(ledger: Ledger, now: PastFailure, circumstances: Circumstances) -> policy.Budget:
    """Return the remaining budget: a checkpoint saved since then refunds earlier charges, and the window drops old ones."""
    if _saved_since(ledger.failures, now):
        charged = 0
    else:
        charged = ledger.charged if circumstances.charges is None else min(ledger.charged, circumstances.charges)
    # Only the newest charges count: earlier ones were refunded or have expired.
    kinds = [failure.kind for failure in reversed(ledger.failures) if failure.charged][:charged]
    return policy.Budget(circumstances.max_restarts, charged, circumstances.kind_limits, Counter(kinds))


def _saved_since(earlier: Sequence[PastFailure], now: PastFailure) -> bool:
    """Return whether this round began at a later checkpoint than every earlier round, so that the charged restarts paid off."""
    if now.resumed_at is None or not earlier:
        return False
    before = [failure.resumed_at for failure in earlier]
    return all(at is not None and at < now.resumed_at for at in before)
