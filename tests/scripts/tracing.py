"""What scripts share that train and leave a trace of the time by their own clock."""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

import elastic_ext
from elastic_ext import Checkpointer

STEP_S, DATA_S = 0.15, 0.03


class Traced:
    """A training that appends `ROUND NAME STEP BEGAN ENDED` to a file, in monotonic seconds: load, data, step, save, end.

    Each begins where the last has ended.
    """

    def __init__(self, path: Path) -> None:
        self.round, self._out = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), path.open("a")
        self._model = torch.nn.Linear(8, 8)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.1)
        self._checkpointer = Checkpointer(model=self._model, optimizer=self._optimizer)
        self._began = time.monotonic()

    def note(self, name: str, step: int) -> None:
        ended = time.monotonic()
        print(self.round, name, step, self._began, ended, file=self._out, flush=True)
        self._began = ended

    def run(self, steps: int, saved: Collection[int], halfway: Callable[[int], None]) -> None:
        """Train from the checkpoint on. saved: steps after which to save. halfway: called in the middle of each step."""
        self.note("load", first := self._checkpointer.load().step)
        for step in range(first + 1, steps + 1):
            with elastic_ext.phase("data"):
                time.sleep(DATA_S)
            self.note("data", step)
            with elastic_ext.phase("step"):
                self._model(torch.ones(8)).sum().backward()
                time.sleep(STEP_S / 2)
                halfway(step)
                time.sleep(STEP_S / 2)
                self._optimizer.step()
            elastic_ext.report_tokens(10)
            elastic_ext.report_flops(2.5e6)
            self.note("step", step)
            if step in saved:
                self._checkpointer.save(step, wait=True)
                self.note("save", step)
        self._checkpointer.close()
        torch.distributed.destroy_process_group()
        self.note("end", steps)
