"""Stops a node that is cut off before the others can take it for dead; lets all train on while etcd is down for everybody.

The server forgets a node when its lease has not been renewed for a whole lease time; the others may then go on without it.
So a node whose lease nears that end must stop its workers, unless no other node of the round can renew its own either: then
nobody is there to form a round, and when etcd is back it gives every lease its whole time again. The nodes tell each other
through the store of the round, which does not depend on etcd.

| share of the lease time left | |
|---|---|
| more than 62 % | well (a renewal is due every third) |
| 10 to 62 % | in trouble: say so in the store |
| less than 10 % | closed, unless all others are in trouble too, or have just come out of it with their lease kept past its end |

Renewals of two nodes are at most a third apart, so in an outage of etcd the last node is in trouble (38 % + 33 % after the first
one's last renewal) before the first one must decide (90 %). What is left then is all the time that its workers get to stop.

When etcd is back one node renews first. If its lease was over by its own count and the server had kept it, then the server has
given all leases their whole time again: the others have that time to renew theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

TROUBLE_SHARE = 0.62
CLOSE_SHARE = 0.10
LOOK_SHARE = 0.05  # how often a node in trouble looks again
GRACE_SHARE = 0.5  # of the whole time that a lease got again: to renew it

WELL, TROUBLE, KEPT = "0", "1", "2"  # what a node says of itself in the store
_STATES = {state.encode(): state for state in (WELL, TROUBLE, KEPT)}  # anything else excuses nobody


class Fence:
    """One thread beside the rendezvous: what it asks of the store may hang on a cut link, and nothing else must wait for it.

    Attributes:
        closed: the workers must not run.
    """

    def __init__(self, lease: Callable[[], tuple[int | None, float]], ttl_s: float, on_change: Callable[[], None]) -> None:
        """lease: its id, and the monotonic time until which it is certainly alive."""
        self._lease = lease
        self._ttl_s = ttl_s
        self._on_change = on_change
        self.closed = False
        self._round: tuple[tuple[str, int], int, int] | None = None
        self._store: tuple[tuple[str, int], TCPStore] | None = None  # kept open from trouble on; with its address
        self._said = WELL
        self._over: int | None = None  # a lease whose end has passed, by our count
        self._all_down = False  # since this trouble began all were seen in trouble at once
        self._kept_at: float | None = None  # when another was first seen to have come out of it
        self._ended = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-fence", daemon=True)
        self._thread.start()

    def watch(self, store: tuple[str, int] | None, rank: int, nodes: int) -> None:
        """The round that this node is in: address and port of its store, this node's rank, how many nodes; None: in none."""
        with self._wake:
            self._round = (store, rank, nodes) if store is not None else None
            self.closed = False
            self._said = WELL  # in a new store nobody has said anything
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(self._ttl_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._ended:
                    return
                lease_id, alive_until = self._lease()
                share = (alive_until - time.monotonic()) / self._ttl_s
                round_ = self._round
                if round_ is None or (share > TROUBLE_SHARE and self._said == WELL):
                    endless = round_ is None or share == float("inf")
                    self._wake.wait(None if endless else (share - TROUBLE_SHARE) * self._ttl_s)
                    continue
            self._look(round_, share, lease_id)
            with self._wake:
                if not self._ended:
                    self._wake.wait(LOOK_SHARE * self._ttl_s)

    def _look(self, round_: tuple[tuple[str, int], int, int], share: float, lease_id: int | None) -> None:
        """Say what there is to say, and decide."""
        state = self._state(share, lease_id)
        others = self._tell(round_, state)
        closed = share <= CLOSE_SHARE and not self._excused(others, time.monotonic())
        with self._wake:
            if self._round is not round_:
                return  # of a round that is over
            # Once it is well again it has no more to say, and what it has said stands until the next trouble.
            self._said = WELL if state == KEPT and others is not None else state
            changed, self.closed = closed != self.closed, closed
        if closed and changed:
            logger.error("cut off from etcd, and others are not: this node's workers stop before the others go on without it")
            self._on_change()

    def _state(self, share: float, lease_id: int | None) -> str:
        if share <= TROUBLE_SHARE:
            if self._said != TROUBLE:
                self._all_down, self._kept_at = False, None
            if share <= 0:
                self._over = lease_id
            return TROUBLE
        kept = self._over is not None and self._over == lease_id
        self._over = None
        return KEPT if kept else WELL

    def _excused(self, others: list[str] | None, now: float) -> bool:
        """Whether nobody can go on without this node. others: what they say of themselves; None: the store does not answer."""
        if others is None or WELL in others:
            return False
        if KEPT not in others:
            self._all_down = True
            return True
        if not self._all_down:
            return False  # it says so of an earlier outage
        if self._kept_at is None:
            self._kept_at = now
        return now < self._kept_at + GRACE_SHARE * self._ttl_s

    def _tell(self, round_: tuple[tuple[str, int], int, int], state: str) -> list[str] | None:
        """Write this node's state into the round's store; return those of the others, who are well if they have never told."""
        (host, port), rank, nodes = round_
        try:
            store = self._connected(host, port)
            store.set(f"elastic_ext/trouble/{rank}", state)
            keys = [f"elastic_ext/trouble/{other}" for other in range(nodes) if other != rank]
            return [_STATES.get(store.get(key), WELL) if store.check([key]) else WELL for key in keys]
        except (RuntimeError, ValueError) as error:  # what torch raises for a store that does not answer
            logger.debug("the store of the round at %s:%s does not answer: %s", host, port, error)
            self._store = None
            return None

    def _connected(self, host: str, port: int) -> TCPStore:
        if self._store is None or self._store[0] != (host, port):
            timeout = timedelta(seconds=max(1.0, self._ttl_s / 10))
            self._store = (host, port), TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return self._store[1]
