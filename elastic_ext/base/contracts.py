"""What passes between rooms that do not know each other: the channel on which nodes agree on a checkpoint, which each rendezvous
implements and `checkpoints.choice` uses; and the lease to revoke, which the rendezvous names and the reaper revokes.
"""

from __future__ import annotations

from typing import Protocol, TypedDict


class Exchange(Protocol):
    """The channel on which the nodes of one round agree on the checkpoint to resume from.

    Each method raises RoundOver if the round ends first, and torch's error for a lost rendezvous if it can no longer reach any
    node.
    """

    def offer(self, text: str) -> None:
        """Publish the checkpoints that this node could load from its own disk."""

    def offers(self, timeout_s: float) -> list[str] | None:
        """Return the offers of all nodes, by rank; None if a node has no offer or was late. For node 0 only."""

    def publish(self, text: str) -> None:
        """Publish the choice. Once this returns, no other choice can reach the nodes of this round. For node 0 only."""

    def choice(self, timeout_s: float) -> str:
        """Return the choice that node 0 has published. For the other nodes."""


class SingleNode:
    """The exchange of a round with one node: nothing leaves this process."""

    def __init__(self) -> None:
        self._offered: list[str] = []

    def offer(self, text: str) -> None:
        self._offered = [text]

    def offers(self, timeout_s: float) -> list[str] | None:
        return self._offered

    def publish(self, text: str) -> None:
        """Do nothing, because there is no other node."""

    def choice(self, timeout_s: float) -> str:
        raise AssertionError("the only node is node 0")


class LeaseRevocation(TypedDict):
    """An etcd lease to revoke. It travels as JSON in the `will` message of the reaper's protocol and is part of its version.

    Keys:
        endpoints: URLs of etcd's members, tried in turn.
        lease: the lease's ID.
        ca, cert, key: paths of PEM files for TLS; None or "" if not used.
        user, password: for etcd's authentication; None or "" if not used. They go through the reaper's pipe only.
    """

    endpoints: list[str]
    lease: int
    ca: str | None
    cert: str | None
    key: str | None
    user: str | None
    password: str | None
