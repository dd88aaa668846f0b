"""The interface with which nodes agree on a checkpoint. `checkpoints.choice` uses it; each rendezvous implements it."""

from __future__ import annotations

from typing import Protocol


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
