"""News among the agents of a round through a TCPStore: "this round is over", as an event.

Each agent waits in one blocking call on a connection of its own; the store wakes all of them when one sets the round's key. What
is told first stays: all agents hear the same.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from elastic_ext.rendezvous.rounds import STALLED

logger = logging.getLogger(__name__)

WAIT = timedelta(days=365)  # a store's wait needs some limit
CONNECT = timedelta(seconds=10)
GONE_ON = "a node has gone on to the next round"
ALL_DONE = "all workers have finished"
LEAVES = "left by "  # how the reason begins where a node goes that was told to
SAVE = "save"  # what is said where a save on demand is wanted; any other text is the reason of an end
DONE_KEY = "elastic_ext/done"  # how many nodes
STALLED_KEY = "elastic_ext/stalled"  # how many nodes claim it now


class RoundEvents:
    """One round's news, each under a key with the next number; an end is the last one.

    Attributes:
        reason: None until some agent says that the round is over.
        saves: how many saves on demand have been asked for.
    """

    def __init__(self, host: str, port: int, key: str, on_news: Callable[[], None]) -> None:
        """Raises what torch raises where the store does not answer: RuntimeError or ValueError."""
        self.reason: str | None = None
        self.saves = 0
        self._key = key
        self._on_news = on_news
        self._host, self._port = host, port
        self._ended = False
        self._stalled = False
        self._heard = threading.Event()
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
        self._threads = [threading.Thread(target=self._wait, args=(store,), name="elastic_ext-news", daemon=True)]
        self._threads[0].start()

    def _wait(self, store: TCPStore) -> None:
        reason: str | None = SAVE
        try:
            for number in itertools.count(1):
                store.wait([f"{self._key}/{number}"], WAIT)
                reason = store.get(f"{self._key}/{number}").decode(errors="replace")
                if reason != SAVE:
                    break
                self.saves += 1
                self._on_news()
        except (RuntimeError, ValueError) as error:  # the store's host is gone: no news from here any more
            logger.debug("no more news of this round: %s", error)
            reason = None
        if reason is not None and not self._ended:
            self.reason = reason
            self._on_news()
        self._heard.set()

    @property
    def lost(self) -> bool:
        """The store does not answer any more: the agent of rank 0, which hosts it, is gone."""
        return self._heard.is_set() and self.reason is None and not self._ended

    @property
    def of_failure(self) -> bool:
        """The round is over because workers have failed."""
        return self.reason not in (None, GONE_ON, ALL_DONE) and self.left_by is None

    @property
    def of_no_failure(self) -> bool:
        """Nodes have gone on, or left, for another reason than a failure: they will tell of none."""
        return self.reason == GONE_ON or self.left_by is not None

    @property
    def left_by(self) -> str | None:
        """The node that was told to leave, and with which the round has ended; None: it has not ended so."""
        return self.reason.removeprefix(LEAVES) if self.reason is not None and self.reason.startswith(LEAVES) else None

    def await_all_done(self, nodes: int, timeout_s: float) -> str | None:
        """This node's workers have finished: tell, and return `reason` once there is one; None: no more news, or none in time.

        nodes: of the round; the last one of them to finish tells all of ALL_DONE.
        """
        self._start(lambda store: self._count_done(store, nodes))
        self._heard.wait(timeout_s)
        return self.reason

    def _count_done(self, store: TCPStore, nodes: int) -> None:
        if store.add(DONE_KEY, 1) == nodes:
            self._say(store, ALL_DONE)

    def stalled(self, stalled: bool, nodes: int) -> None:
        """Claim that all workers of this node stall, or take the claim back. The last node of the round to claim so ends it.

        A claim may be repeated: the workers of other nodes may have finished since.
        """
        if stalled or self._stalled:
            change = stalled - self._stalled
            self._stalled = stalled
            self._start(lambda store: self._claim(store, change, stalled, nodes))

    def _claim(self, store: TCPStore, change: int, stalled: bool, nodes: int) -> None:
        if store.add(STALLED_KEY, change) + store.add(DONE_KEY, 0) >= nodes and stalled:
            self._say(store, STALLED)

    def tell(self, reason: str, wait_s: float = 0.0) -> None:
        """Tell all agents of the round, from a thread: a store that hangs must hold up nobody for longer than `wait_s`."""
        thread = self._start(lambda store: self._say(store, reason))
        thread.join(wait_s)

    def request_save(self) -> None:
        """Ask all agents of the round for a save on demand. Two that ask at the same moment ask for one."""
        self._start(lambda store: self._say(store, SAVE, self.saves + 1))

    def _say(self, store: TCPStore, text: str, first: int = 1) -> None:
        """Under the first free number from `first` on, unless the round is over."""
        for number in itertools.count(first):
            there = store.compare_set(f"{self._key}/{number}", "", text).decode(errors="replace")
            if there == text or there != SAVE:
                return

    def _start(self, call: Callable[[TCPStore], object]) -> threading.Thread:
        thread = threading.Thread(target=self._call, args=(call,), name="elastic_ext-news", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _call(self, call: Callable[[TCPStore], object]) -> None:
        try:
            call(TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=CONNECT))
        except (RuntimeError, ValueError) as error:
            logger.warning("the other nodes could not be told that this round is over: %s", error)

    def close(self) -> None:
        """This node goes on to another round. Tells the others too, which ends their waits, unless all have heard already."""
        self._ended = True
        if not self._heard.is_set():
            self.tell(GONE_ON)

    def end(self, timeout_s: float = 5.0) -> None:
        """The process is about to end, and a thread that came back from torch's C++ code meanwhile would abort it: wait for them.

        A thread that a cut link holds for longer than `timeout_s` stays there, and comes back no more.
        """
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
