"""A bounded queue with a thread that empties it, so that no disk, pipe or server can hold up the job."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST = 1000  # items that wait; a job has a few in a second at worst


class Outbox(Generic[T]):
    """Hands each item to `send` in a daemon thread, in order. Any thread may put, also within a signal handler.

    Attributes:
        dropped: items that did not fit into the queue.
    """

    def __init__(self, send: Callable[[T], None], name: str, most: int = MOST, at_end: Callable[[], None] = lambda: None) -> None:
        """send: may block for ever, and should not raise. name: of the thread. at_end: called there after the last item."""
        self._send, self._most, self._at_end = send, most, at_end
        self.dropped = 0
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()  # its put() is re-entrant
        self._lock = threading.RLock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            logger.warning("%s does nothing: no thread can be started: %s", name, error)
            self._closed = True

    def put(self, item: T) -> None:
        """Queue an item, or drop it. Returns at once; never raises."""
        with self._lock:
            if self._closed:
                return
            if self._waiting.qsize() >= self._most:
                self.dropped += 1
            else:
                self._waiting.put(item)

    def close(self, wait_s: float) -> bool:
        """Send what waits, for at most wait_s seconds; return whether all was sent. The thread is left alone if it hangs."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._send(item)
            except Exception:  # a thread that ends would take all later items with it
                logger.exception("%s: an item was lost", self._thread.name)
        self._at_end()
