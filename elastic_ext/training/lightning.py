"""For Lightning: saves on demand through its own way of saving.

    trainer = Trainer(..., callbacks=[ModelCheckpoint(dirpath=...), SaveOnDemand()])
    trainer.fit(model, ckpt_path=elastic_ext.resume_from())

The agent's `checkpoint_dir` is the directory of the ModelCheckpoint. Saves on demand stay there until somebody removes them (the
ModelCheckpoint counts its own only); `elastic-ext checkpoints prune` does.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic_ext.training.saves import report_save_failed, report_saved, save_requested

LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # two packages with the same classes, which know nothing of each other


class SaveOnDemand:
    """Has the Trainer save at the step that all ranks have agreed on when the agent asks.

    An instance is a Callback of the library that the script has imported.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> SaveOnDemand:
        missing = tuple(base for base in _callbacks() if not issubclass(cls, base))
        return super().__new__(type(cls.__name__, (cls, *missing), {}) if missing else cls)

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        """dirpath: where to save, a path or a URL; default: where the first ModelCheckpoint does, else `default_root_dir`."""
        self._dirpath = dirpath
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:  # gradients are being accumulated
            return
        self._step = trainer.global_step
        if save_requested():
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        began = time.monotonic()
        folder = self._dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        try:
            with _at_once(trainer.strategy):
                # Named as a ModelCheckpoint does by default: so they are of one kind, in one order.
                trainer.save_checkpoint(os.path.join(folder, f"epoch={trainer.current_epoch}-step={self._step}.ckpt"))
        except BaseException:
            report_save_failed()
            raise
        report_saved(self._step, time.monotonic() - began)  # save_checkpoint ends with a barrier


@contextmanager
def _at_once(strategy: Any) -> Iterator[None]:
    """An AsyncCheckpointIO comes back before anything is written; what it wraps does not."""
    usual = strategy.checkpoint_io
    if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(usual).__mro__):
        strategy.checkpoint_io = usual.checkpoint_io
    try:
        yield
    finally:
        strategy.checkpoint_io = usual


def _callbacks() -> list[type]:
    """The class Callback of the library that is in use."""
    loaded = [module for name in LIBRARIES if (module := sys.modules.get(name)) is not None]
    for name in LIBRARIES if not loaded else ():
        try:
            loaded = [importlib.import_module(name)]
            break
        except ModuleNotFoundError:
            continue
    if not loaded:
        raise ImportError("elastic_ext.training.lightning needs the package lightning or pytorch_lightning, found neither")
    return [module.Callback for module in loaded]
