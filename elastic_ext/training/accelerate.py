"""Saves for a loop of your own with accelerate, around its `save_state` and `load_state`.

    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(dataloader_config=config)
    model, optimizer, loader, scheduler = accelerator.prepare(...)
    saves = Resilience(accelerator)
    step = saves.resume()
    for epoch, batches in saves.epochs(loader, 3):
        for batch in batches:
            with accelerator.accumulate(model):
                ...
            if accelerator.sync_gradients:
                step += 1
                saves.step_ended(step)

accelerate restores weights, optimizer, scheduler, scaler, each rank's random generators and what you register. It does not
restore the step, nor the position in the data unless the loader has a state; and in mid-epoch its new iterator draws once more
from the generators. This adds what is missing. With as many ranks, losses and weights are those of a run without a failure, to
the bit, unless the dataset draws from the global generators. With another number of ranks the position holds if the global batch
stays the same: see `elastic_ext.accumulation`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, RandomSampler

from elastic_ext.base.errors import UsageError
from elastic_ext.training import generators, own_saves
from elastic_ext.training.save_pace import SavePace
from elastic_ext.training.saves import report_saved, resume_from, resume_step, save_dir, save_requested

if TYPE_CHECKING:
    from accelerate import Accelerator


class Resilience:
    """All ranks call each method, at the same steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str = "",
        every: int | None = None,
        every_s: float | None = None,
        keep: int | None = 2,
    ) -> None:
        """
        Args:
            directory: without an agent, or where its job has no `checkpoint_dir`; under it, `elastic_ext.save_dir()`.
            every, every_s: save every so many steps or seconds; default: as often as costs about 1 % of the time at most.
            keep: how many of this process's saves stay; None: all.

        Raises UsageError.
        """
        self._accelerator, self._directory = accelerator, save_dir(directory)
        self._pace, self._own = SavePace(every, every_s), own_saves.OwnSaves(keep)
        self._step = 0
        self._before: generators.Generators | None = None  # the checkpoint's random generators

    def resume(self) -> int:
        """Load the checkpoint that the agent chose; return its step, 0 without one. Call it after `prepare`."""
        if chosen := resume_from():
            self._accelerator.load_state(chosen)
            self._step = resume_step() or 0
            self._before = generators.take()
        self._pace.begins(self._step)
        return self._step

    def epochs(self, loader: DataLoader, number: int) -> Iterator[tuple[int, DataLoader]]:
        """Give each epoch that is left and its batches; the first one from the checkpoint's position on. Raises UsageError."""
        stateful = getattr(loader, "use_stateful_dataloader", False)
        sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
        if type(sampler) is RandomSampler and not stateful:
            raise UsageError(
                "accelerate shuffles, and no other process can find that order again: give Accelerator "
                "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)"
            )
        micro_steps = self._accelerator.gradient_accumulation_steps
        first, done = divmod(self._step, -(-len(loader) // micro_steps))
        for epoch in range(first, number):
            loader.set_epoch(epoch)
            rest = loader
            if epoch == first and done:
                self._accelerator.step = done * micro_steps  # it is saved as it was with that number of ranks
                rest = loader if stateful else self._accelerator.skip_first_batches(loader, done * micro_steps)
                rest.set_epoch(epoch)
                if self._before is not None:
                    generators.restore_after_iter(rest.base_dataloader, self._before)
            yield epoch, rest

    def step_ended(self, step: int) -> None:
        """Save here if that is due, or the agent asks for it. Call it after each optimizer step."""
        requested, due = save_requested(), self._pace.due(step)  # both count the steps
        if requested or due:
            self.save(step)

    def save(self, step: int) -> None:
        """Save here in any case."""
        began, name = time.monotonic(), f"checkpoint_{step}"
        self._accelerator.save_state(os.path.join(self._directory, name))
        self._accelerator.wait_for_everyone()
        took_s = time.monotonic() - began
        report_saved(step, took_s)
        self._pace.saved(step, took_s)
        self._own.add(name)
        old = self._own.take_old()
        if self._accelerator.is_local_main_process:
            own_saves.remove(self._directory, old)
