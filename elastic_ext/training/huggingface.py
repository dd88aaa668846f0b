"""Saves on demand for Hugging Face's Trainer, which saves in its own way.

    trainer = Trainer(..., callbacks=[SaveOnDemand()])
    trainer.train(resume_from_checkpoint=elastic_ext.resume_from())

The agent's `checkpoint_dir` is the Trainer's `output_dir`, a local path, because the Trainer does not read URLs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from elastic_ext.training.progress import report_total_steps
from elastic_ext.training.saves import note_resumes, report_save_failed, report_saved, save_requested

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

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
        self._requested = save_requested() or self._requested
        control.should_save = control.should_save or self._requested
        self._began = time.monotonic()

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
