"""Keeps all leases of a client alive, from one daemon thread.

A lease is due a third of its TTL after the last renewal. Leases due at about the same time share one short stream.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.etcd.errors import ClientClosed, EtcdError
from elastic_ext.etcd.lease import LeaseSession, LeaseState
from elastic_ext.etcd.values import KeptAlive

logger = logging.getLogger(__name__)

_MIN_ATTEMPT_S = 0.2
_MAX_RETRY_S = 0.5
_JOIN_S = 2.0
_PER_CALL = 200  # leases: with thousands of leases, one slow call should not lose all


class KeepAlive(Protocol):
    """The signature of `EtcdClient.lease_keep_alive`."""

    def __call__(self, lease_ids: Sequence[int], *, timeout_s: float | None = None, beside_s: float = ...) -> KeptAlive: ...


@dataclass(frozen=True)
class Plan:
    """The renewer's next actions.

    Attributes:
        due: ids of leases to renew.
        given_up: ids of leases whose server has been silent for too long.
        wait_s: seconds until the next action; None: no lease needs one.
    """

    due: tuple[int, ...]
    given_up: tuple[int, ...]
    wait_s: float | None


def plan(states: Iterable[LeaseState], now: float) -> Plan:
    """Return what to do at `now`, in monotonic seconds."""
    states = list(states)
    given_up = {state.lease_id for state in states if not state.patient and now >= state.alive_until}
    kept = [state for state in states if state.lease_id not in given_up]
    due: list[int] = []
    if any(state.next_at <= now for state in kept):
        # Take along those due within a tenth of their TTL: 1,000 leases should not make 1,000 calls.
        due = [state.lease_id for state in kept if state.next_at <= now + state.ttl_s / 10]
    if due or given_up:
        return Plan(tuple(due), tuple(given_up), 0.0)
    ends = [state.alive_until for state in kept if not state.patient]
    events = [state.next_at for state in kept] + ends
    return Plan((), (), min(events) - now if events else None)


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
        self._trouble: str | None = None

    def add(self, session: LeaseSession) -> None:
        """Renew this session from now on."""
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
            if not todo.due and not todo.given_up:
                self._wakes_at = math.inf if todo.wait_s is None else time.monotonic() + todo.wait_s
                self._changed.wait(todo.wait_s)
                return
            due = [self._sessions[lease_id] for lease_id in todo.due]
        for session in self._forget(todo.given_up):
            session.end(f"no answer from etcd for its TTL of {session.ttl_s} s: {self._trouble or 'renewal was late'}")
        for at in range(0, len(due), _PER_CALL):
            self._renew(due[at : at + _PER_CALL])

    def _forget(self, lease_ids: Sequence[int]) -> list[LeaseSession]:
        with self._changed:
            return [self._sessions.pop(lease_id) for lease_id in lease_ids if lease_id in self._sessions]

    def _renew(self, due: list[LeaseSession]) -> None:
        now = time.monotonic()
        shortest = min(session.ttl_s for session in due)
        # Return in time to give up the session that ends first.
        until_end = min((s.alive_until - now for s in due if s.alive_until > now), default=shortest / 3)
        timeout_s = max(_MIN_ATTEMPT_S, min(shortest / 3, until_end))
        beside_s = max(_MIN_ATTEMPT_S, shortest / 10)
        try:
            kept = self._keep_alive([s.lease_id for s in due], timeout_s=timeout_s, beside_s=beside_s)
        except ClientClosed:
            return
        except EtcdError as error:
            self._note(str(error))
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

    def _note(self, trouble: str | None) -> None:
        """Log one line when trouble begins, and one when it ends."""
        if trouble is not None and self._trouble is None:
            logger.warning("etcd leases are not being renewed; trying again: %s", trouble)
        elif trouble is None and self._trouble is not None:
            logger.info("etcd leases are being renewed again")
        self._trouble = trouble
