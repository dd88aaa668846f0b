"""The checkpoint that a round resumes from, and this node's copies of the state in memory.

Nodes agree on the checkpoint, pin it, pass it to workers, and quarantine it if it is bad.

The copies are in the agent's private directory on tmpfs, and go with that: see `launch.own_run_dir`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerGroup

from elastic_ext.agent import companion, launch
from elastic_ext.agent.beginning import RoundBeginning, newest_checkpoint_step
from elastic_ext.agent.feature import Feature, JobParts
from elastic_ext.base import contracts, diagnosis, errors, files, threads
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import nodes
from elastic_ext.checkpoints.agreement.messages import MAX_OFFERS, NONE_SAVED, NewestSaved
from elastic_ext.checkpoints.agreement.quarantine import quarantine, quarantine_newer
from elastic_ext.checkpoints.agreement.shared_dir import SharedDir
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.candidates import order_or_oldest
from elastic_ext.checkpoints.sharing.catalogue import MIRRORED, KeptParts
from elastic_ext.checkpoints.sharing.fetching import let_go, pin_of
from elastic_ext.checkpoints.storage import LocalStorage, open_storage
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.workers.limits import memory_left
from elastic_ext.workers.progress import Progress

logger = logging.getLogger(__name__)

COPIES = "memory"  # in the agent's private directory
LOADED_STEPS = 32  # of one worker, after which all have loaded what was fetched from other nodes
SHARE = 4  # a quarter of the memory that is free, and what the copies already have


class MemoryCopies:
    """The copies of this node's workers, over all rounds."""

    def __init__(self, settings: Settings, run_dir: str) -> None:
        """run_dir: the agent's private directory."""
        self._settings, self._run_dir = settings, run_dir
        self.refused: tuple[str, ...] = ()  # names of copies that no round may resume from
        # the newest checkpoint or copy that this agent knows of; None: it cannot know
        self.saved: NewestSaved | None = NONE_SAVED
        self.resumes = False  # a script of this job takes our word for what to resume from
        self.checkpoint_step: int | None = None  # step of the newest checkpoint that it knows of; 0: none exists, None: unknown

    def open(self, nodes: int) -> contracts.MemoryRoom | None:
        """Return the memory for this node's own copies in a round of this many nodes; None: there is not enough.

        With several nodes, it is half of what there is: the other half is for the copies of another node.
        """
        settings = self._settings
        if not settings.copies_to_memory or not self._run_dir.startswith(launch.IN_MEMORY):
            return None
        directory = self._directory
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            limit = (memory_left() + _used(directory)) // SHARE if settings.memory_limit is None else settings.memory_limit
        except (OSError, ValueError) as error:
            logger.warning("no copies of the state in memory: %s", error)
            return None
        limit = limit // 2 if nodes > 1 else limit
        return contracts.MemoryRoom(directory, limit, settings.memory_every, settings.topology or "", settings.copy_mb_s * 1e6)

    @property
    def _directory(self) -> str:
        return os.path.join(self._run_dir, COPIES)

    def has(self, path: str) -> bool:
        """Return whether this is the path of a copy in memory."""
        return os.path.dirname(path) == self._directory

    def newest_step(self) -> int | None:
        """Return the step of the newest copy of which this node has parts, or None."""
        try:
            found = tiers.offers(open_storage(self._directory))
        except (OSError, errors.ElasticExtError) as error:
            logger.warning("cannot list the copies in memory: %s", error)
            return None
        return next((each.step for each in found if each.name not in self.refused), None)

    def refuse(self, newer_than: int = -1) -> None:
        """Have no round resume from the copies of later steps that exist now, wherever their parts are. Raises OSError."""
        storage = open_storage(self._directory)
        names = [name for name in tiers.own_checkpoints(storage) if order_or_oldest(name)[1] > newer_than]
        self.refused = tuple(dict.fromkeys([*names, *self.refused]))[:MAX_OFFERS]
        for name in names:
            storage.remove_tree(name)


def _used(directory: str) -> int:
    """Return the bytes that the copies have. Parts of other nodes arrive, and replace older ones, at any moment."""
    return sum(files.size(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


class ResumePoint(RoundBeginning):
    """The checkpoint that one round resumes from.

    A checkpoint in the local tier is pinned until the workers have loaded it, so that the copier cannot prune it before.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: contracts.Resumption,
        pin: tiers.Pin | None = None,
        copies: MemoryCopies | None = None,
        memory: Mapping[str, str] | None = None,
    ) -> None:
        """copies: this node's copies in memory. memory: the environment variables about them."""
        super().__init__(checkpoint)
        self._copies, self._memory = copies, memory or {}
        self._settings = settings
        self._pin = pin
        self.shared: SharedDir | None = None  # how the nodes of the round read each other's `local_dir`

    @property
    def step(self) -> int | None:
        return self.checkpoint.at

    def variables(self) -> dict[str, str]:
        return {
            contracts.CHECKPOINT_DIR: self._settings.checkpoint_dir or "",
            contracts.LOCAL_DIR: self._settings.local_dir or "",
            contracts.SAVE_DIR: (self._settings.local_dir if self.saves_locally else self._settings.checkpoint_dir) or "",
            **self.checkpoint.variables,
            **self._memory,
        }

    def own_variables(self, rank: int) -> dict[str, str]:
        path, files = self.checkpoint.path, self.checkpoint.files
        if files and rank not in files:
            logger.warning("%s has no file of rank %s: ELASTIC_EXT_RESUME_FROM of this rank keeps the *", path, rank)
        return self.checkpoint.variables_of(rank)

    def log(self, level: int) -> None:
        checkpoint = self.checkpoint
        if checkpoint.path:
            logger.log(level, "resuming from %s, step %s (%s)", checkpoint.path, checkpoint.step, checkpoint.reason)
        else:
            logger.log(level, "starting from nothing: %s", checkpoint.reason)
        place = checkpoint.place
        if place.reason:
            fallback = logging.WARNING if place.full else logging.DEBUG
            logger.log(fallback, "save_dir() is checkpoint_dir in this round, not local_dir: %s", place.reason)

    def check(self, workers: companion.LocalWorkers) -> None:
        # Loading is collective: once one worker has made a step, all have loaded. But some make steps first, to have a state to
        # load into (`_init_optim_state` in torch/distributed/checkpoint/state_dict.py), and what was fetched would then be gone.
        least = LOADED_STEPS if self.checkpoint.fetched else 1
        if self._pin is not None and any(progress.steps >= least or progress.saves for progress in workers.read_progress()):
            self.release()
            self._let_go()

    def _let_go(self) -> None:
        """Free what was fetched from other nodes: with all of a checkpoint on each node, that may be a lot of memory."""
        local = open_storage(self._settings.local_dir or "/")
        if not self.checkpoint.fetched or not isinstance(local, LocalStorage):
            return
        try:
            remove = let_go(local, self.checkpoint.fetched)
        except OSError as error:
            logger.warning("what was fetched from other nodes stays in local_dir: %s", error)
            return
        threads.started(remove, "elastic_ext-free", logger.debug, "what was fetched from other nodes stays for now: %s")

    def workers_ended(self, workers: companion.LocalWorkers) -> None:
        self.release()
        if self._copies is not None:
            rows = workers.read_progress()
            self._copies.saved = after_round(self._copies.saved, rows)
            self._copies.resumes = self._copies.resumes or any(row.resumes for row in rows)
            self._copies.checkpoint_step = newest_checkpoint_step(self._copies.checkpoint_step, rows)

    def release(self) -> None:
        if self._pin is not None:
            self._pin.release()
            self._pin = None  # only now: a signal may interrupt release(), which is then called again

    def newest_steps(self, workers: Sequence[Progress]) -> tuple[int | None, int | None]:
        if self._copies is None:
            return None, None
        return self._copies.newest_step(), newest_checkpoint_step(self._copies.checkpoint_step, workers)

    def go_back(self, verdict: JobVerdict, node: str) -> None:
        """Refuse or quarantine what a verdict bars from being resumed; node: id of this one.

        Every node that failed refuses what copies it has. The node with the cause, or one that stays if that one leaves, also
        quarantines the checkpoint that is to blame. Of the checkpoints since the replicas were equal, each quarantines those in
        its `local_dir`, and one node that stays those in `checkpoint_dir`. All must be known before the next round is sealed:
        this node calls this before it joins that round.
        """
        decision, copies = verdict.decision, self._copies
        blamed = decision.checkpoints_back > 0 and node == (verdict.refused_by or verdict.node)
        blamed_copy = blamed and copies is not None and decision.kind != diagnosis.NUMERIC and copies.has(self.checkpoint.path)
        try:
            if copies is not None and (verdict.refuse_copies or blamed_copy):
                copies.refuse()
            elif copies is not None and verdict.refuse_newer is not None:
                copies.refuse(verdict.refuse_newer)
            if verdict.refuse_newer is not None:
                self._quarantine_newer(verdict.refuse_newer, verdict.round, verdict.refused_by == node)
            if blamed and not blamed_copy:
                reason = f"the failure of round {verdict.round} (kind {decision.kind}, rule {decision.rule}) is blamed on it"
                number = self.checkpoint.save_number or 0
                quarantine(self._settings, self.checkpoint.path, decision.kind == diagnosis.NUMERIC, reason, number)
        except (errors.UsageError, errors.StorageAway, OSError) as error:
            logger.warning("the checkpoint or copy that is blamed for the failure could not be quarantined or refused: %s", error)

    def _quarantine_newer(self, than: int, round_: int, shared: bool) -> None:
        reason = f"the replicas of round {round_} are not known to have been equal after step {than}"
        resumed_from = self.checkpoint.path
        nodes.once_there(lambda: quarantine_newer(self._settings, than, resumed_from, reason, shared))


def after_round(known: NewestSaved | None, workers: Sequence[Progress]) -> NewestSaved | None:
    """Return the newest checkpoint that is known after a round; None if it cannot be, because no worker has reported."""
    if known is None or not any(worker.pid for worker in workers):
        return None
    return replace(known, step=max([known.step, *(worker.saved_step for worker in workers if worker.saved_step is not None)]))


def place_of(group: WorkerGroup) -> nodes.NodeInRound:
    ranks = tuple(worker.global_rank for worker in group.workers)
    return nodes.NodeInRound(group.group_rank, group.group_world_size, len(group.workers), ranks=ranks)


def agree(settings: Settings, job: Rendezvous, place: nodes.NodeInRound, copies: MemoryCopies) -> ResumePoint:
    """Return the checkpoint that this round resumes from; it is the same on every node.

    copies: this node's copies in memory.

    Raises RoundOver: the round ended before all of its nodes knew the choice; others: see `nodes.agree`.
    """
    pin = tiers.Pin(open_storage(settings.local_dir)) if settings.local_dir is not None else None
    try:
        room = copies.open(place.nodes)
        if room is not None:
            place = replace(place, memory=room.directory, refused=copies.refused)
        place = replace(place, saved=copies.saved, restarts=job.part.round > 1, resumes=copies.resumes)
        if copies.saved is not None:  # if the round ends before all know the choice, none of its workers can load or save
            copies.saved = replace(copies.saved, round=job.part.round)
        checkpoint = nodes.agree(settings, job.get_run_id(), job.part.exchange, place)
        copies.saved = NewestSaved(job.part.round, checkpoint.at or 0)  # no copy counts as older than a checkpoint without a step
        if not copies.has(checkpoint.path):
            copies.checkpoint_step = checkpoint.at
        memory = room.variables(place.workers) if room is not None else {}
        if pin is not None and checkpoint.local:
            pin.keep_only(pin_of(checkpoint.fetched) if checkpoint.fetched else checkpoint.path.rpartition("/")[2])
            kept, pin = pin, None
            return ResumePoint(settings, checkpoint, kept, copies, memory)
    finally:
        if pin is not None:
            pin.release()
    return ResumePoint(settings, checkpoint, None, copies, memory)


class Resuming(Feature):
    """Has each round begin at a checkpoint, or at a copy of the state in memory."""

    def __init__(self, parts: JobParts) -> None:
        super().__init__(parts)
        self._copies = MemoryCopies(parts.settings, parts.run_dir)
        self._shared: SharedDir | None = None  # from the first round of several nodes on
        self._unshared = ""  # why it is not there

    @staticmethod
    def check(settings: Settings) -> None:
        if settings.checkpoint_dir is None:
            return
        storage = open_storage(settings.checkpoint_dir)
        if isinstance(storage, LocalStorage):  # torch.save makes none. Not the one above: perhaps its file system is not mounted
            with suppress(OSError):
                os.mkdir(storage.address)
        try:
            listing.newest_complete(settings.checkpoint_dir, listing.Wanted(pattern=settings.checkpoint_pattern))
        except OSError as error:  # the storage does not answer yet; it must by the first round
            logger.warning("checkpoint_dir %s cannot be listed now: %s", settings.checkpoint_dir, error)

    def agree(self, group: WorkerGroup) -> ResumePoint:
        place = place_of(group)
        settings = self.parts.settings
        if self._shared is None and (place.nodes > 1 or _keeps_parts(settings)):
            try:
                self._shared = shared_dir(settings, self.parts.job.node.address)
            except (OSError, ValueError, errors.UsageError) as error:
                self._unshared = str(error)
        place = replace(place, shared=self._shared, unshared=self._unshared)
        found = agree(settings, self.parts.job, place, self._copies)
        found.shared = self._shared
        return found

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def saves_to(self) -> Sequence[str]:
        return addresses(self.parts.settings)


def shared_dir(settings: Settings, host: str) -> SharedDir | None:
    """Serve `local_dir` to the other nodes of the job; None where it is not set. Raises OSError, ValueError, UsageError."""
    if settings.local_dir is None or settings.checkpoint_dir is None or settings.local_saves != "all":
        return None
    local = open_storage(settings.local_dir)
    secret = settings.job_secret or ""
    if not secret and settings.job_secret_file is not None:
        secret = Path(settings.job_secret_file).read_text().strip()
    return SharedDir(local, host, secret, _kept_in(settings)) if isinstance(local, LocalStorage) else None


def _kept_in(settings: Settings) -> Callable[[LocalStorage], KeptParts] | None:
    """Return what says what a directory keeps of other nodes; None: nodes keep nothing of each other."""
    if not settings.mirrors_saves:
        return None
    from elastic_ext.checkpoints.sharing.mirrored import kept_in

    return kept_in


def _keeps_parts(settings: Settings) -> bool:
    """Return whether `local_dir` keeps parts of other nodes, which a job on this node alone may need."""
    local = open_storage(settings.local_dir) if settings.mirrors_saves and settings.local_dir is not None else None
    with suppress(OSError):
        return isinstance(local, LocalStorage) and any(each.is_dir for each in local.listed(MIRRORED))
    return False


def addresses(settings: Settings) -> list[str]:
    """Return those of `checkpoint_dir` and `local_dir`, as far as they are set."""
    return [open_storage(each).address for each in (settings.checkpoint_dir, settings.local_dir) if each is not None]
