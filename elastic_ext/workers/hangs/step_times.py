"""Finds ranks that are slower than the others, by their step times. Pure, standard library only.

If every step has a collective of all ranks, all ranks take as long as the slowest one, and this finds none. It finds slow ranks
only where ranks step independently: local SGD, pipelines of unequal depth, gradient accumulation without synchronisation.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

SLOW = 1.25  # times the median of the others
MIN_STEPS = 10  # by each rank, or a single evaluation would make it a straggler


@dataclass(frozen=True)
class StepMark:
    """The number of steps that a rank has done, and the end of the last one (monotonic seconds)."""

    steps: int
    at_s: float


def step_times(before: Mapping[int, StepMark], now: Mapping[int, StepMark]) -> dict[int, float] | None:
    """Return the seconds per step between two marks, by rank; None if a rank has done fewer than MIN_STEPS in between."""
    if before.keys() != now.keys() or any(now[rank].steps - before[rank].steps < MIN_STEPS for rank in now):
        return None
    return {rank: (now[rank].at_s - before[rank].at_s) / (now[rank].steps - before[rank].steps) for rank in now}


def stragglers(times: Mapping[int, float]) -> dict[int, float]:
    """Return the slow ranks, each with its step time divided by the median of the others."""
    found = {}
    for rank, seconds in times.items():
        others = statistics.median([other for each, other in times.items() if each != rank] or [seconds])
        if others > 0 and seconds > SLOW * others:
            found[rank] = seconds / others
    return found
