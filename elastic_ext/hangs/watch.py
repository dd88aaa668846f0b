"""Watches one round's workers for hangs. Reads their progress and their process stats when the detector says that it is time.

`HangWatch` follows `detector`; `QuietWatch`, apart from it, looks for a silence that a missing answer explains (`unanswered`).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base import records
from elastic_ext.base.diagnosis import Collective
from elastic_ext.hangs import detector, process_stats, sockets, stacks, unanswered
from elastic_ext.hangs.detector import Activity, Assessment, Stuck, WorkerStatus
from elastic_ext.hangs.process_stats import ProcessStats, Rates
from elastic_ext.hangs.stacks import CallChecks, FirstAnswers, is_outstanding
from elastic_ext.workers import worker_env
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)

NOTHING_FOUND = Assessment(False, (), "not checked yet")
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
        self._found = NOTHING_FOUND  # at the last check
        self._progress, self._fixed_s = progress, fixed_s
        self._new = {local_rank: WorkerStatus(rank, 0, 0.0, world=world) for local_rank, rank in ranks.items()}
        self._quiet_from = time.monotonic()  # earlier quiet time does not count: a debugger, or a machine that stood still
        self._next_check = self._next_stats = self._quiet_from
        self._stall: Stall | None = None  # while all workers are quiet
        self._call_checks: CallChecks | None = None  # while all are quiet for a good part of the limit of a wait
        self._warned = False
        self._first_answers = FirstAnswers()

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stalled at the last check."""
        return self._found.stalled

    @property
    def imminent(self) -> bool:
        """Whether they soon will."""
        return self._found.imminent

    def next_check_s(self) -> float:
        """Return the seconds until check() has something to do."""
        return max(0.0, self._next_check - time.monotonic())

    def check(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> Assessment | None:
        """Assess the workers, or return None before the next check is due.

        pids, stacks_files: those of running workers, and where each writes its stacks, by local rank.
        """
        now = time.monotonic()
        if now < self._next_check:
            return None
        if now > self._next_check + detector.LATE_S:
            self._restart_count(now)
        if self._fixed_s is None:
            self._first_answers.ask(pids, self._progress, now)
        workers = self._status(pids, now)
        if not workers or not detector.needs_stats(workers, self._fixed_s):
            self._stall = None
        elif now >= self._next_stats:
            self._read_stats(pids, now)
            workers = self._status(pids, now)
            if any(worker.debugged for worker in workers):
                self._restart_count(now)
        if now >= self._next_stats:
            self._next_stats = now + detector.next_check_s(workers, self._fixed_s)
        workers = self._check_calls(workers, pids, stacks_files, now)
        self._found = detector.assess(workers, self._fixed_s)
        if self._found.waiting and self._call_checks is not None and not self._call_checks.confirm(pids, stacks_files):
            self._found = detector.assess(self._status(pids, now), self._fixed_s)
        if self._found.stalled and not self._found.waiting:  # the checks of calls keep a wait up to date
            self._next_stats = min(self._next_stats, now + detector.CALL_CHECK_S)
        left_s = self._call_checks.left_s(pids, now) if self._call_checks is not None else 0.0
        self._next_check = min(self._next_stats, now + max(left_s, detector.next_call_check_s(workers, self._fixed_s)))
        return self._found

    def _check_calls(
        self, workers: list[WorkerStatus], pids: Mapping[int, int], stacks_files: Mapping[int, str], now: float
    ) -> list[WorkerStatus]:
        """Find out whether the workers stay in their calls, if it is time to; return them with what was found."""
        if not workers or not detector.needs_call_checks(workers, self._fixed_s):
            self._call_checks = None
            return workers
        if self._call_checks is None:
            self._call_checks = CallChecks()
        self._call_checks.update(pids, {each: self._progress.read(each) for each in pids}, stacks_files, now)
        return self._status(pids, now)

    def _restart_count(self, now: float) -> None:
        self._quiet_from, self._call_checks, self._stall = now, None, None

    def _read_stats(self, pids: Mapping[int, int], now: float) -> None:
        if self._stall is None:
            self._stall = Stall(detector.window_s(self._fixed_s))
        self._stall.update(pids, now)
        if not self._warned and (uncounted := self._stall.uncounted()):
            self._warned = True
            logger.warning(
                "elastic_ext: cannot count the reads, writes and network traffic of rank %s; it never counts as idle",
                self._new[uncounted[0]].rank,
            )

    def _status(self, pids: Mapping[int, int], now: float) -> list[WorkerStatus]:
        workers = []
        for local_rank in pids:
            progress = self._progress.read(local_rank)
            worker = replace(
                self._new[local_rank],
                steps=progress.steps,
                quiet_s=self._quiet_s(progress, now),
                reports=progress.reports,
                phase=progress.phase,
                gaps=progress.gaps,
                known=progress.pid != 0,
            )
            if self._stall is not None:
                worker = self._stall.complete(worker, local_rank, detector.limit_s(worker, Activity.NONE, self._fixed_s))
            if self._call_checks is not None:
                wait, stayed_s = self._call_checks.stay(local_rank, now)
                worker = replace(worker, wait=wait, stayed_s=stayed_s)
            workers.append(worker)
        return workers

    def _quiet_s(self, progress: Progress, now: float) -> float:
        return now - max(progress.sign_ns / 1e9, self._quiet_from)

    # Once the whole job hangs.

    def examine(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> dict[int, Stuck]:
        """Return where each worker is stuck, by local rank. Asks every worker that can answer for its stacks.

        stacks_files: where each worker writes its stacks, by local rank.
        """
        now, sample = time.monotonic(), process_stats.read(pids.values())
        found = {}
        for local_rank, pid in pids.items():
            progress, stats = self._progress.read(local_rank), sample.get(pid, ProcessStats(""))
            rates = self._rates(local_rank)
            condition = detector.condition(stats.state, stats.wchan, rates.cpu_share, rates.waiting_share)
            stack = stacks.dump(pid, stacks_files[local_rank]) if stacks.can_dump(progress, stats) else ""
            found[local_rank] = Stuck(
                self._new[local_rank].rank,
                progress.steps,
                progress.reports,
                self._quiet_s(progress, now),
                progress.phase,
                stats.state,
                condition if stack else f"{condition}, and cannot show its stacks",
                stack,
                collective_in(stacks_files[local_rank], self._new[local_rank].rank) if is_outstanding(progress, now) else None,
            )
        return found

    def _rates(self, local_rank: int) -> Rates:
        rates = self._stall.rates(local_rank) if self._stall is not None else Rates()
        return self._call_checks.rates(local_rank) if rates == Rates() and self._call_checks is not None else rates


def collective_in(stacks_file: str, rank: int) -> Collective | None:
    """Return which collective of a worker does not complete; None if it has not said. See `recorder.oldest`."""
    path = worker_env.collective_path(stacks_file)
    try:
        with open(path or "", "rb") as file:
            said = json.loads(file.read(COLLECTIVE_BYTES))
        return records.build(Collective, {**said, "rank": rank}, path or "") if said else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, records.RecordError) as error:
        logger.debug("cannot read %s: %s", path, error)
        return None


@dataclass(frozen=True)
class Sample:
    """The stats of all workers at one moment (monotonic seconds), by local rank; None for one that cannot be read."""

    at: float
    stats: Mapping[int, ProcessStats | None]


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

    def record(self, stats: Mapping[int, ProcessStats | None], now: float) -> None:
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

    def rates(self, local_rank: int, since: int = 0) -> Rates:
        """Return this worker's rates from sample number `since`, by default of a window ago, to the last one."""
        if len(self._samples) < 2:
            return Rates()
        first, last = self._samples[since], self._samples[-1]
        before, now = first.stats.get(local_rank), last.stats.get(local_rank)
        return process_stats.rates(before, now, last.at - first.at) if before and now and last.at > first.at else Rates()

    def uncounted(self) -> list[int]:
        """Return the local ranks whose bytes the kernel does not report."""
        found = self._samples[-1].stats.items() if self._samples else ()
        return [local_rank for local_rank, each in found if each is not None and (each.io_bytes is None or each.sockets is None)]

    def complete(self, worker: WorkerStatus, local_rank: int, limit_s: float) -> WorkerStatus:
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


class QuietWatch:
    """The quiet watch of one round. /proc and the kernel's sockets are read only when all workers have been quiet for a while."""

    def __init__(self, progress: ProgressTable, ranks: Mapping[int, int], fixed_s: float | None) -> None:
        """Start watching. ranks: the workers' global ranks, by local rank. fixed_s: the setting hang_timeout."""
        # the hosts that did not answer these workers at the last check; None: not all of them were quiet
        self.reach: unanswered.Reachability | None = None
        self._progress, self._ranks, self._fixed_s = progress, dict(ranks), fixed_s
        self._quiet_from = time.monotonic()  # earlier quiet time does not count
        self._next_check = self._quiet_from
        self._stall: Stall | None = None  # while all workers are quiet

    def next_check_s(self) -> float:
        """Return the seconds until check() has something to do."""
        return max(0.0, self._next_check - time.monotonic())

    def check(self, pids: Mapping[int, int]) -> None:
        """Update `reach` if the next check is due. pids: those of running workers, by local rank."""
        now = time.monotonic()
        if now < self._next_check:
            return
        if now > self._next_check + detector.LATE_S:
            self._restart_count(now)
        workers = [self._status(local_rank, now) for local_rank in pids]
        limit_s = unanswered.limit_s(workers, self._fixed_s)
        reach = None
        if workers and unanswered.needs_stats(workers, limit_s):
            workers = self._with_stats(workers, pids, now, limit_s)
            reach = self._read_reach(pids) if unanswered.is_quiet(workers, limit_s) else None
        else:
            self._stall = None
        self.reach = unanswered.lasting(reach, limit_s) if reach is not None else None
        self._next_check = now + unanswered.next_check_s(workers, limit_s, reach)

    def examine(self, pids: Mapping[int, int]) -> unanswered.Reachability:
        """Return the hosts that have not answered the workers for so long that it explains a hang. pids: by local rank."""
        return unanswered.explaining(self._read_reach(pids), self._fixed_s)

    def _read_reach(self, pids: Mapping[int, int]) -> unanswered.Reachability:
        """Return the hosts that do not answer the workers now; none if that is not known. pids: by local rank."""
        inodes = process_stats.open_sockets(pids.values())
        found = sockets.connections({self._ranks[local_rank]: inodes[pid] for local_rank, pid in pids.items()})
        return unanswered.reach_of(found or {})

    def _restart_count(self, now: float) -> None:
        self._quiet_from, self._stall = now, None

    def _status(self, local_rank: int, now: float) -> WorkerStatus:
        row = self._progress.read(local_rank)
        quiet_s = now - max(row.sign_ns / 1e9, self._quiet_from)
        return WorkerStatus(self._ranks[local_rank], row.steps, quiet_s, row.reports, row.phase, row.gaps, known=row.pid != 0)

    def _with_stats(
        self, workers: Sequence[WorkerStatus], pids: Mapping[int, int], now: float, limit_s: float
    ) -> list[WorkerStatus]:
        if self._stall is None:
            self._stall = Stall(unanswered.window_s(limit_s))
        self._stall.update(pids, now)
        complete = [self._stall.complete(*each, limit_s) for each in zip(workers, pids, strict=True)]
        if any(worker.debugged for worker in complete):
            self._restart_count(now)
        return complete
