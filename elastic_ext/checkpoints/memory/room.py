"""The room for copies in memory, as the agent gives it to its workers; `base.checkpoint_variables` has the variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.base.checkpoint_variables import MEMORY_DIR, MEMORY_EVERY, MEMORY_LIMIT, MEMORY_PEER


@dataclass(frozen=True)
class Room:
    """The room of one node, or of one of its workers.

    Attributes:
        directory: the tier's directory.
        limit: bytes for all copies together.
        every: the setting memory_every: copy every so many steps, 0: never, None: as often as costs little.
        peer: the socket of the agent, which sends a worker's part to another node; "": it does not.
    """

    directory: str
    limit: int
    every: int | None = None
    peer: str = ""

    def variables(self, workers: int) -> dict[str, str]:
        """Return the environment variables for each worker of the node. workers: how many there are."""
        return {
            MEMORY_DIR: self.directory,
            MEMORY_LIMIT: str(self.limit // max(1, workers)),
            MEMORY_PEER: self.peer,
            **({} if self.every is None else {MEMORY_EVERY: str(self.every)}),
        }


def given(environ: Mapping[str, str] = os.environ) -> Room | None:
    """Return the room of this worker; None if its agent gave it none."""
    directory, every = environ.get(MEMORY_DIR, ""), environ.get(MEMORY_EVERY, "")
    if not directory:
        return None
    limit, peer = int(environ.get(MEMORY_LIMIT) or 0), environ.get(MEMORY_PEER, "")
    return Room(directory, limit, int(every) if every else None, peer)
