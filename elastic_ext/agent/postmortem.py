"""The evidence of each worker of this node after a failed round, and the diagnosis of each one by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import ProcessFailure

from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.agent.report import FailedWorker
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.evidence import ErrorFile, Evidence, exit_status, read_error_file
from elastic_ext.failures.host import HostEvidence
from elastic_ext.failures.user_rules import UserRule
from elastic_ext.workers.hangs.detector import Stuck
from elastic_ext.workers.processes import Exit
from elastic_ext.workers.stderr.tails import StderrTails


@dataclass(frozen=True)
class EndedRound:
    """The workers of one node, all ended. Mappings and collections are by local rank, unless said otherwise.

    Attributes:
        node: the name of this host.
        host: the evidence of this host from the time of the round.
        stderr: the last lines that the workers wrote to stderr.
        warm: workers whose processes were warm standbys.
        hung: workers that the others waited for.
        torch_failures: torch's record of failed processes of a function entrypoint, by global rank.
        asked_to_end: count a worker that was asked to end as failed, however it ended, because none failed by itself.
    """

    node: str
    host: HostEvidence
    workers: LocalWorkers
    stderr: StderrTails
    warm: Collection[int]
    hung: Mapping[int, Stuck]
    torch_failures: Mapping[int, ProcessFailure]
    asked_to_end: bool


def failed_workers(ended: EndedRound, rules: Sequence[UserRule]) -> list[FailedWorker]:
    """Judge each worker that did not end well, one by one."""
    failed = []
    for local_rank, pid in ended.workers.processes.pids.items():
        exit_ = ended.workers.processes.exits.get(local_rank)
        error_file = read_error_file(ended.workers.error_files.get(local_rank, ""))
        exitcode = _failed_with(ended, local_rank, exit_, error_file)
        if exitcode is None:
            continue
        if local_rank in ended.hung:
            evidence = _of_hang(ended, local_rank)
        else:
            evidence = _of_exit(ended, local_rank, exitcode, exit_, error_file)
        failed.append(FailedWorker(local_rank, pid, exitcode, error_file, classify(evidence, rules)))
    return failed


def _failed_with(ended: EndedRound, local_rank: int, exit_: Exit | None, error_file: ErrorFile) -> int | None:
    """Return the exit code of a worker that failed; None if it did not fail."""
    if exit_ is None:
        return -signal.SIGKILL
    asked_to_end = ended.asked_to_end and exit_.stop_sent_ns is not None
    if not exit_.failed and not asked_to_end and local_rank not in ended.hung:
        return None
    if exit_.exitcode is not None:
        return exit_.exitcode
    # Torch or its forkserver has reaped the process of a function entrypoint; torch records those that failed.
    failure = ended.torch_failures.get(ended.workers.ranks[local_rank])
    if failure is not None:
        return int(failure.exitcode)
    return 1 if error_file.data is not None else None


def cause_and_others(failed: Sequence[FailedWorker]) -> tuple[FailedWorker, list[FailedWorker]]:
    """Return the worker that explains the failure on this node, and the others."""
    diagnosis = root_cause([worker.diagnosis for worker in failed])
    cause = next(worker for worker in failed if worker.diagnosis.evidence is diagnosis.evidence)
    return cause, [worker for worker in failed if worker is not cause]


def failed_by_itself(workers: LocalWorkers) -> bool:
    """Return whether one of the workers that were told to end had failed before.

    A worker that ends with an exception closes its connections. The others can fail because of that, and break the round, before
    its process is gone. Their failures must not hide its failure.
    """
    return any(
        exit_.exitcode is not None
        and exit_.failed
        and not exit_.ended_by_agent(read_error_file(workers.error_files.get(local_rank, "")).raised_ns)
        for local_rank, exit_ in workers.processes.exits.items()
    )


def _of_exit(ended: EndedRound, local_rank: int, exitcode: int, exit_: Exit | None, error_file: ErrorFile) -> Evidence:
    code, signal_name = exit_status(exitcode)
    host = ended.host
    table = ended.workers.progress
    progress = table.read(local_rank) if table is not None else None
    return Evidence(
        rank=ended.workers.ranks[local_rank],
        exit_code=code,
        signal=signal_name,
        exception=error_file.exception,
        stderr_tail=ended.stderr.tail(local_rank) or "",
        # The count covers the whole memory cgroup: it says nothing about a worker that ended in another way.
        oom_kills=host.oom_kills if signal_name == signal.SIGKILL.name or code == 128 + signal.SIGKILL else None,
        xids=host.xids,
        gpu_recovery=host.gpu_recovery,
        platform=host.platform,
        node=ended.node,
        step=progress.steps if progress and progress.pid else None,
        first_step_done=progress.first_step_done if progress else None,
        warm=local_rank in ended.warm,
        stopped_by_agent=exit_ is None or exit_.ended_by_agent(error_file.raised_ns),
        ended_ns=error_file.raised_ns or (exit_.seen_ns if exit_ is not None else time.monotonic_ns()),
    )


def _of_hang(ended: EndedRound, local_rank: int) -> Evidence:
    """Return the evidence without how the worker ended, because this agent ended it."""
    hung = ended.hung[local_rank]
    return Evidence(
        rank=hung.rank,
        xids=ended.host.xids,
        gpu_recovery=ended.host.gpu_recovery,
        platform=ended.host.platform,
        node=ended.node,
        step=hung.steps,
        first_step_done=hung.steps > 0,
        warm=local_rank in ended.warm,
        hang=True,
        hang_reason=hung.reason,
        hang_blame=hung.blame,
        ended_ns=time.monotonic_ns(),
    )
