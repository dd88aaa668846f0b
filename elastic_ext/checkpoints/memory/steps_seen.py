"""Whether the steps of the optimizers are seen, so that they can be made to wait for a copy. Pure.

Torch calls a hook before each eager `Optimizer.step`. It calls none when a step is replayed in a CUDA graph, runs as compiled
code, or is made by an optimizer that is not torch's. Such a step would overtake a copy that goes on beside training.
"""

from __future__ import annotations

from collections.abc import Iterable


class StepsSeen:
    """Counts the steps before which the hook was called.

    Attributes:
        captured: whether a step was captured in a CUDA graph. Its replays are not seen.
    """

    def __init__(self, optimizers: Iterable[object]) -> None:
        self._seen = dict.fromkeys(map(id, optimizers), 0)
        self._last: int | None = None
        self.captured = False

    def step(self, optimizer: object) -> None:
        """Note that the hook was called. Other optimizers do not count: they tell nothing of ours."""
        if id(optimizer) in self._seen:
            self._seen[id(optimizer)] += 1

    def all_since_last(self, step: int) -> bool:
        """Return whether every step of every optimizer from the step of the last call up to this one was seen."""
        last, self._last = self._last, step
        fewest = min(self._seen.values(), default=0)
        self._seen = dict.fromkeys(self._seen, 0)
        return last is not None and not self.captured and fewest >= max(1, step - last)
