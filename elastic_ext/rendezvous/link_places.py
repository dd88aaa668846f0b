"""A bounded number of places for connections, of which no one address keeps another from getting one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Visitor = TypeVar("Visitor", bound=Hashable)


class LinkPlaces(Generic[Visitor]):
    """Where all are taken, the oldest of the address that has most makes room for a new one. Of equal addresses, the oldest."""

    def __init__(self, most: int) -> None:
        """most: places, 1 or more."""
        self._most = most
        self._taken: dict[Visitor, str] = {}  # the address of each, the oldest first

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, visitor: Visitor, address: str) -> Visitor | None:
        """Give a place to one that has none. Return which has lost its place; None: there was room."""
        loser = self._crowding(address) if len(self._taken) >= self._most else None
        if loser is not None:
            del self._taken[loser]
        self._taken[visitor] = address
        return loser

    def leave(self, visitor: Visitor) -> bool:
        """Give up a place. Return False: it has none, or has lost it."""
        return self._taken.pop(visitor, None) is not None

    def _crowding(self, coming: str) -> Visitor:
        """coming: the address of the new one, which counts, too."""
        number = Counter(self._taken.values())
        number[coming] += 1
        return max(self._taken, key=lambda each: number[self._taken[each]])  # the first of those that are equal
