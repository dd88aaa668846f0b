"""For Hugging Face's Trainer: saves on demand through its own way of saving.

    trainer = Trainer(..., callbacks=[SaveOnDemand()])
    trainer.train(resume_from_checkpoint=elastic_ext.resume_from())

The agent's `checkpoint_dir` is the Trainer's `output_dir`, a local path: the Trainer reads no URLs.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from elastic_ext.training.saves import report_save_failed, report_saved, save_requested

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(f"elastic_ext.training.huggingface needs the package transformers, and: {error}") from error


class SaveOnDemand(TrainerCallback):
    """Has the Trainer save at the step that all ranks have agreed on when the agent asks; tells the agent of each save."""

    def __init__(self) -> None:
        self._wanted = False
        self._began = 0.0  # monotonic: what the Trainer does last before it may save

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wanted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Wanted until it is saved: save_strategy="best" takes should_save back where it evaluates at this step.
        self._wanted = save_requested() or self._wanted
        control.should_save = control.should_save or self._wanted
        self._began = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # This rank has saved its part; the Trainer's ranks do not wait for each other. All are here if we have asked for it, but
        # a callback of the user's may have one rank alone save: then rank 0 tells, which writes the state of the Trainer last.
        if self._wanted and dist.is_initialized():
            dist.barrier()
        if self._wanted or state.is_world_process_zero:
            report_saved(state.global_step, time.monotonic() - self._began)
        self._wanted = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._wanted:
            report_save_failed()
