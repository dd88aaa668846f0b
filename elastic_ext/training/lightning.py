"""Saves for Lightning, which saves and loads in its own way.

    trainer = Trainer(..., strategy="ddp", callbacks=[Resilience()])
    trainer.fit(model, ckpt_path=elastic_ext.resume_from())

`SaveOnDemand` only answers the agent's requests, beside a ModelCheckpoint of yours. `Resilience` decides besides when to save,
and restores what Lightning does not.

What Lightning restores by itself: step, weights, optimizer, scheduler, scaler, the states of callbacks, and of a data loader that
has a state (torchdata's StatefulDataLoader). It restores neither random generators nor, in mid-epoch, the position in the data:
it goes on with the epoch's first batches. `Resilience` does, also for checkpoints that a ModelCheckpoint makes.
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

from elastic_ext.training import lightning_position, own_saves
from elastic_ext.training.progress import report_total_steps
from elastic_ext.training.save_pace import SavePace
from elastic_ext.training.saves import note_resumes, report_save_failed, report_saved, save_dir, save_requested

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
        if self._wants_save():
            # The default name of a ModelCheckpoint, so that all checkpoints look alike and sort together.
            self._save(trainer, os.path.join(self._folder(trainer), f"epoch={trainer.current_epoch}-step={self._step}.ckpt"))

    def _wants_save(self) -> bool:
        """Return whether all ranks are to save after this step; called once for each."""
        return save_requested()

    def _folder(self, trainer: Trainer) -> str:
        return os.fspath(self._dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)

    def _save(self, trainer: Trainer, path: str) -> float:
        """Return how many seconds it took."""
        began = time.monotonic()
        try:
            with _synchronous(trainer.strategy):
                trainer.save_checkpoint(path)
        except BaseException:
            report_save_failed()
            raise
        took_s = time.monotonic() - began  # save_checkpoint ends with a barrier
        report_saved(self._step, took_s)
        return took_s


class Resilience(SaveOnDemand):
    """As `SaveOnDemand`; besides, saves as often as that costs about 1 % of the time at most, and resumes exactly.

    - Each checkpoint gets the random generators of every rank, and the position in the data. With as many ranks, losses and
      weights are those of a run without a failure, to the bit. What a loader's own processes draw is drawn anew.
    - With another number of ranks the position holds to the sample if Lightning has put its DistributedSampler into your loader,
      as it does with a strategy such as "ddp". Keep the global batch: `elastic_ext.accumulation`. New ranks are seeded anew.
    - Several loaders and iterable data are read up to the position, which takes time. A loader with a state is left to Lightning.
    - The callback removes all but the newest of its own saves. Those of a ModelCheckpoint stay.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        every: int | None = None,
        every_s: float | None = None,
        keep: int | None = 2,
    ) -> None:
        """
        Args:
            dirpath: path or URL to save to; default: `elastic_ext.save_dir()`, and without an agent that of `SaveOnDemand`.
            every, every_s: save every so many steps or seconds instead.
            keep: how many of its saves stay; None: all.

        Raises UsageError.
        """
        super().__init__(dirpath)
        self._pace = SavePace(every, every_s)
        self._own = own_saves.OwnSaves(keep)
        self._trainer: Trainer | None = None
        self._loaded: lightning_position.State = {}

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> lightning_position.State:
        """Collective: Lightning asks all ranks, and writes rank 0's answer."""
        position = lightning_position.take(self._trainer) if self._trainer is not None else {}
        return {**position, **self._own.state_dict()}

    def load_state_dict(self, state_dict: lightning_position.State) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        """Go on where the checkpoint was saved: Lightning has just made the loader's iterator."""
        super().on_train_start(trainer, pl_module)
        self._own.load(self._loaded)
        if self._loaded:
            lightning_position.restore(trainer, self._loaded)
        self._loaded = {}
        self._pace.begins(self._step)

    def _wants_save(self) -> bool:
        requested, due = super()._wants_save(), self._pace.due(self._step)  # both count the steps
        return requested or due

    def _folder(self, trainer: Trainer) -> str:
        return os.fspath(self._dirpath or save_dir(super()._folder(trainer)))

    def _save(self, trainer: Trainer, path: str) -> float:
        self._own.add(path)
        took_s = super()._save(trainer, path)
        self._pace.saved(self._step, took_s)
        for old in self._own.take_old():
            trainer.strategy.remove_checkpoint(old)  # on rank 0
        return took_s


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
