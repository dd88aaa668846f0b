"""What saves may cost: the shortest interval between two of them that is worth it. Pure.

How often a job fails is not known, only for how long it has not: that stands for the mean time between failures in Young's
interval of least expected cost. At any constant rate of failures this costs a third more than the best interval does. Two bounds
on the cost hold besides, so that a failure loses a few steps however rare it is.
"""

from __future__ import annotations

import math

SHARE = 0.01  # of the time of the steps that saves may hold up training
# However long nothing fails. At 0.001, a job of 64 GPUs lost more to copies than stock loses in all (benchmarks/simulate.py).
LEAST_SHARE = 0.0003


def interval_by_share_s(held_s: float) -> float:
    """Return the shortest interval at which saves that hold up training for so long cost SHARE at most."""
    return held_s / SHARE


def interval_by_age_s(held_s: float, age_s: float) -> float:
    """Return Young's interval where nothing has failed for `age_s`, but at most the one at which saves cost LEAST_SHARE."""
    return min(math.sqrt(2 * held_s * age_s), held_s / LEAST_SHARE)
