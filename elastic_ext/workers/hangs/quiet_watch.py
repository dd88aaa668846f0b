"""Watches one round's workers for a silence that a missing answer explains (`unanswered`), beside `watch` and apart from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from elastic_ext.workers.hangs import detector, tcp_connections, unanswered
from elastic_ext.workers.hangs.detector import WorkerStatus
from elastic_ext.workers.hangs.unanswered import Reach
from elastic_ext.workers.hangs.watch import Stall
from elastic_ext.workers.progress import ProgressTable


class QuietWatch:
    """The quiet watch of one round. /proc and the kernel's sockets are read only when all workers have been quiet for a while.

    Attributes:
        reach: the hosts that did not answer these workers at the last check; None: not all of them were quiet.
    """

    def __init__(self, progress: ProgressTable, ranks: Mapping[int, int], fixed_s: float | None) -> None:
        """Start watching. ranks: the workers' global ranks, by local rank. fixed_s: the setting hang_timeout."""
        self.reach: Reach | None = None
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

    def examine(self, pids: Mapping[int, int]) -> Reach:
        """Return the hosts that have not answered the workers for so long that it explains a hang. pids: by local rank."""
        return unanswered.explaining(self._read_reach(pids), self._fixed_s)

    def _read_reach(self, pids: Mapping[int, int]) -> Reach:
        """Return the hosts that do not answer the workers now; none if that is not known. pids: by local rank."""
        found = tcp_connections.by_rank({self._ranks[local_rank]: pid for local_rank, pid in pids.items()})
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
