"""The checkpoint that a round resumes from. Nodes agree on it, pin it, pass it to workers, and quarantine it if it is bad."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import WorkerGroup

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.memory import MemoryCopies
from elastic_ext.base import checkpoint_variables, kinds
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery, resolution, sources
from elastic_ext.checkpoints.choice.offers import Saved
from elastic_ext.checkpoints.choice.resolution import Place, Resumption
from elastic_ext.checkpoints.directory.tiers import Pin
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers.progress import Progress

logger = logging.getLogger(__name__)


class ResumePoint(Companion):
    """The checkpoint that one round resumes from.

    A checkpoint in the local tier is pinned until the workers have loaded it, so that the copier cannot prune it before.

    Attributes:
        checkpoint: the chosen checkpoint, and why it was chosen.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: Resumption,
        pin: Pin | None = None,
        copies: MemoryCopies | None = None,
        memory: Mapping[str, str] | None = None,
    ) -> None:
        """copies: this node's copies in memory. memory: the environment variables about them."""
        self.checkpoint = checkpoint
        self._copies, self._memory = copies, memory or {}
        self._settings = settings
        self._pin = pin

    @property
    def step(self) -> int | None:
        """The step that the round starts from; 0 is the beginning, None is unknown."""
        return self.checkpoint.at if self._settings.checkpoint_dir is not None else None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell workers which checkpoint to resume from."""
        if self._settings.checkpoint_dir is None:
            return {}
        return {
            checkpoint_variables.CHECKPOINT_DIR: self._settings.checkpoint_dir,
            checkpoint_variables.LOCAL_DIR: self._settings.local_dir or "",
            **self.checkpoint.variables,
            **self._memory,
        }

    def own_variables(self, rank: int) -> dict[str, str]:
        """Return those that differ for one rank: the path of its own file, if each rank wrote one."""
        path, files = self.checkpoint.path, self.checkpoint.files
        if files and rank not in files:
            logger.warning("%s has no file of rank %s: this rank finds the name with the *", path, rank)
        return self.checkpoint.variables_of(rank)

    def log(self) -> None:
        """Log what the round resumes from, if the job uses checkpoints."""
        if self._settings.checkpoint_dir is None:
            return
        checkpoint = self.checkpoint
        if checkpoint.path:
            logger.info("resuming from %s, step %s (%s)", checkpoint.path, checkpoint.step, checkpoint.reason)
        else:
            logger.info("starting from nothing: %s", checkpoint.reason)

    def check(self, workers: LocalWorkers) -> None:
        # Loading is collective: once one worker has made a step, all have loaded.
        if self._pin is not None and any(progress.steps or progress.saves for progress in workers.read_progress()):
            self.release()

    def workers_ended(self, workers: LocalWorkers) -> None:
        self.release()
        if self._copies is not None:
            rows = workers.read_progress()
            self._copies.saved = after_round(self._copies.saved, rows)
            self._copies.checkpoint_step = newest_checkpoint_step(self._copies.checkpoint_step, rows)

    def release(self) -> None:
        """Let the copier prune the checkpoint. A second call does nothing."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None  # only now: a signal may interrupt release(), which is then called again

    def newest_steps(self, workers: Sequence[Progress]) -> tuple[int | None, int | None]:
        """Return the steps of the newest copy in memory and of the newest checkpoint, as in `failures.ledger.Report`."""
        if self._copies is None:
            return None, None
        return self._copies.newest_step(), newest_checkpoint_step(self._copies.checkpoint_step, workers)

    def go_back(self, verdict: JobVerdict, node: str) -> None:
        """Do what a verdict says of what no round may resume from any more; node: id of this one.

        Every node that failed refuses what copies it has. The node with the cause also quarantines the checkpoint that is to
        blame. Both must be known before the next round is sealed: this node calls this before it joins that round.
        """
        decision, copies = verdict.decision, self._copies
        blamed = decision.checkpoints_back > 0 and verdict.node == node
        blamed_copy = blamed and copies is not None and decision.kind != kinds.NUMERIC and copies.has(self.checkpoint.path)
        try:
            if copies is not None and (verdict.refuse_copies or blamed_copy):
                copies.refuse_all()
            if blamed and not blamed_copy:
                reason = f"the failure of round {verdict.round} (kind {decision.kind}, rule {decision.rule}) is blamed on it"
                sources.quarantine(self._settings, self.checkpoint.path, decision.kind == kinds.NUMERIC, reason)
        except (UsageError, OSError) as error:
            logger.warning("what is blamed for the failure could not be refused or quarantined: %s", error)


def newest_checkpoint_step(known: int | None, workers: Sequence[Progress]) -> int | None:
    """Return the step of the newest checkpoint that is known after a round. known: before it."""
    return max((step for step in (known, *(worker.saved_step for worker in workers)) if step is not None), default=None)


def after_round(known: Saved | None, workers: Sequence[Progress]) -> Saved | None:
    """Return the newest checkpoint that is known after a round; None if it cannot be, because no worker has told anything."""
    if known is None or not any(worker.pid for worker in workers):
        return None
    return replace(known, step=max([known.step, *(worker.saved_step for worker in workers if worker.saved_step is not None)]))


def place_of(group: WorkerGroup) -> Place:
    """Return this node's place in a round that it has joined."""
    return Place(group.group_rank, group.group_world_size, len(group.workers), group.workers[0].global_rank)


def agree(settings: Settings, job: Rendezvous, place: Place, copies: MemoryCopies) -> ResumePoint:
    """Return the checkpoint that this round resumes from; it is the same on every node.

    copies: this node's copies in memory.

    Raises:
        RoundOver: the round ended before all of its nodes knew the choice.
        Others: see `resolution.agree`.
    """
    pin = Pin(open_storage(settings.local_dir)) if settings.local_dir is not None else None
    try:
        room = copies.open(place.nodes)
        if room is not None:
            place = replace(place, memory=room.directory, peer=copies.peer_address, refused=copies.refused)
        place = replace(place, saved=copies.saved)
        if copies.saved is not None:  # if the round ends before all know the choice, none of its workers can load or save
            copies.saved = replace(copies.saved, round=job.round)
        checkpoint = resolution.agree(settings, job.get_run_id(), job.part.exchange, place)
        copies.saved = Saved(job.round, checkpoint.at or 0)  # no copy counts as older than a checkpoint without a step
        if not copies.has(checkpoint.path):
            copies.checkpoint_step = checkpoint.at
        if room is not None:
            own = range(place.base_rank, place.base_rank + place.workers)
            room = copies.exchange(room, checkpoint, own, lambda: job.part.over() is not None)
        memory = room.variables(place.workers) if room is not None else {}
        if pin is not None and checkpoint.local:
            pin.keep_only(checkpoint.path.rpartition("/")[2])
            kept, pin = pin, None
            return ResumePoint(settings, checkpoint, kept, copies, memory)
    finally:
        if pin is not None:
            pin.release()
    return ResumePoint(settings, checkpoint, None, copies, memory)


def newest_checkpoint(settings: Settings) -> str | None:
    """Return the path of the newest complete checkpoint in `checkpoint_dir`; None if there is none. Any thread may call this."""
    if settings.checkpoint_dir is None:
        return None
    newest = discovery.newest_complete(settings.checkpoint_dir, discovery.Wanted(pattern=settings.checkpoint_pattern)).resume
    return newest.path if newest is not None else None
