"""A lease that is kept alive in the background until it is abandoned, revoked or lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_ext.etcd.errors import ClientClosed, ConfigError, EtcdError
from elastic_ext.etcd.values import KeptAlive, Lease

logger = logging.getLogger(__name__)


LATE_SHARE = 0.5  # a renewal is due after a third of the TTL, and one that fails is retried at once
MIN_TTL_S = 2  # etcd raises shorter TTLs to one and a half election timeouts, 2 s by default


@dataclass(frozen=True)
class LeaseState:
    """The state of one lease, as known here. Times are monotonic seconds."""

    lease_id: int
    ttl_s: int
    next_at: float  # when to renew it
    alive_until: float  # time until which the server certainly keeps it


class LeaseClient(Protocol):
    """The part of a client that a session needs."""

    @property
    def renewer(self) -> LeaseRenewer: ...

    def now(self) -> float: ...

    def lease_grant(self, ttl_s: int, *, timeout_s: float | None = None) -> Lease: ...

    def lease_revoke(self, lease_id: int, *, timeout_s: float | None = None) -> None: ...


class LeaseSession:
    """A lease granted by the constructor and renewed every third of its TTL by the client's renewer.

    Lost means: the server says that the lease is gone. It stays lost; the caller grants a new one if it wants. Silence is no
    loss, since a lease outlives an outage of all members: etcd gives each its full TTL again when a leader is elected. So a
    session keeps asking; meanwhile `alive_until` may lie in the past.
    """

    def __init__(
        self,
        client: LeaseClient,
        ttl_s: int,
        *,
        on_lost: Callable[[LeaseSession], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Grant the lease.

        Args:
            ttl_s: seconds, at least 2.
            on_lost: called once, on the renewer's thread; it must return at once.
            timeout_s: for the grant.

        Raises EtcdError: the lease could not be granted.
        """
        if ttl_s < MIN_TTL_S:
            raise ConfigError(f"lease TTL of {ttl_s} s: expected at least {MIN_TTL_S} s, the shortest TTL that etcd keeps")
        self._client = client
        self._on_lost = on_lost
        self.lost = threading.Event()  # set when the lease is lost
        self.late_at: float | None = None  # when a renewal last came `late`, monotonic; None if never
        granted = client.lease_grant(ttl_s, timeout_s=timeout_s)
        self.lease_id = granted.lease_id  # for `Put(..., lease_id=)`
        self.ttl_s = granted.ttl_s  # as granted by the server
        self.state = _state_of(granted.lease_id, granted.sent_at, granted.ttl_s)
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
        """Delete the lease and its keys now. Raises EtcdError if that fails; the lease then expires when its time is up."""
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
        self.state = _state_of(self.lease_id, sent_at, ttl_s)

    def retry_at(self, at: float) -> None:
        """Record a failed renewal, to be retried at this monotonic time."""
        self.state = replace(self.state, next_at=at)

    def end(self, reason: str) -> None:
        """Mark the lease as lost. reason: one line."""
        logger.warning("etcd lease %x is lost: %s", self.lease_id, reason)
        self.lost.set()
        if self._on_lost is not None:
            try:
                self._on_lost(self)
            except Exception:  # foreign code on the thread that keeps the other leases alive
                logger.exception("on_lost of etcd lease %x failed", self.lease_id)


def _state_of(lease_id: int, sent_at: float, ttl_s: int) -> LeaseState:
    return LeaseState(lease_id, ttl_s, sent_at + ttl_s / 3, sent_at + ttl_s)


_MIN_ATTEMPT_S = 0.2
_MAX_RETRY_S = 0.5
_JOIN_S = 2.0
_PER_CALL = 200  # leases: with thousands of leases, one slow call should not lose all


class KeepAlive(Protocol):
    """The signature of `EtcdClient.lease_keep_alive`."""

    def __call__(self, lease_ids: Sequence[int], *, timeout_s: float | None = None, beside_s: float = ...) -> KeptAlive: ...


@dataclass(frozen=True)
class RenewalPlan:
    """The renewer's next actions."""

    due: tuple[int, ...]  # ids of leases to renew
    wait_s: float | None  # seconds until the next action; None: no lease needs one


def plan(states: Iterable[LeaseState], now: float) -> RenewalPlan:
    """Return what to do at `now`, in monotonic seconds."""
    states = list(states)
    wait_s = min((state.next_at for state in states), default=math.inf) - now
    if wait_s > 0:
        return RenewalPlan((), wait_s if states else None)
    # Take along those due within a tenth of their TTL: 1,000 leases should not make 1,000 calls.
    return RenewalPlan(tuple(state.lease_id for state in states if state.next_at <= now + state.ttl_s / 10), 0.0)


class LeaseRenewer:
    """Renews the sessions of one client. Its thread starts with the first session."""

    def __init__(self, keep_alive: KeepAlive, closed: threading.Event) -> None:
        """closed: set when the client is closed."""
        self._keep_alive = keep_alive
        self._closed = closed
        self._sessions: dict[int, LeaseSession] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf
        self._troubles: set[type[EtcdError]] = set()  # since a renewal last came through

    def add(self, session: LeaseSession) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="etcd-lease-renewer", daemon=True)
                thread.start()
                self._thread = thread
            self._sessions[session.lease_id] = session
            if session.state.next_at < self._wakes_at:
                self._changed.notify()

    def remove(self, session: LeaseSession) -> None:
        """Stop renewing this session; do nothing if it is not there."""
        with self._changed:
            self._sessions.pop(session.lease_id, None)

    def close(self) -> None:
        """Wake and end the thread. Call this after `closed` is set."""
        with self._changed:
            self._changed.notify()
        thread = self._thread  # it may fail, and forget itself, meanwhile
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._turn()
        except Exception as error:
            logger.exception("the thread that keeps etcd leases alive failed")
            with self._changed:
                sessions = self._forget(list(self._sessions))
                self._thread = None  # the next session starts another
            for session in sessions:
                session.end(f"the thread that keeps it alive failed: {error!r}")

    def _turn(self) -> None:
        with self._changed:
            if self._closed.is_set():
                return
            todo = plan([session.state for session in self._sessions.values()], time.monotonic())
            if not todo.due:
                self._wakes_at = math.inf if todo.wait_s is None else time.monotonic() + todo.wait_s
                self._changed.wait(todo.wait_s)
                return
            due = [self._sessions[lease_id] for lease_id in todo.due]
        for at in range(0, len(due), _PER_CALL):
            self._renew(due[at : at + _PER_CALL])

    def _forget(self, lease_ids: Sequence[int]) -> list[LeaseSession]:
        with self._changed:
            return [self._sessions.pop(lease_id) for lease_id in lease_ids if lease_id in self._sessions]

    def _renew(self, due: list[LeaseSession]) -> None:
        now = time.monotonic()
        shortest = min(session.ttl_s for session in due)
        # Not beyond the end of the lease that ends first: another try may still keep it.
        until_end = min((s.alive_until - now for s in due if s.alive_until > now), default=shortest / 3)
        timeout_s = max(_MIN_ATTEMPT_S, min(shortest / 3, until_end))
        beside_s = max(_MIN_ATTEMPT_S, shortest / 10)
        try:
            kept = self._keep_alive([s.lease_id for s in due], timeout_s=timeout_s, beside_s=beside_s)
        except ClientClosed:
            return
        except EtcdError as error:
            self._note(error)
            self._retry(due, shortest, now)
            return
        self._note(None)
        gone = [lease_id for lease_id, ttl_s in kept.ttl_s.items() if ttl_s <= 0]
        for session in due:
            ttl_s = kept.ttl_s.get(session.lease_id, 0)
            if ttl_s > 0:
                session.renewed(kept.sent_at, ttl_s)
        self._retry([session for session in due if session.lease_id not in kept.ttl_s], shortest, now)
        for session in self._forget(gone):
            session.end("etcd says that it has expired or was revoked")

    @staticmethod
    def _retry(sessions: list[LeaseSession], ttl_s: int, began: float) -> None:
        """Have them renewed again: at once, if the attempt that began then has taken its time. Little of the TTL may be left."""
        at = began + min(_MAX_RETRY_S, ttl_s / 6)
        for session in sessions:
            session.retry_at(at)

    def _note(self, trouble: EtcdError | None) -> None:
        """Log one line when trouble begins, or another kind of it, and one when all ends."""
        if trouble is None:
            if self._troubles:
                logger.info("etcd leases are being renewed again")
            self._troubles.clear()
        elif type(trouble) not in self._troubles:
            logger.warning("etcd leases are not being renewed; trying again: %s", trouble)
            self._troubles.add(type(trouble))
