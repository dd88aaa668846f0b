"""A node leaves the job: it was drained (`elastic-ext drain`), or a signal says that the platform will end this agent soon.

`SavesOnDemand` asks the job for a checkpoint while there is time. It shows a request to the workers of this node and acknowledges
it to the other agents through the store of the round: each agent adds 1 to `save/NUMBER/acks`, and the last one sets
`save/NUMBER/go`. `DrainWatch` reports when this node can leave without losing work: after a save on demand where the script
supports that, else after the next checkpoint that the script publishes. `plan_save` and `plan_drain` decide from plain values.
The leader does the rest of a drain; see `rendezvous.drains`.
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
from elastic_ext.base import printable, round_store, threads, torch_private
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures import host, slurm
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.round_records import Drain
from elastic_ext.workers.progress import Progress, ProgressTable, WakePipe

logger = logging.getLogger(__name__)

STEPS_TO_AGREE = 3  # workers see a request within one step and agree on the next; one more is under way
MARGIN = 1.5  # a save that took 10 s may take 15 s
POLL_S = 5.0  # between two readings of checkpoint_dir: a storage reports no change; as often as for grow_at=checkpoint


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
    end = slurm.read_environment(environ).end_time
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
    return (signal.SIGTERM, *slurm.notices(environ))


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
        wanted = self._job.part.save_wanted
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
        before = self._job.part.save_wanted
        self._job.part.request_save()
        torch_private.reraise_signals(wakeup.clear())
        outcome = None
        while outcome is None and (left_s := begin + asked.wait_s - time.monotonic()) > 0:
            if processes.failed or not processes.running or self._job.part.over() is not None:
                outcome = "the round has ended"
            elif self._job.part.save_wanted > before and (result := self.update(workers)) is not None:
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


class Step(Enum):
    ASK = "ask"  # for a checkpoint
    WAIT = "wait"
    GO = "go"  # the node can leave


@dataclass(frozen=True)
class DrainFacts:
    """What this node knows of checkpoints since the request to drain it, in this round."""

    asks: bool = False  # the script asks whether to save
    asked: bool = False  # this node has asked for a save on demand
    result: SaveResult | None = None  # of that save; None while it is unknown
    reported: bool = False  # the workers have reported a checkpoint
    published: bool = False  # the newest complete checkpoint in `checkpoint_dir` is another one than at first
    local: bool = False  # workers save to `local_dir`, which goes with this node: only a copy in `checkpoint_dir` counts


@dataclass(frozen=True)
class DrainPlan:
    """The next step. reason: for the log."""

    step: Step
    reason: str


def plan_drain(seen: DrainFacts) -> DrainPlan:
    if seen.asks and not seen.asked:
        return DrainPlan(Step.ASK, "asking the job for a checkpoint")
    if seen.asked and seen.result is None and not seen.published:  # only one rank has to report it, maybe on another node
        return DrainPlan(Step.WAIT, "waiting for the checkpoint that was asked for")
    if seen.local:
        if seen.published:
            return DrainPlan(Step.GO, "a new checkpoint is complete in checkpoint_dir")
        return DrainPlan(Step.WAIT, "waiting for a checkpoint to be copied to checkpoint_dir")
    if seen.result is SaveResult.SAVED:
        return DrainPlan(Step.GO, "the checkpoint that was asked for is complete")
    if seen.reported or seen.published:
        return DrainPlan(Step.GO, "the script has saved a checkpoint")
    failed = "the checkpoint that was asked for has failed; " if seen.result is SaveResult.FAILED else ""
    return DrainPlan(Step.WAIT, f"{failed}waiting for the next one that the script saves")


@dataclass(frozen=True)
class Published:
    """The newest complete checkpoint in `checkpoint_dir`, and what else lies there."""

    path: str = ""  # "": no checkpoint is there
    step: int | None = None  # None if unknown
    # distinguishes it from others of the same path: some scripts write each checkpoint to the same file
    version: float | None = None
    # path and version of all that may be checkpoints, but for those that are incomplete or damaged
    lies_there: frozenset[tuple[str, float | None]] = frozenset()


def published(settings: Settings) -> Published:
    """Read it. It may take as long as the storage does."""
    if settings.checkpoint_dir is None:
        return Published()
    storage = open_storage(settings.checkpoint_dir)
    choice = listing.newest_in(storage, listing.Wanted(pattern=settings.checkpoint_pattern))
    entries = listing.candidates_among(listing.list_entries(storage), settings.checkpoint_pattern)
    # The time of a directory is that of its names, not of its content: writers of directories give each a name of its own.
    versions = {entry.path: None if entry.is_dir else entry.mtime for entry in entries}
    passed_over = {each.path for each in choice.passed_over}
    lies_there = frozenset(each for each in versions.items() if each[0] not in passed_over)
    if (newest := choice.resume) is None:
        return Published(lies_there=lies_there)
    return Published(newest.path, newest.step, versions.get(newest.path), lies_there)


def is_new(first: Published, newest: Published, goal: int | None) -> bool:
    """Return whether a checkpoint has been published since the first reading: one of the step `goal`, if given, or a later one.

    One that lay there at first is not new: it is the newest again where a later one was deleted. Steps alone do not decide it,
    since those of some scripts restart with each epoch: a new checkpoint of an earlier step than at first is of a later epoch.
    """
    if newest.path == "" or (newest.path, newest.version) in first.lies_there:
        return False
    if goal is None or newest.step is None:
        return True
    begins_again = first.step if first.step is not None else 0
    return (newest.step < begins_again, newest.step) >= (goal < begins_again, goal)


class Directory:
    """Reads `checkpoint_dir` from a thread of its own, since a storage may hang."""

    def __init__(self, read: Callable[[], Published], on_read: Callable[[], None]) -> None:
        """on_read: called after each reading."""
        # first, newest: what it held at the first reading and at the last one; None before the first
        self.first: Published | None = None
        self.newest: Published | None = None
        self._read, self._on_read = read, on_read
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="elastic_ext-drain", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.newest = self._read()
                self.first = self.first or self.newest
            except Exception as error:  # noqa: BLE001 - any storage, any error: the next reading may work
                logger.warning("drain: checkpoint_dir could not be read: %s", error)
            if not self._closed.is_set():
                self._on_read()
            self._closed.wait(POLL_S)

    def has_new(self, goal: int | None) -> bool:
        """Return whether there is a new checkpoint, of the step `goal` or a later one. goal: None for any."""
        return self.first is not None and self.newest is not None and is_new(self.first, self.newest, goal)

    def close(self) -> None:
        """Stop reading. Does not wait: a storage may hang, and the reading that is under way changes nothing."""
        self._closed.set()


@dataclass
class _UnderWay:
    """One drain of this node in one round."""

    drain: Drain
    directory: Directory | None  # reads `checkpoint_dir`; None: it is not set, or need not be read any longer
    reported: int  # checkpoints that the workers had reported when it began
    before: int  # number of the job's last save on demand then
    goal: int | None = None  # step of the first checkpoint in `local_dir` since: later ones do not move it
    asked: bool = False  # this node has asked for a save
    last: DrainPlan | None = None

    def published(self, saved_at: int | None, reported: bool) -> bool:
        """Return whether checkpoint_dir holds a new checkpoint, since the request.

        saved_at: the newest step in local_dir, which copies of older ones may follow; None: they save to checkpoint_dir itself.
        A script may save faster than that is copied: the newest never gets there.
        """
        if self.goal is None and reported:
            self.goal = saved_at
        if self.directory is None or (saved_at is not None and self.goal is None):
            return False
        return self.directory.has_new(self.goal)

    def step(self, workers: LocalWorkers) -> int | None:
        """Return the step of the newest checkpoint; None if unknown."""
        steps = [row.saved_step for row in workers.read_progress() if row.saved_step is not None]
        newest = self.directory.newest if self.directory is not None else None
        steps += [newest.step] if newest is not None and newest.step is not None else []
        return max(steps, default=None)

    def close(self) -> None:
        if self.directory is not None:
            self.directory.close()
            self.directory = None


class DrainWatch(Companion):
    """Carries out the drains of this node in one round, each from the request to the checkpoint."""

    def __init__(self, job: Rendezvous, saves: SavesOnDemand | None, settings: Settings) -> None:
        """saves: None if workers cannot be asked to save."""
        self._job, self._saves, self._settings = job, saves, settings
        self._under_way: _UnderWay | None = None

    def check(self, workers: LocalWorkers) -> None:
        drain = self._job.drain
        if drain is None or drain.released or drain.now:
            self._end()
            return
        if self._under_way is None or drain.number != self._under_way.drain.number:
            self._under_way = self._begin(drain, workers)
        if self._under_way.last is None or self._under_way.last.step is not Step.GO:
            self._carry_out(self._under_way, workers)

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._end()

    def _begin(self, drain: Drain, workers: LocalWorkers) -> _UnderWay:
        self._end()
        directory = None
        if self._settings.checkpoint_dir is not None:
            directory = Directory(lambda: published(self._settings), lambda: self._job.on_event())
        return _UnderWay(drain, directory, sum(row.saves for row in workers.read_progress()), self._job.part.save_wanted)

    def _carry_out(self, this: _UnderWay, workers: LocalWorkers) -> None:
        decided = plan_drain(self._facts(this, workers))
        if decided != this.last:
            logger.warning("drain (%s): %s", printable.shown(this.drain.reason), decided.reason)
        this.last = decided
        if decided.step is Step.ASK:
            this.asked = True
            self._job.part.request_save()
        elif decided.step is Step.GO:
            step = this.step(workers)
            self._job.part.post(topics.READY, topics.ReadyToLeave(this.drain.number, topics.NO_STEP if step is None else step))
            this.close()

    def _facts(self, this: _UnderWay, workers: LocalWorkers) -> DrainFacts:
        rows = workers.read_progress()
        local = self._settings.local_dir is not None
        reported = sum(row.saves for row in rows) > this.reported
        saved = [row.saved_step for row in rows if row.saved_step is not None]
        result = None
        if self._saves is not None and this.asked and self._job.part.save_wanted > this.before:
            result = self._saves.update(workers)
        return DrainFacts(
            asks=self._saves is not None and bool(rows) and all(row.asks_for_saves for row in rows),
            asked=this.asked,
            result=result,
            reported=reported,
            published=this.published(max(saved, default=None) if local else None, reported),
            local=local,
        )

    def _end(self) -> None:
        if self._under_way is not None:
            self._under_way.close()
        self._under_way = None
