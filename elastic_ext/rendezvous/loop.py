"""One thread that runs what happens to its participants, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Runner(Protocol):
    def run(self, work: Callable[[], None]) -> None:
        """Run it, and answer for what it raises."""

    def on_time(self) -> None:
        """The time given to `wake_at` has come."""


class Loop:
    """A job's agent has one participant on it; a simulation many."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Runner, Callable[[], None]] | None] = queue.SimpleQueue()
        self._due: dict[Runner, float] = {}
        self._thread = threading.Thread(target=self._run, name="elastic_ext-rendezvous", daemon=True)
        self._thread.start()

    def post(self, runner: Runner, work: Callable[[], None]) -> None:
        self._queue.put((runner, work))

    def wake_at(self, runner: Runner, at: float | None) -> None:
        """Call its `on_time` at this monotonic time; only from the loop's thread."""
        if at is None:
            self._due.pop(runner, None)
        else:
            self._due[runner] = at

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            for runner in [due for due, at in self._due.items() if at <= now]:
                self._due.pop(runner, None)
                runner.run(runner.on_time)
            at = min(self._due.values(), default=None)
            try:
                item = self._queue.get(timeout=None if at is None else max(0.0, at - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                return
            runner, work = item
            runner.run(work)
