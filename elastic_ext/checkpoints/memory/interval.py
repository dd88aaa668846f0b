"""How often to copy the state to memory. Pure.

The rule is a bound on the cost, not the interval of least expected cost (Young, Daly): that one grows with the time between
failures, while a copy in memory is to lose a step or two however rare failures are. Every rank gets the same answer from the same
timings of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.01  # of the time of the steps that copies may hold up training
MARGIN = 1.25  # a copy should be committed before the next one begins, with some time left
FIRST_EVERY = 10  # steps, until something is measured
LEAST_SEND_S = 2.0  # a new connection across a slow network takes some tenths of a second
HOLD_S = 20.0  # the longest that training waits for a copy to be committed; after 60 s without progress a round counts as hung
BUFFERS_HOLD_S = 2.0  # the longest that training waits for buffers; many gigabytes take longer
MAX_DOUBLINGS = 6  # of the interval while copies fail: 64 times as long


@dataclass(frozen=True)
class Timing:
    """What one rank has measured recently, in seconds.

    Attributes:
        step_s: a step, without the copy; None if unknown.
        stall_s: what a copy stalls training; None before the first.
        commit_s: the longest time from the end of the stall until a copy was committed; None before the first.
        wait_s: what training has waited on average for the copy before.
    """

    step_s: float | None = None
    stall_s: float | None = None
    commit_s: float | None = None
    wait_s: float = 0.0

    @property
    def held_s(self) -> float:
        """For how long a copy holds up training."""
        return (self.stall_s or 0.0) + self.wait_s


@dataclass(frozen=True)
class Interval:
    """Copy every `every` steps, for this reason."""

    every: int
    reason: str


def choose(asked: int | None, timings: Sequence[Timing], failures: int = 0) -> Interval:
    """Return the interval for all ranks.

    Args:
        asked: the setting memory_every, 1 or more; None: as often as SHARE allows.
        timings: those of all ranks. The slowest copy and the shortest step count.
        failures: attempts in a row that failed. Each doubles the interval, so that they cost ever less.
    """
    found = Interval(asked, f"memory_every={asked}") if asked is not None else _affordable(timings)
    if not failures:
        return found
    return Interval(found.every << min(failures, MAX_DOUBLINGS), f"{found.reason}; {failures} attempts in a row failed")


def send_limit_s(every: int, timing: Timing) -> float:
    """Return how long it may take to send a part to another node, in seconds.

    The next copy waits for it, and so does training for a while. So it may take as long as two intervals: if that is not enough,
    the next interval is longer, and so is the next limit.
    """
    return max(LEAST_SEND_S, 2 * every * (timing.step_s or 0.0))


def hold_limit_s(for_buffers: bool) -> float:
    """Return for how long training may wait for a copy that is not committed, or for buffers, in seconds.

    Less than a part may take to send: such a copy is committed while training goes on, and the next one is left out.
    """
    return BUFFERS_HOLD_S if for_buffers else HOLD_S


def _affordable(timings: Sequence[Timing]) -> Interval:
    steps = [each.step_s for each in timings if each.step_s]
    measured = [each for each in timings if each.stall_s is not None]
    if not steps or not measured:
        return Interval(FIRST_EVERY, "nothing is measured yet")
    step_s, slowest = min(steps), max(measured, key=lambda each: each.held_s)
    commit_s = max((each.commit_s for each in timings if each.commit_s is not None), default=0.0)
    by_stall, by_commit = math.ceil(slowest.held_s / (SHARE * step_s)), math.ceil(MARGIN * commit_s / step_s)
    if by_commit > by_stall:
        return Interval(by_commit, f"a copy is committed after {commit_s:.3g} s, and a step takes {step_s:.3g} s")
    every = max(1, by_stall)
    waits = f" and waits for {slowest.wait_s:.3g} s" if slowest.wait_s else ""
    held = f"a copy stalls for {slowest.stall_s:.3g} s{waits}"
    return Interval(every, f"{held}, {SHARE:.0%} of {every} steps of {step_s:.3g} s at most")
