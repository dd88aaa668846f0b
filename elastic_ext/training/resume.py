"""The checkpoint to resume from, which the agent passes to its workers in the environment."""

from __future__ import annotations

import os

from elastic_ext.base import checkpoint_variables


def resume_from() -> str | None:
    """Return the checkpoint that the agent chose for this round; it is the same on all ranks.

    Returns:
        A path or a URL: of this rank's own file, if each rank wrote one. None to start from nothing.
    """
    return os.environ.get(checkpoint_variables.RESUME_FROM) or None


def resume_step() -> int | None:
    """Return the step of the checkpoint from `resume_from`.

    Returns:
        The step in the checkpoint's content, else in its name; None if neither holds one, or if there is nothing to resume from.
    """
    step = os.environ.get(checkpoint_variables.RESUME_STEP)
    return int(step) if step else None
