"""Write one save at a time in a background thread: choose the destination, retry, and handle the result."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.formats.manifest import Manifest, directory_name
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing import commit
from elastic_ext.checkpoints.writing.commit import At, Outcome
from elastic_ext.checkpoints.writing.errors import FailureKind, Rank0Failed, SaveFailure, failure_of, group_failure
from elastic_ext.checkpoints.writing.fence import Fence
from elastic_ext.checkpoints.writing.local_tier import Directories
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.results import Event, Results
from elastic_ext.checkpoints.writing.retention import Retention, remove
from elastic_ext.checkpoints.writing.staging import Staged

logger = logging.getLogger(__name__)

LATE_S = 20.0  # a rank that comes later than this to a save has left it out
ATTEMPTS = 4  # per save, if the storage asks to retry later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True)
class Save:
    """One rank's part of a save, and the manifest for it. called: when `save` was called, in monotonic seconds.

    manifest: without files and generation.
    """

    staged: Staged
    manifest: Manifest
    called: float

    @property
    def at(self) -> At:
        return self.manifest.step, self.manifest.accumulation


class Destination:
    """Where saves go: to each node's own disk while a local tier accepts them, else to the remote directory.

    Attributes:
        agreed: set once all ranks have made the save in progress.
    """

    def __init__(self, directories: Directories, fence: Fence, ranks: Ranks, on_generation: Callable[[int], None] | None) -> None:
        """on_generation: called on all ranks, with the generation, before each attempt. Collective."""
        self._directories, self._fence, self._ranks, self._on_generation = directories, fence, ranks, on_generation
        self.agreed = threading.Event()
        self._tier_failure: FailureKind | None = None  # why the last save bypassed the local tier

    @property
    def storage(self) -> Storage:
        """The directory that the last save went to."""
        tier = self._directories.local
        return tier.storage if tier is not None and self._tier_failure is None else self._directories.remote

    def write(self, save: Save) -> tuple[str, Outcome]:
        """Make one attempt; return the outcome and the checkpoint's name, "" if it got none. Collective.

        Raises StaleGroup on all ranks; torch's RuntimeError if the ranks cannot communicate.
        """
        remote, tier, staged = self._directories.remote, self._directories.local, save.staged
        failure = commit.what_prevents(save.at, staged, self._ranks)
        self.agreed.set()
        if failure is not None:
            return "", Outcome(failure)
        try:
            generation = self._fence.open()
        except OSError as error:
            return "", Outcome(failure_of(error, 0))
        if self._on_generation is not None:
            self._on_generation(generation)
        manifest = replace(save.manifest, generation=generation)
        name = directory_name(manifest.step, generation)
        if tier is not None:
            outcome = commit.save_on_nodes(tier, remote, name, staged, manifest, self._ranks)
            self._note_tier(outcome.failure)
            if outcome.failure is None or outcome.failure.kind is FailureKind.STALE:
                return name, outcome
            if tier.first:
                remove(tier.storage, name)  # the disk may be full
        return name, commit.save(remote, name, staged, manifest, self._ranks)

    def _note_tier(self, failure: SaveFailure | None) -> None:
        """Log when saves start to bypass the local tier, and when they stop."""
        before, self._tier_failure = self._tier_failure, failure.kind if failure is not None else None
        if failure is not None and failure.kind is not before:
            remote = self._directories.remote.address
            logger.warning("rank %s cannot save to local_dir: %s; saves go to %s", failure.rank, failure.reason, remote)
        elif before is not None and failure is None:
            logger.warning("saves go to local_dir again")


class BackgroundSaver:
    """Writes the saves. All ranks take the same steps, because rank 0's decisions are broadcast."""

    def __init__(self, destination: Destination, ranks: Ranks, retention: Retention, results: Results) -> None:
        self._destination, self._ranks, self._retention, self._results = destination, ranks, retention, results
        self._thread: threading.Thread | None = None
        self._at: At | None = None  # what the thread saves
        self._hurry = threading.Event()  # set when the next save waits for the thread: no more pauses

    def start(self, save: Save) -> None:
        """Write the save in a thread. The previous save must have ended."""
        self._hurry.clear()
        self._destination.agreed.clear()
        self._at = save.at
        name = f"checkpoint-{save.manifest.step}"
        thread = threading.Thread(target=self._run, args=(save,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the other ranks wait for this one
            logger.warning("step %s is saved while training waits: %s", save.manifest.step, error)
            self._run(save)
            return
        self._thread = thread

    def is_left_out(self, at: At) -> bool:
        """Return whether a rank has left out the save in progress, which waits for it; wait LATE_S to know. at: of the next save.

        Not if that is of the same state: no training comes between the two, so other ranks may be as late as they like.
        """
        return self._thread is not None and at != self._at and not self._destination.agreed.wait(LATE_S)

    def wait(self, hurry: bool = False) -> None:
        """Wait until the save in progress, if any, is committed or has failed. hurry: do not pause to retry it."""
        if hurry:
            self._hurry.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Save) -> None:
        step = save.manifest.step
        try:
            name, outcome = self._write(save)
        except (StaleGroup, Rank0Failed, OSError) as error:  # on all ranks
            name, outcome = "", Outcome(failure_of(error, 0))
        except Exception as error:  # the top of a thread
            failure = group_failure(error, self._ranks.rank, self._ranks.lost)
            logger.exception("no more checkpoints will be saved: %s", failure.reason)
            name, outcome = "", Outcome(failure)
        self._destination.agreed.set()  # or it has failed
        if outcome.failure is None:
            self._committed(name, step, outcome.size, time.monotonic() - save.called)
            return
        self._results.failed(name, step, outcome.failure)
        if name and self._ranks.rank == 0 and outcome.failure.kind not in (FailureKind.STALE, FailureKind.GROUP):
            self._retention.discard(name)  # the disk may be full

    def _write(self, save: Save) -> tuple[str, Outcome]:
        """Write the save, retrying while the storage asks to retry later."""
        attempt = 0
        while True:
            attempt += 1
            name, outcome = self._destination.write(save)
            failure = outcome.failure
            if failure is None or failure.kind is not FailureKind.THROTTLED:
                return name, outcome
            if not self._ranks.broadcast(attempt < ATTEMPTS and self._paused(attempt, failure)):
                return name, outcome

    def _paused(self, attempt: int, failure: SaveFailure) -> bool:
        """Pause on rank 0, longer each time; return False as soon as the next save waits. Other ranks await its answer."""
        if self._ranks.rank != 0:
            return False
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.Random().uniform(0.5, 1.0)
        logger.warning("save failed on rank %s (%s); retrying in %.1f s", failure.rank, failure.reason, pause)
        return not self._hurry.wait(pause)

    def _committed(self, name: str, step: int, size: int, seconds: float) -> None:
        if self._ranks.rank == 0:
            logger.info("saved %s: %.1f MB in %.2f s", self._destination.storage.path(name), size / 1e6, seconds)
        self._results.committed(name, step, size, seconds)
        if self._ranks.rank == 0:
            try:
                for removed in self._retention.prune(name):
                    self._results.emit(Event("pruned", step, removed.name, reason=removed.reason))
            except (OSError, StaleGroup) as error:  # not a reason to stop training
                logger.warning("pruning old checkpoints failed: %s; the next save tries again", error)
