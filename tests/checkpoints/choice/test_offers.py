"""Which copy in memory a round can load."""

import random
from dataclasses import replace

import pytest

from elastic_ext.checkpoints.choice.offers import (
    MemoryChoice,
    Move,
    NewestSaved,
    Offers,
    keepers,
    needs_no_storage,
    newest_whole,
)
from elastic_ext.checkpoints.directory.tiers import Offer
from elastic_ext.checkpoints.formats.manifest import directory_name


def offer(step: int, *ranks: int, generation: int = 1, nodes: int = 2, world: int = 4, digest: str = "") -> Offer:
    return Offer(directory_name(step, generation), digest or f"digest {step}", step, nodes, world, ranks)


def holder(workers: int, *held: Offer, saved: NewestSaved | None = None) -> Offers:
    return Offers(memory=held, workers=workers, has_memory=True, saved=saved)


def on(*nodes: list[Offer], workers: int = 2) -> list[Offers]:
    return [holder(workers, *each) for each in nodes]


WHOLE = offer(7, 0, 1), offer(7, 2, 3)


ALL = offer(7, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("nodes", "step", "moves", "lost"),
    [
        ([], None, [], {}),
        (on([], []), None, [], {}),
        (on([WHOLE[0]], [WHOLE[1]]), 7, [], {}),
        (on([WHOLE[0], offer(8, 0)], [WHOLE[1], offer(8, 2, 3)]), 7, [], {8: [1]}),
        (on([WHOLE[0], offer(8, 0, 1)], [WHOLE[1]]), 7, [], {8: [2]}),
        (on([WHOLE[0], offer(8, 0, 1)], [WHOLE[1], offer(8, 2, 3)]), 8, [], {}),
        # A later group of workers counts as newer, whatever its step.
        (on([WHOLE[0], offer(5, 0, 1, generation=2)], [WHOLE[1], offer(5, 2, 3, generation=2)]), 5, [], {}),
        # The same name, but another manifest.
        (on([offer(7, 0, 1, digest="a")], [offer(7, 2, 3, digest="b")]), None, [], {7: [0, 2]}),
        # Some part is on no node.
        (on([WHOLE[0]], []), None, [], {7: [2]}),
        (on([WHOLE[0]], [], []), None, [], {7: [2]}),
        # Parts that other nodes have are moved.
        (on([ALL], [ALL]), 7, [], {}),
        (on([ALL], []), 7, [(2, 0, 1), (3, 0, 1)], {}),  # a replacement
        (on([], [ALL]), 7, [(0, 1, 0), (1, 1, 0)], {}),
        (on([WHOLE[1]], [WHOLE[0]]), 7, [(0, 1, 0), (1, 1, 0), (2, 0, 1), (3, 0, 1)], {}),  # the nodes changed their order
        (on([offer(7, 0, 2)], [offer(7, 1, 3)]), 7, [(1, 1, 0), (2, 0, 1)], {}),
        (on([offer(8, 0, 1), ALL], []), 7, [(2, 0, 1), (3, 0, 1)], {8: [2]}),  # the newest has not reached the peer
        # Another world, or other nodes: workers send each other what they need.
        (on([offer(8, 0, 1, 2, 3, world=8), ALL], [ALL]), 7, [], {8: [4]}),
        (on([offer(7, 0, 1, 2, 3)], workers=4), 7, [], {}),
        (on([WHOLE[0]], [WHOLE[1]], []), 7, [], {}),
        (on([ALL], [], []), 7, [], {}),
    ],
)
def test_the_newest_copy_whose_parts_all_exist(nodes, step, moves, lost):
    """moves: rank, from which node, to which one. lost: the first rank whose part is on no node, by step."""
    found = newest_whole(nodes)
    assert (found.offer.step if found.offer else None) == step
    assert [(move.rank, move.source, move.target) for move in found.moves] == moves
    assert list(found.lost) == [
        (directory_name(step, 1), f"no node has the part of rank {rank}") for step, ranks in lost.items() for rank in ranks
    ]


def test_refused_copies_are_not_even_told_as_lost():
    nodes = on([WHOLE[0], offer(8, 0)], [WHOLE[1], offer(8, 2, 3)])
    assert newest_whole(nodes, {directory_name(8, 1)}).lost == ()
    assert newest_whole(nodes, {directory_name(8, 1), directory_name(7, 1)}) == MemoryChoice(None)


def test_nodes_with_different_numbers_of_workers():
    held = [offer(7, 0, world=4), offer(7, 1, 2, 3, world=4)]
    nodes = [holder(1, held[0]), holder(3, held[1])]
    assert newest_whole(nodes).moves == ()
    assert newest_whole(list(reversed(nodes))).moves == (Move(0, 1, 0), Move(3, 0, 1))


def test_none_can_be_loaded_if_a_node_has_no_memory():
    nodes = on([ALL], [])
    found = newest_whole([nodes[0], replace(nodes[1], has_memory=False)])
    assert found.offer is None
    assert [reason.partition(":")[0] for _, reason in found.lost] == ["node 1 has no memory for copies"]


COPY, FRESH = offer(7, 0, world=1, nodes=1), NewestSaved()


@pytest.mark.parametrize(
    ("nodes", "enough"),
    [
        ([holder(1, COPY, saved=NewestSaved(3, 7))], True),  # the last round resumed from it, or has saved this step
        ([holder(1, COPY, saved=NewestSaved(3, 0))], True),  # nothing was ever saved
        ([holder(1, COPY, saved=NewestSaved(3, 8))], False),
        ([holder(1, COPY, saved=None)], False),  # its workers do not report
        ([holder(1, saved=FRESH), holder(1, COPY, saved=NewestSaved(3, 6))], True),  # a replacement, which knows of nothing
        ([holder(1, COPY, saved=NewestSaved(3, 6)), holder(1, COPY, saved=NewestSaved(3, 8))], False),
        (
            [holder(1, COPY, saved=NewestSaved(3, 6)), holder(1, saved=NewestSaved(2, 8))],
            True,
        ),  # in round 3 the job went back to an older one
        (
            [holder(1, COPY, saved=NewestSaved(2, 6)), holder(1, saved=NewestSaved(3, 5))],
            False,
        ),  # its workers are not those of the last round
    ],
)
def test_whether_a_copy_needs_no_storage(nodes, enough):
    assert needs_no_storage(COPY, None, nodes) == enough
    assert not needs_no_storage(None, None, nodes)


def test_what_is_newer_on_the_local_disks_is_known_of():
    nodes = [holder(1, COPY, saved=NewestSaved(3, 6))]
    assert needs_no_storage(COPY, offer(7), nodes)
    assert not needs_no_storage(COPY, offer(8), nodes)
    assert not needs_no_storage(COPY, offer(5, generation=2), nodes)


def test_which_node_keeps_whose_parts():
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


def test_each_node_keeps_one_others_in_another_domain_where_possible():
    draw = random.Random(1)
    for _ in range(200):
        domains = [draw.choice("abcd") for _ in range(draw.randint(2, 40))]
        found = keepers(domains)
        assert sorted(found) == list(range(len(domains)))
        assert all(node != keeper for node, keeper in enumerate(found))
        largest = max(domains.count(each) for each in domains)
        same = sum(domains[node] == domains[keeper] for node, keeper in enumerate(found))
        assert same == max(0, 2 * largest - len(domains)), domains
