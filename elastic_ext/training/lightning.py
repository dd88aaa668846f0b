"""Saves on demand for Lightning, which saves in its own way.

    trainer = Trainer(..., callbacks=[ModelCheckpoint(dirpath=...), SaveOnDemand()])
    trainer.fit(model, ckpt_path=elastic_ext.resume_from())

The agent's `checkpoint_dir` is the directory of the ModelCheckpoint. Saves on demand stay there until they are removed, for
instance with `elastic-ext checkpoints prune`: the ModelCheckpoint counts only its own saves.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic_ext.training.progress import report_total_steps
from elastic_ext.training.saves import note_resumes, report_save_failed, report_saved, save_requested

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy

LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # two independent packages with the same classes


class SaveOnDemand:
    """When the agent asks, makes the Trainer save at a step that all ranks agreed on.

    An instance is a Callback of the library that the script has imported.
    """

    def __new__(cls, *args: object, **kwargs: object) -> SaveOnDemand:
        missing = tuple(base for base in _callbacks() if not issubclass(cls, base))
        return super().__new__(type(cls.__name__, (cls, *missing), {}) if missing else cls)

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        """dirpath: path or URL to save to; default: the directory of the first ModelCheckpoint, else `default_root_dir`."""
        self._dirpath = dirpath
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        """Record the step at which training starts; report to the agent how many there will be, if Lightning knows."""
        self._step = trainer.global_step
        note_resumes()
        total = trainer.estimated_stepping_batches
        if math.isfinite(total) and total >= 1:
            report_total_steps(int(total), self._step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """Save here if the agent asks for it, unless gradients are still being accumulated, which is not a step."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if save_requested():
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        began = time.monotonic()
        folder = self._dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        try:
            with _synchronous(trainer.strategy):
                # The default name of a ModelCheckpoint, so that all checkpoints look alike and sort together.
                trainer.save_checkpoint(os.path.join(folder, f"epoch={trainer.current_epoch}-step={self._step}.ckpt"))
        except BaseException:
            report_save_failed()
            raise
        report_saved(self._step, time.monotonic() - began)  # save_checkpoint ends with a barrier


@contextmanager
def _synchronous(strategy: Strategy) -> Iterator[None]:
    """Inside this context, make saves return only when written: replace an AsyncCheckpointIO with the one that it wraps."""
    usual = strategy.checkpoint_io
    if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(usual).__mro__):
        strategy.checkpoint_io = usual.checkpoint_io
    try:
        yield
    finally:
        strategy.checkpoint_io = usual


def _callbacks() -> list[type]:
    """Return the Callback class of each library that the script imported, else of one that is installed."""
    loaded = [module for name in LIBRARIES if (module := sys.modules.get(name)) is not None]
    for name in LIBRARIES if not loaded else ():
        try:
            loaded = [importlib.import_module(name)]
            break
        except ModuleNotFoundError:
            continue
    if not loaded:
        raise ImportError("elastic_ext.training.lightning needs the package lightning or pytorch_lightning; found neither")
    return [module.Callback for module in loaded]
