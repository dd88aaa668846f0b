"""Watches one round's workers for hangs. Reads their progress and their process stats when the detector says that it is time."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_ext.base import diagnosis, records
from elastic_ext.hangs import detector, process_stats, stacks, unanswered
from elastic_ext.workers import worker_env
from elastic_ext.workers.progress import ProgressTable

logger = logging.getLogger(__name__)

NOTHING_FOUND = detector.Assessment(False, (), "not checked yet")
COLLECTIVE_BYTES = 4096
RECENT_SHARE = 0.4  # of the limit: activity within this time counts as recent


class HangWatch:
    """The hang watch of one round.

    Reading the progress costs microseconds. /proc is read, and the workers' calls are checked, only when all of them have been
    quiet for half of their limit, every few seconds while they stall, and once when a worker has started.
    """

    def __init__(self, progress: ProgressTable, ranks: Mapping[int, int], fixed_s: float | None, world: int = 1) -> None:
        """Start watching.

        ranks: the workers' global ranks, by local rank. fixed_s: the setting hang_timeout. world: number of ranks of the job.
        """
        self._progress, self._fixed_s = progress, fixed_s
        self._new = {local_rank: detector.WorkerStatus(rank, 0, 0.0, world=world) for local_rank, rank in ranks.items()}
        self._quiet_from = time.monotonic()  # earlier quiet time does not count: a debugger, or a machine that stood still
        self._next_check = self._quiet_from
        self._stall: Stall | None = None  # while all workers are quiet
        self._found = NOTHING_FOUND  # at the last check
        self._next_stats = self._next_check
        self._call_checks: stacks.CallChecks | None = None  # while all are quiet for a good part of the limit of a wait
        self._warned = False
        self._first_answers = stacks.FirstAnswers()

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stalled at the last check."""
        return self._found.stalled

    @property
    def imminent(self) -> bool:
        """Whether they soon will."""
        return self._found.imminent

    def next_check_s(self) -> float:
        return max(0.0, self._next_check - time.monotonic())

    def check(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> detector.Assessment | None:
        """Assess the workers, or return None before the next check is due.

        pids, stacks_files: those of running workers, and where each writes its stacks, by local rank.
        """
        now = time.monotonic()
        if now > self._next_check + detector.LATE_S:
            self._restart_count(now)
        if now < self._next_check:
            return None
        if self._fixed_s is None:
            self._first_answers.ask(pids, self._progress, now)
        workers = self._workers(pids, now)
        if not workers or not detector.needs_stats(workers, self._fixed_s):
            self._stall = None
        elif now >= self._next_stats:
            self._stall = self._stall or Stall(detector.window_s(self._fixed_s))
            self._stall.update(pids, now)
            self._warn_of_uncounted(self._stall)
            workers = self._workers(pids, now)
            if any(worker.debugged for worker in workers):
                self._restart_count(now)
        if now >= self._next_stats:
            self._next_stats = now + detector.next_check_s(workers, self._fixed_s)
        workers = self._check_calls(workers, pids, stacks_files, now)
        self._found = detector.assess(workers, self._fixed_s)
        if self._found.waiting and self._call_checks is not None and not self._call_checks.confirm(pids, stacks_files):
            self._found = detector.assess(self._workers(pids, now), self._fixed_s)
        if self._found.stalled and not self._found.waiting:  # the checks of calls keep a wait up to date
            self._next_stats = min(self._next_stats, now + detector.CALL_CHECK_S)
        left_s = self._call_checks.left_s(pids, now) if self._call_checks is not None else 0.0
        self._next_check = min(self._next_stats, now + max(left_s, detector.next_call_check_s(workers, self._fixed_s)))
        return self._found

    def _check_calls(
        self, workers: list[detector.WorkerStatus], pids: Mapping[int, int], stacks_files: Mapping[int, str], now: float
    ) -> list[detector.WorkerStatus]:
        """Find out whether the workers stay in their calls, if it is time to; return them with what was found."""
        if not workers or not detector.needs_call_checks(workers, self._fixed_s):
            self._call_checks = None
            return workers
        if self._call_checks is None:
            self._call_checks = stacks.CallChecks()
        self._call_checks.update(pids, {each: self._progress.read(each) for each in pids}, stacks_files, now)
        return self._workers(pids, now)

    def _restart_count(self, now: float) -> None:
        self._quiet_from, self._stall, self._call_checks = now, None, None

    def _warn_of_uncounted(self, stall: Stall) -> None:
        if not self._warned and (uncounted := stall.uncounted()):
            self._warned = True
            logger.warning(
                "elastic_ext: cannot count the reads, writes and network traffic of rank %s; it never counts as idle",
                self._new[uncounted[0]].rank,
            )

    def _status(self, local_rank: int, now: float) -> detector.WorkerStatus:
        row = self._progress.read(local_rank)
        return replace(
            self._new[local_rank],
            steps=row.steps,
            quiet_s=now - max(row.sign_ns / 1e9, self._quiet_from),
            reports=row.reports,
            phase=row.phase,
            gaps=row.gaps,
            known=row.pid != 0,
        )

    def _workers(self, pids: Mapping[int, int], now: float) -> list[detector.WorkerStatus]:
        workers = []
        for local_rank in pids:
            worker = self._status(local_rank, now)
            if self._stall is not None:
                worker = self._stall.complete(worker, local_rank, detector.limit_s(worker, detector.Activity.NONE, self._fixed_s))
            if self._call_checks is not None:
                wait, stayed_s = self._call_checks.stay(local_rank, now)
                worker = replace(worker, wait=wait, stayed_s=stayed_s)
            workers.append(worker)
        return workers

    # Once the whole job hangs.

    def examine(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> dict[int, detector.Stuck]:
        """Return where each worker is stuck, by local rank. Asks every worker that can answer for its stacks.

        stacks_files: where each worker writes its stacks, by local rank.
        """
        now, sample = time.monotonic(), process_stats.read(pids.values())
        found = {}
        for local_rank, pid in pids.items():
            progress, stats = self._progress.read(local_rank), sample.get(pid, process_stats.ProcessStats(""))
            rates, file = self._rates(local_rank), stacks_files[local_rank]
            condition = detector.condition(stats.state, stats.wchan, rates.cpu_share, rates.waiting_share)
            stack = stacks.dump(pid, file) if stacks.can_dump(progress, stats) else ""
            worker = replace(self._status(local_rank, now), state=stats.state)
            found[local_rank] = detector.Stuck(
                **vars(worker),
                condition=condition if stack else f"{condition}, and cannot show its stacks",
                stack=stack,
                collective=collective_in(file, worker.rank) if stacks.is_outstanding(progress, now) else None,
            )
        return found

    def silent_hosts(self, pids: Mapping[int, int]) -> list[unanswered.Unanswered]:
        """Return the hosts that do not answer the workers; none if that is not known. pids: by local rank."""
        inodes = process_stats.open_sockets(pids.values())
        found = process_stats.connections({self._new[local_rank].rank: inodes[pid] for local_rank, pid in pids.items()})
        return unanswered.silent_hosts(found or {})

    def _rates(self, local_rank: int) -> process_stats.Rates:
        rates = self._stall.rates(local_rank) if self._stall is not None else process_stats.Rates()
        return self._call_checks.rates(local_rank) if rates == process_stats.Rates() and self._call_checks is not None else rates


def collective_in(stacks_file: str, rank: int) -> diagnosis.Collective | None:
    """Return which collective of a worker does not complete; None if it has not said. See `recorder.oldest`."""
    path = worker_env.collective_path(stacks_file)
    try:
        with open(path or "", "rb") as file:
            said = json.loads(file.read(COLLECTIVE_BYTES))
        return records.build(diagnosis.Collective, {**said, "rank": rank}, path or "") if said else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, records.RecordError) as error:
        logger.debug("cannot read %s: %s", path, error)
        return None


@dataclass(frozen=True)
class Sample:
    """The stats of all workers at one moment (monotonic seconds), by local rank; None for one that cannot be read."""

    at: float
    stats: Mapping[int, process_stats.ProcessStats | None]


class Stall:
    """The activity of the workers' processes while all workers are quiet. A stall ends when one gives a sign of life.

    Each sample is compared with one that is a window old, and with the one before it unless that is too young to separate work
    from noise. So work that has just begun counts before the first claim, and each of the frequent checks after it sees a whole
    window.
    """

    def __init__(self, window_s: float) -> None:
        """window_s: the newest sample that is as old as this is compared, or the first. Half of it separates work from noise."""
        self._window_s = window_s
        self._samples: deque[Sample] = deque()  # the first one is a window old
        self._worked: dict[int, float] = {}  # when each was last seen to work, or its activity was not known
        self._slept: dict[int, float] = {}  # when each was last seen asleep in the kernel

    def update(self, pids: Mapping[int, int], now: float) -> None:
        """Read the stats of all workers and record them. pids: by local rank."""
        sample = process_stats.read(pids.values())
        self.record({local_rank: sample.get(pid) for local_rank, pid in pids.items()}, now)

    def record(self, stats: Mapping[int, process_stats.ProcessStats | None], now: float) -> None:
        """Record what each worker has done over the window that ends now. stats: see Sample."""
        self._samples.append(Sample(now, stats))
        while len(self._samples) > 2 and now - self._samples[1].at >= self._window_s:
            self._samples.popleft()
        spans = [self.rates]
        if len(self._samples) > 2 and now - self._samples[-2].at >= self._window_s / 2:
            spans.append(functools.partial(self.rates, since=-2))
        for local_rank, each in stats.items():
            if any(detector.works(rates.cpu_share, rates.bytes_s) for rates in (span(local_rank) for span in spans)):
                self._worked[local_rank] = now
            if each is not None and each.asleep_in_kernel:
                self._slept[local_rank] = now

    def rates(self, local_rank: int, since: int = 0) -> process_stats.Rates:
        """Return this worker's rates from sample number `since`, by default of a window ago, to the last one."""
        if len(self._samples) > 1:
            first, last = self._samples[since], self._samples[-1]
            before, now = first.stats.get(local_rank), last.stats.get(local_rank)
            if before and now and last.at > first.at:
                return process_stats.rates(before, now, last.at - first.at)
        return process_stats.Rates()

    def uncounted(self) -> list[int]:
        """Return the local ranks whose bytes the kernel does not report."""
        found = self._samples[-1].stats.items() if self._samples else ()
        return [local_rank for local_rank, each in found if each is not None and (each.io_bytes is None or each.sockets is None)]

    def complete(self, worker: detector.WorkerStatus, local_rank: int, limit_s: float) -> detector.WorkerStatus:
        """Add what its processes showed at the last check. limit_s: how long it may be quiet if no worker works."""
        last = self._samples[-1] if self._samples else None
        stats = last.stats.get(local_rank) if last is not None else None
        if last is None or stats is None:
            return worker
        worker = replace(worker, state=stats.state, debugged=stats.debugged)
        worked = self._worked.get(local_rank)
        if worked is None or len(self._samples) < 2:
            return worker
        # Idle for half of the limit, and quiet for all of it: the first check was at the half.
        idle_s, recent_s = last.at - worked, RECENT_SHARE * limit_s
        slept = last.at - self._slept.get(local_rank, -math.inf) < recent_s
        return replace(worker, idle_s=idle_s, working=idle_s < recent_s, asleep_in_kernel=slept)
