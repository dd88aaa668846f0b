"""The members of a round, as a leader learns them from assignments of which some are lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_ext.etcd import Put
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.leader import Members
from elastic_ext.rendezvous.round_records import Assignment, Header, RecordReader, State, encode
from tests.simulation import Client, World

KEYS = JobKeys("job")
ORDER = ("a", "b", "c", "d")


@pytest.mark.parametrize("lost", ["", "a", "d", "bd"])
def test_a_lost_member_is_known_by_its_neighbors(lost: str) -> None:
    """A node and the store are lost together: nobody writes its assignment again, and the others still know that it was there."""
    header = Header(3, State.RUNNING, nodes=len(ORDER), world=4, seal="s")
    waited: list[bool] = []
    client = Client(World())
    lease = client.lease_grant(60).lease_id
    for rank, id_ in enumerate(ORDER):
        if id_ not in lost:
            assignment = Assignment(3, rank, rank, rank, 4, seal="s", neighbors=rounds.neighbors(rank, ORDER))
            client.txn([], [Put(KEYS.assignment(id_), encode(assignment), lease_id=lease)])
    context = SimpleNamespace(client=client, keys=KEYS, reader=RecordReader())
    outage = SimpleNamespace(expect_members=lambda: waited.append(True))
    members = Members(context, SimpleNamespace(value=header), outage)  # type: ignore[arg-type]
    members.load()
    assert members.ranks == {id_: rank for rank, id_ in enumerate(ORDER)}
    assert waited == [True] * bool(lost), "those that live write their own again"
