"""The time that a leader gives members that it does not see because etcd was unreachable or has lost records."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ext.etcd import LeaseSession

RETURN_S = (
    8.0  # gRPC takes up to 5 to find a server again (min_reconnect_backoff_ms and a pause); the rest is for the node's write
)


def returning_s(ttl_s: float) -> float:
    """Return how many seconds a leader gives members to come back after an outage: longer than the fence lets them train on."""
    return max(ttl_s, RETURN_S)


class Outage:
    """The last outage that this node knows of. For the rendezvous thread."""

    def __init__(self, ttl_s: float, session: Callable[[], LeaseSession | None], now: Callable[[], float]) -> None:
        """session: returns the node's current lease, if any. now: returns the monotonic time."""
        self._ttl_s = ttl_s
        self._session = session
        self._now = now
        self._until: float | None = None

    def expect_members(self) -> None:
        """Start the wait: records are lost, or this node was cut off for long, and the others may have been as well."""
        self._until = self._now() + returning_s(self._ttl_s)

    @property
    def returning_until(self) -> float | None:
        """See `rounds.View`."""
        session = self._session()
        if session is not None and session.late:
            self.expect_members()
        elif session is not None and session.late_at is not None:
            until = session.late_at + returning_s(self._ttl_s)
            return until if self._until is None else max(until, self._until)
        return self._until
