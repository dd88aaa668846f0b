"""Sends a node's claims to the round's store, however long the store, or the way to it, stands still.

The timeout of a TCPStore bounds neither `compare_set` nor `check`, nor its constructor once the server's kernel has accepted the
connection: a store that is stopped, or whose packets are dropped, holds a call without limit. So each attempt to send has a
thread and a connection of its own, and a thread of ours waits for it. An attempt that takes too long is given up: the next one
is begun beside it. If it goes on later, it does no harm: see the invariant of `claims`. If the claim changes meanwhile, the next
one is begun at once: a withdrawal has little time (`rounds.CLAIMS_S`), and what holds up an attempt may be its connection alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from elastic_ext.base import round_store
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.rendezvous.c10d.claims import Claim, Claims

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # until a claim that did not arrive is sent again
MAX_BESIDE = 4  # attempts under way; with so many, a change waits like a repetition
PROMPT_S = 1.0  # a hang is judged by an attempt that takes no longer


class StoodStill(ElasticExtError):
    """The store was slow to answer. Withdrawals of other nodes may have been held up as long, so no hang can be judged yet."""


class ClaimSender:
    """One agent's sender, in one round. Its thread is started by the first claim and ends with the round."""

    def __init__(self, claims: Claims, attempt: Callable[[float], None], start: Callable[[Callable[[], None]], object]) -> None:
        """Start nothing yet.

        Args:
            attempt: sends what `claims` has not told yet. Called with the seconds within which it may judge a hang; if it took
                longer, it raises StoodStill instead.
            start: runs a function in another thread. Raises RuntimeError if there can be no more threads.
        """
        self._claims, self._attempt, self._start = claims, attempt, start
        self._lock = threading.Lock()
        self._running = False
        self._news = threading.Event()  # a claim has been made, or the round is over
        self._changed: Future[None] = Future()  # done once a claim says something else than the one before
        self._over: Future[None] = Future()  # done once the round is over

    def change(self, change: Callable[[Claim], Claim]) -> None:
        """Change what this node claims; return at once."""
        changed = self._claims.change(change)
        self._news.set()
        with self._lock:
            if changed and not self._changed.done():
                self._changed.set_result(None)
            if self._running or self._claims.all_told:
                return
            try:
                self._start(self._run)
                self._running = True
            except RuntimeError as error:  # the next claim tries again; the store holds none that is to be withdrawn
                logger.warning("could not tell the other nodes whether the workers of this node make progress: %s", error)

    def end(self) -> None:
        """The round is over: nobody needs our claims any more."""
        with self._lock:
            if not self._over.done():
                self._over.set_result(None)
        self._news.set()

    def _run(self) -> None:
        while not self._over.done():
            self._news.wait()
            self._news.clear()
            self._send_all()

    def _send_all(self) -> None:
        """Send until all is told: a withdrawal that got lost would let the others end the round of a healthy job."""
        attempts: set[Future[None]] = set()
        patience_s, prompt_s = round_store.ANSWER.total_seconds(), PROMPT_S
        level = logging.WARNING
        while not (self._claims.all_told or self._over.done()):
            changed = self._next_change()  # before the attempt, which tells what has changed until it writes
            attempts.add(self._begin(prompt_s))
            news = {changed} if len(attempts) < MAX_BESIDE else set()
            done, left = wait({*attempts, self._over, *news}, patience_s, FIRST_COMPLETED)
            attempts &= left
            errors = [error for each in done if (error := each.exception()) is not None]
            if changed in done and attempts:
                prompt_s = 0.0  # the store may stand still, as below
            elif not done:
                errors = [TimeoutError(f"no answer from the store in {patience_s:g} s; trying beside it on a new connection")]
                patience_s *= 2  # so those that are held up stay few
                prompt_s = 0.0  # the store stands still: the next attempt may start just before it goes on
            for error in errors:
                if isinstance(error, StoodStill):
                    logger.debug("%s", error)
                    prompt_s = patience_s  # of a store that is always slow a hang must be known, too
                else:
                    logger.log(level, "could not tell the other nodes whether the workers of this node make progress: %s", error)
                    level = logging.DEBUG
            if done and errors:
                wait([self._over], RETRY_S)

    def _next_change(self) -> Future[None]:
        """Return what is done once the claim changes after this call."""
        with self._lock:
            if self._changed.done():
                self._changed = Future()
            return self._changed

    def _begin(self, prompt_s: float) -> Future[None]:
        """Start an attempt. It counts as failed if there can be no more threads."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(self._attempt(prompt_s))
            except Exception as error:  # noqa: BLE001 - top of the thread; `_send_all` logs it and tries again
                done.set_exception(error)

        try:
            self._start(run)
        except RuntimeError as error:
            done.set_exception(error)
        return done
