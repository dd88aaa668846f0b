"""Saves: copy the state aside, write it in a thread, commit it, report how it ended, and prune old checkpoints.

The order of writes is what makes a save atomic:

1. each rank writes its shards, then torch's `.metadata` (rank 0), its own file, the shared file (rank 0);
2. all ranks report what they wrote, with sizes and checksums; one failure ends the attempt, and no manifest is written;
3. rank 0 checks that its group was not replaced;
4. rank 0 writes the manifest. With a local tier, each node's first rank writes the shared small files and the manifest to its own
   disk, rank 0's node last, because it copies the manifest to the remote directory.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory import own_files, tiers, upkeep
from elastic_ext.checkpoints.directory.generations import Opener, StaleGroup, open_generation, refuse_stale
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.formats.candidates import OWN, directory_name, order_or_oldest
from elastic_ext.checkpoints.ranks import Directories, FailureKind, LocalTier, Rank0Failed, Ranks, SaveFailure, failure_of
from elastic_ext.checkpoints.state import EXTRA, Objects, StateDict, capture, digests, torch_dumps
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.dcp_files import Files, Writer
from elastic_ext.training import saves

logger = logging.getLogger(__name__)


ALARM_AFTER = 3  # failed saves in a row


@dataclass(frozen=True)
class SaveEvent:
    """The argument of `on_event`, which the writing thread calls."""

    kind: str  # saved, failed, alarm (several saves failed in a row) or pruned
    step: int  # step of the save; for "pruned", of the save that made the checkpoint superfluous
    name: str  # name of the checkpoint in its directory; "" if it got none
    seconds: float = 0.0  # time from the call of `save` to the commit
    size: int = 0  # bytes
    reason: str = ""  # why it failed or was removed


class Results:
    def __init__(self, on_event: Callable[[SaveEvent], None] | None) -> None:
        self._on_event = on_event
        # last_error, failures, last_saved: see `Checkpointer`.
        self.last_error: str | None = None
        self.failures = 0
        self.last_saved: int | None = None
        self._saved: set[int] = set()  # steps committed by this group
        self.stale: StaleGroup | None = None  # set if another group has taken over: no further save is possible
        self.ended = ""  # any other reason why no further save is possible, else ""

    def new_group(self) -> None:
        """Forget what is saved: steps trained again belong to a new group."""
        self.last_saved = None
        self._saved.clear()

    def committed(self, name: str, step: int, size: int, seconds: float) -> None:
        self.last_error, self.failures, self.last_saved = None, 0, step
        self._saved.add(step)
        saves.report_saved(step, seconds)
        self.emit(SaveEvent("saved", step, name, seconds, size))

    def failed(self, name: str, step: int, failure: SaveFailure) -> None:
        self.failures += 1
        self.last_error = f"step {step} was not saved: rank {failure.rank}: {failure.kind.value}: {failure.reason}"
        logger.warning("%s; training continues", self.last_error)
        saves.report_save_failed()
        self.emit(SaveEvent("failed", step, name, reason=self.last_error))
        if failure.kind is FailureKind.STALE:
            self.stale = StaleGroup(failure.reason)
        elif failure.kind is FailureKind.GROUP:
            self.ended = self.last_error
        elif self.failures >= ALARM_AFTER:
            logger.error("%s saves failed in a row; the last saved step is %s", self.failures, self.last_saved)
            self.emit(SaveEvent("alarm", step, name, reason=self.last_error))

    def skip(self, step: int) -> bool:
        """Return whether this step need not or cannot be saved, and if so notify the agent. Raises StaleGroup."""
        if self.stale is not None:
            raise self.stale
        if self.ended:
            logger.info("step %s is not saved: %s", step, self.ended)
            saves.report_save_failed()
        elif step in self._saved:  # nothing is ever written into a committed checkpoint
            logger.info("step %s is not saved: it has been saved already", step)
            saves.report_saved(step, 0.0)
        else:
            return False
        return True

    def emit(self, event: SaveEvent) -> None:
        """Call `on_event` and log its exceptions."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")


At = tuple[float, int]  # the step of a save and its micro-steps; later ones are greater
AFTER_ALL: At = (math.inf, 0)

SHARED_FILE = "shared.pt"  # the state that all ranks share, pickled


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state, pickled."""
    return f"rank_{rank:05d}.pt"


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended, the same on all ranks. failure: None if it is committed. size: bytes of the checkpoint."""

    failure: SaveFailure | None
    size: int = 0


def what_prevents(at: At, staged: Staged, ranks: Ranks) -> SaveFailure | None:
    """Return why no attempt to save this state makes sense, wherever it writes to, once all ranks save it. Collective.

    The first of all that ranks do together for a save, and for a load: so they meet here, in any case. A rank that has
    left out a save is ahead of the others. Their save fails, and the rank asks again, until all are at the same place. So the
    result is the same on all ranks that save one state.
    """
    while True:
        places, failures, extras = zip(*ranks.all_gather((at, staged.failure, staged.extra)), strict=True)
        first, last = min(places), max(places)
        if at < last:
            reason = f"rank {places.index(last)} is at {_described(last)} and has not saved this one"
            return SaveFailure(FailureKind.OTHER, f"{reason}; all ranks must call save for the same steps", ranks.rank)
        if at == first:
            failed = [failure for failure in failures if failure is not None] or [*_differing(extras)]
            return failed[0] if failed else None
        logger.warning("%s waits for rank %s, which is at %s", _described(at), places.index(first), _described(first))


def end_of_saves(ranks: Ranks) -> None:
    """Wait until all ranks call this; what a rank saves that others have left out fails. Collective."""
    what_prevents(AFTER_ALL, Staged(), ranks)


def _described(at: At) -> str:
    step, accumulation = at
    if at == AFTER_ALL:
        return "a load"
    return f"step {step}, micro-step {accumulation}" if accumulation else f"step {step}"


def save_to(
    tier: LocalTier | None, remote: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks
) -> AttemptOutcome:
    """Write and commit one checkpoint, after `what_prevents`: to each node's own disk; without a tier, to the remote directory.

    Collective. manifest: without files; rank 0's is used. With a tier it is committed once rank 0's node has the manifest. In any
    case the remote directory shows whether there is a newer group.

    Raises torch's RuntimeError if the ranks cannot communicate.
    """
    storage = remote if tier is None else tier.storage
    complete = _written(storage, name, staged, manifest if tier is None else replace(manifest, nodes=tier.nodes), ranks)
    if isinstance(complete, SaveFailure):
        return AttemptOutcome(complete)
    common = ranks.broadcast(commit(tier, remote, name, complete) if ranks.rank == 0 else {})
    if isinstance(common, SaveFailure) or tier is None:
        return AttemptOutcome(common if isinstance(common, SaveFailure) else None, complete.size)
    for leads in (False, True):  # rank 0's node last: it copies the manifest to the remote directory
        failure = None
        if tier.first and (ranks.rank == 0) is leads:
            failure = _put_common(tier.storage, name, {MANIFEST: common[MANIFEST]} if leads else common, ranks.rank)
        failures = [failure for failure in ranks.all_gather(failure) if failure]
        if failures:
            return AttemptOutcome(failures[0])
    return AttemptOutcome(None, complete.size)


def commit(tier: LocalTier | None, remote: Storage, name: str, manifest: Manifest) -> Mapping[str, bytes] | SaveFailure:
    """Write the manifest on rank 0, unless a newer group has taken over; or return why it could not.

    With a tier, each node writes it: return the small files that every node has, by name, the manifest last.
    """
    try:
        refuse_stale(remote, manifest.generation)
        if tier is None:
            tiers.put_manifest(remote, name, manifest)
            return {}
        names = [file.name for file in manifest.files if tiers.rank_of(file.name) is None]
        return {**{each: tier.storage.read(f"{name}/{each}") for each in names}, MANIFEST: encode(manifest)}
    except Exception as error:
        logger.debug("committing %s failed", name, exc_info=True)
        return failure_of(error, 0)


def _written(storage: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Manifest | SaveFailure:
    """Write this rank's files. Return the manifest with all ranks' files, or the first failure, the same on all ranks."""
    files = Files(storage, name)
    failure = _write(files, name, staged, ranks)
    reports = ranks.all_gather((list(files.written.values()), failure))
    failures = [failure for _, failure in reports if failure]
    if failures:
        return failures[0]
    stored: tuple[StoredFile, ...] = tuple(file for written, _ in reports for file in written)
    return replace(manifest, files=stored, saved_at=time.time())


def _differing(extras: Sequence[Mapping[str, str]]) -> Iterator[SaveFailure]:
    """Yield a failure for each extra object and rank with tensors of which rank 0, whose state is kept, knows nothing. Pure."""
    for rank, extra in enumerate(extras):
        for name in sorted(extra):
            if extra[name] != extras[0].get(name):
                reason = f"the state of extra {name!r} has other tensors than on rank 0, whose state is kept for all ranks"
                yield SaveFailure(FailureKind.OTHER, f"{reason}: return the same keys, types and shapes on all", rank)


def _write(files: Files, name: str, staged: Staged, ranks: Ranks) -> SaveFailure | None:
    writer = Writer(files, name, ranks.rank)
    try:
        with ranks.communicating():
            dcp.save(dict(staged.tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as error:  # raised by the planning, on all ranks
        return failure_of(error, ranks.rank)
    try:
        files.put(f"{name}/{rank_file(ranks.rank)}", staged.own)
        if ranks.rank == 0:
            files.put(f"{name}/{SHARED_FILE}", staged.shared)
    except Exception as error:  # noqa: BLE001  (reported with the files)
        return writer.failure or failure_of(error, ranks.rank)
    return writer.failure


def _put_common(local: Storage, name: str, files: Mapping[str, bytes], rank: int) -> SaveFailure | None:
    try:
        for file, data in files.items():
            local.put(f"{name}/{file}", data)
    except Exception as error:  # noqa: BLE001  (all ranks learn of it)
        return failure_of(error, rank)
    return None


@dataclass(frozen=True)
class Staged:
    """One rank's part of a save, in separate memory."""

    tensors: Mapping[str, Any] = field(default_factory=dict)  # tensors that torch.distributed.checkpoint shards
    shared: bytes = b""  # pickled state that is equal on all ranks; rank 0 has it, the others have b""
    own: bytes = b""  # this rank's own state, pickled
    # By extra object with tensors, a checksum of their keys, types and shapes; rank 0's must be the same.
    extra: Mapping[str, str] = field(default_factory=dict)
    failure: SaveFailure | None = None  # why staging failed; the rest is then empty


class Stager:
    """Stages one save after another. Reuses the memory, because page faults cost more than the copy."""

    def __init__(self, objects: Objects, rank: int) -> None:
        self._objects, self._rank = objects, rank
        self._kept: dict[tuple[object, ...], Tensor] = {}  # the last copies, by their place in the state

    def stage(self, step: int, accumulation: int) -> tuple[Staged, UsageError | None]:
        """Copy the state of `step`. The previous staged state must no longer be in use.

        Never raises, because the other ranks wait for this one's part: an error becomes `Staged.failure`. A UsageError is also
        returned, for the caller to raise once all ranks know of it.
        """
        try:
            taken = capture(self._objects, self._rank, accumulation)
            shared = torch_dumps(taken.shared, common=True) if self._rank == 0 else b""
            own = torch_dumps(taken.own, common=False)
            extra = digests(taken.tensors.get(EXTRA, {}))
            return Staged(self.copied(taken.tensors), shared, own, extra), None
        except UsageError as error:
            return Staged(failure=SaveFailure(FailureKind.OTHER, str(error), self._rank)), error
        except Exception as error:  # training continues
            logger.exception("the state of step %s could not be copied to host memory", step)
            return Staged(failure=SaveFailure(FailureKind.OTHER, f"{type(error).__name__}: {error}", self._rank)), None

    def copied(self, tensors: StateDict) -> StateDict:
        """Return a copy in host memory that training does not change. The previous copy must no longer be in use."""
        before, self._kept = self._kept, {}
        found: StateDict = {key: self._copy(each, (key,), before) for key, each in tensors.items()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # copies from the device are asynchronous
        return found

    def _copy(self, value: object, path: tuple[object, ...], before: Mapping[tuple[object, ...], Tensor]) -> object:
        if isinstance(value, Tensor):
            self._kept[path] = _copied(value.detach(), before.get(path))
            return self._kept[path]
        if isinstance(value, Mapping):
            return {key: self._copy(each, (*path, key), before) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            copies = [self._copy(each, (*path, number), before) for number, each in enumerate(value)]
            return copies if isinstance(value, list) else tuple(copies)
        return copy.deepcopy(value)


def _copied(value: Tensor, room: Tensor | None) -> Tensor:
    """Copy into `room` if it fits, else into new memory."""
    fits = room is not None and type(room) is type(value) and room.shape == value.shape and room.dtype == value.dtype
    if not fits or (isinstance(room, DTensor) and room.placements != value.placements):
        room = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    assert room is not None
    return room.copy_(value, non_blocking=value.is_cuda)


# Who may commit, and what is pruned.

LAUNCH_ENV = "ELASTIC_EXT_LAUNCH"


class GenerationFence:
    """The generation that this group of workers opened in the remote directory. Only the newest one may write there."""

    def __init__(self, remote: Storage, ranks: Ranks) -> None:
        self._remote, self._ranks = remote, ranks
        # This group, from the agent's environment variables.
        self.opener = Opener(
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            os.environ.get(LAUNCH_ENV, ""),
        )
        self.generation: int | None = None  # the same on all ranks; None until the directory was opened

    def open(self) -> int:
        """Return this group's generation, taking one if needed. Collective. Raises StaleGroup, OSError on all ranks."""
        if self.generation is None:
            self.generation = self._ranks.from_rank_0(lambda: open_generation(self._remote, self.opener))
        return self.generation

    def reopen(self) -> None:
        """Take a new generation. Collective. Raises StaleGroup on all ranks.

        A directory that cannot be written to now is only logged, because checkpoints can still be loaded from it.
        """
        self.generation = None
        try:
            self.open()
        except OSError as error:
            logger.warning("cannot write to %s now: %s; each save tries again", self._remote.address, error)

    def check(self) -> None:
        """Raise StaleGroup if another group has taken over, or OSError if that cannot be determined."""
        assert self.generation is not None, "the directory is open"
        refuse_stale(self._remote, self.generation)


class Retention:
    """Prunes the remote directory, only on rank 0. The agent's copier prunes the local one."""

    def __init__(self, directories: Directories, fence: GenerationFence, keep_last: int, keep_every: int | None) -> None:
        """keep_last: number of newest complete ones to keep. keep_every: also keep those whose step is a multiple of this."""
        self._directories, self._fence = directories, fence
        self._keep_last, self._keep_every = keep_last, keep_every or 0
        # Name of the loaded checkpoint; never removed, because other ranks may still be loading it.
        self.in_use: str | None = None

    def prune(self, newest: str) -> Iterator[upkeep.PruneDecision]:
        """Remove superfluous checkpoints; yield each completed removal. newest: the one that was just committed.

        Raises StaleGroup if another group has taken over; OSError.
        """
        self._fence.check()
        for decision in upkeep.plan_prune(self._present(newest), self._keep_last, self._keep_every):
            if decision.remove:
                self._fence.check()
                if remove(self._directories.remote, decision.name):
                    logger.info("removed %s: %s", self._directories.remote.path(decision.name), decision.reason)
                    yield decision

    def _present(self, newest: str) -> list[upkeep.PruneCandidate]:
        remote, tier = self._directories.remote, self._directories.local
        pinned, quarantined = own_files.pinned_names(remote), own_files.quarantined_names(remote)
        # A checkpoint in the local tier may be being copied there. Its copy is then not torn and must not be removed.
        copied = set(tiers.own_checkpoints(tier.storage)) if tier is not None else set()
        found = []
        for name in tiers.own_checkpoints(remote):
            complete = (name == newest and name not in copied) or remote.stat(f"{name}/{MANIFEST}") is not None
            kept = name in pinned or name == self.in_use or (name in copied and not complete)
            step = order_or_oldest(name)[1]
            found.append(upkeep.PruneCandidate(name, "", step, OWN, complete, pinned=kept, quarantined=name in quarantined))
        return found


def remove(storage: Storage, name: str) -> bool:
    """Remove a checkpoint or its leftovers; return whether something was removed. Errors are logged."""
    try:
        upkeep.delete(storage, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s could not be removed: %s", storage.path(name), error)
        return False
    return True


# The writing thread.

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


class BackgroundSaver:
    """Writes the saves: to each node's own disk while a local tier accepts them, else to the remote directory.

    All ranks take the same steps, because rank 0's decisions are broadcast.
    """

    def __init__(
        self,
        directories: Directories,
        fence: GenerationFence,
        ranks: Ranks,
        retention: Retention,
        results: Results,
        on_generation: Callable[[int], None] | None,
    ) -> None:
        """on_generation: called on all ranks, with the generation, before each attempt. Collective."""
        self._directories, self._fence, self._ranks = directories, fence, ranks
        self._retention, self._results, self._on_generation = retention, results, on_generation
        self._thread: threading.Thread | None = None
        self._at: At | None = None  # what the thread saves
        self._agreed = threading.Event()  # set once all ranks have made the save in progress, or it has failed
        self._hurry = threading.Event()  # set when the next save waits for the thread: no more pauses
        self._tier_failure: FailureKind | None = None  # why the last save bypassed the local tier

    def start(self, save: Save) -> None:
        """Write the save in a thread. The previous save must have ended."""
        self._hurry.clear()
        self._agreed.clear()
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
        return self._thread is not None and at != self._at and not self._agreed.wait(LATE_S)

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
            name, outcome = "", AttemptOutcome(failure_of(error, 0))
        except Exception as error:  # the top of a thread
            failure = self._ranks.group_failure(error)
            logger.exception("no more checkpoints will be saved: %s", failure.reason)
            name, outcome = "", AttemptOutcome(failure)
        self._agreed.set()
        if outcome.failure is None:
            self._committed(name, step, outcome.size, time.monotonic() - save.called)
            return
        self._results.failed(name, step, outcome.failure)
        if name and self._ranks.rank == 0 and outcome.failure.kind not in (FailureKind.STALE, FailureKind.GROUP):
            remove(self._directories.remote, name)  # the disk may be full

    def _write(self, save: Save) -> tuple[str, AttemptOutcome]:
        """Write the save, retrying while the storage asks to retry later."""
        attempt = 0
        while True:
            attempt += 1
            name, outcome = self._write_once(save)
            failure = outcome.failure
            if failure is None or failure.kind is not FailureKind.THROTTLED:
                return name, outcome
            if not self._ranks.broadcast(attempt < ATTEMPTS and self._paused(attempt, failure)):
                return name, outcome

    def _write_once(self, save: Save) -> tuple[str, AttemptOutcome]:
        """Make one attempt; return the outcome and the checkpoint's name, "" if it got none. Collective.

        Raises StaleGroup on all ranks; torch's RuntimeError if the ranks cannot communicate.
        """
        remote, tier, staged = self._directories.remote, self._directories.local, save.staged
        failure = what_prevents(save.at, staged, self._ranks)
        self._agreed.set()
        if failure is not None:
            return "", AttemptOutcome(failure)
        try:
            generation = self._fence.open()
        except OSError as error:
            return "", AttemptOutcome(failure_of(error, 0))
        if self._on_generation is not None:
            self._on_generation(generation)
        manifest = replace(save.manifest, generation=generation)
        name = directory_name(manifest.step, generation)
        if tier is not None:
            outcome = save_to(tier, remote, name, staged, manifest, self._ranks)
            self._note_tier(outcome.failure)
            if outcome.failure is None or outcome.failure.kind is FailureKind.STALE:
                return name, outcome
            if tier.first:
                remove(tier.storage, name)  # the disk may be full
        return name, save_to(None, remote, name, staged, manifest, self._ranks)

    def _note_tier(self, failure: SaveFailure | None) -> None:
        """Log when saves start to bypass the local tier, and when they stop."""
        before, self._tier_failure = self._tier_failure, failure.kind if failure is not None else None
        if failure is not None and failure.kind is not before:
            remote = self._directories.remote.address
            logger.warning("rank %s cannot save to local_dir: %s; saves go to %s", failure.rank, failure.reason, remote)
        elif before is not None and failure is None:
            logger.warning("saves go to local_dir again")

    def _paused(self, attempt: int, failure: SaveFailure) -> bool:
        """Pause on rank 0, longer each time; return False as soon as the next save waits. Other ranks await its answer."""
        if self._ranks.rank != 0:
            return False
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.Random().uniform(0.5, 1.0)
        logger.warning("save failed on rank %s (%s); retrying in %.1f s", failure.rank, failure.reason, pause)
        return not self._hurry.wait(pause)

    def _committed(self, name: str, step: int, size: int, seconds: float) -> None:
        if self._ranks.rank == 0:
            tier = self._directories.local
            storage = tier.storage if tier is not None and self._tier_failure is None else self._directories.remote
            logger.info("saved %s: %.1f MB in %.2f s", storage.path(name), size / 1e6, seconds)
        self._results.committed(name, step, size, seconds)
        if self._ranks.rank == 0:
            try:
                for removed in self._retention.prune(name):
                    self._results.emit(SaveEvent("pruned", step, removed.name, reason=removed.reason))
            except (OSError, StaleGroup) as error:  # not a reason to stop training
                logger.warning("pruning old checkpoints failed: %s; the next save tries again", error)
