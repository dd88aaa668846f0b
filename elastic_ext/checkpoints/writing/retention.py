"""The right of this group of workers to commit and to prune, and what it prunes: old checkpoints, leftovers of failed saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from elastic_ext.checkpoints.directory import marks, pruning, tiers
from elastic_ext.checkpoints.directory.generations import Opener, open_generation, refuse_stale
from elastic_ext.checkpoints.formats.inspection import OWN
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.local_tier import Directories
from elastic_ext.checkpoints.ranks import Ranks
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)


LAUNCH_ENV = "ELASTIC_EXT_LAUNCH"


class GenerationFence:
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


class Retention:
    """Prunes the remote directory, only on rank 0. The agent's copier prunes the local one.

    Attributes:
        in_use: name of the loaded checkpoint; never removed, because other ranks may still be loading it.
    """

    def __init__(self, directories: Directories, fence: GenerationFence, keep_last: int, keep_every: int | None) -> None:
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
