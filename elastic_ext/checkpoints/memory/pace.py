"""How often one rank copies its state to memory, by what it measures. Pure, standard library only: the planner asks, too.

What it may cost is in `base.save_cost`. Every rank gets the same answer from the same timings of all ranks.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.base.save_cost import SHARE, interval_by_age_s, interval_by_share_s

logger = logging.getLogger(__name__)

MARGIN = 1.25  # a copy should be committed before the next one begins, with some time left
FIRST_EVERY = 10  # steps, until something is measured
MAX_DOUBLINGS = 6  # of the interval while copies fail: 64 times as long


@dataclass(frozen=True)
class Timing:
    """What one rank has measured recently, in seconds."""

    step_s: float | None = None  # a step, without the copy; None if unknown
    stall_s: float | None = None  # what a copy stalls training; None before the first
    commit_s: float | None = None  # the longest time from the end of the stall until a copy was committed; None before the first
    wait_s: float = 0.0  # what training has waited on average for the copy before
    age_s: float = 0.0  # since the workers' first step, so for how long the job has not failed
    send_s: float = 0.0  # what its part takes to send to another node at the rate that is set; 0: no rate is, or no part

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
    if asked is None:
        every, reason = _affordable(timings)
    elif too_often(asked, timings) > 1:
        send_s, step_s = max(each.send_s for each in timings), min(each.step_s for each in timings if each.step_s)
        every, reason = math.ceil(MARGIN * send_s / step_s), f"to send a part takes {send_s:.3g} s at copy_mb_s"
    else:
        every, reason = asked, f"memory_every={asked}"
    if not failures:
        return every, reason
    return every << min(failures, MAX_DOUBLINGS), f"{reason}; {failures} attempts in a row failed"


def too_often(asked: int, timings: Sequence[Timing]) -> float:
    """Return how many times faster parts would have to be sent to another node for a copy after every `asked` steps.

    Above 1, each part would be given up before it is there, and no copy would be on another node. Else training waits for it at
    most: what was asked for wins over what it costs.
    """
    steps = [each.step_s for each in timings if each.step_s]
    if not steps:
        return 0.0
    return MARGIN * max(each.send_s for each in timings) / _send_limit_s(asked, min(steps))


def _affordable(timings: Sequence[Timing]) -> tuple[int, str]:
    steps = [each.step_s for each in timings if each.step_s]
    measured = [each for each in timings if each.stall_s is not None]
    if not steps or not measured:
        return FIRST_EVERY, "nothing is measured yet"
    step_s, slowest = min(steps), max(measured, key=lambda each: each.held_s)
    commit_s = max(max(each.commit_s or 0.0, each.send_s) for each in timings)
    by_stall, by_commit = math.ceil(interval_by_share_s(slowest.held_s) / step_s), math.ceil(MARGIN * commit_s / step_s)
    age_s = min(each.age_s for each in timings)
    by_age = math.ceil(interval_by_age_s(slowest.held_s, age_s) / step_s)
    if by_commit > max(by_stall, by_age):
        return by_commit, f"a copy is committed after {commit_s:.3g} s, and a step takes {step_s:.3g} s"
    waits = f" and waits for {slowest.wait_s:.3g} s" if slowest.wait_s else ""
    held = f"a copy stalls for {slowest.stall_s:.3g} s{waits}"
    if by_age > max(1, by_stall):
        return by_age, f"{held}, and nothing has failed for {age_s:.3g} s"
    every = max(1, by_stall)
    return every, f"{held}, {SHARE:.0%} of {every} steps of {step_s:.3g} s at most"


LEAST_SEND_S = 2.0  # less would take any hiccup of the network for a slow one, where steps are short


def _send_limit_s(every: int, step_s: float) -> float:
    return max(LEAST_SEND_S, 2 * every * step_s)


# The longest that training waits for a copy to be committed; after 60 s without progress a round counts as hung. Less than a part
# may take to send: such a copy is committed while training goes on, and the next one is left out.
HOLD_S = 20.0
CLOSE_S = HOLD_S  # the longest that the end of training waits for the last copy; after that it is given up
BUFFERS_HOLD_S = 2.0  # the longest that training waits for buffers; many gigabytes take longer


class StepsSeen:
    """Counts the steps before which the hook was called."""

    def __init__(self, optimizers: Iterable[object]) -> None:
        self._seen = dict.fromkeys(map(id, optimizers), 0)
        self._last: int | None = None
        self.captured = False  # whether a step was captured in a CUDA graph. Its replays are not seen

    def step(self, optimizer: object) -> None:
        """Note that the hook was called. Other optimizers do not count: they show nothing of ours."""
        if id(optimizer) in self._seen:
            self._seen[id(optimizer)] += 1

    def all_since_last(self, step: int) -> bool:
        """Return whether every step of every optimizer from the step of the last call up to this one was seen."""
        last, self._last = self._last, step
        fewest = min(self._seen.values(), default=0)
        self._seen = dict.fromkeys(self._seen, 0)
        return last is not None and not self.captured and fewest >= max(1, step - last)


RECENT = 8  # measurements of each kind that count
LOGGED_CHANGE = 1.5  # factor by which the interval changes before the log says so again


class StepTimes:
    def __init__(self) -> None:
        self._steps, self._stalls, self._waits, self._commits = (deque[float](maxlen=RECENT) for _ in range(4))
        self._began: float | None = None  # when the first step ended
        self._last: tuple[int, float] | None = None  # the last step and when training went on after it
        # last_stall_s: for how long the last copy has held up training.
        self.last_stall_s = self._waited_s = 0.0
        self.made_buffers = True  # whether the last attempt, on some rank, was not to copy but to make buffers

    @property
    def last_step(self) -> int:
        """The last step that training has done; 0 before the first."""
        return self._last[0] if self._last is not None else 0

    def step_ends(self, step: int, now: float) -> None:
        """Note that training has done a step. now: monotonic."""
        self._began = now if self._began is None else self._began
        if self._last is not None and step > self._last[0]:
            self._steps.append((now - self._last[1]) / (step - self._last[0]))

    def goes_on(self, step: int, now: float) -> None:
        """Note that training goes on after a step."""
        self._last = step, now

    def waited(self, seconds: float) -> None:
        """Note how long training has waited for the copy before. A wait for buffers is rare, so the interval is not for it."""
        self._waited_s += seconds
        if not self.made_buffers:
            self._waits.append(seconds)

    def copied(self, seconds: float) -> None:
        """Note a copy. Waits before it have stalled training, too."""
        self._stalls.append(seconds)
        self.last_stall_s, self._waited_s = self._waited_s + seconds, 0.0

    def committed(self, seconds: float) -> None:
        self._commits.append(seconds)

    def timing(self) -> Timing:
        step_s, stall_s = (statistics.median(each) if each else None for each in (self._steps, self._stalls))
        # The slowest commits are what training waits for. What it has waited counts in full, however rarely that was.
        wait_s = statistics.mean(self._waits) if self._waits else 0.0
        age_s = self._last[1] - self._began if self._last is not None and self._began is not None else 0.0
        return Timing(step_s, stall_s, max(self._commits, default=None), wait_s, age_s)


class Schedule:
    def __init__(self, asked: int | None, speaks: bool, mb_s: float = 0.0) -> None:
        """asked: see `choose`. speaks: whether this rank writes to the log. mb_s: the setting copy_mb_s."""
        self._asked, self._speaks, self._mb_s = asked, speaks, mb_s
        self._logged: int | None = None  # what the log has said
        self._warned = False
        self.every, _ = choose(asked, ())  # how many steps from one copy to the next, now
        self.first = True  # whether the next attempt is the first one since the ranks have begun
        self.due: int | None = None  # step of the next copy; None: there will be none until the ranks begin again
        # Step of the last copy that was due, if this rank has left it out: other ranks may wait in it for this one.
        self.owes: int | None = None

    def begins(self, due: int | None) -> None:
        """Note that the ranks begin, all together, or that they cannot."""
        self.due, self.first, self.owes = due, True, None

    def takes(self, step: int, free: bool) -> bool:
        """Return whether this step is to be copied. free: whether the last attempt was over a moment ago.

        If not, the step is left out, though another rank may have found it over, and copy the step: then they find out that
        they are apart. But if the attempt has ended since, what it has decided counts.
        """
        if self.due is None or step < self.due:
            return False
        if not free:
            self.due, self.owes = step + self.every, step
        return free

    def copies(self, step: int) -> None:
        # After `begins` no rank has buffers, and this attempt only makes them. Until the next one is committed, parts of the copy
        # that was loaded may be on one node only.
        self.due = step + (1 if self.first else self.every)
        self.first, self.owes = False, None

    def ended(self, apart: int | None, missing: bool) -> None:
        """Note how an attempt ended.

        apart: see `CopyOutcome`. missing: whether a rank was at a load, or at its end: no other copy is made before all begin.
        """
        if missing:
            self.due = self.owes = None
        elif apart is not None:
            self.due = apart + self.every
            if (self.owes or 0) < self.due:  # what this rank has left out since, another one has brought into this attempt
                self.owes = None

    def send_limit_s(self, timing: Timing) -> float:
        """Return how long it may take to send a part to another node, in seconds.

        The next copy waits for it, and so does training for a while. So it may take as long as two intervals: if that is not
        enough, the next interval is longer, and so is the next limit. What the rate that is set costs is no surprise.
        """
        return max(_send_limit_s(self.every, timing.step_s or 0.0), MARGIN * timing.send_s)

    def choose(self, timings: Sequence[Timing], failures: int) -> None:
        """Choose from the timings of all ranks. failures: attempts in a row that failed."""
        self.every, reason = choose(self._asked, timings, failures)
        if self._asked is not None and self._speaks and not self._warned and (times := too_often(self._asked, timings)) > 1:
            self._warned = True
            logger.warning(
                "copies in memory are made every %s steps, not every %s (memory_every): at copy_mb_s=%.3g a part takes %.3g s "
                "to send to another node; for every %s steps, set copy_mb_s to %.3g or more",
                self.every,
                self._asked,
                self._mb_s,
                max(each.send_s for each in timings),
                self._asked,
                self._mb_s * times,
            )
        much = self._logged is None or max(self.every, self._logged) > LOGGED_CHANGE * min(self.every, self._logged)
        if self._speaks and much and not failures:
            self._logged = self.every
            logger.info("the state is copied to memory every %s steps: %s", self.every, reason)
