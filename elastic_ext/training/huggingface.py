"""Saves for Hugging Face's Trainer, which saves and loads in its own way.

    args = TrainingArguments(output_dir=elastic_ext.save_dir(), ...)
    trainer = Trainer(..., args=args, callbacks=[Resilience()])
    trainer.train(resume_from_checkpoint=elastic_ext.resume_from())

`output_dir` is a local path, because the Trainer does not read URLs. `SaveOnDemand` only answers the agent's requests, where you
set `save_steps` yourself; `Resilience` decides besides when to save.

What the Trainer restores by itself: step, weights, optimizer, scheduler, scaler, each rank's random generators, and the position
in the data, also in mid-epoch. So with as many ranks, losses and weights are those of a run without a failure, to the bit, unless
the dataset itself draws from the global random generators: the batches of the first step are drawn before they are restored. The
Trainer counts the position in steps. So with another number of ranks it holds to the sample if the global batch stays the same:
see `elastic_ext.accumulation`. Else samples are left out or seen twice. New ranks begin with new random generators.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from elastic_ext.training import own_saves
from elastic_ext.training.progress import report_total_steps
from elastic_ext.training.save_pace import SavePace
from elastic_ext.training.saves import note_resumes, report_save_failed, report_saved, save_requested

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(f"elastic_ext.training.huggingface needs the package transformers: {error}") from error


class SaveOnDemand(TrainerCallback):
    """When the agent asks, makes the Trainer save at a step that all ranks agreed on; reports each save to the agent."""

    def __init__(self) -> None:
        self._requested = False
        self._began = 0.0  # time.monotonic() of the Trainer's last event before it may save

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Forget a request from an earlier training run; report to the agent how long this one is."""
        self._requested = False
        note_resumes()
        if state.max_steps > 0:
            report_total_steps(state.max_steps, state.global_step)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Ask the Trainer to save here if the agent asks for it."""
        # The request stays until the save: save_strategy="best" resets should_save if it evaluates at this step.
        self._requested = self._wants_save(state) or self._requested
        control.should_save = control.should_save or self._requested
        self._began = time.monotonic()

    def _wants_save(self, state: TrainerState) -> bool:
        """Return whether all ranks are to save after this step; called once for each."""
        return save_requested()

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Note the time: the Trainer may save next."""
        self._began = time.monotonic()

    on_epoch_end = on_evaluate

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Report the save. This rank has saved its part, but the Trainer does not make ranks wait for each other."""
        # All ranks save if we asked for it. But a user's callback may make one rank save alone; then only rank 0 reports, because
        # it writes the Trainer's state last.
        if self._requested and dist.is_initialized():
            dist.barrier()
        if self._requested or state.is_world_process_zero:
            report_saved(state.global_step, time.monotonic() - self._began)
        self._requested = False

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Report a failure if a request is still unsaved."""
        if self._requested:
            report_save_failed()


class Resilience(SaveOnDemand):
    """As `SaveOnDemand`; besides, makes the Trainer save as often as that costs about 1 % of the time at most.

    The callback removes all but the newest of the checkpoints that only it has asked for, unless the Trainer removes by
    `save_total_limit`. What the Trainer's own `save_strategy` has saved stays; "no" is enough.
    """

    def __init__(self, every: int | None = None, every_s: float | None = None, keep: int | None = 2) -> None:
        """every, every_s: save every so many steps or seconds instead. keep: how many stay; None: all. Raises UsageError."""
        super().__init__()
        self._pace = SavePace(every, every_s)
        self._own = own_saves.OwnSaves(keep)

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._pace.begins(state.global_step)
        self._own.load(state.stateful_callbacks.get(own_saves.KEY, {}).get("attributes", {}))

    def _wants_save(self, state: TrainerState) -> bool:
        requested, due = super()._wants_save(state), self._pace.due(state.global_step)  # both count the steps
        return requested or due

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        by_trainer = control.should_save
        super().on_step_end(args, state, control, **kwargs)
        if self._requested and not by_trainer:
            self._own.add(_folder(state.global_step))
        # in the checkpoint's trainer_state.json; no ExportableState, which a checkpoint without this callback would not fit
        state.stateful_callbacks[own_saves.KEY] = {"args": {}, "attributes": self._own.state_dict()}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        of_all_ranks = self._requested
        if not of_all_ranks:
            self._own.discard(_folder(state.global_step))
        super().on_save(args, state, control, **kwargs)
        if of_all_ranks:
            self._pace.saved(state.global_step, time.monotonic() - self._began)
            self._remove_old(args, state)

    def _remove_old(self, args: TrainingArguments, state: TrainerState) -> None:
        self._own.discard(os.path.basename(state.best_model_checkpoint or ""))
        old = self._own.take_old()
        if args.save_total_limit is None and state.is_local_process_zero:
            own_saves.remove(args.output_dir, old)


def _folder(step: int) -> str:
    return f"checkpoint-{step}"
