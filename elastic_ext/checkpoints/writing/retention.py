"""Remove old checkpoints and the leftovers of failed saves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from elastic_ext.checkpoints.directory import marks, pruning, tiers
from elastic_ext.checkpoints.formats.inspection import OWN
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.fence import Fence
from elastic_ext.checkpoints.writing.local_tier import Directories

logger = logging.getLogger(__name__)


class Retention:
    """Prunes the remote directory, only on rank 0. The agent's copier prunes the local one.

    Attributes:
        in_use: name of the loaded checkpoint; never removed, because other ranks may still be loading it.
    """

    def __init__(self, directories: Directories, fence: Fence, keep_last: int, keep_every: int | None) -> None:
        """keep_last: number of newest complete ones to keep. keep_every: also keep those whose step is a multiple of this."""
        self._directories, self._fence = directories, fence
        self._keep_last, self._keep_every = keep_last, keep_every or 0
        self.in_use: str | None = None

    def prune(self, newest: str) -> Iterator[pruning.PruneDecision]:
        """Remove superfluous checkpoints; yield each completed removal. newest: the one that was just committed.

        Raises StaleGroup if another group has taken over; OSError.
        """
        self._fence.check()
        for decision in pruning.plan_prune(self._present(newest), self._keep_last, self._keep_every):
            if decision.remove:
                self._fence.check()
                if remove(self._directories.remote, decision.name):
                    logger.info("removed %s: %s", self._directories.remote.path(decision.name), decision.reason)
                    yield decision

    def discard(self, name: str) -> None:
        """Remove the leftovers of a failed save from the remote directory."""
        remove(self._directories.remote, name)

    def _present(self, newest: str) -> list[pruning.PruneCandidate]:
        remote, tier = self._directories.remote, self._directories.local
        pinned, quarantined = marks.pinned_names(remote), marks.quarantined_names(remote)
        # A checkpoint in the local tier may be being copied there. Its copy is then not torn and must not be removed.
        copied = set(tiers.own_checkpoints(tier.storage)) if tier is not None else set()
        found = []
        for name in tiers.own_checkpoints(remote):
            complete = (name == newest and name not in copied) or remote.stat(f"{name}/{MANIFEST}") is not None
            order = order_of(name)
            kept = pruning.PruneCandidate(
                name=name,
                family="",
                step=order[1] if order else 0,
                format=OWN,
                complete=complete,
                pinned=name in pinned or name == self.in_use or (name in copied and not complete),
                quarantined=name in quarantined,
            )
            found.append(kept)
        return found


def remove(storage: Storage, name: str) -> bool:
    """Remove a checkpoint or its leftovers; return whether something was removed. Errors are logged."""
    try:
        pruning.delete(storage, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s could not be removed: %s", storage.path(name), error)
        return False
    return True
