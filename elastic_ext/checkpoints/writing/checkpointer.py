"""`elastic_ext.Checkpointer`: all that training code needs to save and resume.

    checkpointer = Checkpointer("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    position = checkpointer.load()
    ...
    checkpointer.snapshot(step, epoch=epoch)  # each step; copies the state to memory when that is due
    checkpointer.save(step, epoch=epoch)  # now and then
    ...
    checkpointer.close()

All ranks call every method, in the same order. A save copies the state to memory and returns; a thread with its own process
group writes it. A failed save never stops training: it is logged, kept in `last_error` and reported to `on_event`, and the next
save tries again. If one rank leaves out a save, it fails on the others; the next one that all ranks make succeeds, if it
comes within `timeout`. A rank waits that long at most for the others; after that no more is saved, because they may be lost.

`saving` writes and prunes, `loading` resumes, and `elastic_ext.checkpoints.memory` makes the copies in memory.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from elastic_ext.base.contracts import CHECKPOINT_DIR, RESUME_FROM, memory_room
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import literal
from elastic_ext.checkpoints.directory.own_files import MOST_SHOWN, Manifest, count
from elastic_ext.checkpoints.memory.saver import make as make_memory_saver
from elastic_ext.checkpoints.ranks import FailureKind, Ranks, SaveFailure, open_directories
from elastic_ext.checkpoints.state import Objects, Stateful
from elastic_ext.checkpoints.storage import Storage, open_storage
from elastic_ext.checkpoints.writing import saving
from elastic_ext.checkpoints.writing.loading import Loader, Reshard, TrainingPosition
from elastic_ext.checkpoints.writing.saving import SaveEvent
from elastic_ext.training import saves
from elastic_ext.training.progress import doing, this_worker

__all__ = ["Checkpointer", "Reshard", "SaveEvent", "Stateful", "TrainingPosition"]


class Checkpointer:
    """Saves in the background, commits atomically, resumes at any world size, keeps the newest few.

    Attributes:
        last_error: why the last save failed; None if it succeeded.
        failures: failed saves in a row.
        last_saved: step of this group's last committed save; None before the first.
        last_stall_s: seconds that the last `save` stalled training.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        dataloader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        memory_every: int | None = None,
        verify: bool = True,
        reshard_dataloader: Reshard | None = None,
        requested: Callable[[int], bool] | None = None,
        on_event: Callable[[SaveEvent], None] | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Open the directory. Collective. Raises UsageError.

        There are many parameters because this is the only object that a training script makes. All but the model are optional
        keywords, and a script names only those that it uses.

        Args:
            directory: path or fsspec URL; by default the agent's checkpoint_dir.
            local_dir: directory on a fast disk of each node, where saves go first. By default the agent's local_dir, if
                `directory` is its checkpoint_dir; "": none. The agent copies from there. Without an agent, run
                `python -m elastic_ext.checkpoints.copying.replicate` on each node, which takes both directories from
                ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR.
            extra: other objects with a state_dict, by name; equal on all ranks, or sharded like the model. Each loads what
                state_dict() of rank 0's returned at the save, with its own part of what is sharded. Ranks may lack an object, or
                have no tensors in it, but a save fails where their tensors are others than those of rank 0. So does a copy in
                memory where the ranks of a node do not have the same ones.
            keep_last: number of newest complete checkpoints to keep. The loaded one and pinned ones are also kept.
            keep_every: keep checkpoints whose step is a multiple of this forever.
            memory_every: how many steps from one `snapshot` that copies the state to the next; 0: none does. By default the
                agent's memory_every, else as often as costs less than 1 % of the time.
            verify: compare each file's checksum before a load. Sizes are always compared.
            reshard_dataloader: for a load at another world size. Without it, the data loader then starts from the beginning,
                and a warning is logged.
            requested: called by `save_requested`; by default asks the agent (see `elastic_ext.training.saves`).
            on_event: callback for metrics. Must be quick; its exceptions are logged.
            timeout: how long a rank waits for the other ranks' parts of a save.
        """
        keep_last, timeout = _whole("keep_last", keep_last, 1), _time_limit("timeout", timeout)
        keep_every = None if keep_every is None else _whole("keep_every", keep_every, 1)
        memory_every = None if memory_every is None else _whole("memory_every", memory_every)
        remote = _open_directory(directory)
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        objects = Objects(model, optimizers, scheduler, scaler, dataloader, dict(extra or {}))
        self._ranks = Ranks(timeout)
        room = memory_room()
        directories = open_directories(remote, local_dir, room.directory if room is not None else "", self._ranks)
        self._fence = saving.GenerationFence(remote, self._ranks)
        self._loader = Loader(objects, directories, self._ranks, verify, reshard_dataloader)
        self._resume_from = os.environ.get(RESUME_FROM)  # "": start from nothing; None: no choice by an agent
        self._stager = saving.Stager(objects, self._ranks.rank)
        self._retention = saving.Retention(directories, self._fence, keep_last, keep_every)
        self._results = saving.Results(on_event)
        self._memory = make_memory_saver(directories.memory, room, memory_every, objects, self._ranks, timeout)
        on_generation = self._memory.has_generation if self._memory is not None else None
        self._saver = saving.BackgroundSaver(directories, self._fence, self._ranks, self._retention, self._results, on_generation)
        self._requested = requested
        self.last_stall_s = 0.0
        atexit.register(self.close)

    @property
    def last_error(self) -> str | None:
        return self._results.last_error

    @property
    def failures(self) -> int:
        return self._results.failures

    @property
    def last_saved(self) -> int | None:
        return self._results.last_saved

    @doing("checkpoint_load")
    def load(self) -> TrainingPosition:
        """Load a checkpoint: the agent's choice, else the newest complete one. Without any, return the zero position.

        The agent's choice applies to the first load. Later loads, to go back, take the newest complete one. From here on only
        this group of workers may commit.

        Collective. Raises StaleGroup; CheckpointError, on all ranks, if the agent's choice is damaged or does not fit (the
        state is then undefined); OSError if the directory cannot be listed.
        """
        self.wait()
        saving.end_of_saves(self._ranks)
        if self._fence.generation is None or self.last_saved is not None:
            self._results.new_group()
            self._fence.reopen()
        chosen, self._resume_from = self._resume_from, None
        position = self._load(chosen) if chosen != "" else None
        if self._memory is not None:
            self._memory.begin(self._fence.generation, self._loader.copy)
        return position or TrainingPosition()

    def _load(self, chosen: str | None) -> TrainingPosition | None:
        began = time.monotonic()
        position = self._loader.load_chosen(chosen) if chosen is not None else self._loader.load_newest()
        self._retention.in_use = self._loader.loaded
        if position is not None:
            this_worker().row.report_loaded(time.monotonic() - began)
        return position

    def snapshot(self, step: int, *, epoch: int = 0, accumulation: int = 0, note: Mapping[str, Any] | None = None) -> None:
        """Copy the state to memory that outlives this worker, if that is due. Call it after each optimizer step.

        A restart resumes from the newest copy that all nodes have whole, if it is newer than the checkpoints. Nothing but the
        copy into memory holds up training: a thread does the rest, and a failure is only logged. Without an agent that gives it
        memory, this does nothing. The arguments are those of `save`.

        Collective. Raises only UsageError, for wrong arguments.
        """
        step, epoch, accumulation = _position(step, epoch, accumulation)
        if self._memory is not None:
            self._memory.step(step, accumulation, lambda: self._manifest(step, epoch, accumulation, note))

    def save_requested(self, step: int) -> bool:
        """Return whether a preemption, a drain or a person asks for a save now, at `step`. All ranks ask once per step."""
        return saves.save_requested() if self._requested is None else self._requested(step)

    @doing("checkpoint_save")
    def save(
        self, step: int, *, epoch: int = 0, accumulation: int = 0, note: Mapping[str, Any] | None = None, wait: bool = False
    ) -> None:
        """Copy the state and return; it is written while training continues. Waits for the previous save first.

        In the middle of an accumulation the gradients are also saved, except those that FSDP2 keeps unsharded.

        Args:
            step: optimizer steps done, 0 or more. A step that this group has already saved is not saved again. Here and below, a
                whole number of NumPy or torch is as good as an int.
            epoch: epoch of the step, from 0.
            accumulation: micro-steps done toward the next optimizer step.
            note: small JSON values for people and for `TrainingPosition.note`; rank 0's are kept.
            wait: return only after the save is committed or has failed, see `last_error`.

        Collective. Raises StaleGroup if another group has taken over; UsageError for wrong arguments, before all else, and for
        state that cannot be saved.
        """
        step, epoch, accumulation = _position(step, epoch, accumulation)
        if not isinstance(note, Mapping | None):  # whether its values are JSON shows as it is written, in the background
            raise _wrong("note", note, "a mapping, such as a dict, or None")
        called = time.monotonic()
        if self._saver.is_left_out((step, accumulation)):  # that rank may wait for this one, in a collective of training
            reason = "the save before it still waits for a rank that has left it out; all ranks must call save for the same steps"
            self._results.failed("", step, SaveFailure(FailureKind.OTHER, reason, self._ranks.rank))
            return
        self._saver.wait(hurry=True)  # training stands still, and a newer state is about to be saved
        if self._results.skip(step):
            return
        began = time.monotonic()
        saves.note_save_begins(step)
        staged, refused = self._stager.stage(step, accumulation)
        self._saver.start(saving.Save(staged, self._manifest(step, epoch, accumulation, note), called))
        self.last_stall_s = time.monotonic() - began
        if refused is not None:
            raise refused
        if wait:
            self.wait()

    def _manifest(self, step: int, epoch: int, accumulation: int, note: Mapping[str, Any] | None) -> Manifest:
        """Return the manifest without files and generation, which are not known yet."""
        return Manifest(
            step=step,
            generation=0,
            files=(),
            world_size=self._ranks.world,
            epoch=epoch,
            accumulation=accumulation,
            run_id=self._fence.opener.run_id,
            restart=self._fence.opener.restart,
            saved_at=time.time(),
            extra=dict(note or {}),
        )

    @doing("checkpoint_save")
    def wait(self) -> None:
        """Wait until the save in progress, if any, is committed or has failed."""
        self._saver.wait()

    def close(self) -> None:
        """Wait for the last save. Never raises; see `last_error`. Call this before destroying the process group."""
        atexit.unregister(self.close)
        self.wait()
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_directory(directory: str | os.PathLike[str] | None) -> Storage:
    """Open the directory. Raises UsageError if neither the script nor the agent names one."""
    where = os.fspath(directory) if directory is not None else os.environ.get(CHECKPOINT_DIR, "")
    if not where:
        raise UsageError(f"no directory for checkpoints: pass one, or set {CHECKPOINT_DIR} (--rdzv-conf checkpoint_dir=...)")
    return open_storage(where)


# What scripts pass is checked at the call, before anything is written and before any collective: a wrong value that only rank 0
# looks at, or that a reader refuses later, would leave other ranks waiting or lose a checkpoint. All of these raise UsageError.


def _whole(name: str, value: object, least: int = 0) -> int:
    """Return a whole number as a plain int."""
    try:
        return count(value, least)
    except ValueError:
        raise _wrong(name, value, f"a whole number, {least} or more") from None


def _position(step: object, epoch: object, accumulation: object) -> tuple[int, int, int]:
    """Return where training is, as plain ints."""
    return _whole("step", step), _whole("epoch", epoch), _whole("accumulation", accumulation)


def _time_limit(name: str, value: object) -> timedelta:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise _wrong(name, value, "a datetime.timedelta above 0, such as timedelta(minutes=30)")
    return value


def _wrong(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {literal(value, MOST_SHOWN)}, expected {expected}")
