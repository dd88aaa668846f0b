"""Stops a node that is cut off before the others can count it as lost; lets all train on while etcd is down for everybody.

The server forgets a node when its lease has not been renewed for a whole lease time; the others may then go on without it. So a
node whose lease is about to end must stop its workers, unless no other node of the round can renew its own lease either: then
no node can form a round, and when etcd is back it gives every lease its full time again.

Wire protocol: each node writes its state (WELL, TROUBLE or BACK) into the store of the round, which does not depend on etcd,
under elastic_ext/trouble/RANK (`round_store.NodeStates`). A node that has never written is well.

| share of the lease time left | |
|---|---|
| more than 62 % | well (a renewal is due every third) |
| 10 to 62 % | in trouble: the node writes this into the store |
| less than 10 % | closed, unless all others are in trouble too, or have just come back from an outage that all were in |

Renewals of two nodes are at most a third apart, so in an outage of etcd the last node is in trouble (38 % + 33 % after the first
node's last renewal) before the first one must decide (90 %). The workers must stop in the rest of the lease time.

When etcd is back, one node is the first to renew, or to register again if its lease has ended. It writes BACK, and the others,
which are about to come back too, train on for `train_on_s`, counted from before it was back. No round is formed without them in
that time: the leader was in the outage too, and gives the members longer than that to come back (`outage.returning_s`).

Invariant: a node writes BACK only if half of its lease time had passed; a leader in that state waits for the members
(`LeaseSession.late`). A node that comes out of a shorter trouble writes WELL and excuses no node.

Invariant: a fence that has closed stays so for the round. Its workers are being stopped, though the lease may have been renewed
since; the node's next record says so (`Node.cut`), which explains the failures of the others.

A node that may have been declared dead (`links`) gives up: it closes at once, and its workers get no grace. It does not if it
knows from its last look that all nodes are in trouble, unless it was certainly declared dead.

Not covered: all members of the round are cut off from etcd while a node outside it is not. Spares are not in the round's store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_ext.etcd.lease import LATE_SHARE
from elastic_ext.rendezvous.round_store import BACK, TROUBLE, WELL, NodeStates, RoundStore

logger = logging.getLogger(__name__)

TROUBLE_SHARE = 0.62
CLOSE_SHARE = 0.10
POLL_SHARE = 0.05  # how often a node in trouble looks again
TRAIN_ON_S = 5.0  # gRPC takes that long to find a server again (min_reconnect_backoff_ms and a pause)
TRAIN_ON_SHARE = 0.5  # of the lease time, if that is longer


def train_on_s(ttl_s: float) -> float:
    """Return how many seconds after all were last seen in trouble this node must be back, once another node is."""
    return max(TRAIN_ON_S, TRAIN_ON_SHARE * ttl_s)


def _call_s(ttl_s: float) -> float:
    """Return how many seconds the store of the round has for an answer."""
    return max(1.0, ttl_s / 10)


def may_train_on(others: Sequence[str] | None, all_down_at: float | None, now: float, ttl_s: float) -> bool:
    """Return whether no other node can go on without a node in trouble.

    others: their states; None: the store does not answer. all_down_at: see Trouble.
    """
    if others is None or not all(each in (TROUBLE, BACK) for each in others):
        return False
    if BACK not in others:
        return True
    # None: they wrote BACK after an earlier outage.
    return all_down_at is not None and now < all_down_at + train_on_s(ttl_s)


@dataclass
class Trouble:
    """The last trouble of this node in the round."""

    late: bool = False  # half of the lease time has passed in it
    all_down_at: float | None = None  # start of the last look in it that saw all nodes in trouble


class Fence:
    """A thread beside the rendezvous thread, because its store calls take a while on a cut link."""

    def __init__(self, lease: Callable[[], tuple[int | None, float]], ttl_s: float, on_change: Callable[[], None]) -> None:
        """lease: returns its id, and the monotonic time until which it is certainly alive."""
        self._lease = lease
        self._ttl_s = ttl_s
        self._on_change = on_change
        self.closed = False  # the workers must not run. It stays so until the next round
        self._round: RoundStore | None = None
        self._states = NodeStates(_call_s(ttl_s))
        self._written = WELL  # this node's last written state; a written BACK counts as WELL
        self._trouble = Trouble()
        self._given_up = False  # in this round; see `give_up`
        self._ended = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-fence", daemon=True)
        self._thread.start()

    def watch(self, round_: RoundStore | None) -> None:
        """Guard the workers of this round; None: this node is in no round."""
        with self._wake:
            self._round = round_
            self.closed = self._given_up = False
            self._written = WELL  # nothing has been written into a new store
            self._wake.notify()

    def give_up(self, reason: str, certain: bool) -> None:
        """Close for the rest of this round, if there is one. Any thread may call this; it returns at once.

        certain: the others do continue without this node; otherwise they may, and cannot while all are in trouble.
        """
        with self._wake:
            if self._round is None or self._given_up or (not certain and self._all_are_down()):
                return
            self.closed = self._given_up = True
            self._wake.notify()
        logger.error("elastic_ext: the other nodes may continue without this one: %s; stopping its workers", reason)
        self._on_change()

    def _all_are_down(self) -> bool:
        """Return whether all nodes were in trouble at the last look, and this one still is."""
        at = self._trouble.all_down_at
        return self._written == TROUBLE and at is not None and time.monotonic() < at + 2 * POLL_SHARE * self._ttl_s

    @property
    def stop_by(self) -> float | None:
        """The monotonic time by which the workers must be gone; None while the fence is open."""
        if not self.closed:
            return None
        return time.monotonic() if self._given_up else self._lease()[1]

    def close(self, timeout_s: float = 3.0) -> None:
        """End the thread. It may be in a store call: after timeout_s, abandon it."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._ended:
                    return
                share, round_ = self._share(), self._round
                if self._given_up:
                    self._wake.wait()  # for the next round
                    continue
                if round_ is None or (share > TROUBLE_SHARE and self._written == WELL):
                    endless = round_ is None or share == float("inf")
                    self._wake.wait(None if endless else (share - TROUBLE_SHARE) * self._ttl_s)
                    continue
            self._look(round_, share)
            with self._wake:
                if not self._ended:
                    self._wake.wait(POLL_SHARE * self._ttl_s)

    def _share(self) -> float:
        """Return the share of the lease time that is left."""
        return (self._lease()[1] - time.monotonic()) / self._ttl_s

    def _answer_s(self, share: float) -> float:
        """Return how long to wait for the others' states: until this node must decide, unless all were seen in trouble."""
        if self._written == TROUBLE and self._trouble.all_down_at is not None:
            return _call_s(self._ttl_s)
        return min(_call_s(self._ttl_s), max(share - CLOSE_SHARE, POLL_SHARE) * self._ttl_s)

    def _look(self, round_: RoundStore, share: float) -> None:
        """Write this node's state into the store, and decide."""
        began = time.monotonic()
        state = self._state(share)
        others = self._states.swap(round_, state, self._answer_s(share))
        if state == TROUBLE and others is not None and all(each == TROUBLE for each in others):
            self._trouble.all_down_at = began
        share = self._share()  # the lease may have been renewed meanwhile
        closed = share <= CLOSE_SHARE and not may_train_on(others, self._trouble.all_down_at, time.monotonic(), self._ttl_s)
        with self._wake:
            if self._round is not round_ or self._given_up:
                return  # the round of this look is over
            # Once the node is out of trouble and has written so, it writes no more until the next trouble.
            self._written = TROUBLE if state == TROUBLE or others is None or not self._states.settled else WELL
            closes = closed and not self.closed
            self.closed = self.closed or closed
        if closes:
            logger.error(
                "cut off from the job's store, but other nodes are not; stopping its workers before the others go on without it"
            )
            self._on_change()

    def _state(self, share: float) -> str:
        if share > TROUBLE_SHARE:
            return BACK if self._trouble.late and self._trouble.all_down_at is not None else WELL
        if self._written == WELL:
            self._trouble = Trouble()
        self._trouble.late = self._trouble.late or share <= 1 - LATE_SHARE
        return TROUBLE
