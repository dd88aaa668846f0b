"""The checkpoints that a callback of ours has asked a trainer for: the newest stay, older ones go."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence

from elastic_ext.base.errors import UsageError

logger = logging.getLogger(__name__)

KEY = "elastic_ext"  # of the state in a trainer's checkpoint


class OwnSaves:
    """Their names, oldest first. The state goes into each checkpoint, so that the next attempt removes what this one left."""

    def __init__(self, keep: int | None) -> None:
        """keep: how many stay; None: all. Raises UsageError."""
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: expected 1 or more, or None to keep all saves")
        self._keep = keep
        self._names: list[str] = []

    def add(self, name: str) -> None:
        self.discard(name)
        self._names.append(name)

    def discard(self, name: str) -> None:
        """Leave this one to whoever else has asked for it."""
        if name in self._names:
            self._names.remove(name)

    def take_old(self) -> Sequence[str]:
        """Return those that are to go, and forget them."""
        old = self._names[: -self._keep] if self._keep is not None else []
        self._names = self._names[len(old) :]
        return old

    def state_dict(self) -> dict[str, list[str]]:
        return {"saves": list(self._names)}

    def load(self, state: Mapping[str, Sequence[str]]) -> None:
        self._names = list(state.get("saves", ()))


def remove(directory: str, names: Sequence[str]) -> None:
    """Remove these from a local directory. Training goes on where that fails."""
    for name in names:
        path = os.path.join(directory, name)
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass  # another node was first
        except OSError as error:
            logger.warning("an older checkpoint stays: %s cannot be removed: %s", path, error)
