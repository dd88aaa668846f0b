"""A node leaves the job: a signal says that the platform will end this agent soon. `drains` has what an operator asks for.

`SavesOnDemand` asks the job for a checkpoint while there is time. It shows a request to the workers of this node and acknowledges
it to the other agents through the store of the round: each agent adds 1 to `save/NUMBER/acks`, and the last one sets
`save/NUMBER/go`. `plan_save` decides from plain values.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FrameType

from elastic_ext.agent import exits
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base import round_store, threads, torch_private
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.failures import host
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.contract import Rendezvous, RoundPart
from elastic_ext.workers.progress import Progress, ProgressTable, WakePipe

logger = logging.getLogger(__name__)

STEPS_TO_AGREE = 3  # workers see a request within one step and agree on the next; one more is under way
MARGIN = 1.5  # a save that took 10 s may take 15 s


@dataclass(frozen=True)
class SavePlan:
    """Whether to ask for a checkpoint. wait_s: how long to wait for it, 0 to not ask. reason: for the log."""

    wait_s: float
    reason: str


def plan_save(grace_s: float, stop_s: float, workers: Sequence[Progress]) -> SavePlan:
    """Decide whether to ask for a checkpoint before the workers are stopped.

    grace_s: seconds until this agent is killed. stop_s: seconds of these that stopping the workers may take. workers: the
    progress of each worker of this node.
    """
    if not workers or not all(worker.asks_for_saves for worker in workers):
        return SavePlan(0.0, "the training script has not called save_requested()")
    left_s = grace_s - stop_s
    save_s = max((worker.save_s for worker in workers if worker.save_s is not None), default=None)
    needs_s = STEPS_TO_AGREE * max(worker.step_s or 0.0 for worker in workers) + (save_s or 0.0) * MARGIN
    if left_s <= 0 or needs_s > left_s:
        return SavePlan(0.0, f"a save needs about {needs_s:.3g} s, and {max(left_s, 0.0):.3g} s are left")
    known = f"the last save took {save_s:.3g} s" if save_s is not None else "no save has been measured yet"
    return SavePlan(left_s, f"{known}, and {left_s:.3g} s are left")


def grace_s(
    platform_grace_s: float | None, pod_grace_s: float | None, shutdown_timeout_s: float, environ: Mapping[str, str], now: float
) -> float:
    """Return the seconds until this agent, which has to leave, is killed: the shortest of all known times.

    A pod may be deleted with less grace than usual (`kubectl delete --grace-period=5`), and a save that is killed before it ends
    is lost.

    Args:
        platform_grace_s: the setting platform_grace.
        pod_grace_s: the grace that Kubernetes gives this pod when it deletes it.
        shutdown_timeout_s: torchrun's `--shutdown-timeout`, which users set for a clean end; used if the other two are None.
        environ: holds the end time of a Slurm job. Slurm may kill the job earlier, so this only shortens the time.
        now: Unix time. This host's clock is compared with Slurm's end time for the job.
    """
    end = host.slurm_end(environ)
    known = [seconds for seconds in (platform_grace_s, pod_grace_s) if seconds is not None] or [shutdown_timeout_s]
    if end is not None and end > now:
        known.append(end - now)
    return min(known)


def time_left_s(settings: Settings, shutdown_timeout_s: float) -> float:
    """Ask the platform, and return the result of `grace_s`."""
    pod_grace_s = host.deletion_grace_s(os.environ)
    return grace_s(settings.platform_grace, pod_grace_s, shutdown_timeout_s, os.environ, time.time())


def signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals by which the platform ends this agent. Torch handles SIGTERM only once it has started workers."""
    return (signal.SIGTERM, *host.slurm_notices(environ))


def save_wanted(part: RoundPart) -> int:
    """Return the number of the last save on demand in this round; 0: there was none."""
    found = part.agreed(topics.SAVE)
    return found.number if found is not None else 0


def ask_for_save(part: RoundPart) -> None:
    """Ask all nodes of this round for a save; return at once."""
    part.post(topics.SAVE, topics.next_save(part.agreed(topics.SAVE)))


class SaveResult(Enum):
    SAVED = "saved"
    FAILED = "failed"


class SavesOnDemand(Companion):
    """The saves on demand of one round.

    Invariants: a request is in the progress slots of all workers of a node before that node acknowledges it; each node
    acknowledges every number, even one that it has never seen because a greater one followed at once.
    """

    def __init__(self, job: Rendezvous, progress: ProgressTable, nodes: int, store_at: tuple[str, int]) -> None:
        """nodes: number of nodes in the round. store_at: host and port of its store."""
        self._job, self._progress, self._nodes, self._store_at = job, progress, nodes, store_at
        self._shown = 0  # the last number in the workers' slots
        self._reported = 0  # the last number that this node has reported as saved
        self._acks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def check(self, workers: LocalWorkers) -> None:
        self.update(workers)

    def update(self, workers: LocalWorkers) -> SaveResult | None:
        """Show the workers the job's last request, and report it once it is saved. Returns at once, with None while unknown."""
        wanted = save_wanted(self._job.part)
        if not wanted:
            return None
        self._show(wanted, workers)
        result = self._result(wanted)
        if result is SaveResult.SAVED and self._reported != wanted:
            self._reported = wanted
            step = max(progress.saved_step or 0 for progress in self._progress.read_all())
            self._job.part.post(topics.SAVED, topics.SaveDone(wanted, step))
        return result

    def save_before_leaving(
        self, signal_name: str, grace_s: float, stop_s: float, workers: LocalWorkers, wakeup: Wakeup, wake_pipe: WakePipe
    ) -> float | None:
        """Ask the job for a checkpoint and wait for it, if there is time before the platform takes this node away.

        The end of the round ends the wait; so does the exception of a signal of the user.

        grace_s, stop_s: see `plan_save`. wakeup, wake_pipe: readable when the job or a worker of this node has news.

        Returns the seconds waited; None if the job was not asked.
        """
        processes = workers.processes
        if processes.stopped or processes.failed or not processes.running:
            return None
        asked = plan_save(grace_s, stop_s, workers.read_progress())
        if asked.wait_s <= 0:
            logger.info("%s: not asking the job for a checkpoint: %s", signal_name, asked.reason)
            return None
        logger.warning("%s: asking the job for a checkpoint: %s", signal_name, asked.reason)
        begin = time.monotonic()
        before = save_wanted(self._job.part)
        ask_for_save(self._job.part)
        torch_private.reraise_signals(wakeup.clear())
        outcome = None
        while outcome is None and (left_s := begin + asked.wait_s - time.monotonic()) > 0:
            if processes.failed or not processes.running or self._job.part.over() is not None:
                outcome = "the round has ended"
            elif save_wanted(self._job.part) > before and (result := self.update(workers)) is not None:
                outcome = result.value
            if outcome is None:
                processes.wait(left_s, wakeup, wake_pipe)
                again = wakeup.clear()
                torch_private.reraise_signals(again)  # those of the user
                for number in again:
                    name, left = signal.Signals(number).name, begin + asked.wait_s - time.monotonic()
                    logger.warning("%s again: waiting for the checkpoint for up to %.3g s; SIGINT ends the wait", name, left)
                wake_pipe.clear()
        took_s = time.monotonic() - begin
        logger.warning("checkpoint before leaving: %s after %.2g s", outcome or "not finished", took_s)
        return took_s

    def _show(self, number: int, workers: LocalWorkers) -> None:
        if number <= self._shown:
            return
        for local_rank in workers.ranks:
            self._progress.want_save(local_rank, number)
        logger.info("a checkpoint has been requested (save on demand %s of this round)", number)
        for each in range(self._shown + 1, number + 1):
            self._acks.put(each)
        self._shown = number
        if self._thread is None:  # a store that hangs must not block the loop
            thread = threads.StoreCall(target=self._acknowledge, name="elastic_ext-save", daemon=True)
            with threads.held() as received:  # an exception of a signal handler inside `start` would come out of it as a KeyError
                thread.start()
                self._thread = thread
            threads.raise_again(received)

    def _acknowledge(self) -> None:
        store = None
        while (number := self._acks.get()) is not None:
            try:
                if store is None:
                    store = round_store.connect(*self._store_at)
                if store.add(round_store.save_acks(number), 1) == self._nodes:
                    store.set(round_store.save_go(number), "1")
            except (RuntimeError, ValueError) as error:
                logger.warning("no save on demand: the store of the round does not answer: %s", error)
                return

    def _result(self, number: int) -> SaveResult | None:
        """Return the result from any worker of this node, since all ranks save or fail together; None while unknown."""
        workers = self._progress.read_all()
        if any(progress.save_kept >= number for progress in workers):
            return SaveResult.SAVED
        return SaveResult.FAILED if any(progress.save_failed >= number for progress in workers) else None

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._acks.put(None)


def take_as_one(received: signal.Signals, leave_by: Callable[[], float | None]) -> None:
    """From now on, have signals of the platform change nothing until `leave_by`, and end this agent at once after it.

    Slurm sends SIGTERM twice at a time limit, and timeout(1) sends it to its child and to its child's group. A second one that
    ended the agent would cost the checkpoint that the first one has asked for. The user's signals still end it at once.

    As torch's handlers, these stay until the process ends. Does nothing outside the main thread, where Python has no handlers.

    received: why this agent has to leave. After a signal of the user, any other one ends the agent at once. leave_by: returns the
    monotonic time until which the platform lets this agent run; None: not known yet.
    """
    if received in exits.USER_SIGNALS or threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals() - set(exits.USER_SIGNALS):
        first = signal.getsignal(number)
        if callable(first) and torch_private.ends_agent(first):
            signal.signal(number, _unless_there_is_time(first, leave_by))


def _unless_there_is_time(
    first: Callable[[int, FrameType | None], object], leave_by: Callable[[], float | None]
) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        by = leave_by()
        if by is not None and time.monotonic() >= by:
            first(number, frame)

    return handle
