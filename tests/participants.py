"""A node's part in a round, for tests that have a `Participant` and no agent."""

from __future__ import annotations

import threading

from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.place import Place
from elastic_ext.rendezvous.etcd.round_part import EtcdRound
from elastic_ext.rendezvous.round_records import Assignment, Header


class NoFence:
    """Of a node without workers."""

    closed, stop_by = False, None


def part_of(participant: Participant, joined: tuple[Header, Assignment] | None = None) -> EtcdRound:
    """Return the node's part in a round that it has joined; by default that in which it is."""
    joined = joined or participant.joined
    assert joined is not None
    place = Place("127.0.0.1", None, participant, None, NoFence(), None, threading.Condition(), lambda: None)
    return EtcdRound(place, *joined, 1, None)
