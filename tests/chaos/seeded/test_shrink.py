"""Shrinking, with made-up outcomes."""

from __future__ import annotations

import pytest

from tests.chaos.seeded.shrink import fewest


@pytest.mark.parametrize("culprits", [{0}, {2}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_only_the_faults_that_matter_are_left(culprits):
    asked = []

    def fails(positions: set[int]) -> bool:
        asked.append(frozenset(positions))
        return culprits <= positions

    assert fewest(3, fails) == culprits
    assert len(asked) == len(set(asked)), "a run takes long"


def test_what_no_fault_explains_keeps_one():
    assert len(fewest(3, lambda positions: True)) == 1
