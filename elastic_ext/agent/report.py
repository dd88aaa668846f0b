"""A failure as the user reads it and as torch records it: the cause comes first, its traceback appears once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing import ProcessFailure

from elastic_ext.base.kinds import CASCADE
from elastic_ext.base.printable import Block, cut, shown, shown_lines
from elastic_ext.failures.classify import Diagnosis, describe, first_line
from elastic_ext.failures.cuts import NO_RANK
from elastic_ext.failures.evidence import ErrorFile
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous.drains import host_of


@dataclass(frozen=True)
class FailedWorker:
    """One worker that failed. exitcode: as in subprocess, the negative signal number if a signal killed it."""

    local_rank: int
    pid: int
    exitcode: int
    error_file: ErrorFile
    diagnosis: Diagnosis

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.diagnosis.evidence.rank


def failure_text(cause: FailedWorker, others: Sequence[FailedWorker], verdict: JobVerdict, decision: Decision, node: str) -> str:
    """Return the text for the log: all of it on one node, which `verdict` names; a line on the others.

    The decision and the cause come first. On a stop, torch prints the traceback in its own text, which comes last.

    Args:
        cause, others: the workers that failed on this node.
        verdict: the verdict of the job.
        decision: the decision for this node.
        node: id of this node.
    """
    if verdict.shown_by not in ("", node):
        return line_elsewhere(verdict, decision, node, cause.diagnosis)
    lines = [_line(decision)]
    evidence = cause.diagnosis.evidence
    if evidence.step is not None:
        lines.append(f"  last step of rank {evidence.rank} since it started: {evidence.step}, on {evidence.node}")
    if verdict.node not in ("", node):
        lines.append(f"  the cause was on {verdict.host}; on this node: {cause.diagnosis.reason}")
    if others:
        lines.append(f"  also ended: {', '.join(f'rank {other.rank} ({_short(other)})' for other in others)}")
    lines += [f"  {worker.error_file.problem}" for worker in (cause, *others) if worker.error_file.problem]
    if decision.action is not Action.STOP and (traceback := _traceback(cause.error_file)):
        lines += ["  " + line.expandtabs() for line in traceback.rstrip().splitlines()]
    return Block("\n".join(map(shown, lines)))


def line_elsewhere(verdict: JobVerdict, decision: Decision, node: str, here: Diagnosis | None = None) -> str:
    """Return the one line for the log of a node that carries out the verdict on another one's failure.

    Args:
        decision: the decision for this node.
        node: id of this node.
        here: what failed on this node, if anything did; what only follows from another failure is not worth a word.
    """
    line = _line(decision, f"on {verdict.host}: " if verdict.rank != NO_RANK else "")
    if here is not None and here.kind != CASCADE:
        line += f"; here: {describe(here.evidence)}"
    if verdict.shown_by not in ("", node):
        line += f"; more in the log of {host_of(verdict.shown_by)}"
    return shown(line)


def _line(decision: Decision, where: str = "") -> str:
    line = f"elastic_ext: {decision.action.value}: {where}{decision.reason} (kind {decision.kind}, rule {decision.rule})"
    if decision.action is Action.STOP and decision.exit_code is not None:
        line += f"; exit code {decision.exit_code}"
    return f"{line}; in {decision.delay_s:.1f} s" if decision.delay_s > 0 else line


def remote_failure(verdict: JobVerdict) -> dict[int, ProcessFailure]:
    """Return torch's record of a failure on another node: torch needs one to say that the job has failed."""
    failure = ProcessFailure(local_rank=-1, pid=-1, exitcode=1, error_file="")
    failure.error_file_data = dict(failure.error_file_data)
    failure.message = shown(f"on {verdict.host}: {verdict.decision.reason}")
    return {verdict.rank: failure}


def process_failures(cause: FailedWorker, others: Sequence[FailedWorker]) -> dict[int, ProcessFailure]:
    """Return torch's record of the failures, by global rank.

    Torch treats the failure with the earliest timestamp as the root cause, or the first among equals: the cause is both.
    """
    first = _process_failure(cause)
    failures = {cause.rank: first}
    for worker in others:
        failure = _process_failure(worker)
        failure.timestamp = max(failure.timestamp, first.timestamp)
        if _traceback(worker.error_file):
            failure.message = shown(f"{_short(worker)}; its traceback is in the error file")
        failures[worker.rank] = failure
    return failures


def _process_failure(worker: FailedWorker) -> ProcessFailure:
    failure = ProcessFailure(local_rank=worker.local_rank, pid=worker.pid, exitcode=worker.exitcode, error_file="")
    # Torch shares one dict among all failures without a file, and writes into it.
    failure.error_file_data = dict(failure.error_file_data)
    data = worker.error_file.data
    if data is not None:
        message = data["message"]
        failure.error_file = worker.error_file.path
        failure.error_file_data = data
        failure.message = _safe_for_torch(message)
        failure.timestamp = int(data.get("timestamp", 0) if isinstance(message, str) else message["extraInfo"]["timestamp"])
    elif worker.error_file.problem:
        failure.message = f"{failure.message}\n  ({shown(worker.error_file.problem)})"
    return failure


def _safe_for_torch(message: Any) -> Any:
    """Make the message of an error file safe for torch, which prints the text, or the traceback in the dict."""
    if not isinstance(message, dict):
        return shown_lines(str(message))
    extra = message["extraInfo"]
    fit = {name: shown_lines(str(extra[name])) for name in ("py_callstack",) if name in extra}
    return {**message, "message": shown_lines(str(message.get("message", ""))), "extraInfo": {**extra, **fit}}


def _traceback(error_file: ErrorFile) -> str:
    message: Any = error_file.data["message"] if error_file.data else None
    return str(message["extraInfo"].get("py_callstack", "")) if isinstance(message, dict) else ""


def _short(worker: FailedWorker) -> str:
    exception = worker.diagnosis.evidence.exception
    if exception is not None:
        text = cut(first_line(exception.message), 120)
        return f"{exception.type}: {text}" if text else exception.type
    signal = worker.diagnosis.evidence.signal
    return signal if signal is not None else f"exit code {worker.exitcode}"
