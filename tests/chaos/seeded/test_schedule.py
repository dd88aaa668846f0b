"""Plans: the same from the same seed, possible, and none left out."""

from __future__ import annotations

import json
from itertools import combinations

from tests.chaos.seeded.schedule import HOSTS, KINDS, LAST_STEP, ONE_OF, RANK_0, SETUPS, decode, encode, only, plan

PLANS = [plan(seed) for seed in range(len(KINDS) * 5)]


def test_a_seed_gives_the_same_plan_each_time():
    assert [plan(each.seed) for each in PLANS] == PLANS
    assert len({each.faults for each in PLANS}) > 0.9 * len(PLANS)


def test_as_many_seeds_in_a_row_as_there_are_kinds_have_them_all():
    for start in (0, 7):
        found = {fault.kind for each in PLANS[start : start + len(KINDS)] for fault in each.faults}
        assert found == KINDS.keys()


def test_one_two_and_three_faults_at_once_come_and_all_ways_to_set_a_job_up():
    assert {len(each.faults) for each in PLANS} == {1, 2, 3}
    assert {(each.trainers, each.etcd, each.nnodes) for each in PLANS} == set(SETUPS)
    for setting in ("standby", "local", "spare", "s3"):
        assert {getattr(each, setting) for each in PLANS} == {True, False}


def test_faults_are_possible():
    for each in PLANS:
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


def test_a_plan_survives_json_and_can_be_cut_down():
    whole = next(each for each in PLANS if len(each.faults) == 3)
    assert decode(json.loads(json.dumps(encode(whole)))) == whole
    assert only(whole, {0, 2}).faults == (whole.faults[0], whole.faults[2])
