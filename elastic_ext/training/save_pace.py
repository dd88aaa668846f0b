"""When a trainer's own save is due, by what saves cost; the same step on all ranks.

The ranks exchange what they have measured at steps on which all agreed in the exchange before: halfway to the next save, halfway
again, and where it is due. So there are few exchanges, and steps that become slower or faster move a save that is far away.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.base.save_cost import SHARE, interval_by_age_s, interval_by_share_s
from elastic_ext.training import all_ranks

logger = logging.getLogger(__name__)

FIRST_EVERY = 10  # steps, until something is measured
RECENT = 8  # measurements of each kind that count
LOGGED_CHANGE = 1.5  # factor by which the interval changes before the log says so again


@dataclass(frozen=True)
class SaveTiming:
    """What one rank has measured recently, in seconds."""

    step_s: float | None = None  # a step, without a save; None if unknown
    stall_s: float | None = None  # what a save stalls training; None before the first
    age_s: float = 0.0  # since this process began to train, so for how long the job has not failed


def interval(timings: Sequence[SaveTiming], every_s: float | None = None) -> tuple[int, str]:
    """Return every how many steps to save, and why. Pure: all ranks have the same timings, those of all ranks.

    every_s: seconds that were asked for, whatever they cost; None: as often as `base.save_cost` allows.
    """
    steps = [each.step_s for each in timings if each.step_s]
    stalls = [each.stall_s for each in timings if each.stall_s is not None]
    if not steps or (every_s is None and not stalls):
        return FIRST_EVERY, "nothing is measured yet"
    if every_s is not None:
        return max(1, int(every_s / max(steps))), f"every_s={every_s:g}, and a step takes {max(steps):.3g} s"
    step_s, stall_s, age_s = min(steps), max(stalls), min(each.age_s for each in timings)
    by_share, by_age = interval_by_share_s(stall_s), interval_by_age_s(stall_s, age_s)
    every = max(1, math.ceil(max(by_share, by_age) / step_s))
    if by_age > by_share:
        return every, f"a save stalls for {stall_s:.3g} s, and nothing has failed for {age_s:.3g} s"
    return every, f"a save stalls for {stall_s:.3g} s, {SHARE:.0%} of {every} steps of {step_s:.3g} s at most"


Exchange = Callable[[SaveTiming], Sequence[SaveTiming]]


def exchange_over_ranks(own: SaveTiming) -> Sequence[SaveTiming]:
    """Return the timings of all ranks. Collective, in the default group if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [own]
    found: list[SaveTiming] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


class SavePace:
    """Call `due` on every rank after each optimizer step, and `saved` on every rank after each save of all ranks."""

    def __init__(
        self,
        every: int | None = None,
        every_s: float | None = None,
        exchange: Exchange = exchange_over_ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """every: save at each step that this divides. every_s: save so many seconds apart. Default: by cost.

        Raises UsageError: both are given, or one is not positive.
        """
        if every is not None and every_s is not None:
            raise UsageError(f"every={every} and every_s={every_s:g}: expected one of them, or none to save by cost")
        for name, value in (("every", every), ("every_s", every_s)):
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r}: expected more than 0, or None to save by cost")
        self._every, self._every_s, self._exchange, self._clock = every, every_s, exchange, clock
        self._steps, self._stalls = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        self._interval, self._logged = FIRST_EVERY, 0
        self.begins(0)

    def begins(self, step: int) -> None:
        """Note that training begins after this step, which has a checkpoint or needs none."""
        self._began = self._went_on = self._clock()
        self._last, self._look = step, step + 1

    def due(self, step: int) -> bool:
        """Return whether to save after this step; the same on all ranks. Collective at some steps."""
        now = self._clock()
        self._steps.append(now - self._went_on)
        self._went_on = now
        if self._every is not None:
            return step % self._every == 0
        if step < self._look:
            return False
        self._interval, reason = interval(self._exchange(self._timing()), self._every_s)
        self._say(reason)
        left = self._last + self._interval - step
        self._look = step + math.ceil(left / 2)
        return left <= 0

    def saved(self, step: int, seconds: float) -> None:
        """Note a save of this step, by whomever it was wanted. seconds: for how long it has stalled this rank."""
        self._stalls.append(seconds)
        self._went_on = self._clock()
        self._last, self._look = step, step + math.ceil(self._interval / 2)

    def _timing(self) -> SaveTiming:
        step_s, stall_s = (statistics.median(each) if each else None for each in (self._steps, self._stalls))
        return SaveTiming(step_s, stall_s, self._clock() - self._began)

    def _say(self, reason: str) -> None:
        if max(self._interval, self._logged) > LOGGED_CHANGE * min(self._interval, self._logged):
            self._logged = self._interval
            if all_ranks.own_rank() == 0:
                logger.info("this job saves every %s steps: %s", self._interval, reason)
