"""The right of this group of workers to commit and to prune."""

from __future__ import annotations

import logging
import os

from elastic_ext.checkpoints.directory.generations import Opener, open_generation, refuse_stale
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.ranks import Ranks

logger = logging.getLogger(__name__)

LAUNCH_ENV = "ELASTIC_EXT_LAUNCH"


class Fence:
    """The generation that this group of workers opened in the remote directory. Only the newest one may write there.

    Attributes:
        opener: this group, from the agent's environment variables.
        generation: the same on all ranks; None until the directory was opened.
    """

    def __init__(self, remote: Storage, ranks: Ranks) -> None:
        self._remote, self._ranks = remote, ranks
        self.opener = Opener(
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            os.environ.get(LAUNCH_ENV, ""),
        )
        self.generation: int | None = None

    def open(self) -> int:
        """Return this group's generation, taking one if needed. Collective. Raises StaleGroup, OSError on all ranks."""
        if self.generation is None:
            self.generation = self._ranks.from_rank_0(lambda: open_generation(self._remote, self.opener))
        return self.generation

    def reopen(self) -> None:
        """Take a new generation. Collective. Raises StaleGroup on all ranks.

        A directory that cannot be written to now is only logged, because checkpoints can still be loaded from it.
        """
        self.generation = None
        try:
            self.open()
        except OSError as error:
            logger.warning("cannot write to %s now: %s; each save tries again", self._remote.address, error)

    def check(self) -> None:
        """Raise StaleGroup if another group has taken over, or OSError if that cannot be determined."""
        assert self.generation is not None, "the directory is open"
        refuse_stale(self._remote, self.generation)
