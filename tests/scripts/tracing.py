"""What scripts share that train and leave a trace of the time by their own clock."""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

import elastic_ext
from elastic_ext import Checkpointer

STEP_S, DATA_S, STATE_S = 0.15, 0.03, 0.1


class Traced:
    """A training that appends `ROUND STATE STEPS EARLIEST LATEST` to a file whenever its state changes.

    STATE: that begins. STEPS: of the job, that are done. EARLIEST, LATEST: monotonic seconds between which it has begun, however
    busy the machine.

    States: load, startup, data, work, step (work that follows a finished step), save, end.
    """

    def __init__(self, path: Path) -> None:
        self.round, self._out = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), path.open("a")
        self._model = torch.nn.Linear(8, 8)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.1)
        self._checkpointer = Checkpointer(model=self._model, optimizer=self._optimizer, extra={"traced": self})
        self._within: tuple[float, float] | None = None

    def state_dict(self) -> dict[str, int]:
        """Called within a save; as the next one within a load, it takes long enough to be seen in the sums."""
        began = time.monotonic()
        time.sleep(STATE_S)
        self._within = began, time.monotonic()
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state_dict()

    def _note(self, state: str, steps: int, earliest: float, latest: float | None = None) -> None:
        print(self.round, state, steps, earliest, time.monotonic() if latest is None else latest, file=self._out, flush=True)

    def _call(self, state: str, steps: int, function: Callable[[], object], then: str) -> None:
        before, self._within = time.monotonic(), None
        function()
        after = time.monotonic()
        first, last = self._within or (after, before)
        self._note(state, steps, before, first)
        self._note(then, steps, last, after)

    def run(self, steps: int, saved: Collection[int], halfway: Callable[[int], None]) -> None:
        """Train from the checkpoint on. saved: steps after which to save. halfway: called in the middle of each step."""
        self._call("load", 0, self._checkpointer.load, "startup")
        first = (elastic_ext.resume_step() or 0) + 1
        for step in range(first, steps + 1):
            before = time.monotonic()
            with elastic_ext.phase("data"):
                self._note("data", step - 1, before)
                time.sleep(DATA_S)
                before = time.monotonic()
            self._note("startup" if step == first else "work", step - 1, before)
            before = time.monotonic()
            with elastic_ext.phase("step"):
                self._note("work", step - 1, before)
                self._model(torch.ones(8)).sum().backward()
                time.sleep(STEP_S / 2)
                halfway(step)
                time.sleep(STEP_S / 2)
                before = time.monotonic()
                self._optimizer.step()
                self._note("step", step, before)
            elastic_ext.report_tokens(10)
            elastic_ext.report_flops(2.5e6)
            if step in saved:
                self._call("save", step, lambda step=step: self._checkpointer.save(step, wait=True), "work")
        self._call("save", steps, self._checkpointer.close, "work")
        before = time.monotonic()
        elastic_ext.phase("compile")  # what follows is no part of any sum that is compared
        self._note("end", steps, before)
        torch.distributed.destroy_process_group()
