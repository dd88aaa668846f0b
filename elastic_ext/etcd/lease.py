"""A lease that is kept alive in the background until it is abandoned, revoked or lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.etcd.errors import ConfigError
from elastic_ext.etcd.values import Lease

logger = logging.getLogger(__name__)

LATE_SHARE = 0.5  # a renewal is due after a third of the TTL, and one that fails is retried at once
MIN_TTL_S = 2  # etcd raises shorter TTLs to one and a half election timeouts, 2 s by default


@dataclass(frozen=True)
class LeaseState:
    """The state of one lease, as known here. Times are monotonic seconds.

    Attributes:
        next_at: when to renew it.
        alive_until: time until which the server certainly keeps it.
        patient: the server's silence is no reason to give it up.
    """

    lease_id: int
    ttl_s: int
    next_at: float
    alive_until: float
    patient: bool


class Renewer(Protocol):
    """Renews sessions in the background: `lease_renewer.LeaseRenewer`."""

    def add(self, session: LeaseSession) -> None: ...

    def remove(self, session: LeaseSession) -> None: ...


class LeaseClient(Protocol):
    """The part of a client that a session needs."""

    @property
    def renewer(self) -> Renewer: ...

    def now(self) -> float: ...

    def lease_grant(self, ttl_s: int, *, timeout_s: float | None = None) -> Lease: ...

    def lease_revoke(self, lease_id: int, *, timeout_s: float | None = None) -> None: ...


class LeaseSession:
    """A lease granted by the constructor and renewed every third of its TTL by the client's renewer.

    Lost means: the server says that the lease is gone; or, unless `patient`, `alive_until` has passed without an answer.
    Connection trouble before that time is no loss. A lost lease stays lost; the caller grants a new one if it wants.

    A lease outlives an outage of all members: etcd gives each lease its full TTL again when a leader is elected. A `patient`
    session uses that: it keeps asking, and only the server's answer ends it; meanwhile `alive_until` lies in the past.

    Attributes:
        lease_id: for `Put(..., lease_id=)`.
        ttl_s: as granted by the server.
        lost: set when the lease is lost.
        lost_reason: one line, once lost.
        late_at: when a renewal last came `late`, monotonic; None if never.
    """

    def __init__(
        self,
        client: LeaseClient,
        ttl_s: int,
        *,
        on_lost: Callable[[LeaseSession], None] | None = None,
        patient: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Grant the lease.

        Args:
            ttl_s: seconds, at least 2.
            on_lost: called once, on the renewer's thread; it must return at once.
            timeout_s: for the grant.

        Raises:
            EtcdError: the lease could not be granted.
        """
        if ttl_s < MIN_TTL_S:
            raise ConfigError(f"lease TTL of {ttl_s} s: expected at least {MIN_TTL_S} s, the shortest TTL that etcd keeps")
        self._client = client
        self._on_lost = on_lost
        self.lost = threading.Event()
        self.lost_reason: str | None = None
        self.late_at: float | None = None
        granted = client.lease_grant(ttl_s, timeout_s=timeout_s)
        self.lease_id = granted.lease_id
        self.ttl_s = granted.ttl_s
        self.state = _state_of(granted.lease_id, granted.sent_at, granted.ttl_s, patient)
        client.renewer.add(self)

    def __repr__(self) -> str:
        return f"LeaseSession({self.lease_id:x}, {self.ttl_s} s{', lost' if self.lost.is_set() else ''})"

    @property
    def alive_until(self) -> float:
        """Monotonic time until which the lease is certainly alive on the server.

        It counts from just before the last successful renewal was sent: the server began to count later than that.
        """
        return self.state.alive_until

    @property
    def late(self) -> bool:
        """Whether more than LATE_SHARE of the lease time is over: etcd does not answer, or this process stood still."""
        return self._client.now() > self.alive_until - (1 - LATE_SHARE) * self.ttl_s

    def revoke(self, *, timeout_s: float | None = None) -> None:
        """Delete the lease and its keys now. Raises EtcdError if that fails; the lease then expires by itself."""
        self.stop_renewing()
        self._client.lease_revoke(self.lease_id, timeout_s=timeout_s)

    def stop_renewing(self) -> None:
        """Stop renewing: the server lets the lease expire, at `alive_until` or somewhat later."""
        self._client.renewer.remove(self)

    # For the renewer

    def renewed(self, sent_at: float, ttl_s: int) -> None:
        """Record a successful renewal. sent_at: monotonic, before its request was sent."""
        if self.late:
            self.late_at = self._client.now()
        self.state = _state_of(self.lease_id, sent_at, ttl_s, self.state.patient)

    def retry_at(self, at: float) -> None:
        """Record a failed renewal, to be retried at this monotonic time."""
        self.state = LeaseState(self.lease_id, self.state.ttl_s, at, self.state.alive_until, self.state.patient)

    def end(self, reason: str) -> None:
        """Mark the lease as lost. reason: one line."""
        logger.warning("etcd lease %x is lost: %s", self.lease_id, reason)
        self.lost_reason = reason
        self.lost.set()
        if self._on_lost is not None:
            try:
                self._on_lost(self)
            except Exception:  # foreign code on the thread that keeps the other leases alive
                logger.exception("on_lost of etcd lease %x failed", self.lease_id)


def _state_of(lease_id: int, sent_at: float, ttl_s: int, patient: bool) -> LeaseState:
    return LeaseState(lease_id, ttl_s, sent_at + ttl_s / 3, sent_at + ttl_s, patient)
