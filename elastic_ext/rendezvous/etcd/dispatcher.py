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
    """The thread and its queue. An agent has one runner on it, its participant's; a simulation has many."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Runner, Callable[[], None]] | None] = queue.SimpleQueue()
        self._due: dict[Runner, float] = {}
        self._order: list[tuple[float, int, Runner]] = []  # a heap; an entry that contradicts `_due` is void
        self._numbers = itertools.count()  # runners themselves cannot be ordered
        self._thread = threading.Thread(target=self._run, name="elastic_ext-rendezvous", daemon=True)
        self._thread.start()

    def post(self, runner: Runner, task: Callable[[], None]) -> None:
        """Run a task after those posted before it. Any thread may call this; it returns at once."""
        self._queue.put((runner, task))

    def wake_at(self, runner: Runner, at: float | None) -> None:
        """Call `on_timer` of the runner at this monotonic time; None: do not call it. Only from the dispatcher's thread."""
        if at is None:
            self._due.pop(runner, None)
        elif self._due.get(runner) != at:
            self._due[runner] = at
            heapq.heappush(self._order, (at, next(self._numbers), runner))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Run the waiting tasks, then end. After timeout_s seconds, abandon the thread in whatever call it is in."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.debug("abandoned the rendezvous thread, which is stuck in a call")

    def _run(self) -> None:
        while True:
            at = self._run_due(time.monotonic())
            try:
                item = self._queue.get(timeout=None if at is None else max(0.0, at - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                return
            runner, task = item
            runner.run(task)

    def _run_due(self, now: float) -> float | None:
        """Wake the runners whose time has come; return the time of the next one."""
        due: list[Runner] = []
        while self._order:
            at, _, runner = self._order[0]
            holds = self._due.get(runner) == at
            if holds and at > now:
                break
            heapq.heappop(self._order)
            if holds:
                del self._due[runner]
                due.append(runner)
        for runner in due:
            runner.run(runner.on_timer)
        return self._order[0][0] if self._order else None  # maybe of a void entry: then the next look is only too early
