"""How the nodes of one round agree on what to resume from: `checkpoints.choice` asks, each rendezvous answers in its own way."""

from __future__ import annotations

from typing import Protocol


class Exchange(Protocol):
    """How the nodes of one round agree on what to resume from.

    Each method raises RoundOver where the round ends before it is done, and what torch raises for a rendezvous that is lost
    where nobody can be asked any more.
    """

    def offer(self, text: str) -> None:
        """Tell what this node could load from its own disk."""

    def offers(self, timeout_s: float) -> list[str] | None:
        """On node 0: the offers of all nodes, by rank; None: a node has none, or has not told it in time."""

    def publish(self, text: str) -> None:
        """On node 0: publish the choice. Once this returns, no other choice can reach the nodes of this round."""

    def choice(self, timeout_s: float) -> str:
        """On the other nodes: what node 0 has published."""


class Alone:
    """The exchange of a round's only node: nothing leaves this process."""

    def __init__(self) -> None:
        self._offered: list[str] = []

    def offer(self, text: str) -> None:
        self._offered = [text]

    def offers(self, timeout_s: float) -> list[str] | None:
        return self._offered

    def publish(self, text: str) -> None:
        """There is nobody to tell."""

    def choice(self, timeout_s: float) -> str:
        raise AssertionError("the only node is node 0")
