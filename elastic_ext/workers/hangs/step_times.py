"""Who is slower than the others: the time of an optimizer step by rank, lately. Pure, standard library only.

Where every step has a collective of all ranks, all take the time of the slowest one, and nobody stands out here: what shows then
is a rank whose steps are its own (local SGD, pipelines of unequal depth, gradient accumulation without synchronisation).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

SLOW = 1.25  # times the median of the others
LEAST_STEPS = 10  # of each rank, or a single evaluation would be the news


@dataclass(frozen=True)
class Mark:
    """steps: done; at_s: when the last of them was."""

    steps: int
    at_s: float


def step_times(before: Mapping[int, Mark], now: Mapping[int, Mark]) -> dict[int, float] | None:
    """Seconds of a step by rank; None while a rank has done fewer than LEAST_STEPS in between."""
    if before.keys() != now.keys() or any(now[rank].steps - before[rank].steps < LEAST_STEPS for rank in now):
        return None
    return {rank: (now[rank].at_s - before[rank].at_s) / (now[rank].steps - before[rank].steps) for rank in now}


def stragglers(times: Mapping[int, float]) -> dict[int, float]:
    """By rank, how many times as long as the median of the others the slow ones take."""
    found = {}
    for rank, seconds in times.items():
        others = statistics.median([other for each, other in times.items() if each != rank] or [seconds])
        if others > 0 and seconds > SLOW * others:
            found[rank] = seconds / others
    return found
