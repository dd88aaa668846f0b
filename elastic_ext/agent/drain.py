"""The agent's side of `elastic-ext drain`: it tells the job when this node can leave without losing work.

`plan` decides from plain values. `DrainWatch` asks the job for a checkpoint where the script supports that, and else waits for
the next one that the script publishes. The leader does the rest; see `rendezvous.drains`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.saves import SaveOnDemand, SaveResult
from elastic_ext.base.printable import shown
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.round_records import Drain

logger = logging.getLogger(__name__)

POLL_S = 5.0  # between two looks at checkpoint_dir: a storage tells of no change; as often as for grow_at=checkpoint


class Step(Enum):
    """What to do next for the drain."""

    ASK = "ask"  # for a checkpoint
    WAIT = "wait"
    GO = "go"  # the node can leave


@dataclass(frozen=True)
class Seen:
    """What this node knows of checkpoints since it was told to leave, in this round.

    Attributes:
        asks: the script asks whether to save.
        asked: this node has asked for a save on demand.
        result: of that save; None while it is unknown.
        reported: the workers have reported a checkpoint.
        published: the newest complete checkpoint in `checkpoint_dir` is another one than at first.
        local: workers save to `local_dir`, which goes with this node: only a copy in `checkpoint_dir` counts.
    """

    asks: bool = False
    asked: bool = False
    result: SaveResult | None = None
    reported: bool = False
    published: bool = False
    local: bool = False


@dataclass(frozen=True)
class Plan:
    """The next step. reason: for the log."""

    step: Step
    reason: str


def plan(seen: Seen) -> Plan:
    """Decide on the next step."""
    if seen.asks and not seen.asked:
        return Plan(Step.ASK, "asking the job for a checkpoint")
    if seen.asked and seen.result is None and not seen.published:  # only one rank has to report it, maybe on another node
        return Plan(Step.WAIT, "waiting for the checkpoint that was asked for")
    if seen.local:
        if seen.published:
            return Plan(Step.GO, "a new checkpoint is complete in checkpoint_dir")
        return Plan(Step.WAIT, "waiting for a checkpoint to be copied to checkpoint_dir")
    if seen.result is SaveResult.SAVED:
        return Plan(Step.GO, "the checkpoint that was asked for is complete")
    if seen.reported or seen.published:
        return Plan(Step.GO, "the script has saved a checkpoint")
    failed = "the checkpoint that was asked for has failed; " if seen.result is SaveResult.FAILED else ""
    return Plan(Step.WAIT, f"{failed}waiting for the next one that the script saves")


@dataclass(frozen=True)
class Published:
    """The newest complete checkpoint in `checkpoint_dir`, and what else lies there.

    Attributes:
        path: "": there is none.
        step: None if unknown.
        version: tells it from others of the same path: some scripts write each checkpoint to the same file.
        lies_there: path and version of all that may be checkpoints, but for those that are incomplete or damaged.
    """

    path: str = ""
    step: int | None = None
    version: float | None = None
    lies_there: frozenset[tuple[str, float | None]] = frozenset()


def published(settings: Settings) -> Published:
    """Look for it. It may take as long as the storage does."""
    if settings.checkpoint_dir is None:
        return Published()
    storage = open_storage(settings.checkpoint_dir)
    choice = discovery.newest_in(storage, discovery.Wanted(pattern=settings.checkpoint_pattern))
    entries = discovery.candidates(discovery.list_entries(storage), settings.checkpoint_pattern, detect.plugins())
    # The time of a directory tells of its names, not of its content: writers of directories give each a name of its own.
    versions = {entry.path: None if entry.is_dir else entry.mtime for entry in entries}
    passed_over = {each.path for each in choice.passed_over}
    lies_there = frozenset(each for each in versions.items() if each[0] not in passed_over)
    newest = choice.resume
    return (
        Published(lies_there=lies_there)
        if newest is None
        else Published(newest.path, newest.step, versions.get(newest.path), lies_there)
    )


def is_new(first: Published, newest: Published, goal: int | None) -> bool:
    """Return whether a checkpoint has been published since the first look: one of the step `goal`, if given, or a later one.

    One that lay there at first is not new: it is the newest again where a later one was deleted. Steps alone cannot tell, since
    those of some scripts begin anew with each epoch: a new checkpoint of a step before the first look's is of a later epoch.
    """
    if newest.path == "" or (newest.path, newest.version) in first.lies_there:
        return False
    if goal is None or newest.step is None:
        return True
    begins_anew = first.step if first.step is not None else 0
    return (newest.step < begins_anew, newest.step) >= (goal < begins_anew, goal)


class Directory:
    """Looks at `checkpoint_dir` from a thread of its own, since a storage may hang.

    Attributes:
        first, newest: what it held at the first look and at the last one; None before the first.
    """

    def __init__(self, look: Callable[[], Published], on_look: Callable[[], None]) -> None:
        """on_look: called after each look."""
        self.first: Published | None = None
        self.newest: Published | None = None
        self._look, self._on_look = look, on_look
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="elastic_ext-drain", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.newest = self._look()
                self.first = self.first or self.newest
            except Exception as error:  # noqa: BLE001 - any storage, any error: the next look may work
                logger.warning("drain: checkpoint_dir could not be read: %s", error)
            if not self._closed.is_set():
                self._on_look()
            self._closed.wait(POLL_S)

    def has_new(self, goal: int | None) -> bool:
        """Return whether there is a new checkpoint, of the step `goal` or a later one. goal: None for any."""
        return self.first is not None and self.newest is not None and is_new(self.first, self.newest, goal)

    def close(self) -> None:
        """Look no more. Does not wait: a storage may hang, and the look that is under way changes nothing."""
        self._closed.set()


@dataclass
class _UnderWay:
    """One drain of this node in one round.

    Attributes:
        directory: looks at `checkpoint_dir`; None: there is none, or nothing is to be looked for any more.
        reported: checkpoints that the workers had reported when it began.
        before: number of the job's last save on demand then.
        goal: step of the first checkpoint in `local_dir` since: later ones do not move it.
        asked: this node has asked for a save.
    """

    drain: Drain
    directory: Directory | None
    reported: int
    before: int
    goal: int | None = None
    asked: bool = False
    last: Plan | None = None

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

    def __init__(self, job: Rendezvous, saves: SaveOnDemand | None, settings: Settings) -> None:
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
        decided = plan(self._look(this, workers))
        if decided != this.last:
            logger.warning("drain (%s): %s", shown(this.drain.reason), decided.reason)
        this.last = decided
        if decided.step is Step.ASK:
            this.asked = True
            self._job.part.request_save()
        elif decided.step is Step.GO:
            self._job.part.report_ready_to_leave(this.drain.number, this.step(workers))
            this.close()

    def _look(self, this: _UnderWay, workers: LocalWorkers) -> Seen:
        rows = workers.read_progress()
        local = self._settings.local_dir is not None
        reported = sum(row.saves for row in rows) > this.reported
        saved = [row.saved_step for row in rows if row.saved_step is not None]
        result = None
        if self._saves is not None and this.asked and self._job.part.save_wanted > this.before:
            result = self._saves.update(workers)
        return Seen(
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
