"""Who waits in another collective than the rest. Pure."""

from __future__ import annotations

import pytest

from elastic_ext.base import records
from elastic_ext.base.diagnosis import Collective, compared


def at(rank: int, operation: str = "all_reduce", number: int = 412, group: str = "1", **more: object) -> Collective:
    return Collective(rank, operation, number, group, **{"first": 0, "size": 4, "shapes": "[[8]]", **more})


ALL = [at(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ALL, ""),
        ([], ""),
        ([*ALL[:3], at(3, "all_gather")], "rank 3 is in all_gather 412 of group 1, the others in all_reduce 412 of group 1"),
        ([at(0, number=411), *ALL[1:]], "rank 0 is in all_reduce 411 of group 1, the others in all_reduce 412 of group 1"),
        (
            [*ALL[:3], at(3, shapes="[[4]]")],
            "rank 3 is in all_reduce 412 of group 1 with inputs [[4]], the others in all_reduce 412 of group 1 with inputs [[8]]",
        ),
        ([*ALL[:3], at(3, shapes="")], ""),  # unknown
        ([at(rank, "all_gather", shapes=f"[[{rank}]]") for rank in range(4)], ""),  # may differ
        (
            [*ALL[:3], at(3, "broadcast", 7, "2", size=2, first=2)],
            "rank 3 is in broadcast 7 of group 2, the others in all_reduce 412 of group 1",
        ),
        (ALL[:3], "rank 3 is in no collective that its recorder shows, the others in all_reduce 412 of group 1"),
        (
            [*ALL[:2], at(2, "barrier"), at(3, "barrier")],
            "ranks 0, 1 are in all_reduce 412 of group 1, ranks 2, 3 are in barrier 412 of group 1",
        ),
        # Two groups of two: each waits in its own, which is as it should be.
        ([at(0, size=2), at(1, size=2), at(2, number=9, size=2, first=2), at(3, number=9, size=2, first=2)], ""),
        # Within one of them, one rank is in another operation.
        (
            [at(0, size=2), at(1, size=2), at(2, size=2, first=2), at(3, "broadcast", size=2, first=2)],
            "rank 2 is in all_reduce 412 of group 1, rank 3 is in broadcast 412 of group 1",
        ),
    ],
)
def test_who_is_in_another_collective(found, expected):
    assert compared(found, range(4)) == expected
    assert compared(found[::-1], range(4)) == expected


def test_many_ranks_are_named_as_a_run():
    found = [at(rank, "barrier" if rank < 20 else "all_reduce", size=64) for rank in range(64)]
    assert compared(found, range(64)) == ("ranks 0 to 19 are in barrier 412 of group 1, the others in all_reduce 412 of group 1")


def test_not_all_collectives_are_named_if_all_differ():
    found = compared([at(rank, number=rank, size=5000) for rank in range(5000)], range(5000))
    assert "rank 7 is in all_reduce 7 of group 1, 4991 ranks are in 4991 others, rank 4999 is in all_reduce 4999" in found
    assert len(found) < 1000


def test_what_a_worker_says_is_checked():
    said = records.plain(ALL[0])
    assert records.build(Collective, said, "it") == ALL[0]
    for wrong in ({"operation": "x" * 201}, {"group": "a\nb"}, {"number": -1}, {"size": "4"}):
        with pytest.raises(records.RecordError):
            records.build(Collective, {**said, **wrong}, "it")
