"""One thread that runs the tasks of its runners, in order."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

CLOSE_S = 10.0  # twice the longest duration of an etcd call (EtcdClient.timeout_s)


class Runner(Protocol):
    """One participant's side of the dispatcher."""

    def run(self, task: Callable[[], None]) -> None:
        """Run a task, and handle what it raises."""

    def on_timer(self) -> None:
        """Handle the time given to `wake_at`."""


class Dispatcher:
    """The thread and its queue. An agent has one runner on it, its participant's; a simulation has many.

    It is also the clock of its runners, so that a test can have them all live by a clock of its own.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Runner, Callable[[], None]] | None] = queue.SimpleQueue()
        self._due: dict[Runner, float] = {}
        # A heap: a time, and a task to post then, or None for `on_timer`, which is void where it contradicts `_due`.
        self._order: list[tuple[float, int, Runner, Callable[[], None] | None]] = []
        self._numbers = itertools.count()  # runners themselves cannot be ordered
        self._thread = threading.Thread(target=self._run, name="elastic_ext-rendezvous", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Return the monotonic time, in seconds."""
        return time.monotonic()

    def post(self, runner: Runner, task: Callable[[], None]) -> None:
        """Run a task after those posted before it. Any thread may call this; it returns at once."""
        self._queue.put((runner, task))

    def wake_at(self, runner: Runner, at: float | None) -> None:
        """Call `on_timer` of the runner at this monotonic time; None: do not call it. Only from the dispatcher's thread."""
        if at is None:
            self._due.pop(runner, None)
        elif self._due.get(runner) != at:
            self._due[runner] = at
            heapq.heappush(self._order, (at, next(self._numbers), runner, None))

    def run_at(self, runner: Runner, at: float, task: Callable[[], None]) -> None:
        """Run a task at this monotonic time. Only from the dispatcher's thread."""
        heapq.heappush(self._order, (at, next(self._numbers), runner, task))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Run the waiting tasks, then end. After timeout_s seconds, abandon the thread in whatever call it is in."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.debug("abandoned the rendezvous thread, which is stuck in a call")

    def _run(self) -> None:
        while True:
            at = self._run_due(self.now())
            try:
                item = self._queue.get(timeout=None if at is None else max(0.0, at - self.now()))
            except queue.Empty:
                continue
            if item is None:
                return
            runner, task = item
            runner.run(task)

    def _run_due(self, now: float) -> float | None:
        """Run what is due; return the time of what comes next."""
        due: list[tuple[Runner, Callable[[], None]]] = []
        while self._order:
            at, _, runner, task = self._order[0]
            holds = task is not None or self._due.get(runner) == at
            if holds and at > now:
                break
            heapq.heappop(self._order)
            if holds and task is None:
                del self._due[runner]
            if holds:
                due.append((runner, task or runner.on_timer))
        for runner, task in due:
            runner.run(task)
        return self._order[0][0] if self._order else None  # maybe of a void entry: then the next look is only too early
