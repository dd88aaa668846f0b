"""Where a round begins. Without checkpoints, that is nothing; `features.resume` has the other case."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from elastic_ext.agent.companion import Companion
from elastic_ext.base.contracts import Resumption
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.workers.progress import Progress

logger = logging.getLogger(__name__)


class RoundBeginning(Companion):
    """The beginning of one round; this one is of a job without checkpoint_dir."""

    def __init__(self, checkpoint: Resumption | None = None) -> None:
        self.checkpoint = checkpoint or Resumption()  # the chosen checkpoint, and why it was chosen

    @property
    def saves_locally(self) -> bool:
        """Whether a script that saves in its own way should do so in `local_dir`."""
        return self.checkpoint.place.local

    @property
    def step(self) -> int | None:
        """The step that the round starts from; 0 is the beginning, None is unknown."""
        return None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that name the workers' checkpoint."""
        return {}

    def own_variables(self, rank: int) -> dict[str, str]:
        """Return those that differ for one rank: the path of its own file, if each rank wrote one."""
        return {}

    def log(self, level: int) -> None:
        """Log what the round resumes from, at this level of `logging`."""
        if level > logging.INFO:  # it was said at the start
            logger.log(level, "starting from nothing: no checkpoint_dir is set")

    def release(self) -> None:
        """Let the copier prune the checkpoint. A second call does nothing."""

    def newest_steps(self, workers: Sequence[Progress]) -> tuple[int | None, int | None]:
        """Return the steps of the newest copy in memory and of the newest checkpoint, as in `failures.ledger.Report`."""
        return None, newest_checkpoint_step(self.checkpoint.at, workers)

    def go_back(self, verdict: JobVerdict, node: str) -> None:
        """Refuse or quarantine what a verdict bars from being resumed; node: id of this one."""


def newest_checkpoint_step(known: int | None, workers: Sequence[Progress]) -> int | None:
    """Return the step of the newest checkpoint that is known after a round. known: before it."""
    return max((step for step in (known, *(worker.saved_step for worker in workers)) if step is not None), default=None)
