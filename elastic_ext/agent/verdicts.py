"""From the end of workers to the end of the agent: evidence, diagnosis, the text for the user, verdict file, result for torch."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from elastic_ext.agent import companion, exits, launch
from elastic_ext.base import diagnosis
from elastic_ext.base.errors import (
    EX_CODE,
    EX_CONFIG,
    EX_FAILED,
    EX_NODE,
    EX_TRY_AGAIN,
    BadCheckpoints,
    NodeDrained,
    NodeUnfit,
    StorageAway,
)
from elastic_ext.base.printable import Block, counted, cut, printable, shown, shown_lines
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_private import received
from elastic_ext.events.event_table import SeenFailure
from elastic_ext.failures import joint_evidence, policy
from elastic_ext.failures.classify import Diagnosis, classify, describe, first_line, root_cause
from elastic_ext.failures.evidence import ErrorFile, Evidence, exit_status, read_error_file
from elastic_ext.failures.host import HostEvidence, HostProbe
from elastic_ext.failures.joint_evidence import NOTHING_KNOWN, Ended, Reach, unanswered
from elastic_ext.failures.ledger import MAX_TEXT, JobVerdict, encode_verdict
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.failures.rules import GROUP, STOP_REQUESTED, says_why_all_leave
from elastic_ext.hangs.detector import Stuck
from elastic_ext.rendezvous.address import own_addresses
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.drains import host_of
from elastic_ext.workers.logs import StderrTails
from elastic_ext.workers.processes import Exit

if TYPE_CHECKING:
    from elastic_ext.failures.user_rules import UserRule

logger = logging.getLogger(__name__)

RAISED = 1  # exit code of a worker that an exception ends
MAX_TRACEBACK = 16 << 10  # characters of a traceback in a span
PLATFORM_S = 2.0  # time for the platform to say why the agent has to stop


@dataclass(frozen=True)
class EndedRound:
    """The workers of one node, all ended. Mappings and collections are by local rank, unless said otherwise."""

    node: str  # the name of this host
    host: HostEvidence  # the evidence of this host from the time of the round
    workers: companion.LocalWorkers
    stderr: StderrTails  # the last lines that the workers wrote to stderr
    warm: Collection[int]  # workers whose processes were warm standbys
    hung: Mapping[int, Stuck]  # workers that the others waited for
    torch_failures: Mapping[int, ProcessFailure]  # torch's record of failed processes of a function entrypoint, by global rank
    asked_to_end: bool  # count a worker that was asked to end as failed, however it ended, because none failed unasked


def rules_of_users(path: str | None) -> tuple[UserRule, ...]:
    """Return the rules of a file (None for no file) and of other packages. Raises UsageError."""
    if path is None and not entry_points(group=GROUP):
        return ()
    from elastic_ext.failures import user_rules

    return user_rules.load(path)


def failed_workers(ended: EndedRound, rules: Sequence[UserRule]) -> list[FailedWorker]:
    """Judge each worker that did not end well, one by one. One whose script had does not count beside one that failed unasked."""
    failed, well = [], {each.rank for each in ended_well(ended.workers)}
    for local_rank, pid in ended.workers.processes.pids.items():
        exit_ = ended.workers.processes.exits.get(local_rank)
        error_file = read_error_file(ended.workers.error_files.get(local_rank, ""))
        exitcode = _failed_with(ended, local_rank, exit_, error_file)
        if exitcode is None:
            continue
        hung = local_rank in ended.hung
        evidence = _of_hang(ended, local_rank) if hung else _of_exit(ended, local_rank, exitcode, exit_, error_file)
        failed.append(FailedWorker(local_rank, pid, exitcode, error_file, classify(evidence, rules)))
    others = [each for each in failed if each.rank not in well]
    return others if any(not each.diagnosis.evidence.stopped_by_agent for each in others) else failed


def _failed_with(ended: EndedRound, local_rank: int, exit_: Exit | None, error_file: ErrorFile) -> int | None:
    """Return the exit code of a worker that failed; None if it did not fail."""
    if exit_ is None:
        return -signal.SIGKILL
    asked_to_end = ended.asked_to_end and exit_.stop_sent_ns is not None
    if not exit_.failed and not asked_to_end and local_rank not in ended.hung:
        return None
    if exit_.exitcode is not None:
        return own_exitcode(exit_, exit_.exitcode, _leaving(ended.workers, local_rank, error_file))
    # Torch or its forkserver has reaped the process of a function entrypoint; torch records those that failed.
    failure = ended.torch_failures.get(ended.workers.ranks[local_rank])
    if failure is not None:
        return int(failure.exitcode)
    return 1 if error_file.data is not None else None


@dataclass(frozen=True)
class Leaving:
    """What a worker has said of its end with an error. since_ns: time.monotonic_ns() when that began; None: it said nothing."""

    since_ns: int | None
    code: int = RAISED


def _leaving(workers: companion.LocalWorkers, local_rank: int, error_file: ErrorFile) -> Leaving:
    """Return what it has said in its error file, and in its row of the progress table."""
    row = workers.progress.read(local_rank) if workers.progress is not None else None
    if row is None or not row.ends_with:
        return Leaving(error_file.raised_ns)
    return Leaving(error_file.raised_ns or row.ended_ns or None, row.ends_with)


def own_exitcode(exit_: Exit, exitcode: int, leaving: Leaving) -> int:
    """Return the exit code that a worker would have had without the agent. exitcode: the real one.

    Where the agent's signal ended a worker that was about to end with an error, the signal says nothing.
    """
    by_agents_signal = exitcode < 0 and exit_.stop_sent_ns is not None
    return leaving.code if by_agents_signal and not exit_.ended_by_agent(leaving.since_ns) else exitcode


def cause_and_others(failed: Sequence[FailedWorker]) -> tuple[FailedWorker, list[FailedWorker]]:
    """Return the worker that explains the failure on this node, and the others."""
    diagnosis = root_cause([worker.diagnosis for worker in failed])
    cause = next(worker for worker in failed if worker.diagnosis.evidence is diagnosis.evidence)
    return cause, [worker for worker in failed if worker is not cause]


def failed_by_itself(workers: companion.LocalWorkers) -> bool:
    """Return whether one of the workers that were asked to end had failed before.

    A worker that ends with an exception closes its connections. The others can fail because of that, and break the round, before
    its process is gone. Their failures must not hide its failure.
    """
    return any(
        exit_.exitcode is not None
        and exit_.failed
        and not exit_.ended_by_agent(
            _leaving(workers, local_rank, read_error_file(workers.error_files.get(local_rank, ""))).since_ns
        )
        for local_rank, exit_ in workers.processes.exits.items()
    )


def ended_well(workers: companion.LocalWorkers) -> tuple[Ended, ...]:
    """Return the workers whose scripts had ended with 0 before the agent stopped them.

    Afterwards, their processes may have crashed, or the agent has killed them: gloo's threads abort an interpreter that ends.
    """
    found, now_ns = [], time.monotonic_ns()
    for local_rank, exit_ in workers.processes.exits.items():
        row = workers.progress.read(local_rank) if workers.progress is not None else None
        over_ns = row.sign_ns if row is not None and row.phase == "exit" and not row.ends_with else None
        if over_ns is not None and read_error_file(workers.error_files.get(local_rank, "")).data is not None:
            over_ns = None  # a KeyboardInterrupt
        by_signal = exit_.exitcode is not None and exit_.exitcode < 0
        if (not exit_.failed or (by_signal and over_ns is not None)) and not exit_.ended_by_agent(over_ns):
            steps = row.steps if row is not None and row.pid else None
            found.append(Ended(workers.ranks[local_rank], steps, (now_ns - exit_.seen_ns) / 1e9))
    return tuple(found)


def says_why(workers: companion.LocalWorkers, stderr: StderrTails) -> bool:
    """Return whether one of the workers that were asked to end was about to leave with the others, and has said why."""
    return any(
        exit_.failed and says_why_all_leave(stderr.tail(local_rank) or "")
        for local_rank, exit_ in workers.processes.exits.items()
    )


def stopped(workers: companion.LocalWorkers) -> bool:
    """Return whether a worker was stopped, or has failed; else all have ended well before."""
    return any(exit_.failed or exit_.stop_sent_ns is not None for exit_ in workers.processes.exits.values())


def _of_host(ended: EndedRound, local_rank: int) -> Evidence:
    """Return the evidence that does not depend on how the worker ended."""
    host, rank, warm = ended.host, ended.workers.ranks[local_rank], local_rank in ended.warm
    return Evidence(
        rank,
        xids=host.xids,
        gpu_recovery=host.gpu_recovery,
        platform=host.platform,
        links=host.links.names,
        link_away=host.links.away,
        full=host.full,
        node=ended.node,
        warm=warm,
    )


def _of_exit(ended: EndedRound, local_rank: int, exitcode: int, exit_: Exit | None, error_file: ErrorFile) -> Evidence:
    code, signal_name = exit_status(exitcode)
    table = ended.workers.progress
    progress = table.read(local_rank) if table is not None else None
    leaving = _leaving(ended.workers, local_rank, error_file)
    return replace(
        _of_host(ended, local_rank),
        exit_code=code,
        signal=signal_name,
        exception=error_file.exception,
        stderr_tail=ended.stderr.tail(local_rank) or "",
        # The count covers the whole memory cgroup: it says nothing about a worker that ended in another way.
        oom_kills=ended.host.oom_kills if signal_name == signal.SIGKILL.name or code == 128 + signal.SIGKILL else None,
        step=progress.steps if progress and progress.pid else None,
        first_step_done=progress.first_step_done if progress else None,
        stopped_by_agent=exit_ is None or exit_.ended_by_agent(leaving.since_ns),
        ended_ns=leaving.since_ns or (exit_.seen_ns if exit_ is not None else time.monotonic_ns()),
    )


def _of_hang(ended: EndedRound, local_rank: int) -> Evidence:
    """Return the evidence without how the worker ended, because this agent ended it."""
    hung = ended.hung[local_rank]
    return replace(
        _of_host(ended, local_rank),
        step=hung.steps,
        first_step_done=hung.steps > 0,
        hang=True,
        hang_reason=hung.reason,
        hang_blame=hung.blame,
        ended_ns=time.monotonic_ns(),
    )


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

    cause, others: the workers that failed on this node, whose id is `node`. decision: for this node.
    """
    if verdict.shown_by not in ("", node):
        return line_elsewhere(verdict, decision, node, cause.diagnosis)
    lines = [_line(decision)]
    evidence = cause.diagnosis.evidence
    if evidence.step is not None:
        lines.append(f"  rank {evidence.rank} on {evidence.node} had made {counted(evidence.step, 'step')} since its start")
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

    decision: for this node. here: what failed on it, if anything did; a failure that follows from another one is left out.
    """
    line = _line(decision, _where(verdict))
    if here is not None and here.kind != diagnosis.CASCADE:
        line += f"; here: {describe(here.evidence)}"
    if verdict.shown_by not in ("", node):
        line += f"; more in the log of {host_of(verdict.shown_by)}"
    return shown(line)


def _where(verdict: JobVerdict) -> str:
    return f"on {verdict.host}: " if verdict.rank != joint_evidence.NO_RANK else ""


def _done(decision: Decision, where: str = "") -> str:
    return f"{decision.action.value}: {where}{decision.reason} (kind {decision.kind}, rule {decision.rule})"


def _line(decision: Decision, where: str = "") -> str:
    line = f"elastic_ext: {_done(decision, where)}"
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


def seen_failure(worker: FailedWorker) -> SeenFailure:
    """Return what spans say of the worker that explains a failure on this node."""
    diagnosis, evidence = worker.diagnosis, worker.diagnosis.evidence
    raised, at = evidence.exception, (evidence.ended_ns or time.monotonic_ns()) / 1e9
    failure = SeenFailure(at, diagnosis.kind, diagnosis.rule, diagnosis.reason, evidence.rank, worker.pid, evidence.exit_code)
    if raised is None:
        return failure
    traceback = _traceback(worker.error_file)[-MAX_TRACEBACK:]  # its end says what was raised, and where
    return replace(failure, exception_type=raised.type, message=raised.message, traceback=traceback)


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


class Verdicts:
    """Makes the verdicts that no worker's failure causes, and ends this agent for any verdict.

    Invariants: a verdict is published where schedulers look before the agent leaves; the result is FAILED.
    """

    def __init__(self, settings: Settings, handler: Rendezvous) -> None:
        self._settings, self._handler = settings, handler
        self.closing: JobVerdict | None = None  # what the others do if this agent closes the job; None: nothing is known

    # Verdicts of this node alone.

    def of_checkpoints(self, error: BadCheckpoints | StorageAway) -> JobVerdict:
        """Return a stop: all checkpoints are bad, or unknown as their storage is away. From nothing, the work would be lost."""
        bad = isinstance(error, BadCheckpoints)
        code, rule = (EX_CODE, "no-checkpoint-left") if bad else (EX_TRY_AGAIN, "storage-away")
        return self._node_stop(diagnosis.STORAGE, str(error), code, rule)

    def of_this_host(self, error: NodeUnfit | OSError) -> JobVerdict:
        """Return a stop because this host is bad, or lacks descriptors, processes, memory or room. Another host may be better."""
        if isinstance(error, NodeUnfit):
            if error.by_settings:  # so on every node: this host may come back
                reason = f"{error}: a directory or a setting is wrong, see what it printed"
                return self._node_stop(diagnosis.UNKNOWN, reason, EX_CONFIG, "node-check")
            return self._node_stop(diagnosis.HARDWARE, str(error), EX_NODE, "node-check")
        reason = f"this host lacks what the next round needs: {error}"
        return self._node_stop(diagnosis.UNKNOWN, reason, EX_TRY_AGAIN, "host-exhausted")

    def kernel_sleep(self) -> JobVerdict:
        """Return a stop because a worker has slept in the kernel for too long."""
        reason = "a worker slept in the kernel for longer than the limit; this host may need a reboot"
        return self._node_stop(diagnosis.HARDWARE, reason, EX_NODE, "kernel-sleep")

    def of_agent(self, error: BaseException) -> JobVerdict:
        """Return a stop because this agent has failed. The others get its exit code: only this agent knows why the job ended."""
        if isinstance(error, (RendezvousConnectionError, RendezvousTimeoutError)):
            return self._node_stop(diagnosis.NETWORK, cut(str(error), MAX_TEXT), EX_TRY_AGAIN, "unreachable")
        code = error.code if isinstance(error, SystemExit) else None
        cause = error.__cause__ or error
        reason = cut(f"the agent on {self._handler.node.host} failed: {type(cause).__name__}: {cause}", MAX_TEXT)
        return self._node_stop(diagnosis.UNKNOWN, reason, EX_CONFIG if code == EX_CONFIG else EX_FAILED, "agent")

    def _node_stop(self, kind: diagnosis.Kind, reason: str, code: int, rule: str) -> JobVerdict:
        """Return a stop of this node alone. code: the exit code of the preset "design"."""
        return self._job_verdict(Decision(Action.STOP, kind, reason, policy.exit_code_for(code, self._settings.exit_codes), rule))

    def _job_verdict(self, decision: Decision) -> JobVerdict:
        return JobVerdict(decision, self._handler.part.round, self._handler.node.id, self._handler.node.host)

    # The end of this agent.

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the other nodes the verdict of an error that ends this agent, in case it closes the job."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.closing = for_others(self.of_agent(error), self._settings.exit_codes)
            raise

    def stop(self, verdict: JobVerdict, decision: Decision, failures: Mapping[int, ProcessFailure]) -> RunResult:
        """Publish the verdict and return the result of the agent. decision: for this node. failures: torch's, by global rank."""
        code, here = self._publish(verdict, decision), min((each.local_rank for each in failures.values()), default=-1) >= 0
        shown_here = here and verdict.shown_by in ("", self._handler.node.id)
        why = _done(decision, "" if shown_here else _where(verdict))
        return RunResult(WorkerState.FAILED, failures=exits.FailuresWithCode(failures, code, why, shown_here))

    def stop_not_copied(self, left: tuple[str, ...]) -> RunResult:
        """Stop although training is done: these checkpoints are on this node only. A new agent on this node would copy them."""
        reason = f"training is done, but {', '.join(left)} could not be copied to checkpoint_dir and is on this node only"
        verdict = self._node_stop(diagnosis.STORAGE, reason, EX_TRY_AGAIN, "not-copied")
        logger.error("elastic_ext: %s; exit code %s", printable(reason), verdict.decision.exit_code)
        return self.stop(verdict, verdict.decision, remote_failure(verdict))

    def publish_leaving(self, error: SignalException | NodeDrained, host: HostProbe) -> None:
        """Publish the verdict of what has this agent leave a job that goes on."""
        if not isinstance(error, NodeDrained):
            self._publish_signal(error, host)
            return
        verdict = self._node_stop(diagnosis.PREEMPTION, str(error), EX_NODE, "drained")
        code = self._publish(verdict, verdict.decision)
        logger.warning("elastic_ext: %s; exit code %s", error, code)  # in place of a traceback

    def _publish_signal(self, error: SignalException, host: HostProbe) -> None:
        """Publish the verdict of a signal that ends this agent. The platform says who sent it, which decides the exit code."""
        if exits.job.verdict_code is not None:
            return  # the job has already ended
        host.start_asking()
        platform = host.evidence(PLATFORM_S).platform
        diagnosis = classify(
            Evidence(rank=-1, agent_signal=received(error).name, node=self._handler.node.host, platform=platform)
        )
        if diagnosis.tier == STOP_REQUESTED:
            decision = policy.decide(diagnosis, exit_codes=self._settings.exit_codes)
            self._publish(self._job_verdict(decision), decision)

    def _publish(self, verdict: JobVerdict, decision: Decision) -> int:
        """Write the verdict where schedulers look; return the exit code."""
        code = decision.exit_code or EX_FAILED  # never 0: the job has not finished
        self.closing = for_others(verdict, self._settings.exit_codes)
        exits.job.verdict_code = code
        exits.publish(json.loads(encode_verdict(replace(verdict, decision=decision))), self._settings.verdict_file)
        if verdict.replaces(self._handler.node.id) and decision.kind == diagnosis.HARDWARE:
            launch.report_bad_node(self._settings, self._handler.node.host, decision.reason)
        return code


def for_others(verdict: JobVerdict, preset: str) -> JobVerdict:
    """Return what the other nodes do if this one closes the job for its own verdict. preset: a key of policy.EXIT_CODES.

    Where only the host of this node is to be replaced, they are to be started again. Then the job's ledger is kept.
    """
    again = policy.exit_code_for(EX_TRY_AGAIN, preset)
    ill = policy.exit_code_for(EX_NODE, preset)
    if verdict.decision.response is not None or verdict.decision.exit_code not in (again, ill):
        return verdict
    return replace(verdict, decision=replace(verdict.decision, exit_code=again, response=diagnosis.Response.REQUEUE))


def reach_by(diagnosis_: Diagnosis) -> Reach:
    """Return which peers no longer acknowledged what a worker sent, by NCCL's words, if another worker's failure ended it."""
    if diagnosis_.response is not diagnosis.Response.FOLLOW:
        return NOTHING_KNOWN
    raised = diagnosis_.evidence.exception
    texts = (raised.message if raised is not None else "", diagnosis_.evidence.stderr_tail)
    return Reach(own_addresses(), unanswered(texts, diagnosis_.evidence.rank))
