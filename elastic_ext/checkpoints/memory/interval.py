"""How many steps lie between two copies in memory. Pure, standard library only: the planner asks it, too.

How often a job fails is not known, only for how long it has not: that stands for the mean time between failures in Young's
interval of least expected cost. At any constant rate of failures this costs a third more than the best interval does. Two bounds
on the cost hold besides, so that a failure loses a few steps however rare it is. Every rank gets the same answer from the same
timings of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.01  # of the time of the steps that copies may hold up training
LEAST_SHARE = 0.001  # however long nothing fails
MARGIN = 1.25  # a copy should be committed before the next one begins, with some time left
FIRST_EVERY = 10  # steps, until something is measured
MAX_DOUBLINGS = 6  # of the interval while copies fail: 64 times as long


@dataclass(frozen=True)
class Timing:
    """What one rank has measured recently, in seconds.

    Attributes:
        step_s: a step, without the copy; None if unknown.
        stall_s: what a copy stalls training; None before the first.
        commit_s: the longest time from the end of the stall until a copy was committed; None before the first.
        wait_s: what training has waited on average for the copy before.
        age_s: since the workers' first step, so for how long the job has not failed.
    """

    step_s: float | None = None
    stall_s: float | None = None
    commit_s: float | None = None
    wait_s: float = 0.0
    age_s: float = 0.0

    @property
    def held_s(self) -> float:
        """For how long a copy holds up training."""
        return (self.stall_s or 0.0) + self.wait_s


def choose(asked: int | None, timings: Sequence[Timing], failures: int = 0) -> tuple[int, str]:
    """Return every how many steps to copy, the same on all ranks, and why.

    Args:
        asked: the setting memory_every, 1 or more; None: as often as SHARE allows, and ever more rarely while nothing fails.
        timings: those of all ranks. The slowest copy and the shortest step count.
        failures: attempts in a row that failed. Each doubles the interval, so that they cost ever less.
    """
    every, reason = (asked, f"memory_every={asked}") if asked is not None else _affordable(timings)
    if not failures:
        return every, reason
    return every << min(failures, MAX_DOUBLINGS), f"{reason}; {failures} attempts in a row failed"


def _affordable(timings: Sequence[Timing]) -> tuple[int, str]:
    steps = [each.step_s for each in timings if each.step_s]
    measured = [each for each in timings if each.stall_s is not None]
    if not steps or not measured:
        return FIRST_EVERY, "nothing is measured yet"
    step_s, slowest = min(steps), max(measured, key=lambda each: each.held_s)
    commit_s = max((each.commit_s for each in timings if each.commit_s is not None), default=0.0)
    by_stall, by_commit = math.ceil(slowest.held_s / (SHARE * step_s)), math.ceil(MARGIN * commit_s / step_s)
    age_s = min(each.age_s for each in timings)
    by_age = math.ceil(min(math.sqrt(2 * slowest.held_s * age_s), slowest.held_s / LEAST_SHARE) / step_s)
    if by_commit > max(by_stall, by_age):
        return by_commit, f"a copy is committed after {commit_s:.3g} s, and a step takes {step_s:.3g} s"
    waits = f" and waits for {slowest.wait_s:.3g} s" if slowest.wait_s else ""
    held = f"a copy stalls for {slowest.stall_s:.3g} s{waits}"
    if by_age > max(1, by_stall):
        return by_age, f"{held}, and nothing has failed for {age_s:.3g} s"
    every = max(1, by_stall)
    return every, f"{held}, {SHARE:.0%} of {every} steps of {step_s:.3g} s at most"
