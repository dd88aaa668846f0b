"""How the nodes of a round agree on a checkpoint; `checkpoints.choice` uses it, each rendezvous implements it."""

from __future__ import annotations

from typing import Protocol


class Exchange(Protocol):
    """How the nodes of one round agree on the checkpoint to resume from.

    Each method raises RoundOver if the round ends first, and torch's error for a lost rendezvous if no node can be reached any
    more.
    """

    def offer(self, text: str) -> None:
        """Publish which checkpoints this node could load from its own disk."""

    def offers(self, timeout_s: float) -> list[str] | None:
        """On node 0: return the offers of all nodes, by rank; None: a node has no offer, or was late."""

    def publish(self, text: str) -> None:
        """On node 0: publish the choice. Once this returns, no other choice can reach the nodes of this round."""

    def choice(self, timeout_s: float) -> str:
        """On the other nodes: return the choice that node 0 has published."""


class Alone:
    """The exchange of a round with one node: nothing leaves this process."""

    def __init__(self) -> None:
        self._offered: list[str] = []

    def offer(self, text: str) -> None:
        self._offered = [text]

    def offers(self, timeout_s: float) -> list[str] | None:
        return self._offered

    def publish(self, text: str) -> None:
        """Do nothing: there is no other node."""

    def choice(self, timeout_s: float) -> str:
        raise AssertionError("the only node is node 0")
