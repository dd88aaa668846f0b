"""Decides when to check the workers, and what to find out then. Pure, standard library only; times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_ext.workers.hangs import detector
from elastic_ext.workers.hangs.detector import Activity, WorkerStatus
from elastic_ext.workers.hangs.waits import Wait

STATS_SHARE = 0.45  # of the limit: the process stats are read from then on
LOOK_SHARE = 0.2  # of the limit of a wait: from then on the agent looks whether the workers stay; leaves time for STAY_SHARE
# Between later looks, and between reads of the process stats while this node claims a stall. No node looks again when the last
# one claims, so a claim may be this old, and older where an agent is late. The stays of all nodes must have a moment in common
# all the same: each lasts for 12 s at least.
LOOK_S = 3.0
# Of the interval between checks, 30 s by default: the process stats are compared over this time at least, however often they are
# read. Over LOOK_S, 60 ms would count as work: background threads, or a few dumps of stacks. Over 27 s it takes 0.54 s, which a
# process that computes uses up before the next look.
WINDOW_SHARE = 0.9
MIN_CHECK_S = 0.1


def next_check_s(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> float:
    """Return after how many seconds `assess` may give another answer, as long as this node claims no stall.

    The process stats are read at half of the smallest limit, and compared when a hang is imminent and at the limit. From then on,
    the interval stays at half of the floor, because a worker that works may stop working.
    """
    often = _often_s(fixed_s)
    quiet = [(worker.quiet_s, detector.limit_s(worker, Activity.NONE, fixed_s)) for worker in workers]
    if not quiet:
        return often
    until = (max(share * limit - quiet_s for quiet_s, limit in quiet) for share in (0.5, detector.IMMINENT_SHARE, 1.0))
    return max(MIN_CHECK_S, min(often, next((left_s for left_s in until if left_s > 0), often)))


def window_s(fixed_s: float | None = None) -> float:
    """Return over how many seconds the process stats are compared: less right after the first ones, more after a longer pause."""
    return WINDOW_SHARE * min(_often_s(fixed_s), detector.IDLE_FLOOR_S / 2)


def _often_s(fixed_s: float | None) -> float:
    """Return the longest time between two checks."""
    # The first step, or the end of an evaluation, can shorten the limits to this floor.
    return (detector.IDLE_FLOOR_S if fixed_s is None else fixed_s) / 2


def needs_stats(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> bool:
    """Return whether all workers have been quiet for so long that their process stats are needed."""
    return all(worker.quiet_s >= STATS_SHARE * detector.limit_s(worker, Activity.NONE, fixed_s) for worker in workers)


def needs_looks(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> bool:
    """Return whether all workers have been quiet for so long that it matters whether they stay in their calls."""
    return fixed_s is None and all(
        worker.steady and not worker.debugged and worker.quiet_s >= _look_from_s(worker) for worker in workers
    )


def next_look_s(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> float:
    """Return after how many seconds a look may give another answer; inf: in none, because the limit of a wait does not apply."""
    if fixed_s is not None:
        return float("inf")
    if not workers or not all(worker.steady for worker in workers):
        return LOOK_SHARE * detector.WAIT_FLOOR_S[Wait.RANKS]  # they may be by then
    first_s = max(_look_from_s(worker) - worker.quiet_s for worker in workers)
    if first_s > 0:
        return max(MIN_CHECK_S, first_s)
    limits = [(worker, detector.wait_limit_s(worker)) for worker in workers]
    claim_s = max(max(limit - worker.quiet_s, detector.STAY_SHARE * limit - worker.stayed_s) for worker, limit in limits)
    return max(MIN_CHECK_S, min(LOOK_S, claim_s)) if claim_s > 0 else LOOK_S


def _look_from_s(worker: WorkerStatus) -> float:
    """Return the quiet seconds from which on this worker is looked at. Before that, nobody knows what it waits for."""
    return LOOK_SHARE * detector.wait_limit_s(replace(worker, wait=Wait.RANKS))
