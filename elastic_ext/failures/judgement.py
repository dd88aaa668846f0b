"""The verdict for the whole job, from its nodes' reports and its ledger. Pure functions, standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.diagnosis import CODE, NODE_LOST, NUMERIC, Response, Weight, compared
from elastic_ext.base.errors import EX_NODE, EX_TRY_AGAIN
from elastic_ext.base.printable import beginnings, ranks_in_words
from elastic_ext.base.printable import cut as shortened
from elastic_ext.failures import joint_evidence as joint
from elastic_ext.failures import ledger as records
from elastic_ext.failures import policy
from elastic_ext.failures.classify import Diagnosis, classify, describe, first_line, root_cause
from elastic_ext.failures.evidence import CERTAIN, WAITS, Evidence, Precedent
from elastic_ext.failures.fingerprints import of_exit
from elastic_ext.failures.history import Nodes
from elastic_ext.failures.ledger import JobVerdict, Ledger, PastFailure, Report, began_after, past_failure, precedents
from elastic_ext.failures.rules import (
    ENDED_EARLY,
    EXIT_STATUS,
    FILES,
    HANG_RULE,
    INTERFACE,
    NETWORK_RULE,
    PEERS,
    REPLAY,
    RERUN,
    RERUN_DIFFERS,
    STOPPED,
)

VICTIM = 120  # characters of a victim's message
_BUILT_AT = re.compile(r"\[/[^\s\]]{1,200}/([^\s/\]]{1,80}:\d{1,6})\]")  # a source file where torch was built
MAX_NAMED = 8  # lost nodes in a reason
TOO_FEW = "too-few-left"  # name of a rule
_RANK = re.compile(r"(?<!local )\brank (\d{1,9})\b", re.IGNORECASE)

LEAST_STACKS = 150  # characters of a node: a sentence


@dataclass(frozen=True)
class Lost:
    """A node of the round that is gone. how: what became of it, after its name. id: "" if only its host is known."""

    host: str
    how: str = "was lost"
    id: str = ""


# For reports of other nodes, after the first one of a failure: one of them may have the cause. Their workers break within
# milliseconds of each other, and are being stopped meanwhile.
SETTLE_S = 0.5


@dataclass(frozen=True)
class Circumstances:
    """The input of a judgement besides the reports and the ledger."""

    max_restarts: int
    # exit_codes, backoff, jitter: see policy.decide
    exit_codes: str = "design"
    nodes: int | None = None  # number of nodes present now, including those with a report and spares
    members: int = 0  # number of nodes of the round; 0: unknown
    min_nodes: int | None = None  # minimum number of nodes of the job
    lost: tuple[Lost, ...] = ()  # the round's nodes that are gone, were cut off or were asked to leave; they explain any cascade
    charges: int | None = None  # restarts charged within the budget's window; None without a window, when all count
    # the addresses of the nodes of the round, by id: some have nothing to report
    reaches: Mapping[str, joint.Reach] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)  # their names, by id
    at: str = ""  # see JobVerdict
    backoff: policy.Backoff = policy.NO_BACKOFF
    jitter: float = 0.0


@dataclass(frozen=True)
class _Cause:
    """The root cause. report: that of the worker by which it is known. The others: see JobVerdict."""

    diagnosis: Diagnosis
    report: Report
    node: str
    host: str
    rank: int
    refuse_newer: int | None = None
    gone: str = ""


def judge(reports: Mapping[str, Report], ledger: Ledger, circumstances: Circumstances, round_: int) -> tuple[Ledger, JobVerdict]:
    """Return the ledger after this round, and the verdict that all agents carry out.

    Args:
        reports: the reports by node id, at least one.
        ledger: the job's history before this round.
        round_: the round that has ended.
    """
    cause = _cause(reports, ledger, circumstances)
    report = cause.report
    now, budget, past = _compared(cause.diagnosis, report, ledger, circumstances)
    nodes = Nodes(circumstances.nodes, circumstances.min_nodes, circumstances.members)
    decision = policy.decide(cause.diagnosis, budget, past, nodes, backoff=circumstances.backoff, jitter=circumstances.jitter)
    bad = _bad(reports, cause, decision)
    if decision.exit_code is not None:
        decision = replace(decision, exit_code=policy.exit_code_for(decision.exit_code, circumstances.exit_codes))
    numeric = decision.kind == NUMERIC and cause.diagnosis.checkpoints_back > 0
    if numeric and decision.checkpoints_back:
        known = report.resumed_at is not None or report.resumed_from
        back = going_back(report.copied_at, report.saved_at, ledger.failures) if known else NO_WAY_BACK
        decision = replace(decision, reason=f"{decision.reason}; {back.reason}", checkpoints_back=int(back.checkpoint))
        now = replace(now, gone_back_to=back.to)
    if cause.diagnosis.rule == HANG_RULE and (apart := _apart(reports, circumstances.lost)):
        decision = replace(decision, reason=f"{decision.reason}; {apart}")
    charged = budget.charged + decision.charged
    now = replace(now, charged=decision.charged, moved=decision.moves_ranks or cause.diagnosis.evidence.link_failed)
    found = [f"on {each.host}: {each.stacks}" for each in reports.values() if each.stacks]
    stacks = beginnings(found, records.MAX_STACKS, LEAST_STACKS)
    verdict = JobVerdict(
        decision,
        round_,
        cause.node,
        cause.host,
        cause.rank,
        charged,
        circumstances.max_restarts,
        circumstances.at,
        stacks,
        cause.diagnosis.evidence.cut,
        refuse_copies=numeric and decision.response is not Response.STOP,
        shown_by=next(id_ for id_, each in reports.items() if each is report),
        refuse_newer=cause.refuse_newer,
        refused_by=_refused_by(reports, cause, decision),
        bad=bad,
        gone=cause.gone,
    )
    failures = (*ledger.failures, now)[-records.MAX_FAILURES :]
    if bad:  # the next launch is on other nodes, and has a budget of its own
        charged, failures = 0, tuple(replace(each, charged=False) for each in failures)
    return Ledger(failures, charged, (*ledger.verdicts, verdict)[-records.MAX_VERDICTS :]), verdict


def _bad(reports: Mapping[str, Report], cause: _Cause, decision: policy.Decision) -> tuple[str, ...]:
    """Return the nodes to replace if the job ends; (): see `JobVerdict.bad`. Of replicas without a majority, all that differ.

    decision: with the exit code of the preset "design".
    """
    if decision.response is not Response.STOP or decision.exit_code != EX_NODE:
        return ()
    differ = tuple(id_ for id_, each in reports.items() if each.host in cause.diagnosis.evidence.differs)
    return differ or ((cause.node,) if cause.node else ())


def _refused_by(reports: Mapping[str, Report], cause: _Cause, decision: policy.Decision) -> str:
    """Return the node that marks refused checkpoints: not the one that leaves, which the next round does not wait for."""
    leaves = decision.response is Response.REPLACE_NODE
    if cause.refuse_newer is None and not (leaves and decision.checkpoints_back):
        return ""
    stay = [id_ for id_ in reports if not leaves or id_ != cause.node]
    return stay[0] if stay else cause.node


def too_few_left(ledger: Ledger, circumstances: Circumstances, round_: int) -> tuple[Ledger, JobVerdict]:
    """Return the ledger and the verdict where fewer nodes are left than the job needs: a scheduler may start it on others.

    circumstances: with one lost node or more. Nothing is held against them: the platform sees that they are gone.
    """
    lost = circumstances.lost
    names = "; ".join(f"node {each.host} {each.how}" for each in lost[:MAX_NAMED])
    more = f" (and {len(lost) - MAX_NAMED} more)" if len(lost) > MAX_NAMED else ""
    left = f"{circumstances.nodes} of at least {circumstances.min_nodes} nodes are left, and no other one has come"
    code = policy.exit_code_for(EX_TRY_AGAIN, circumstances.exit_codes)
    decision = policy.Decision(
        policy.Action.STOP, NODE_LOST, f"{names}{more}; {left} (rejoin_timeout)", code, TOO_FEW, response=Response.REQUEUE
    )
    of_first = (lost[0].id, lost[0].host, joint.NO_RANK, ledger.charged, circumstances.max_restarts, circumstances.at)
    verdict = JobVerdict(decision, round_, *of_first, gone=lost[0].how)
    return replace(ledger, verdicts=(*ledger.verdicts, verdict)[-records.MAX_VERDICTS :]), verdict


@dataclass(frozen=True)
class Back:
    """What no round may resume from any more, besides the copies in memory, after a number has left its range."""

    checkpoint: bool  # whether the newest checkpoint is not to be used
    reason: str
    to: int | None = None  # step of the newest checkpoint, if that is tried


NO_WAY_BACK = Back(False, "no checkpoint is known, so the script alone chooses what it resumes from")


def going_back(copied_at: int | None, saved_at: int | None, earlier: Sequence[PastFailure]) -> Back:
    """Go back by one: to the newest checkpoint if there are newer copies in memory; else to the checkpoint before it.

    Copies that were made since the last such failure do not count: they come from the checkpoint that was tried then.

    Args:
        copied_at: step of the newest copy; None: there is none.
        saved_at: step of the newest checkpoint; 0: there is none, None: unknown.
    """
    newest = f"the newest checkpoint{f' (step {saved_at})' if saved_at else ''}"
    last = next((past for past in reversed(earlier) if past.kind == NUMERIC), None)
    tried = bool(saved_at) and last is not None and last.gone_back_to == saved_at
    newer = copied_at is not None and (saved_at is None or copied_at > saved_at)
    if newer and not tried:
        return Back(False, f"the copies in memory (up to step {copied_at}) are refused, and {newest} is tried", saved_at or None)
    copies = "the copies in memory are refused; " if copied_at is not None else ""
    before = f"{newest} was tried before, so the one before it" if tried else f"the checkpoint before {newest}"
    return Back(True, f"{copies}{before} is tried, if there is one")


def _apart(reports: Mapping[str, Report], lost: Sequence[Lost]) -> str:
    """Return which ranks wait in another collective than the rest; "" if nothing shows that.

    Without the reports of lost nodes a group of as many ranks as have reported may be another one than that of all ranks.
    """
    found = [each for report in reports.values() for each in report.collectives]
    return compared(found, {rank for report in reports.values() for rank in report.ranks} if not lost else ())


def _cause(reports: Mapping[str, Report], ledger: Ledger, circumstances: Circumstances) -> _Cause:
    failed = [report for report in reports.values() if not report.only_ended] or reports.values()
    cause = root_cause([report.diagnosis for report in failed])
    node, report = next((node, report) for node, report in reports.items() if report.diagnosis.evidence is cause.evidence)
    hosts = {**circumstances.hosts, **{id_: each.host for id_, each in reports.items()}}
    differ = joint.difference((hashed for each in reports.values() for hashed in each.hashed), over=True)
    if differ is not None and differ.agreed is not None:
        return _of_replicas(reports, differ)
    if circumstances.lost and (report.follows or cause.rule == NETWORK_RULE):
        return _of_lost(circumstances.lost, cause, report)
    certain = cause.evidence.hang_blame[:1] == (CERTAIN,)  # a stopped worker, say: all wait for it, no matter who reaches whom
    alone = circumstances.members == 1  # its workers reach each other without a link
    may_be_cut = not alone and (report.follows or (cause.rule == HANG_RULE and not certain))
    if (may_be_cut or cause.rule == NETWORK_RULE) and (down := [id_ for id_, each in reports.items() if each.links]):
        if len(down) == 1:
            return _of_link(cause, report, down[0], reports[down[0]])
        names = ", ".join(reports[id_].host for id_ in down[:MAX_NAMED])
        cause = replace(cause, reason=f"{cause.reason}; links went down on {len(down)} nodes, as with a switch: {names}")
    found = _cuts(reports, circumstances) if may_be_cut else []
    ends = {id_ for id_, each in reports.items() if each.ended}
    apart = any(ends.isdisjoint(each.pair) for each in found)  # an early end explains no silence between two other nodes
    peers = cause.rule in (*PEERS, INTERFACE) and not apart
    waits = peers or (cause.evidence.hang_blame[:1] == (WAITS,) and not found)
    if waits and (early := _of_early(reports, cause, report)) is not None:
        return early
    if found:
        _, _, past = _compared(cause, report, ledger, circumstances)
        return _cut_off(reports, found, hosts, [each.cut for each in past if not each.before_repair])
    if cause.rule == REPLAY:
        return _of_replay(reports, cause, node)
    if cause.rule == RERUN_DIFFERS:
        return _of_rerun(cause, report, ledger.failures, hosts)
    by_themselves = [each.diagnosis for each in reports.values() if each.diagnosis.rule != STOPPED]
    alike = sum(_alike(cause, each) for each in by_themselves) if not report.follows and cause.rule != RERUN else 0
    everywhere = alike == len(by_themselves) > 1
    cause = replace(cause, evidence=replace(cause.evidence, shared=alike > 1, everywhere=everywhere))
    return _Cause(_of_resumed(cause, report), report, node, report.host, cause.evidence.rank)


def _of_resumed(cause: Diagnosis, report: Report) -> Diagnosis:
    """Return the cause; with the checkpoint that the round resumed from to blame if this lacks the file that was missing."""
    raised, path = cause.evidence.exception, report.resumed_from.rpartition("://")[2]
    if cause.rule != FILES or cause.evidence.first_step_done or not path or raised is None or f"{path}/" not in raised.message:
        return cause
    reason = f"{cause.reason}; the checkpoint that it resumed from lacks it, and the previous one is tried"
    return replace(cause, checkpoints_back=1, reason=reason)


def _alike(one: Diagnosis, other: Diagnosis) -> bool:
    """Return whether workers of two nodes have failed in the same way: none of the two nodes explains it."""
    hangs = one.evidence.hang_blame == other.evidence.hang_blame
    return one.rule == other.rule and (hangs if one.rule == HANG_RULE else one.fingerprint == other.fingerprint)


def _of_replay(reports: Mapping[str, Report], cause: Diagnosis, node: str) -> _Cause:
    """Return the rank that the message names as the one that computes wrongly. No other node is replaced for it."""
    report, raised = reports[node], cause.evidence.exception
    named = _RANK.search(raised.message) if raised is not None else None
    if named is None or int(named[1]) == cause.evidence.rank:
        return _Cause(cause, report, node, report.host, cause.evidence.rank)
    rank = int(named[1])
    for id_, each in reports.items():
        if rank == each.diagnosis.evidence.rank or rank in each.ranks:
            return _Cause(cause, report, id_, each.host, rank)
    reason = f"{cause.reason}; the node of rank {rank} has reported no failure, so none is replaced"
    return _Cause(replace(cause, response=Response.RESTART, reason=reason), report, node, report.host, rank)


def _of_rerun(cause: Diagnosis, report: Report, earlier: Sequence[PastFailure], hosts: Mapping[str, str]) -> _Cause:
    """Return the node whose ranks moved for a step to be computed elsewhere, where it has given another result.

    The checkpoint that the script made for that is refused: from there it would compare the results again, and leave again.
    """
    asked = next((past.node for past in reversed(earlier) if past.rule == RERUN), None)
    at = [id_ for id_, host in hosts.items() if host == asked != report.host]
    refused = report.resumed_at - 1 if report.resumed_at else None
    if len(at) == 1:
        found = replace(cause, evidence=replace(cause.evidence, node=asked))
        return _Cause(found, report, at[0], hosts[at[0]], joint.NO_RANK, refused)
    reason = f"{cause.reason}; that one is not known, or no longer in the job, so no node is replaced"
    found = replace(cause, response=Response.RESTART, reason=reason, evidence=replace(cause.evidence, node=None))
    return _Cause(found, report, "", "", joint.NO_RANK, refused)


def _of_link(victim: Diagnosis, report: Report, node: str, holder: Report) -> _Cause:
    """Return the node whose link went down as the cause. victim, report: of the worker that explains the others.

    Where links of several nodes went down, as with a switch, no node is to blame.
    """
    of_holder = holder.diagnosis.evidence
    evidence = Evidence(joint.NO_RANK, node=holder.host, links=of_holder.links, link_away=of_holder.link_away, link_failed=True)
    seen = victim.evidence
    found = classify(replace(evidence, step=seen.step, first_step_done=seen.first_step_done, ended_ns=seen.ended_ns))
    reason = f"{found.reason}; then {shortened(describe(seen), VICTIM)}, on {report.host}"
    return _Cause(replace(found, reason=reason), report, node, holder.host, joint.NO_RANK)


def _of_replicas(reports: Mapping[str, Report], differ: joint.Difference) -> _Cause:
    """Return the odd replica as the cause, however the round has ended; without a majority, all."""
    held = {id_: {rank for hashed in each.hashed for rank in hashed.ranks} for id_, each in reports.items()}
    holders = {id_: [rank for rank in differ.odd if rank in held[id_]] for id_ in reports}
    node = min((id_ for id_ in holders if holders[id_]), key=lambda id_: holders[id_])
    report, rank = reports[node], holders[node][0]
    hosts = tuple(dict.fromkeys(each.host for id_, each in reports.items() if holders[id_]))
    began_at = next((each.counts_from for each in reports.values() if each.counts_from is not None), 0)
    last_good = began_at + differ.counted
    named = (report.host,) if differ.majority else hosts
    evidence = report.diagnosis.evidence  # without how the worker ended: its agent ended it
    of_host = Evidence(rank, step=evidence.step, first_step_done=True, xids=evidence.xids, node=report.host, differs=named)
    found = classify(replace(of_host, gpu_recovery=evidence.gpu_recovery, ended_ns=evidence.ended_ns))
    reason = f"{differ.text}, on {' and '.join(hosts)}: checkpoints after step {last_good} of the job are refused"
    return _Cause(replace(found, reason=reason), report, node, report.host, rank, last_good)


def _of_lost(lost: Sequence[Lost], victim: Diagnosis, report: Report) -> _Cause:
    """Return the loss of a node as the cause. victim: of a worker that failed as the lost ones were gone."""
    first, evidence = lost[0], victim.evidence
    if evidence.exception is not None:
        message = shortened(_BUILT_AT.sub(r"[\1]", first_line(evidence.exception.message)), VICTIM)
        evidence = replace(evidence, exception=replace(evidence.exception, message=message))
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    reason = f"node {first.host} {first.how}{more}; then {describe(evidence)}, on {report.host}"
    evidence = replace(victim.evidence, node=first.host)
    diagnosis = replace(victim, kind=NODE_LOST, response=Response.RESTART_FREE, reason=reason, evidence=evidence)
    return _Cause(diagnosis, report, first.id, first.host, joint.NO_RANK, gone=first.how)


def _of_early(reports: Mapping[str, Report], victim: Diagnosis, report: Report) -> _Cause | None:
    """Return the ranks that had ended with 0, if others wait for them; None: there are none.

    Agents have seen it, so it weighs more than the victim's words: that a peer has gone, or that no rank comes.
    """
    seen = victim.evidence
    early = joint.awaited([each for of_node in reports.values() for each in of_node.ended], seen.step)
    if not early or report.only_ended:  # no one is known to wait
        return None
    first = min(early, key=lambda each: each.rank)
    node, holder = next((id_, each) for id_, each in reports.items() if first in each.ended)
    who, them = ranks_in_words(each.rank for each in early), "them" if len(early) > 1 else "it"
    at = f" at step {(holder.counts_from or 0) + first.step}" if first.step else ""
    since = " since it started" if at and holder.counts_from is None else ""
    then = f"then {shortened(describe(seen), VICTIM)}, on {report.host}"
    reason = f"{who} ended with 0{at}{since}, the others wait for {them}, as with a bug or uneven data; {then}"
    begun = None if first.step is None else first.step > 0
    evidence = Evidence(first.rank, exit_code=0, step=first.step, first_step_done=begun, node=holder.host)
    fingerprint = of_exit(ENDED_EARLY, "exit code 0")
    found = Diagnosis(CODE, Response.CONFIRM, ENDED_EARLY, reason, fingerprint, evidence, EXIT_STATUS, weight=Weight.PLATFORM)
    return _Cause(found, report, node, holder.host, first.rank)


def _cuts(reports: Mapping[str, Report], circumstances: Circumstances) -> list[joint.Cut]:
    known = dict(circumstances.reaches)
    for id_, report in reports.items():
        known[id_] = joint.union(report.reach, known.get(id_, joint.NOTHING_KNOWN))
    return [each for each in joint.find_cuts(known) if each.node in reports]


def _cut_off(
    reports: Mapping[str, Report], found: Sequence[joint.Cut], hosts: Mapping[str, str], earlier: Sequence[tuple[str, ...]]
) -> _Cause:
    """Return what `_cause` returns for hosts that cannot reach each other: their workers wait, or NCCL gives up.

    hosts, earlier: see `choose_cut`. A node that others miss may have nothing to report: no worker has failed there. That it says
    nothing makes it the likelier one of two.
    """
    ranks = {
        id_: reports[id_].diagnosis.evidence.rank if id_ in reports else joint.NO_RANK for each in found for id_ in each.pair
    }
    order = {id_: rank if rank != joint.NO_RANK else len(ranks) + max(ranks.values()) for id_, rank in ranks.items()}
    cut, node = joint.choose_cut(found, order, hosts, earlier)
    here, there, silent = hosts[cut.node], hosts[cut.other], cut.silent
    who = f"rank {silent.rank} on {here}" if silent.rank != joint.NO_RANK else here
    of_rank = f", the host of rank {ranks[cut.other]}" if ranks[cut.other] != joint.NO_RANK else ""
    reason = f"{who} gets no answer from {there}{of_rank} ({silent.address})"
    if silent.for_s:
        reason += f", for {silent.for_s:.3g} s"
    if len(found) > 1:
        reason += f" (and {len(found) - 1} more between hosts of the job)"
    report = reports.get(node) or reports[cut.node]
    pairs = tuple(tuple(sorted(hosts[id_] for id_ in each.pair)) for each in (cut, *(one for one in found if one is not cut)))
    evidence = replace(report.diagnosis.evidence, rank=ranks[node], node=hosts[node], cuts=pairs, cuts_text=reason)
    found_cut = classify(replace(evidence, exit_code=None, signal=None, exception=None, stopped_by_agent=False))
    return _Cause(found_cut, report, node, hosts[node], evidence.rank)


def _compared(
    diagnosis: Diagnosis, report: Report, ledger: Ledger, circumstances: Circumstances
) -> tuple[PastFailure, policy.Budget, tuple[Precedent, ...]]:
    """Return the ledger's record of this failure, the budget that is left for it, and the earlier ones compared with it."""
    began_at = report.resumed_at if report.resumed_at is not None else report.counts_from
    now = past_failure(diagnosis, began_at, report.resumed_from, report.saved_at, report.save_number)
    budget = _budget(ledger, now, circumstances)
    return now, budget, precedents(now, ledger.failures, budget.charged, report.ranks)


def _budget(ledger: Ledger, now: PastFailure, circumstances: Circumstances) -> policy.Budget:
    """Return the remaining budget: a checkpoint saved since then refunds earlier charges, and the window drops old ones."""
    if _saved_since(ledger.failures, now):
        charged = 0
    else:
        charged = ledger.charged if circumstances.charges is None else min(ledger.charged, circumstances.charges)
    return policy.Budget(circumstances.max_restarts, charged)


def _saved_since(earlier: Sequence[PastFailure], now: PastFailure) -> bool:
    """Return whether this round began at a later checkpoint than every earlier round, so that the charged restarts paid off."""
    return bool(earlier) and all((began_after(failure, now) or 0) > 0 for failure in earlier)
