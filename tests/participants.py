"""A node's part in a round, for tests that have a `Participant` and no agent."""

from __future__ import annotations

import threading

from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.patience import Patience
from elastic_ext.rendezvous.place import Participant, Place
from elastic_ext.rendezvous.round_part import EtcdRound
from elastic_ext.rendezvous.round_records import Assignment, Header


class NoFence:
    """Of a node without workers."""

    closed, stop_by = False, None


def place_of(participant: Participant) -> Place:
    """Return the node's place in the job; it waits for no round longer than a moment."""
    changed = threading.Condition()
    return Place(
        None, Settings(), None, "127.0.0.1", Patience(0.0, 1, 1), participant, None, NoFence(), None, None, None, changed
    )


def part_of(participant: Participant, joined: tuple[Header, Assignment] | None = None) -> EtcdRound:
    """Return the node's part in a round that it has joined; by default that in which it is."""
    joined = joined or participant.joined
    assert joined is not None
    return EtcdRound(place_of(participant), *joined, 1)
