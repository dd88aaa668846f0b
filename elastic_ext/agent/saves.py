"""Saves on demand, the agent's side: is there time for one before this agent must be gone, and is it done?

`plan` decides over plain values; `SaveOnDemand` shows a request to the workers of this node and tells the other agents so.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_ext.base import round_store
from elastic_ext.failures.sources import slurm
from elastic_ext.workers.progress import Progress, ProgressTable

logger = logging.getLogger(__name__)

STEPS_TO_AGREE = 3  # a request is seen after one step at most, agreed for the next, and one is under way
MARGIN = 1.5  # a save that took 10 s may take 15 s


@dataclass(frozen=True)
class Plan:
    """wait_s: how long to wait for the save; 0: none is asked for. reason: why, for people."""

    wait_s: float
    reason: str


def plan(grace_s: float, stop_s: float, workers: Sequence[Progress]) -> Plan:
    """Whether to ask for a checkpoint before the workers are stopped.

    Args:
        grace_s: until this agent is killed.
        stop_s: that stopping the workers may take of it.
        workers: of this node.
    """
    if not workers or not all(worker.asks_for_saves for worker in workers):
        return Plan(0.0, "the training script does not ask for saves on demand")
    left_s = grace_s - stop_s
    save_s = max((worker.save_s for worker in workers if worker.save_s is not None), default=None)
    needs_s = STEPS_TO_AGREE * max(map(_step_s, workers)) + (save_s or 0.0) * MARGIN
    if left_s <= 0 or needs_s > left_s:
        return Plan(0.0, f"a save needs about {needs_s:.3g} s, and {max(left_s, 0.0):.3g} s are left")
    known = f"the last save took {save_s:.3g} s" if save_s is not None else "no save has been measured yet"
    return Plan(left_s, f"{known}, and {left_s:.3g} s are left")


def _step_s(worker: Progress) -> float:
    """Mean time of an optimizer step; 0 where it is not known."""
    return (worker.last_step_ns - worker.first_step_ns) / 1e9 / (worker.steps - 1) if worker.steps > 1 else 0.0


def grace_s(
    platform_grace_s: float | None, pod_grace_s: float | None, shutdown_timeout_s: float, environ: Mapping[str, str], now: float
) -> float:
    """Seconds until this agent, which was told to leave, is killed: the least of what is known.

    A pod may be deleted with less grace than usual (`kubectl delete --grace-period=5`), and a save that is killed in the middle
    is lost.

    Args:
        platform_grace_s: the setting.
        pod_grace_s: what Kubernetes says of the pod that it deletes.
        shutdown_timeout_s: torchrun's `--shutdown-timeout`: what users give for a clean end where neither of these is known.
        environ: Slurm tells there when the job ends; it may kill it before that, so this only shortens the time.
        now: Unix time; this host's clock is compared with Slurm's, which runs the job here.
    """
    end = slurm.read_environment(environ).end_time
    known = [seconds for seconds in (platform_grace_s, pod_grace_s) if seconds is not None] or [shutdown_timeout_s]
    if end is not None and end > now:
        known.append(end - now)
    return min(known)


class Job(Protocol):
    """What is used of the rendezvous handler."""

    @property
    def save_wanted(self) -> int: ...
    def saved(self, number: int, step: int) -> None: ...


class SaveOnDemand:
    """One round's requests. Invariants: a request is in the words of all workers of a node before that node has said so; each
    node says so of each number, those that it has never seen because a greater one came at once, too.
    """

    def __init__(self, board: ProgressTable, workers: int, nodes: int, store_at: tuple[str, int]) -> None:
        """workers: of this node. nodes: of the round. store_at: host and port of its store."""
        self._board, self._workers, self._nodes, self._store_at = board, workers, nodes, store_at
        self._shown = 0
        self._kept = 0  # the last one that this node has told the job of
        self._to_say: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, job: Job) -> str | None:
        """Pass on what the job wants, and tell it what came of it; as `over`."""
        wanted = job.save_wanted
        if not wanted:
            return None
        self.show(wanted)
        over = self.over(wanted)
        if over == "kept" and self._kept != wanted:
            self._kept = wanted
            job.saved(wanted, max(word.saved_step or 0 for word in self._board.read_all()))
        return over

    def show(self, number: int) -> None:
        """A save with this number is wanted; the same may be said again and again. Returns at once."""
        if number <= self._shown:
            return
        for slot in range(self._workers):
            self._board.want_save(slot, number)
        logger.info("a save on demand is wanted (number %s of this round)", number)
        for each in range(self._shown + 1, number + 1):
            self._to_say.put(each)
        self._shown = number
        if self._thread is None:  # a store that hangs must hold up nobody
            self._thread = threading.Thread(target=self._say, name="elastic_ext-save", daemon=True)
            self._thread.start()

    def _say(self) -> None:
        store: Any = None
        while (number := self._to_say.get()) is not None:
            try:
                if store is None:
                    store = round_store.connect(*self._store_at)
                if store.add(round_store.save_acks(number), 1) == self._nodes:
                    store.set(round_store.save_go(number), "1")
            except (RuntimeError, ValueError) as error:
                logger.warning("no save on demand, the store of the round does not answer: %s", error)
                return

    def over(self, number: int) -> str | None:
        """What became of it: "kept" or "failed" as soon as one worker here says so; None: not yet known."""
        words = self._board.read_all()
        if any(word.save_kept >= number for word in words):
            return "kept"
        return "failed" if any(word.save_failed >= number for word in words) else None

    def close(self, timeout_s: float = 1.0) -> None:
        """A thread that came back from torch's C++ code while the process ends would abort it: wait for it."""
        self._to_say.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
