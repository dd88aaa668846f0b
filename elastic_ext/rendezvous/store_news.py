"""News among the agents of a round through a TCPStore: "this round is over", as an event.

Each agent waits in one blocking call on a connection of its own; the store wakes all of them when one sets the round's key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

WAIT = timedelta(days=365)  # a store's wait needs some limit
CONNECT = timedelta(seconds=10)


class RoundNews:
    """One round's news. `reason` is None until some agent says that the round is over."""

    def __init__(self, host: str, port: int, key: str, on_news: Callable[[], None]) -> None:
        """Raises what torch raises where the store does not answer: RuntimeError or ValueError."""
        self.reason: str | None = None
        self._key = key
        self._on_news = on_news
        self._host, self._port = host, port
        self._ended = False
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
        self._threads = [threading.Thread(target=self._wait, args=(store,), name="elastic_ext-news", daemon=True)]
        self._threads[0].start()

    def _wait(self, store: TCPStore) -> None:
        try:
            store.wait([self._key], WAIT)
            reason = store.get(self._key).decode()
        except (RuntimeError, ValueError) as error:  # the store's host is gone: no news from here any more
            logger.debug("no more news of this round: %s", error)
            return
        if not self._ended:
            self.reason = reason
            self._on_news()

    def tell(self, reason: str) -> None:
        """Tell all agents of the round, from a thread: a store that hangs must hold up nobody."""
        thread = threading.Thread(target=self._tell, args=(reason,), name="elastic_ext-news", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tell(self, reason: str) -> None:
        try:
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=CONNECT)
            store.set(self._key, reason)
        except (RuntimeError, ValueError) as error:
            logger.warning("the other nodes could not be told that this round is over: %s", error)

    def close(self) -> None:
        """This node goes on to another round. Tells the others too, which ends their waits."""
        self._ended = True
        self.tell("a node has gone on to the next round")

    def end(self, timeout_s: float = 5.0) -> None:
        """The process is about to end, and a thread that came back from torch's C++ code meanwhile would abort it: wait for them.

        A thread that a cut link holds for longer than `timeout_s` stays there, and comes back no more.
        """
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
