"""What became of the workers of a round that has failed: the evidence of each, and what it means taken alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.elastic.multiprocessing import ProcessFailure

from elastic_ext.agent.report import FailedWorker
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.evidence import ErrorFile, Evidence, exit_status, read_error_file
from elastic_ext.failures.host import HostEvidence
from elastic_ext.failures.user_rules import UserRule
from elastic_ext.workers.hangs.detector import Stuck
from elastic_ext.workers.processes import Exit
from elastic_ext.workers.progress import ProgressTable
from elastic_ext.workers.stderr.tails import StderrTails


@dataclass(frozen=True)
class Round:
    """The workers of one node, all ended, by local rank.

    Attributes:
        node: the name of this host.
        ranks: the workers' global ranks.
        exits: of those that have been seen to end.
        warm: those whose processes were warm standbys.
        hung: those that the others waited for.
        torch_failures: what torch saw fail of a function's processes, by global rank.
        all_asked: who was asked to end has not failed.
    """

    node: str
    host: HostEvidence
    pids: Mapping[int, int]
    ranks: Mapping[int, int]
    exits: Mapping[int, Exit]
    error_files: Mapping[int, str]
    stderr: StderrTails
    board: ProgressTable | None = None
    warm: Collection[int] = ()
    hung: Mapping[int, Stuck] = field(default_factory=dict)
    torch_failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    all_asked: bool = False


def failed_workers(ended: Round, rules: Sequence[UserRule]) -> list[FailedWorker]:
    """Every worker that did not end well, judged one by one."""
    failed = []
    for local_rank, pid in ended.pids.items():
        exit_ = ended.exits.get(local_rank)
        asked_to_end = ended.all_asked and exit_ is not None and exit_.asked_ns is not None
        if exit_ is not None and not exit_.failed and not asked_to_end and local_rank not in ended.hung:
            continue
        rank = ended.ranks[local_rank]
        exitcode = exit_.exitcode if exit_ is not None else -signal.SIGKILL
        error_file = read_error_file(ended.error_files.get(local_rank, ""))
        if exitcode is None:  # a function's process that torch or its forkserver has reaped: torch tells of one that failed
            if rank in ended.torch_failures:
                exitcode = ended.torch_failures[rank].exitcode
            elif error_file.data is not None:
                exitcode = 1
            else:
                continue
        if local_rank in ended.hung:
            evidence = _of_hang(ended, local_rank)
        else:
            evidence = _of_exit(ended, local_rank, exitcode, exit_, error_file)
        failed.append(FailedWorker(local_rank, pid, exitcode, error_file, classify(evidence, rules)))
    return failed


def cause_and_others(failed: Sequence[FailedWorker]) -> tuple[FailedWorker, list[FailedWorker]]:
    """The worker that explains the failure here, and the others."""
    diagnosis = root_cause([worker.diagnosis for worker in failed])
    cause = next(worker for worker in failed if worker.diagnosis.evidence is diagnosis.evidence)
    return cause, [worker for worker in failed if worker is not cause]


def failed_by_itself(exits: Mapping[int, Exit], error_files: Mapping[int, str]) -> bool:
    """Whether one of the workers that were told to end had failed before that.

    A worker closes its connections while it ends of an exception: so the others can fail of it, and break the round, before
    its process is gone. What they fail of must not hide what it failed of.
    """
    return any(
        exit_.exitcode is not None
        and exit_.failed
        and not exit_.was_asked(read_error_file(error_files.get(local_rank, "")).raised_ns)
        for local_rank, exit_ in exits.items()
    )


def _of_exit(ended: Round, local_rank: int, exitcode: int, exit_: Exit | None, error_file: ErrorFile) -> Evidence:
    code, signal_name = exit_status(exitcode)
    host = ended.host
    progress = ended.board.read(local_rank) if ended.board else None
    return Evidence(
        rank=ended.ranks[local_rank],
        exit_code=code,
        signal=signal_name,
        exception=error_file.exception,
        stderr_tail=ended.stderr.tail(local_rank) or "",
        # The count is of a whole group: it says nothing of a worker that ended otherwise.
        oom_kills=host.oom_kills if signal_name == signal.SIGKILL.name or code == 128 + signal.SIGKILL else None,
        xids=host.xids,
        gpu_recovery=host.gpu_recovery,
        platform=host.platform,
        node=ended.node,
        step=progress.steps if progress and progress.pid else None,
        first_step_done=progress.first_step_done if progress else None,
        warm=local_rank in ended.warm,
        stopped_by_agent=exit_ is None or exit_.was_asked(error_file.raised_ns),
        ended_ns=error_file.raised_ns or (exit_.seen_ns if exit_ is not None else time.monotonic_ns()),
    )


def _of_hang(ended: Round, local_rank: int) -> Evidence:
    """How it ended is how we ended it, and says nothing."""
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
