"""When etcd serves this agent no more, and when it does again. Pure; the caller tells the time, in monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outage:
    """A change. over: etcd serves again. endpoint: asked last, or that answers again. seconds: how long nobody has answered."""

    over: bool
    endpoint: str
    seconds: float


class OutageWatch:
    """Hears how each call ends, and tells of an outage once it has lasted: a member that restarts is none."""

    def __init__(self, after_s: float) -> None:
        """after_s: from the first failed call after the last answer."""
        self._after_s = after_s
        self._answered_at = float("-inf")
        self._since: float | None = None  # since when calls have failed
        self._told = False

    def called(self, began: float, now: float, answered: bool, endpoint: str) -> Outage | None:
        """Note a call that began then and ends now; return what has changed by that."""
        if not answered:
            if self._since is None:
                self._since = max(began, self._answered_at)  # a call that failed late began before the last answer
            if self._told or now - self._since < self._after_s:
                return None
            self._told = True
            return Outage(False, endpoint, now - self._since)
        since, told = self._since, self._told
        self._since, self._told, self._answered_at = None, False, now
        return Outage(True, endpoint, now - since) if told and since is not None else None
