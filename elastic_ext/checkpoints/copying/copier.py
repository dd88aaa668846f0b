"""The agent's side of copying: runs the program `replicate`, passes orders to it, and tracks what is not copied yet."""

from __future__ import annotations

import logging
import os
import time

from elastic_ext.base import isolated, log_records
from elastic_ext.base.checkpoint_variables import CHECKPOINT_DIR, LOCAL_DIR
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.copying import replicate
from elastic_ext.checkpoints.copying.child import Child
from elastic_ext.checkpoints.copying.protocol import LOOK, TOKEN_ENV
from elastic_ext.checkpoints.copying.restarts import CopyMetrics, RestartedChild
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.storage import open_storage

logger = logging.getLogger(__name__)

STALL_S = 60.0  # default of the setting copy_stall


class Copier:
    """Keeps the local tier copied from construction until close(). Only close() waits."""

    def __init__(
        self, local_dir: str, checkpoint_dir: str, mb_s: float, token: str, metrics: CopyMetrics, stall_s: float = STALL_S
    ) -> None:
        """Start the process.

        Args:
            mb_s: limit in megabytes per second; 0: no limit.
            token: the agent's token.
            stall_s: seconds that the process may go without progress.
        """
        command = [*isolated.command(replicate.__name__), f"--mb-s={mb_s}"]
        environ = {
            **os.environ,
            TOKEN_ENV: token,
            log_records.NODE_NAME: log_records.node(),
            LOCAL_DIR: local_dir,
            CHECKPOINT_DIR: checkpoint_dir,
        }
        self._local, self._target = open_storage(local_dir), checkpoint_dir
        self._saves = 0
        self._abandoned: frozenset[str] = frozenset()
        self._child = RestartedChild(lambda: Child(command, environ), checkpoint_dir, metrics, stall_s)

    def update_saves(self, saves: int) -> None:
        """Tell the process to look if this round's workers have reported another save. saves: how many so far."""
        if saves != self._saves:
            self._saves = saves
            self._child.order(LOOK)

    def look_now(self) -> None:
        """Tell the process to look, because there may be a checkpoint that its worker could no longer report."""
        self._child.order(LOOK)

    def abandon_newer_than(self, resumes_from: str) -> None:
        """Abandon the local checkpoints newer than the one that the workers resume from ("": from nothing)."""
        order = order_of(resumes_from.rpartition("/")[2]) or (0, 0)
        try:
            self._abandoned = frozenset(name for name in tiers.own_checkpoints(self._local) if (order_of(name) or (0, 0)) > order)
        except OSError as error:
            logger.warning("local_dir %s cannot be listed: %s", self._local.address, error)

    def close(self, wait_s: float | None) -> tuple[str, ...]:
        """Let the process copy the rest and end. Return the checkpoints whose only copy is on this node.

        wait_s: maximum wait in seconds; None: as long as it makes progress.
        """
        try:
            self._child.finish(float("inf") if wait_s is None else time.monotonic() + wait_s)
        finally:  # also if a signal ends the wait
            left = self._left()
            if left:
                where = self._local.address
                logger.error(
                    "checkpoints not complete in %s; their only copy is on this node (%s): %s",
                    self._target,
                    where,
                    ", ".join(left),
                )
        return left

    def _left(self) -> tuple[str, ...]:
        """Return the local checkpoints that are newer than every complete remote one, except abandoned ones."""
        if self._child.done:
            return ()
        last = self._child.last
        complete = order_of(last.complete) or (-1, -1)
        try:
            names = [name for name in tiers.own_checkpoints(self._local) if self._local.stat(f"{name}/{MANIFEST}") is not None]
        except OSError as error:
            logger.warning("local_dir %s cannot be listed: %s", self._local.address, error)
            names = list(last.waiting)
        return tuple(name for name in names if (order_of(name) or (0, 0)) > complete and name not in self._abandoned)


def claim_local_dir(settings: Settings) -> None:
    """Bind local_dir to checkpoint_dir. Raises UsageError if it belongs to another one, or if checkpoint_dir is not set."""
    if settings.local_dir is None:
        return
    if settings.checkpoint_dir is None:
        raise UsageError("local_dir is set but checkpoint_dir is not: there is nowhere to copy checkpoints to; set both")
    try:
        tiers.claim(open_storage(settings.local_dir), open_storage(settings.checkpoint_dir))
    except OSError as error:
        logger.warning("local_dir %s cannot be written to: %s; saves go to checkpoint_dir", settings.local_dir, error)


def start(settings: Settings, token: str, metrics: CopyMetrics) -> Copier | None:
    """Start copying; return None without a local tier. token: the agent's token."""
    if settings.local_dir is None or settings.checkpoint_dir is None:
        return None
    return Copier(settings.local_dir, settings.checkpoint_dir, settings.copy_mb_s, token, metrics, settings.copy_stall)
