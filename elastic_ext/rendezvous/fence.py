"""Stops a node that is cut off before the others can take it for dead; lets all train on while etcd is down for everybody.

The server forgets a node when its lease has not been renewed for a whole lease time; the others may then go on without it.
So a node whose lease nears that end must stop its workers, unless no other node of the round can renew its own either: then
nobody is there to form a round, and when etcd is back it gives every lease its whole time again. The nodes tell each other
through the store of the round, which does not depend on etcd.

| share of the lease time left | |
|---|---|
| more than 62 % | fine (a renewal is due every third) |
| 10 to 62 % | in trouble: say so in the store |
| less than 10 % | closed, unless all others are in trouble too |

Renewals of two nodes are at most a third apart, so in an outage of etcd the last node is in trouble (38 % + 33 % after the first
one's last renewal) before the first one must decide (90 %). What is left then is all the time that its workers get to stop.
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


class Fence:
    """One thread beside the rendezvous: what it asks of the store may hang on a cut link, and nothing else must wait for it.

    Attributes:
        closed: the workers must not run.
    """

    def __init__(self, alive_until: Callable[[], float], ttl_s: float, on_change: Callable[[], None]) -> None:
        """alive_until: monotonic time until which the lease is certainly alive."""
        self._alive_until = alive_until
        self._ttl_s = ttl_s
        self._on_change = on_change
        self.closed = False
        self._round: tuple[tuple[str, int], int, int] | None = None
        self._ended = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-fence", daemon=True)
        self._thread.start()

    def watch(self, store: tuple[str, int] | None, rank: int, nodes: int) -> None:
        """The round that this node is in: address and port of its store, this node's rank, how many nodes; None: in none."""
        with self._wake:
            self._round = (store, rank, nodes) if store is not None else None
            self.closed = False
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(self._ttl_s)

    def _run(self) -> None:
        said = False
        while True:
            with self._wake:
                if self._ended:
                    return
                share = (self._alive_until() - time.monotonic()) / self._ttl_s
                round_ = self._round
                if round_ is None or share > TROUBLE_SHARE:
                    wait_s = (share - TROUBLE_SHARE) * self._ttl_s if round_ is not None and share != float("inf") else None
                else:
                    wait_s = LOOK_SHARE * self._ttl_s
                if round_ is None or (share > TROUBLE_SHARE and not said):
                    self._wake.wait(wait_s)
                    continue
            said = self._look(round_, share)
            with self._wake:
                if not self._ended:
                    self._wake.wait(LOOK_SHARE * self._ttl_s)

    def _look(self, round_: tuple[tuple[str, int], int, int], share: float) -> bool:
        """Say what there is to say; return whether the others have been told that this node is in trouble."""
        in_trouble = share <= TROUBLE_SHARE
        all_in_trouble = self._tell(round_, in_trouble)
        closed = share <= CLOSE_SHARE and not all_in_trouble
        if closed != self.closed and self._round is round_:
            self.closed = closed
            if closed:
                logger.error("cut off from etcd, and others are not: this node's workers stop before the others go on without it")
                self._on_change()
        return in_trouble

    def _tell(self, round_: tuple[tuple[str, int], int, int], in_trouble: bool) -> bool:
        """Write this node's state into the round's store; return whether all of its nodes are in trouble."""
        (host, port), rank, nodes = round_
        try:
            timeout = timedelta(seconds=max(1.0, self._ttl_s / 10))
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            store.set(f"elastic_ext/trouble/{rank}", "1" if in_trouble else "0")
            keys = [f"elastic_ext/trouble/{other}" for other in range(nodes)]
            return in_trouble and store.check(keys) and all(store.get(key) == b"1" for key in keys)
        except (RuntimeError, ValueError) as error:  # what torch raises for a store that does not answer
            logger.debug("the store of the round at %s:%s does not answer: %s", host, port, error)
            return False
