"""Which copy in memory a round can load."""

from dataclasses import replace

import pytest

from elastic_ext.checkpoints.agreement.messages import MemoryChoice, NewestSaved, Offers, needs_no_storage, newest_whole
from elastic_ext.checkpoints.directory.tiers import Offer
from elastic_ext.checkpoints.formats.candidates import directory_name


def offer(step: int, *ranks: int, generation: int = 1, nodes: int = 2, world: int = 4, digest: str = "") -> Offer:
    return Offer(directory_name(step, generation), digest or f"digest {step}", step, nodes, world, ranks)


def holder(*held: Offer, saved: NewestSaved | None = None) -> Offers:
    return Offers(memory=held, has_memory=True, saved=saved)


def on(*nodes: list[Offer]) -> list[Offers]:
    return [holder(*each) for each in nodes]


WHOLE = offer(7, 0, 1), offer(7, 2, 3)
ALL = offer(7, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("nodes", "step", "lost"),
    [
        ([], None, {}),
        (on([], []), None, {}),
        (on([WHOLE[0]], [WHOLE[1]]), 7, {}),
        (on([WHOLE[0], offer(8, 0)], [WHOLE[1], offer(8, 2, 3)]), 7, {8: [1]}),
        (on([WHOLE[0], offer(8, 0, 1)], [WHOLE[1]]), 7, {8: [2]}),
        (on([WHOLE[0], offer(8, 0, 1)], [WHOLE[1], offer(8, 2, 3)]), 8, {}),
        # A later group of workers counts as newer, whatever its step.
        (on([WHOLE[0], offer(5, 0, 1, generation=2)], [WHOLE[1], offer(5, 2, 3, generation=2)]), 5, {}),
        # The same name, but another manifest.
        (on([offer(7, 0, 1, digest="a")], [offer(7, 2, 3, digest="b")]), None, {7: [0, 2]}),
        # Some part is on no node.
        (on([WHOLE[0]], []), None, {7: [2]}),
        (on([WHOLE[0]], [], []), None, {7: [2]}),
        # Parts may be on other nodes than their ranks, and those may be others than have made them.
        (on([ALL], []), 7, {}),
        (on([WHOLE[1]], [WHOLE[0]]), 7, {}),
        (on([offer(8, 0, 1), ALL], []), 7, {8: [2]}),  # the newest has not reached the other node
        (on([offer(8, 0, 1, 2, 3, world=8), ALL], [ALL]), 7, {8: [4]}),
        (on([WHOLE[0]], [WHOLE[1]], []), 7, {}),
    ],
)
def test_the_newest_copy_whose_parts_all_exist(nodes, step, lost):
    """lost: the first rank whose part is on no node, by step."""
    found = newest_whole(nodes)
    assert (found.offer.step if found.offer else None) == step
    assert list(found.lost) == [
        (directory_name(step, 1), f"no node has the part of rank {rank}") for step, ranks in lost.items() for rank in ranks
    ]


def test_refused_copies_are_not_even_told_as_lost():
    nodes = on([WHOLE[0], offer(8, 0)], [WHOLE[1], offer(8, 2, 3)])
    assert newest_whole(nodes, {directory_name(8, 1)}).lost == ()
    assert newest_whole(nodes, {directory_name(8, 1), directory_name(7, 1)}) == MemoryChoice(None)


def test_none_is_loaded_if_a_node_lacks_memory():
    nodes = on([ALL], [])
    found = newest_whole([nodes[0], replace(nodes[1], has_memory=False)])
    assert found.offer is None
    assert [reason.partition(":")[0] for _, reason in found.lost] == ["node 1 has no memory for copies"]


COPY, FRESH = offer(7, 0, world=1, nodes=1), NewestSaved()


@pytest.mark.parametrize(
    ("nodes", "enough"),
    [
        ([holder(COPY, saved=NewestSaved(3, 7))], True),  # the last round resumed from it, or has saved this step
        ([holder(COPY, saved=NewestSaved(3, 0))], True),  # nothing was ever saved
        ([holder(COPY, saved=NewestSaved(3, 8))], False),
        ([holder(COPY, saved=None)], False),  # its workers do not report
        ([holder(saved=FRESH), holder(COPY, saved=NewestSaved(3, 6))], True),  # a replacement, which knows of nothing
        ([holder(COPY, saved=NewestSaved(3, 6)), holder(COPY, saved=NewestSaved(3, 8))], False),
        ([holder(COPY, saved=NewestSaved(3, 6)), holder(saved=NewestSaved(2, 8))], True),  # in round 3 the job went back
        ([holder(COPY, saved=NewestSaved(2, 6)), holder(saved=NewestSaved(3, 5))], False),  # of workers before the last round
    ],
)
def test_whether_a_copy_needs_no_storage(nodes, enough):
    assert needs_no_storage(COPY, None, nodes) == enough
    assert not needs_no_storage(None, None, nodes)


def test_newer_checkpoints_on_local_disks_are_known():
    nodes = [holder(COPY, saved=NewestSaved(3, 6))]
    assert needs_no_storage(COPY, offer(7), nodes)
    assert not needs_no_storage(COPY, offer(8), nodes)
    assert not needs_no_storage(COPY, offer(5, generation=2), nodes)
