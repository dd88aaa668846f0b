"""Whether a spare replaces a host: decisions over plain values."""

import dataclasses

import pytest

from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous import drains
from elastic_ext.rendezvous.drain_requests import JobRecordsNow
from elastic_ext.rendezvous.round_records import Drain, Header, Node, State

MEMBERS = ("n1-10-aaaaaa", "n2-10-bbbbbb", "n3-10-cccccc")
SPARES = ("n4-10-dddddd", "n5-10-eeeeee")
BECAUSE = "slow_node=replace: rank 3 on "
SEEN = KeyValue(b"header", b"", 1, 1, 1, 0)


def keeps(spares: int, leaving: tuple[str, ...] = (), refused: dict[str, str] | None = None, **more: object) -> str:
    """What there is to say against replacing n2."""
    found = tuple(Drain(id_, drains.host_of(id_), 1, "fan", **more) for id_ in leaving)
    header = dataclasses.replace(Header(3, State.RUNNING, 3), drains=found, drains_made=len(found))
    nodes = dict.fromkeys((*MEMBERS, *SPARES[:spares]), Node(2, 1, "w", "h", 1))
    return JobRecordsNow(header, SEEN, nodes, refused or {}, 1, frozenset(MEMBERS)).keeps("n2", BECAUSE)


@pytest.mark.parametrize(
    ("spares", "leaving", "expected"),
    [
        (0, (), "no spare waits; nothing was changed"),
        (1, (), ""),
        (1, ("n1-10-aaaaaa",), "no spare waits but for 1 node that is to leave before; nothing was changed"),
        (2, ("n1-10-aaaaaa",), ""),
        (1, ("n2-10-bbbbbb",), ""),  # itself, which was asked before
        (1, ("n9-10-ffffff",), ""),  # it has gone
        (1, ("n4-10-dddddd",), "no spare waits; nothing was changed"),
    ],
)
def test_each_node_that_leaves_needs_a_spare_of_its_own(spares, leaving, expected):
    assert keeps(spares, leaving) == expected


@pytest.mark.parametrize(
    ("why", "kept"),
    [
        (f"drained: {BECAUSE}n7 is late by 9 ms of a step of 60 ms: 15%", True),
        ("drained: slow_node=replace: rank 4 on n7 is late by 9 ms of a step of 60 ms: 15%", False),
        ("drained: fan", False),
    ],
)
def test_a_rank_that_is_late_on_one_host_after_another_costs_one_host_only(why, kept):
    """Rank 0 that writes the log, say: the job would restart every few minutes, until no host is left."""
    assert keeps(1, refused={"n7": why}) == ("n7 has left for the same before; nothing was changed" if kept else "")
    assert keeps(1, refused={"n2": why}) == ""
