"""Which node keeps whose parts."""

import random

import pytest

from elastic_ext.checkpoints.memory.peers.plan import keepers


@pytest.mark.parametrize(
    ("domains", "expected"),
    [
        ([], ()),
        ([""], ()),
        (["", ""], (1, 0)),
        (["", "", ""], (1, 2, 0)),
        (["a", "a", "b", "b"], (2, 3, 0, 1)),
        (["a", "b", "a", "b"], (1, 0, 3, 2)),  # in the order of domains: 0 2 1 3
        (["a", "a", "a", "b"], (2, 3, 0, 1)),  # two of three stay in a
    ],
)
def test_table(domains, expected):
    assert keepers(domains) == expected


@pytest.mark.parametrize("seed", range(200))
def test_each_keeps_one_others_part_and_as_many_as_possible_are_in_another_domain(seed):
    draw = random.Random(seed)
    domains = [draw.choice("abcd") for _ in range(draw.randint(2, 40))]
    found = keepers(domains)
    assert sorted(found) == list(range(len(domains)))
    assert all(node != keeper for node, keeper in enumerate(found))
    largest = max(domains.count(each) for each in domains)
    same = sum(domains[node] == domains[keeper] for node, keeper in enumerate(found))
    assert same == max(0, 2 * largest - len(domains))
