"""Which node keeps whose parts."""

import random

from elastic_ext.checkpoints.memory.peers.plan import keepers


def test_table():
    for domains, expected in (
        ([], ()),
        ([""], ()),
        (["", ""], (1, 0)),
        (["", "", ""], (1, 2, 0)),
        (["a", "a", "b", "b"], (2, 3, 0, 1)),
        (["a", "b", "a", "b"], (1, 0, 3, 2)),  # in the order of domains: 0 2 1 3
        (["a", "a", "a", "b"], (2, 3, 0, 1)),  # two of three stay in a
    ):
        assert keepers(domains) == expected, domains


def test_each_keeps_one_others_in_another_domain_where_possible():
    draw = random.Random(1)
    for _ in range(200):
        domains = [draw.choice("abcd") for _ in range(draw.randint(2, 40))]
        found = keepers(domains)
        assert sorted(found) == list(range(len(domains)))
        assert all(node != keeper for node, keeper in enumerate(found))
        largest = max(domains.count(each) for each in domains)
        same = sum(domains[node] == domains[keeper] for node, keeper in enumerate(found))
        assert same == max(0, 2 * largest - len(domains)), domains
