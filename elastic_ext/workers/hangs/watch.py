"""The watch over one round's workers: it looks at their words and vitals when `hang` says that it is time to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from elastic_ext.workers.hangs import detector, process_stats, stacks, step_times
from elastic_ext.workers.hangs.detector import Activity
from elastic_ext.workers.hangs.process_stats import ProcessStats, Rates
from elastic_ext.workers.hangs.step_times import Mark
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)


class HangWatch:
    """Reading words costs microseconds; /proc is read only when all workers have been quiet for half of their limit.

    Attributes:
        stalled: all workers of this node stall, as of the last look. imminent: they soon will.
        step_s: seconds of a step lately, by local rank; empty: not known yet. Replaced, never changed in place.
    """

    def __init__(self, board: ProgressTable, ranks: Mapping[int, int], fixed_s: float | None) -> None:
        """ranks: of the workers, by local rank. fixed_s: the setting hang_timeout."""
        self.stalled = self.imminent = False
        self._board, self._ranks, self._fixed_s = board, dict(ranks), fixed_s
        self._began = time.monotonic()  # the count of who was looked at with a debugger, say, begins anew
        self._next_look = self._began
        self._sample: tuple[float, dict[int, ProcessStats]] | None = None  # of this stall: when, and what was read
        self._before: tuple[float, dict[int, ProcessStats]] | None = None
        self._worked: dict[int, float] = {}  # when each was last seen to work, or it was not known whether it did
        self._said_unknown = False
        self._slept: dict[int, float] = {}  # when each was last seen asleep in the kernel
        self.step_s: dict[int, float] = {}
        self._marks: dict[int, Mark] = {}
        self._slow: frozenset[int] = frozenset()

    def next_look_s(self) -> float:
        return max(0.0, self._next_look - time.monotonic())

    def look(self, pids: Mapping[int, int]) -> detector.Assessment | None:
        """See how they are, if it is time to; None: it is not. pids: of the workers that run, by local rank."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        if now > self._next_look + detector.LATE_S:
            self._begin_anew(now)
        self._look_at_pace(pids)
        workers = self._workers(pids, now)
        if workers and detector.needs_vitals(workers, self._fixed_s):
            self._take_vitals(pids, now)
            workers = self._workers(pids, now)
            if any(worker.debugged for worker in workers):
                self._begin_anew(now)
        elif self._sample is not None:
            self._sample = self._before = None
            self._forget_activity()
        verdict = detector.judge(workers, self._fixed_s)
        self.stalled, self.imminent = verdict.stalled, verdict.imminent
        self._next_look = now + detector.next_look_s(workers, self._fixed_s)
        return verdict

    def _look_at_pace(self, pids: Mapping[int, int]) -> None:
        words = {local_rank: self._board.read(local_rank) for local_rank in pids}
        marks = {local_rank: Mark(word.steps, word.last_step_ns / 1e9) for local_rank, word in words.items() if word.steps}
        times = step_times.step_times(self._marks, marks)
        if times is None:
            if self._marks.keys() != marks.keys():
                self._marks = marks
            return
        self.step_s, self._marks = times, marks
        slow = step_times.stragglers(times)
        if slow.keys() != self._slow:
            shown = ", ".join(f"rank {self._ranks[rank]} ({ratio:.2f} times the median)" for rank, ratio in sorted(slow.items()))
            logger.warning("elastic_ext: slower than the others: %s", shown or "nobody any more")
            self._slow = frozenset(slow)

    def _begin_anew(self, now: float) -> None:
        self._began = now
        self._forget_activity()

    def _forget_activity(self) -> None:
        self._worked.clear()
        self._slept.clear()

    def _take_vitals(self, pids: Mapping[int, int], now: float) -> None:
        self._before, self._sample = self._sample, (now, process_stats.read(pids.values()))
        for local_rank, pid in pids.items():
            rates = self._rates(pid)
            if detector.works(rates.cpu_share, rates.bytes_s):
                self._worked[local_rank] = now
            if pid in self._sample[1] and self._sample[1][pid].asleep_in_kernel:
                self._slept[local_rank] = now

        unknown = [self._ranks[local_rank] for local_rank, pid in pids.items() if _is_uncounted(self._sample[1].get(pid))]
        if unknown and not self._said_unknown:
            self._said_unknown = True
            logger.warning(
                "elastic_ext: what rank %s reads, writes, sends or receives cannot be counted here; it is never taken for idle",
                unknown[0],
            )

    def _rates(self, pid: int) -> Rates:
        """Since the sample before."""
        if self._before is None or self._sample is None:
            return Rates()
        (before_at, before), (at, sample) = self._before, self._sample
        if pid not in before or pid not in sample or at <= before_at:
            return Rates()
        return process_stats.rates(before[pid], sample[pid], at - before_at)

    def _workers(self, pids: Mapping[int, int], now: float) -> list[detector.Worker]:
        return [self._worker(local_rank, pid, self._board.read(local_rank), now) for local_rank, pid in pids.items()]

    def _worker(self, local_rank: int, pid: int, words: Progress, now: float) -> detector.Worker:
        seen = self._sample[1].get(pid) if self._sample is not None else None
        quiet_s = now - max(words.sign_ns / 1e9, self._began)
        worker = detector.Worker(
            self._ranks[local_rank],
            words.steps,
            quiet_s,
            words.reports,
            words.phase,
            words.gaps,
            state=seen.state if seen else "",
            debugged=seen.debugged if seen else False,
            known=words.pid != 0,
        )
        worked = self._worked.get(local_rank)
        if seen is None or worked is None or self._before is None:
            return worker
        # Idle for half of the limit, and quiet for all of it: the first sample was taken at the half.
        idle_s, lately_s = now - worked, 0.4 * detector.limit_s(worker, Activity.NONE, self._fixed_s)
        slept = now - self._slept.get(local_rank, -math.inf) < lately_s
        return replace(worker, idle_s=idle_s, working=idle_s < lately_s, asleep_in_kernel=slept)

    # Once the whole job hangs.

    def examine(self, pids: Mapping[int, int], stacks_files: Mapping[int, str]) -> dict[int, detector.Stuck]:
        """Where each worker is, by local rank; all are asked for their stacks, and those that can answer do."""
        now, sample = time.monotonic(), process_stats.read(pids.values())
        found = {}
        for local_rank, pid in pids.items():
            words, seen = self._board.read(local_rank), sample.get(pid, ProcessStats(""))
            rates = self._rates(pid)
            state = detector.condition(seen.state, seen.wchan, rates.cpu_share, rates.waiting_share)
            can_answer = words.stacks_armed and seen.state not in (detector.STOPPED, detector.ASLEEP_IN_KERNEL)
            stack = stacks.dump(pid, stacks_files[local_rank]) if can_answer else ""
            found[local_rank] = detector.Stuck(
                self._ranks[local_rank],
                words.steps,
                words.reports,
                now - max(words.sign_ns / 1e9, self._began),
                words.phase,
                seen.state,
                state if stack else f"{state}, and cannot show its stacks",
                stack,
            )
        return found


def _is_uncounted(seen: ProcessStats | None) -> bool:
    return seen is not None and (seen.io_bytes is None or seen.sockets is None)
