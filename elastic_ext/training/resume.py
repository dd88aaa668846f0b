"""The checkpoint to resume from, which the agent puts into the environment of its workers."""

from __future__ import annotations

import os

from elastic_ext.base import checkpoint_variables


def resume_from() -> str | None:
    """Return the checkpoint that the agent has chosen for this round, the same on all ranks.

    Returns:
        A path or a URL; None: start from nothing.
    """
    return os.environ.get(checkpoint_variables.RESUME_FROM) or None


def resume_step() -> int | None:
    """Return the step of that checkpoint.

    Returns:
        The step in the checkpoint's content, else in its name; None if neither holds one, or if there is nothing to resume from.
    """
    step = os.environ.get(checkpoint_variables.RESUME_STEP)
    return int(step) if step else None
