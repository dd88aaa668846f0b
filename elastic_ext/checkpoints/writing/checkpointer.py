"""`elastic_ext.Checkpointer`: all that training code needs to save itself and to come back.

    checkpointer = Checkpointer("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    position = checkpointer.load()
    ...
    checkpointer.save(step, epoch=epoch)
    ...
    checkpointer.close()

Every method is called on all ranks, in the same order. A save copies the state to memory and returns; a thread writes it, with a
process group of its own. What goes wrong there never stops training and never leaves a rank waiting: it is logged, kept in
`last_error`, told to `on_event`, and the next save tries again.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory import marks, pruning, tiers
from elastic_ext.checkpoints.directory.generations import Opener, StaleGroup, open_generation, refuse_stale
from elastic_ext.checkpoints.formats.dcp import METADATA as DCP_METADATA
from elastic_ext.checkpoints.formats.inspection import OWN
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, decode, directory_name, order_of
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage
from elastic_ext.checkpoints.writing import state, writer
from elastic_ext.checkpoints.writing.writer import CheckpointError, Kind, LocalTier, Outcome, Parts, Ranks, SaveFailure, Staged
from elastic_ext.training import saves

logger = logging.getLogger(__name__)

DIRECTORY_ENV = "ELASTIC_EXT_CHECKPOINT_DIR"
RESUME_FROM_ENV = "ELASTIC_EXT_RESUME_FROM"
LAUNCH_ENV = "ELASTIC_EXT_LAUNCH"

ATTEMPTS = 4  # of one save, where the storage asks to come back later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
ALARM_AFTER = 3  # failed saves one after the other


@dataclass(frozen=True)
class Position:
    """Where training is.

    Attributes:
        step: optimizer steps done.
        epoch: the one that training is in, from 0.
        accumulation: micro-steps of the next optimizer step that are done; their gradients are in place.
        path: the checkpoint, None at the beginning.
        world_size: of the group that saved it; 0 at the beginning.
        note: what was given to `save`.
        dataloader: the data loader's state is in place; False: it stands where it was made.
        generators: this rank's random generators are as they were; False: they were seeded anew, the same at each try.
    """

    step: int = 0
    epoch: int = 0
    accumulation: int = 0
    path: str | None = None
    world_size: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    dataloader: bool = False
    generators: bool = False


@dataclass(frozen=True)
class Event:
    """What `on_event` gets, from the thread that writes. kind: saved, failed, alarm (several failed in a row) or pruned."""

    kind: str
    step: int
    name: str
    seconds: float = 0.0
    size: int = 0
    reason: str = ""


Reshard = Callable[[Sequence[Any], int, int], Any]
"""(states of all saved ranks in order, this rank, world size) -> this rank's data loader state, or None to begin anew."""


class Checkpointer:
    """Saves in the background, commits atomically, resumes at any world size, keeps the newest few.

    Attributes:
        last_error: why the last save failed, None after one that did not.
        failures: saves that failed one after the other.
        last_saved: step of the last committed save of this group, None before.
        last_stall_s: seconds that the last `save` held up training.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: state.Stateful | None = None,
        scaler: state.Stateful | None = None,
        dataloader: state.Stateful | None = None,
        extra: Mapping[str, state.Stateful] | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        verify: bool = True,
        reshard_dataloader: Reshard | None = None,
        requested: Callable[[int], bool] | None = None,
        on_event: Callable[[Event], None] | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Collective. Raises UsageError.

        Args:
            directory: path or fsspec URL; by default what the agent was given as checkpoint_dir.
            local_dir: on a fast disk of each node, which saves go to first; by default what the agent was given as local_dir, if
                `directory` is its checkpoint_dir; "": none. The agent copies it; without one somebody else must, with
                `python -m elastic_ext.checkpoints.copying.replicate` on each node, which takes both directories from
                ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR.
            extra: by name, other things with a state_dict, alike on all ranks or sharded as the model is.
            keep_last: how many of the newest complete checkpoints stay. The one that was loaded stays too, and pinned ones.
            keep_every: checkpoints whose step this divides stay for good.
            verify: read each file's checksum before a load. Sizes are always compared.
            reshard_dataloader: for a load at another world size; without it the data loader begins anew then, which is logged.
            requested: asked by `save_requested`; by default the agent is (see `elastic_ext.training.saves`).
            on_event: for metrics. Must be quick; what it raises is logged.
            timeout: after which a rank stops waiting for the others' part of a save.
        """
        where = os.fspath(directory) if directory is not None else os.environ.get(DIRECTORY_ENV, "")
        if not where:
            raise UsageError(f"no directory for checkpoints: give one, or set {DIRECTORY_ENV} (--rdzv-conf checkpoint_dir=...)")
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise UsageError(f"keep_last is {keep_last} and keep_every {keep_every}, expected 1 or more")
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        self._objects = state.Objects(model, optimizers, scheduler, scaler, dataloader, dict(extra or {}))
        self._storage = open_storage(where)
        self._keep_last, self._keep_every, self._verify = keep_last, keep_every, verify
        self._reshard = reshard_dataloader
        self._requested = requested
        self._on_event = on_event
        together = dist.is_available() and dist.is_initialized()
        self._ranks = Ranks(dist.new_group(backend="gloo", timeout=timeout) if together else None)
        self._tier = _local_tier(_local_address(local_dir, self._storage), self._ranks)
        self._past_tier = ""  # why the last save went past the local tier
        self._opener = Opener(
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            os.environ.get(LAUNCH_ENV, ""),
        )
        self._agents_choice = os.environ.get(RESUME_FROM_ENV)  # "": begin anew; None: the agent has not said
        self._generation: int | None = None
        self._loaded: str | None = None  # never pruned: others may be loading it still
        self._stager = state.Stager()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()  # the next save waits for the thread: no more pauses
        self._ended = ""  # why no further save can be
        self._stale: StaleGroup | None = None
        self.last_error: str | None = None
        self.failures = 0
        self.last_saved: int | None = None
        self.last_stall_s = 0.0
        atexit.register(self.close)

    # Load.

    def load(self) -> Position:
        """Put the chosen checkpoint in place: the agent's choice, else the newest complete one; nothing there: the zero position.

        The agent's choice is that of the first load; a further one, to go back, takes the newest complete one. From here on only
        this group of workers may commit. Collective. Raises StaleGroup; CheckpointError, on all ranks, where
        the agent's choice is damaged or does not fit (the state is undefined then); OSError where nobody can tell what there is.
        """
        self.wait()
        if self._generation is None or self.last_saved is not None:
            self._generation, self.last_saved = None, None  # steps that are trained again belong to a new generation
            try:
                self._generation = self._ranks.from_rank_0(lambda: open_generation(self._storage, self._opener))
            except OSError as error:  # such a directory can be loaded from all the same
                logger.warning("%s cannot be written to now: %s; each save tries again", self._storage.address, error)
        chosen, self._agents_choice = self._agents_choice, None
        if chosen is not None:
            return self._load_chosen(chosen) if chosen else Position()
        return self._load_newest({}) or Position()

    def _load_newest(self, passed: dict[str, set[str]]) -> Position | None:
        """None: there is none. passed: names to pass over, by address: the two tiers may have the same one."""
        while True:
            storage, name = self._newest(passed)
            if name is None:
                return None
            try:
                manifest, parts = self._checked(storage, name)
            except CheckpointError as error:
                logger.warning("checkpoint %s is passed over: %s", storage.path(name), error)
                passed.setdefault(storage.address, set()).add(name)
                continue
            return self._put_in_place(storage, name, manifest, parts)

    def _newest(self, passed: Mapping[str, set[str]]) -> tuple[Storage, str | None]:
        """Of both tiers; of the same the local one. Raises OSError."""
        remote = self._ranks.from_rank_0(lambda: _newest_complete(self._storage, passed.get(self._storage.address, set())))
        if self._tier is None:
            return self._storage, remote
        local, tier = self._tier.storage, self._tier
        mine = self._ranks.together(lambda: tiers.offers(local) if tier.first else None)
        told = self._ranks.all_gather(mine)
        barred = self._ranks.from_rank_0(lambda: marks.quarantined_names(self._storage)) | passed.get(local.address, set())
        offer = tiers.newest_of_all([each for each in told if each is not None], barred)
        if offer is None or (remote is not None and _order(remote) > _order(offer.name)):
            return self._storage, remote
        return local, offer.name

    def _load_chosen(self, path: str) -> Position:
        """The agent's choice. One of the local tier that is gone or damaged by now has a copy, or older ones have."""
        storage, name = open_parent(path)
        try:
            return self._put_in_place(storage, name, *self._checked(storage, name))
        except CheckpointError as error:
            if self._on_nodes(storage) is None:
                raise
            logger.warning("%s cannot be loaded: %s; %s is looked into", path, error, self._storage.address)
            position = self._load_newest({storage.address: {name}})
            if position is None:
                raise  # beginning from nothing would lose the work
            return position

    def _on_nodes(self, storage: Storage) -> LocalTier | None:
        return self._tier if self._tier is not None and storage.address == self._tier.storage.address else None

    def _checked(self, storage: Storage, name: str) -> tuple[Manifest, Parts | None]:
        """The manifest, once all ranks together have looked at all files. Raises CheckpointError on all ranks.

        With it, of one in the local tier, who has which of its files.
        """
        tier, path, parts = self._on_nodes(storage), storage.path(name), None
        if tier is None:
            manifest = self._ranks.from_rank_0(lambda: _manifest(storage, name))
            share = manifest.files[self._ranks.rank :: self._ranks.world]
        else:
            manifest, parts = self._parts(tier, name)
            mine = [file for file in manifest.files if parts.has(tier.node, file.name)]
            share = tuple(file for file in mine if parts.agent(tier.node, file.name) == self._ranks.rank)

        def check() -> None:
            wrong = [found for file in share if (found := writer.damage(storage, name, file, self._verify))]
            if wrong:
                raise CheckpointError(f"{path}: {'; '.join(wrong)}")

        self._ranks.together(check)
        return manifest, parts

    def _parts(self, tier: LocalTier, name: str) -> tuple[Manifest, Parts]:
        """What the nodes have of one in the local tier. Raises CheckpointError on all ranks if some file is nowhere."""
        path = tier.storage.path(name)

        def look() -> tuple[str, Manifest, frozenset[str]] | None:
            try:
                read = tiers.manifest_of(tier.storage, name)
                return read and (tiers.digest(read[1]), read[0], tiers.files_here(tier.storage, name, read[0]))
            except (ManifestError, OSError) as error:  # another node may have it
                logger.warning("%s: %s", path, error)
                return None

        mine = look() if tier.first else None
        told = self._ranks.all_gather(mine and (mine[0], mine[2]))
        first = next((rank for rank, found in enumerate(told) if found is not None), None)
        if first is None:
            raise CheckpointError(f"{path} has no {MANIFEST} on any node: not a complete checkpoint of elastic_ext")
        manifest = self._ranks.all_gather(mine[1] if mine and self._ranks.rank == first else None)[first]
        assert manifest is not None, "that rank has said so"
        _refuse_other(manifest, name, path)
        digest = next(found[0] for found in told if found is not None)
        same = [(rank, found[1]) for rank, found in enumerate(told) if found is not None and found[0] == digest]
        here = {tiers.node_of(tier.nodes, rank): files for rank, files in same}
        holders = {file.name: tuple(node for node, files in here.items() if file.name in files) for file in manifest.files}
        lost = [file for file, nodes in holders.items() if not nodes]
        if lost:
            raise CheckpointError(f"{path}: {len(lost)} files are on no node, {lost[0]} among them")
        return manifest, Parts(tier.nodes, tier.node, holders)

    def _put_in_place(self, storage: Storage, name: str, manifest: Manifest, parts: Parts | None) -> Position:
        tier = self._on_nodes(storage)
        if tier is None or parts is None:
            return self._restored(
                storage, name, manifest, lambda tensors: writer.read_tensors(storage, name, tensors, self._ranks)
            )
        same = manifest.world_size == self._ranks.world
        wanted = tiers.ranks_of(tier.nodes, tier.node) if same else range(manifest.world_size)
        small = {DCP_METADATA, writer.SHARED_FILE, *(writer.own_file(rank) for rank in wanted)}
        files = [file for file in manifest.files if file.name in small]
        with writer.of_all_nodes(tier, parts, name, self._ranks, files) as fetched:
            return self._restored(
                fetched,
                name,
                manifest,
                lambda tensors: writer.read_tensors_of_nodes(tier, fetched, parts, name, tensors, self._ranks),
            )

    def _restored(
        self, storage: Storage, name: str, manifest: Manifest, read_tensors: Callable[[dict[str, Any]], None]
    ) -> Position:
        ranks, objects = self._ranks, self._objects
        same = manifest.world_size == ranks.world

        def read() -> tuple[Any, dict[int, Any], dict[str, Any]]:
            shared = writer.read_objects(storage, name, writer.SHARED_FILE)
            wanted = (ranks.rank,) if same else range(manifest.world_size)
            owns = {rank: writer.read_objects(storage, name, writer.own_file(rank)) for rank in wanted}
            return shared, owns, state.template(objects, shared, owns)

        shared, owns, tensors = ranks.together(read)
        ranks.together(lambda: read_tensors(tensors))
        ranks.together(lambda: state.restore(objects, tensors, shared, owns))
        dataloader = ranks.together(lambda: self._put_dataloader(owns, same))
        if same:
            generators = owns[ranks.rank]["generators"]
            state.set_generators(generators)  # last: all before may draw from them
            if dataloader:
                state.restore_after_iter(objects.dataloader, generators)
        else:
            logger.warning(
                "%s was saved by %s ranks, there are %s: random generators are seeded anew",
                name,
                manifest.world_size,
                ranks.world,
            )
            state.seed_generators(manifest.step, manifest.accumulation, ranks.rank, ranks.world)
        ours = (self._storage.address, self._tier.storage.address if self._tier is not None else None)
        self._loaded = name if storage.address in ours else None
        logger.info("loaded %s: step %s, epoch %s", storage.path(name), manifest.step, manifest.epoch)
        return Position(
            step=manifest.step,
            epoch=manifest.epoch,
            accumulation=manifest.accumulation,
            path=storage.path(name),
            world_size=manifest.world_size,
            note=manifest.extra,
            dataloader=dataloader,
            generators=same,
        )

    def _put_dataloader(self, owns: Mapping[int, Mapping[str, Any]], same: bool) -> bool:
        loader = self._objects.dataloader
        if loader is None or any("dataloader" not in own for own in owns.values()):
            return False
        if same:
            found = owns[self._ranks.rank]["dataloader"]
        elif self._reshard is None:
            logger.warning(
                "the data loader begins anew: its state is that of %s ranks, and no reshard_dataloader was given", len(owns)
            )
            return False
        else:
            found = self._reshard([owns[rank]["dataloader"] for rank in sorted(owns)], self._ranks.rank, self._ranks.world)
            if found is None:
                return False
        loader.load_state_dict(found)
        return True

    # Save.

    def save_requested(self, step: int) -> bool:
        """Has somebody asked for a save at this step: a preemption notice, a drain, a person? All ranks ask, once a step."""
        return saves.save_requested() if self._requested is None else self._requested(step)

    def save(
        self, step: int, *, epoch: int = 0, accumulation: int = 0, note: Mapping[str, Any] | None = None, wait: bool = False
    ) -> None:
        """Copy the state and return; it is written while training goes on. Waits for the save before this one first.

        In the middle of an accumulation the gradients are saved too; not those that FSDP2 keeps unsharded.

        Args:
            step: optimizer steps done. A step that this group has saved already is not saved again.
            accumulation: micro-steps of the next optimizer step that are done.
            note: small values for people and for `Position.note`, JSON; rank 0's are kept.
            wait: return once it is committed or has failed, see `last_error`.

        Collective. Raises StaleGroup when another group has taken over; UsageError for gradients that cannot be saved.
        """
        called = time.monotonic()
        self._hurry.set()  # training stands still, and what is newer is about to be saved
        self.wait()
        if self._stale is not None:
            raise self._stale
        if self._ended or step == self.last_saved:
            logger.info("step %s is not saved: %s", step, self._ended or "it is saved already")
            if self._ended:
                saves.report_save_failed()
            else:
                saves.report_saved(step, 0.0)
            return
        began = time.monotonic()
        refused: UsageError | None = None
        try:
            staged = self._staged(accumulation)
        except UsageError as error:
            refused, staged = error, Staged(failure=SaveFailure(Kind.OTHER, str(error), self._ranks.rank))
        except Exception as error:  # the other ranks wait for this one's part, and training goes on
            logger.exception("the state of step %s could not be copied", step)
            staged = Staged(failure=SaveFailure(Kind.OTHER, f"{type(error).__name__}: {error}", self._ranks.rank))
        manifest = Manifest(
            step=step,
            generation=0,  # of the thread to fill in
            files=(),
            world_size=self._ranks.world,
            epoch=epoch,
            accumulation=accumulation,
            run_id=self._opener.run_id,
            restart=self._opener.restart,
            extra=dict(note or {}),
        )
        self._hurry.clear()
        work = (staged, manifest, called)
        self._thread = threading.Thread(target=self._save, args=work, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        self.last_stall_s = time.monotonic() - began
        if refused is not None:
            raise refused
        if wait:
            self.wait()

    def _staged(self, accumulation: int) -> Staged:
        taken = state.capture(self._objects, self._ranks.rank, accumulation)
        shared = writer.pickled(taken.shared) if self._ranks.rank == 0 else b""
        return Staged(self._stager.stage(taken.tensors), shared, writer.pickled(taken.own))

    def wait(self) -> None:
        """Until the save under way, if any, is committed or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last save. Raises nothing: see `last_error`. Call it before the process group is destroyed."""
        atexit.unregister(self.close)
        self.wait()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread that writes.

    def _save(self, staged: Staged, manifest: Manifest, called: float) -> None:
        """called: when the save was asked for, monotonic."""
        try:
            name, outcome = self._save_with_patience(staged, manifest)
        except StaleGroup as error:
            name, outcome = "", Outcome(writer.failure_of(error, 0))
        except OSError as error:
            name, outcome = "", Outcome(writer.failure_of(error, 0))
        except Exception as error:  # the top of a thread
            logger.exception("the ranks cannot agree on a save any more: there will be no further one")
            name, outcome = "", Outcome(SaveFailure(Kind.GROUP, f"{type(error).__name__}: {error}", self._ranks.rank))
        if outcome.failure is None:
            self._committed(name, manifest.step, outcome.size, time.monotonic() - called)
        else:
            self._failed(name, manifest.step, outcome.failure)

    def _save_with_patience(self, staged: Staged, manifest: Manifest) -> tuple[str, Outcome]:
        """All ranks take the same turns here: what rank 0 decides is told to all."""
        attempt = 0
        while True:
            attempt += 1
            name, outcome = self._attempt(staged, manifest)
            failure = outcome.failure
            if failure is None or failure.kind is not Kind.THROTTLED:
                return name, outcome
            if not self._ranks.broadcast(attempt < ATTEMPTS and self._paused(attempt, failure)):
                return name, outcome

    def _attempt(self, staged: Staged, manifest: Manifest) -> tuple[str, Outcome]:
        if self._generation is None:
            try:
                self._generation = self._ranks.from_rank_0(lambda: open_generation(self._storage, self._opener))
            except OSError as error:
                return "", Outcome(writer.failure_of(error, 0))
        name = directory_name(manifest.step, self._generation)
        filled = Manifest(**{**manifest.__dict__, "generation": self._generation})
        if self._tier is not None:
            outcome = writer.save_on_nodes(self._tier, self._storage, name, staged, filled, self._ranks)
            self._note_tier(outcome.failure)
            if outcome.failure is None or outcome.failure.kind is Kind.STALE or staged.failure is not None:
                return name, outcome
            if self._tier.first:
                self._remove(self._tier.storage, name)  # a full disk needs the room
        return name, writer.save(self._storage, name, staged, filled, self._ranks)

    def _note_tier(self, failure: SaveFailure | None) -> None:
        """Say when saves begin to go past the local tier, and when they do no more."""
        before, self._past_tier = self._past_tier, failure.kind.value if failure is not None else ""
        if failure is not None and failure.kind.value != before:
            to = self._storage.address
            logger.warning("not saved to local_dir, rank %s: %s; saves go to %s", failure.rank, failure.reason, to)
        elif before and failure is None:
            logger.warning("saves go to local_dir again")

    def _paused(self, attempt: int, failure: SaveFailure) -> bool:
        """Wait, longer each time; False when the next save is there. Rank 0 only: the others wait for its answer."""
        if self._ranks.rank != 0:
            return False
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.Random().uniform(0.5, 1.0)
        logger.warning("save failed on rank %s (%s), again in %.1f s", failure.rank, failure.reason, pause)
        return not self._hurry.wait(pause)

    def _committed(self, name: str, step: int, size: int, seconds: float) -> None:
        self.last_error, self.failures, self.last_saved = None, 0, step
        if self._ranks.rank == 0:
            where = self._tier.storage if self._tier is not None and not self._past_tier else self._storage
            logger.info("saved %s: %.1f MB in %.2f s", where.path(name), size / 1e6, seconds)
        saves.report_saved(step, seconds)
        self._tell(Event("saved", step, name, seconds, size))
        if self._ranks.rank == 0:
            try:
                self._prune(name, step)
            except (OSError, StaleGroup) as error:  # no reason to stop training: the next save prunes
                logger.warning("old checkpoints in %s stay: %s", self._storage.address, error)

    def _failed(self, name: str, step: int, failure: SaveFailure) -> None:
        self.failures += 1
        self.last_error = f"step {step} was not saved, rank {failure.rank}: {failure.kind.value}: {failure.reason}"
        logger.warning("%s; training goes on", self.last_error)
        saves.report_save_failed()
        self._tell(Event("failed", step, name, reason=self.last_error))
        if failure.kind is Kind.STALE:
            self._stale = StaleGroup(failure.reason)
            return
        if failure.kind is Kind.GROUP:
            self._ended = self.last_error
            return
        if self.failures >= ALARM_AFTER:
            logger.error("%s saves failed one after the other, the last saved step is %s", self.failures, self.last_saved)
            self._tell(Event("alarm", step, name, reason=self.last_error))
        if name and self._ranks.rank == 0:
            self._remove(self._storage, name)  # a full disk needs the room

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")

    def _prune(self, newest: str, step: int) -> None:
        assert self._generation is not None
        refuse_stale(self._storage, self._generation)
        pinned, quarantined = marks.pinned_names(self._storage), marks.quarantined_names(self._storage)
        # What is here may be on its way there: it is not torn, and its copy must not be removed under it.
        copied = set(tiers.own_checkpoints(self._tier.storage)) if self._tier is not None else set()
        found = []
        for name in tiers.own_checkpoints(self._storage):
            complete = (name == newest and name not in copied) or _has_manifest(self._storage, name)
            kept = pruning.PruneCandidate(
                name=name,
                family="",
                step=_order(name)[1],
                format=OWN,
                complete=complete,
                pinned=name in pinned or name == self._loaded or (name in copied and not complete),
                quarantined=name in quarantined,
            )
            found.append(kept)
        for decision in pruning.plan_prune(found, self._keep_last, self._keep_every or 0):
            if decision.remove:
                refuse_stale(self._storage, self._generation)
                if self._remove(self._storage, decision.name):
                    logger.info("removed %s: %s", self._storage.path(decision.name), decision.reason)
                    self._tell(Event("pruned", step, decision.name, reason=decision.reason))

    def _remove(self, storage: Storage, name: str) -> bool:
        try:
            pruning.delete(storage, name)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("%s could not be removed: %s", storage.path(name), error)
            return False
        return True


def _local_address(told: str | os.PathLike[str] | None, directory: Storage) -> str:
    """ "": no local tier."""
    if told is not None:
        return os.fspath(told)
    agents = os.environ.get(DIRECTORY_ENV, "")
    if not agents or open_storage(agents).address != directory.address:
        return ""  # the agent would copy to another directory than the script's
    return os.environ.get(tiers.LOCAL_ENV, "")


def _local_tier(address: str, ranks: Ranks) -> LocalTier | None:
    """Collective: all nodes have one, or none has."""
    group, local_rank = int(os.environ.get("GROUP_RANK") or 0), int(os.environ.get("LOCAL_RANK") or 0)
    if address and ranks.world > 1 and "GROUP_RANK" not in os.environ:
        logger.warning("local_dir is not used: nobody says which ranks share a node (torchrun does, by GROUP_RANK)")
        address = ""
    told = ranks.all_gather((group, local_rank, bool(address)))
    if not all(has for _, _, has in told):
        if address:
            lacking = [rank for rank, (_, _, has) in enumerate(told) if not has]
            logger.warning("local_dir is not used: ranks %s have none", lacking)
        return None
    groups = [group for group, _, _ in told]
    if groups != sorted(groups):
        logger.warning("local_dir is not used: the ranks of a node do not follow each other")
        return None
    numbers = sorted(set(groups))
    nodes = tuple(groups.count(number) for number in numbers)
    return LocalTier(open_storage(address), nodes, numbers.index(group), local_rank == 0)


def _manifest(storage: Storage, name: str) -> Manifest:
    """Raises CheckpointError."""
    path = storage.path(name)
    try:
        manifest = decode(storage.read(f"{name}/{MANIFEST}"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: not a complete checkpoint of elastic_ext") from None
    except (ManifestError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    _refuse_other(manifest, name, path)
    return manifest


def _refuse_other(manifest: Manifest, name: str, path: str) -> None:
    if order_of(name) not in (None, manifest.order):
        raise CheckpointError(f"{path} holds the manifest of step {manifest.step}, generation {manifest.generation}")


def _order(name: str) -> tuple[int, int]:
    return order_of(name) or (0, 0)


def _newest_complete(storage: Storage, passed: set[str]) -> str | None:
    """The newest checkpoint of ours whose manifest is there, not quarantined. Raises OSError."""
    barred = passed | marks.quarantined_names(storage)
    for name in tiers.own_checkpoints(storage):
        if name not in barred:
            if _has_manifest(storage, name):
                return name
            logger.info("checkpoint %s is passed over: no %s, the save did not finish", storage.path(name), MANIFEST)
    return None


def _has_manifest(storage: Storage, name: str) -> bool:
    return storage.stat(f"{name}/{MANIFEST}") is not None
