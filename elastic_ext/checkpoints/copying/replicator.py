"""Copy one node's part of each checkpoint to the remote directory: choose it, send it, commit it.

Whenever the leader has finished a checkpoint, it takes the newest one (`coordination`). Checkpoints older than a complete one are
skipped. The leader writes the manifest last, once every file in it is there with the right size.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.copying.coordination import Coordination
from elastic_ext.checkpoints.copying.protocol import Report
from elastic_ext.checkpoints.copying.throttle import Throttle, TokenBucket
from elastic_ext.checkpoints.directory import marks, pruning, transfer
from elastic_ext.checkpoints.directory.pins import unless_pinned
from elastic_ext.checkpoints.directory.pruning import LocalCopy, plan_local_prune
from elastic_ext.checkpoints.directory.tiers import manifest_of, own_checkpoints, rank_of
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, directory_name, order_of
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

STALLED_S = 60.0

Order = tuple[int, int]
"""(generation, step) of a checkpoint."""


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint in the local directory. data: the manifest's bytes. leads: whether rank 0's files are here."""

    name: str
    manifest: Manifest
    data: bytes
    leads: bool


def next_target(
    pending: Sequence[LocalCheckpoint], current: str, refused: Container[str], stalled: bool
) -> LocalCheckpoint | None:
    """Return the checkpoint that the leader copies next. Pure.

    A stalled target is given up only for a checkpoint of another group of workers. Within one group every node has its part, and
    may be sending a large file.

    Args:
        pending: oldest first.
        current: name of the current target; "": none.
        refused: names that will never be complete.
        stalled: the current target has made no progress for STALLED_S.
    """
    usable = [each for each in pending if each.name not in refused]
    newest = usable[-1] if usable else None
    found = next((each for each in usable if each.name == current and each.leads), None)
    if found is None or newest is None or (stalled and found.manifest.generation != newest.manifest.generation):
        return newest
    return found


class Replicator:
    """Copies one node's checkpoints. `turn` does all that can be done now."""

    def __init__(
        self, local: Storage, remote: Storage, bucket: TokenBucket, pulse: Callable[[int], None] = lambda sent: None
    ) -> None:
        """pulse: called with the bytes of this turn so far, at intervals while a file takes long."""
        self._local, self._remote = local, remote
        self._coordination = Coordination(remote)
        self._throttle = Throttle(bucket, self._coordination, pulse)
        self._others = ""  # Report.others
        self._target: str | None = None  # only on the leader; None: it has not looked yet
        self._progress_at = 0.0  # when the target last made progress
        self._began: tuple[str, float] = ("", 0.0)  # the checkpoint that this node last began to copy, and when
        self._uploaded: set[str] = set()  # checkpoints whose part from this node is in the remote directory
        self._complete: set[str] = set()  # checkpoints that are complete there
        self._seen_at: dict[str, float] = {}  # when each pending checkpoint was first seen
        self._failures = 0

    def turn(self) -> Report:
        """Copy, commit and prune. Does not raise: storage errors go into the report."""
        self._throttle.begin_turn()
        reason, newest_remote, copy_s = "", None, None
        pending: list[LocalCheckpoint] = []
        try:
            mine = pending = self._saved_here()
            newest_remote = self._newest_remote()
            pending = _newer(mine, newest_remote)
            target = self._choose(pending) if pending else None
            if target is not None:
                self._copy(target)
            if target is not None and target.name in self._complete:
                newest_remote, copy_s = target.manifest.order, time.monotonic() - self._began[1]
                pending = _newer(mine, newest_remote)
            self._prune({each.name for each in mine}, newest_remote)
        except (OSError, ElasticExtError) as error:
            reason = f"{type(error).__name__}: {error}"
        self._failures = self._failures + 1 if reason else 0
        return replace(self._report(pending, newest_remote, reason), copy_s=copy_s)

    def _saved_here(self) -> list[LocalCheckpoint]:
        """Return the checkpoints saved here, oldest first."""
        found = []
        for name in reversed(own_checkpoints(self._local)):
            try:
                read = manifest_of(self._local, name)
            except ManifestError as error:
                logger.warning("%s is not copied: %s", self._local.path(name), error)
                continue
            if read is not None:
                leads = any(rank_of(entry.name) == 0 for entry in self._local.entries(name))
                found.append(LocalCheckpoint(name, *read, leads))
        return found

    def _newest_remote(self) -> Order | None:
        for name in own_checkpoints(self._remote):
            if name in self._complete or self._is_complete(name):
                self._complete.add(name)
                return order_of(name)
        return None

    def _choose(self, pending: list[LocalCheckpoint]) -> LocalCheckpoint | None:
        """Return the checkpoint that all nodes copy now; None if this node does not have it."""
        if not pending[-1].leads:
            target = self._coordination.target()
            return next((each for each in pending if each.name == target), None)
        before = self._target if self._target is not None else self._coordination.target()
        stalled = time.monotonic() - self._progress_at > STALLED_S
        found = next_target(pending, before, marks.quarantined_names(self._remote), stalled)
        if found is not None and found.name != before:
            self._coordination.set_target(found.name)
        name = found.name if found is not None else ""
        if name != self._target:
            self._target, self._progress_at = name, time.monotonic()
        return found

    def _is_complete(self, name: str) -> bool:
        try:
            read = manifest_of(self._remote, name)
        except ManifestError:
            return False
        return read is not None and not self._missing(name, read[0])

    def _missing(self, name: str, manifest: Manifest) -> list[str]:
        """Return the files that are not in the remote directory with the right size. Costs one listing."""
        try:
            sizes = {entry.name: entry.size for entry in self._remote.entries(name)}
        except FileNotFoundError:
            sizes = {}
        return [file.name for file in manifest.files if sizes.get(file.name) != file.size]

    def _copy(self, checkpoint: LocalCheckpoint) -> None:
        name, manifest = checkpoint.name, checkpoint.manifest
        if self._began[0] != name:
            self._began = (name, time.monotonic())
        if name not in self._uploaded:
            self._upload(checkpoint)
            self._uploaded.add(name)
        if self._is_complete(name):
            self._complete.add(name)
            return
        missing = len(self._missing(name, manifest))
        others = f"{missing} {self._coordination.heartbeats()}"
        if others != self._others:
            self._others, self._progress_at = others, time.monotonic()
        if checkpoint.leads and not missing:
            self._commit(checkpoint)

    def _upload(self, checkpoint: LocalCheckpoint) -> None:
        """Send this node's part. Raises CopyError for a damaged file, which no later turn can fix; OSError."""
        name, leads = checkpoint.name, checkpoint.leads
        mine = {entry.name for entry in self._local.entries(name)}
        part = [file for file in checkpoint.manifest.files if file.name in mine and (leads or rank_of(file.name) is not None)]
        self._coordination.node = str(min((rank for file in part if (rank := rank_of(file.name)) is not None), default=0))
        try:
            transfer.copy_files(
                self._local, self._remote, name, part, self._throttle.wait_to_send, lambda _: self._throttle.report_alive()
            )
        except transfer.CopyError as error:  # the other nodes must not wait for it
            marks.quarantine(self._remote, name, f"{platform.node()} cannot copy its part: {error}", "replicate")
            raise

    def _commit(self, checkpoint: LocalCheckpoint) -> None:
        self._remote.put(f"{checkpoint.name}/{MANIFEST}", checkpoint.data)
        if self._missing(checkpoint.name, checkpoint.manifest):  # another process removed files meanwhile
            self._remote.remove(f"{checkpoint.name}/{MANIFEST}")
            self._uploaded.discard(checkpoint.name)
        else:
            self._complete.add(checkpoint.name)

    def _prune(self, whole: set[str], newest_remote: Order | None) -> None:
        held = [LocalCopy(name, name in whole, name in self._complete) for name in own_checkpoints(self._local)]
        for name in plan_local_prune(held, newest_remote):
            with unless_pinned(self._local, name) as free:
                if free:
                    pruning.delete(self._local, name)
                    logger.info("removed %s: newer ones are complete", self._local.path(name))

    def _report(self, pending: Sequence[LocalCheckpoint], newest_remote: Order | None, reason: str) -> Report:
        now = time.monotonic()
        names = tuple(each.name for each in pending)
        self._seen_at = {name: self._seen_at.get(name, now) for name in names}
        lag: int | None = 0
        if pending:
            lag = max(0, pending[-1].manifest.step - newest_remote[1]) if newest_remote is not None else None
        return Report(
            sent=self._throttle.sent,
            lag_steps=lag,
            lag_s=max((now - since for since in self._seen_at.values()), default=0.0),
            waiting=names,
            complete=directory_name(newest_remote[1], newest_remote[0]) if newest_remote is not None else "",
            failures=self._failures,
            reason=reason,
            others=self._others if names else "",
        )


def _newer(mine: list[LocalCheckpoint], newest_remote: Order | None) -> list[LocalCheckpoint]:
    return [each for each in mine if newest_remote is None or each.manifest.order > newest_remote]
