"""The fewest faults of a plan that still break something."""

from __future__ import annotations

from collections.abc import Callable


def fewest(count: int, fails: Callable[[set[int]], bool]) -> set[int]:
    """Positions of faults, none of which can be left out any more.

    fails: whether a run with these faults alone breaks something; it is asked once for each set.
    """
    kept = set(range(count))
    for position in range(count):
        without = kept - {position}
        if without and fails(without):
            kept = without
    return kept
