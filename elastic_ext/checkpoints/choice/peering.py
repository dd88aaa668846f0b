"""Who keeps whose parts of the copies in memory in a round, and which parts must move before it begins. Pure, but for the key."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.choice.in_memory import MemoryChoice, keepers
from elastic_ext.checkpoints.choice.messages import Offers, Peers


@dataclass(frozen=True)
class PeerPlan:
    """One node's exchange with others.

    Attributes:
        key: of the round; see `Peers`.
        keeper: address of the agent that keeps this node's parts; see `Offers.peer`.
        digest: of the manifest of the copy that the round resumes from; "" if that is none in memory.
        fetch: (rank, address) of the parts of it that this node must get first.
    """

    key: str
    keeper: str
    digest: str = ""
    fetch: tuple[tuple[int, str], ...] = ()


def arrange(nodes: Sequence[Offers], resumed: MemoryChoice | None) -> Peers | None:
    """Return what node 0 tells all nodes; None if not all of them can be sent parts. resumed: what the round resumes from."""
    if len(nodes) < 2 or not all(each.peer for each in nodes):
        return None
    offer = resumed.offer if resumed is not None else None
    return Peers(
        key=secrets.token_hex(32),
        addresses=tuple(each.peer for each in nodes),
        keepers=keepers([each.domain for each in nodes]),
        digest=offer.digest if offer is not None else "",
        moves=resumed.moves if resumed is not None else (),
    )


def plan_of(peers: Peers | None, node: int) -> PeerPlan | None:
    """Return one node's part of it; None if nothing is sent."""
    if peers is None or node >= len(peers.addresses):
        return None
    fetch = tuple((move.rank, peers.addresses[move.source]) for move in peers.moves if move.target == node)
    return PeerPlan(peers.key, peers.addresses[peers.keepers[node]], peers.digest, fetch)
