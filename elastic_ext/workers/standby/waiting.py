"""The waiting standbys, and the surroundings in which they were started."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from elastic_ext.workers.standby import facts, rules
from elastic_ext.workers.standby.client import Standby


class WaitingStandbys:
    """The waiting standbys. Any thread may call this. A standby outlives its server, so standbys of several servers may wait.

    Invariant: all of them were started in the same surroundings.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standbys: list[Standby] = []
        self._surroundings: dict[str, object] = {}
        self._stale = False

    def __len__(self) -> int:
        return len(self._standbys)

    def all(self) -> list[Standby]:
        with self._lock:
            return list(self._standbys)

    def take(self) -> Standby | None:
        """Remove and return one; None if there is none."""
        with self._lock:
            return self._standbys.pop(0) if self._standbys else None

    def add(self, standbys: Iterable[Standby]) -> None:
        with self._lock:
            self._standbys += standbys

    def remove_dead(self) -> list[Standby]:
        """Remove and return the standbys whose process has ended."""
        with self._lock:
            dead = [each for each in self._standbys if not each.alive]
            self._standbys = [each for each in self._standbys if each not in dead]
        return dead

    def end(self) -> None:
        """Kill all of them."""
        with self._lock:
            standbys, self._standbys = self._standbys, []
        for each in standbys:
            each.end()

    def start_in(self, environ: Mapping[str, str]) -> None:
        """Record that a server starts with this environment; end standbys that were started in other surroundings."""
        surroundings = facts.surroundings(environ)
        with self._lock:
            changed, self._surroundings = surroundings != self._surroundings, surroundings
        if changed:
            self.end()

    def differs(self, environ: Mapping[str, str]) -> str | None:
        """Return in words what a worker that starts now would inherit differently; None if nothing. See `take_stale`."""
        now = facts.surroundings(environ)
        with self._lock:
            changed = rules.differs(now, self._surroundings)
            self._stale = self._stale or changed is not None
        return changed

    def take_stale(self) -> bool:
        """Return whether `differs` has found a difference since the last call."""
        with self._lock:
            stale, self._stale = self._stale, False
        return stale
