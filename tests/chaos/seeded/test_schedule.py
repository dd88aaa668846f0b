"""Plans: the same from the same seed, possible, and none left out."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from tests.chaos.seeded.schedule import (
    EMBEDDED_SETUPS,
    HOSTS,
    KINDS,
    LAST_STEP,
    ONE_OF,
    RANK_0,
    SETUPS,
    decode,
    encode,
    fewest,
    kinds_of,
    only,
    plan,
)

PLANS, EMBEDDED = ([plan(seed, embedded) for seed in range(len(KINDS) * 5)] for embedded in (False, True))
MODES = pytest.mark.parametrize(("plans", "setups"), [(PLANS, SETUPS), (EMBEDDED, EMBEDDED_SETUPS)], ids=["etcd", "embedded"])


@MODES
def test_consecutive_seeds_have_all_kinds_of_faults(plans, setups):
    kinds = set(kinds_of(setups))
    for start in (0, 7):
        found = {fault.kind for each in plans[start : start + len(kinds)] for fault in each.faults}
        assert found == kinds


@MODES
def test_faults_are_possible(plans, setups):
    for each in plans:
        for fault in each.faults:
            kind = KINDS[fault.kind]
            assert all(getattr(each, need) for need in kind.needs)
            assert fault.target in targets(kind.scope, HOSTS[: each.trainers])
            assert 0 < fault.step <= LAST_STEP
            low, high = kind.seconds or (0, 0)
            assert low <= fault.seconds <= high
        assert sum(fault.kind in ONE_OF for fault in each.faults) <= 1
        if any(fault.kind == "spare comes" for fault in each.faults):
            assert each.most_nodes > each.trainers, "it would not train"


def targets(scope, hosts):
    pairs = {"-".join(pair) for pair in combinations(hosts, 2)}
    return {"host": {*hosts, RANK_0}, "two hosts": pairs}.get(scope, {""})


def test_a_plan_survives_json_and_shrinks():
    whole = next(each for each in PLANS if len(each.faults) == 3)
    assert decode(json.loads(json.dumps(encode(whole)))) == whole
    assert only(whole, {0, 2}).faults == (whole.faults[0], whole.faults[2])


# The fewest that fail, with made-up outcomes.


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
