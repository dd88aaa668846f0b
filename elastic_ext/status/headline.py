"""The headline of a job: one sentence of at most WORDS words, who or what, and what is waited for or decided. Pure.

It names the cause, never what a victim of it printed. The reason of a verdict, which is long, stands with the failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ext.base import diagnosis as kinds
from elastic_ext.base.diagnosis import Response
from elastic_ext.base.printable import cut, shown
from elastic_ext.failures import rules
from elastic_ext.failures.judgement import TOO_FEW
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action
from elastic_ext.rendezvous.drains import host_of, released
from elastic_ext.rendezvous.round_records import EndKind, Header, State

WORDS = 12
MAX_NAME = 40  # characters of a host's name
NONE_LEFT = "no agent is left; how the job ended is unknown"
_DID = {
    kinds.CODE: "failed in its code",
    kinds.DATA: "met unreadable data",
    kinds.NUMERIC: "got NaN or infinity",
    kinds.USER_STOP: "was stopped by hand",
    kinds.PREEMPTION: "was preempted",
    kinds.HOST_MEMORY: "ran out of memory",
    kinds.DEVICE_MEMORY: "exceeded its GPU memory",
    kinds.STORAGE: "lost its storage",
    kinds.NODE_LOST: "was lost",
    kinds.NETWORK: "lost the network",
    kinds.HARDWARE: "met bad hardware",
    kinds.HANG: "hung",
    kinds.CRASH: "crashed",
}
_DID_BY_RULE = {"killed": "was killed", rules.ENDED_EARLY: "ended before the others"}
_ENDS = {
    EndKind.FAILED: "a worker failed; the cause is being found",
    EndKind.STALLED: "no worker makes progress; the cause is being found",
    EndKind.DIFFERS: "the replicas differ; the cause is being found",
}


@dataclass(frozen=True)
class JobNow:
    """What a headline depends on.

    Attributes:
        state: of the job.
        verdict: on the round of the header, or the last one without a header; None: there is none.
        here: the names of the nodes that are there.
        members: how many of them are in the round.
        training: how many of those run their workers.
        silent: how many of those have reported nothing yet.
        saved_step: of the newest checkpoint; None: none was seen.
    """

    state: str
    header: Header
    verdict: JobVerdict | None = None
    here: tuple[str, ...] = ()
    members: int = 0
    training: int = 0
    silent: int = 0
    saved_step: int | None = None


def of_job(now: JobNow) -> str:
    """Return the headline of the job."""
    if now.state == "succeeded":
        return "the job finished"
    if now.state == "failed":
        return of_failure(now.verdict) if now.verdict is not None else "the job was closed"
    if now.state == "ended":
        signal = f"{_name(now.header.signal)} stopped the job" if now.header.signal else ""
        known = _cause(now.verdict) if now.verdict is not None else signal
        return f"{known}; no agent is left" if known else NONE_LEFT
    if now.state == "running":
        return _of_training(now)
    if now.state == "starting":
        return f"{_all(now.members)} {'are' if now.members > 1 else 'is'} there; the workers start"
    return _of_forming(now) if now.state == "forming" else _of_recovery(now)


def of_failure(verdict: JobVerdict) -> str:
    """Return a verdict as a headline: its cause, and what was decided."""
    return f"{_cause(verdict)}; {_decided(verdict)}"


def _cause(verdict: JobVerdict) -> str:
    host = _name(verdict.host)
    if verdict.gone:
        return f"node {host} {re.split(',| from ', verdict.gone)[0]}"
    if verdict.cut:
        return " and ".join(_name(each) for each in verdict.cut[:2]) + " cannot reach each other"
    if verdict.rank >= 0 and verdict.decision.rule in rules.ELSEWHERE:
        return f"cause unknown: rank {verdict.rank} lost a peer"
    who = f"rank {verdict.rank} on {host}" if verdict.rank >= 0 else f"node {host}" if host else "the job"
    return f"{who} {_DID_BY_RULE.get(verdict.decision.rule) or _DID.get(verdict.decision.kind, 'failed')}"


def _decided(verdict: JobVerdict) -> str:
    decision = verdict.decision
    if decision.rule == TOO_FEW:
        return "too few remain"
    if decision.response is Response.REQUEUE:
        return "a requeue follows"
    if decision.response is Response.REPLACE_NODE:
        return f"{_name(verdict.host) or 'a node'} leaves"
    return "the job stopped" if decision.action is Action.STOP else "the job restarts"


def _of_training(now: JobNow) -> str:
    """Return what a job does whose workers run. Of a node without a report nobody knows that it trains."""
    if not now.training:
        return f"round {now.header.round} runs; no node has reported yet"
    if now.training < now.members:
        silent = f"; {now.silent} silent" if now.silent else ""
        return f"{now.training} of {now.members} nodes train{silent}"
    # The request stays for a while after its node has left.
    leaving = [name for each in now.header.drains if (name := host_of(each.node)) in now.here]
    leaves = f"; {_name(leaving[0])} will leave" if len(leaving) == 1 else f"; {len(leaving)} will leave" if leaving else ""
    return (f"{_all(now.members)} train" if now.members > 1 else f"{_who(now.here)} trains") + leaves


def _of_forming(now: JobNow) -> str:
    if now.header.differs:
        return "the nodes differ in what must be alike; none starts"
    if not now.here:
        return "no node has come yet"
    return f"{_wait(now.here)} for more nodes"


def _of_recovery(now: JobNow) -> str:
    header = now.header
    if header.state is State.RUNNING:
        if not now.here:
            return "no node is there; the job waits for nodes"
        saved = f"; the last checkpoint is of step {now.saved_step}" if now.saved_step is not None else ""
        return f"the workers start again{saved}"
    few = len(now.here) < header.min_nodes
    if now.verdict is not None:
        waits = f"{_wait(now.here)} for {'it' if now.verdict.gone else 'another'}"
        return f"{_cause(now.verdict)}; {waits}" if few else of_failure(now.verdict)
    drained = sorted(released(header))
    if header.lost or drained:
        what = f"node {_name(host_of(header.lost))} was lost" if header.lost else f"node {_name(host_of(drained[0]))} was drained"
        return f"{what}; {_wait(now.here)} for {'it' if header.lost else 'another'}" if few else f"{what}; the others regroup"
    unknown = f"round {header.round} ended; " + (f"{_wait(now.here)} for more nodes" if few else "the nodes regroup")
    return _ENDS.get(header.end, unknown) if header.end is not None else unknown


def _wait(names: Sequence[str]) -> str:
    return f"{_who(names)} waits" if len(names) < 2 else f"{len(names)} nodes wait"


def _who(names: Sequence[str]) -> str:
    return _name(names[0]) if names and names[0] else "the job"


def _all(count: int) -> str:
    return {1: "the node", 2: "both nodes"}.get(count, f"all {count} nodes")


def _name(host: str) -> str:
    """Return the name as one word: anyone may have written it."""
    return cut("_".join(shown(host).split()), MAX_NAME)
