"""A drain of this node (`elastic-ext drain`): when it can leave the job without losing work.

That is after a save on demand where the script supports that, else after the next checkpoint that the script publishes.
`plan_drain` decides from plain values. The leader does the rest of a drain; see `rendezvous.drains`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.feature import Feature, RoundParts
from elastic_ext.agent.leaving import SaveResult, SavesOnDemand, ask_for_save, save_wanted
from elastic_ext.base import printable
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.round_records import Drain

logger = logging.getLogger(__name__)

POLL_S = 5.0  # between two readings of checkpoint_dir: a storage reports no change; as often as for grow_at=checkpoint


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

    def __init__(
        self,
        job: Rendezvous,
        saves: SavesOnDemand | None,
        wake: Callable[[], None],
        read: Callable[[], Published] | None = None,
        local: bool = False,
    ) -> None:
        """saves: None if workers cannot be asked to save. wake: called after each reading. read: what lies in `checkpoint_dir`;
        None without one. local: see `DrainFacts`.
        """
        self._job, self._saves, self._wake, self._read, self._local = job, saves, wake, read, local
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
        directory = Directory(self._read, self._wake) if self._read is not None else None
        return _UnderWay(drain, directory, sum(row.saves for row in workers.read_progress()), save_wanted(self._job.part))

    def _carry_out(self, this: _UnderWay, workers: LocalWorkers) -> None:
        decided = plan_drain(self._facts(this, workers))
        if decided != this.last:
            logger.warning("drain (%s): %s", printable.shown(this.drain.reason), decided.reason)
        this.last = decided
        if decided.step is Step.ASK:
            this.asked = True
            ask_for_save(self._job.part)
        elif decided.step is Step.GO:
            step = this.step(workers)
            self._job.part.post(topics.READY, topics.ReadyToLeave(this.drain.number, topics.NO_STEP if step is None else step))
            this.close()

    def _facts(self, this: _UnderWay, workers: LocalWorkers) -> DrainFacts:
        rows = workers.read_progress()
        reported = sum(row.saves for row in rows) > this.reported
        saved = [row.saved_step for row in rows if row.saved_step is not None]
        result = None
        if self._saves is not None and this.asked and save_wanted(self._job.part) > this.before:
            result = self._saves.update(workers)
        return DrainFacts(
            asks=self._saves is not None and bool(rows) and all(row.asks_for_saves for row in rows),
            asked=this.asked,
            result=result,
            reported=reported,
            published=this.published(max(saved, default=None) if self._local else None, reported),
            local=self._local,
        )

    def _end(self) -> None:
        if self._under_way is not None:
            self._under_way.close()
        self._under_way = None


class Drains(Feature):
    """The drains of a job without checkpoint_dir; `published` has those of the others."""

    def beside_round(self, round_: RoundParts) -> Companion:
        return DrainWatch(self.parts.job, round_.saves, self.parts.wake)
