"""Copies a node's part of each checkpoint from the local tier to the remote directory, in its own process beside the agent.

    elastic_ext.checkpoints.copying.replicate [--mb-s N]      (run by base/isolated.py)

All its state is in the two directories, so a restarted process resumes the interrupted file. Object stores do not report changes,
so it polls with growing pauses.

Saves may come faster than they can be copied, and all nodes must work on the same one. Whenever the leader, the node that has
rank 0's files, has finished a checkpoint, it picks the newest one; the others follow. Checkpoints older than a complete one are
skipped. The leader writes the manifest last, once every file in it is there with the right size. Files below `.elastic_ext/` in
the remote directory:

    copying              the name of that checkpoint, written by the leader
    copying_from/NODE    "BYTES SECONDS": total bytes that a node has sent, and its monotonic clock; written every HEARTBEAT_S
                         while it sends or compares a large file. NODE is the lowest rank whose files it has, or "part-N" for part
                         N of a script's saves. Others only check whether the text changes.

These are UTF-8 text without a version: if their meaning changes, their names must change.

The saves of scripts in the local directory are copied by `script_saves`.

The wire protocol between the agent and this program, version `reports.SCHEMA`:

Environment, set by the agent: ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR (`tiers`), as for workers; and TOKEN_ENV, the
agent's token: when the agent is gone, the reaper ends the processes that carry it. These are not arguments, because every user of
the machine can read arguments, and a URL may hold credentials. The bandwidth is an argument, `--mb-s N`, and so is the setting
checkpoint_pattern, `--pattern P`.

Standard input, one order per line:
    look        a checkpoint was saved, or may have been
    finish      copy the rest, then end
End of input means that the agent is gone, and ends the program.

Standard output, one JSON object per line, with a field "schema":
    CopyState   after each turn
    Pulse       at intervals while one file takes long
Any other line was printed by a library.

Exit code: 0: everything is copied, after `finish`; UNFINISHED: other nodes' files stopped arriving, after `finish`; other codes:
the program died.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base import contracts, errors, log_records
from elastic_ext.checkpoints.copying.reports import CopyState, Pulse, both, encode, made_progress
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.copying.targets import HEARTBEATS, STALLED_S
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.directory.own_files import MANIFEST, MARKERS, Manifest, ManifestError
from elastic_ext.checkpoints.directory.tiers import files_here, manifest_of, own_checkpoints, rank_of, unless_pinned
from elastic_ext.checkpoints.formats.candidates import directory_name, order_of
from elastic_ext.checkpoints.storage import LocalStorage, Storage, open_storage

logger = logging.getLogger(__name__)

TARGET = f"{MARKERS}/copying"
TOKEN_ENV = "ELASTIC_EXT_COPIER"
LOOK, FINISH = "look", "finish"
UNFINISHED = 3
HEARTBEAT_S = 20.0


PULSE_S = 5.0  # interval between pulses to the agent while one file is being sent


class Throttle:
    """Called with each block. Limits the rate, and reports to the agent and the other nodes that this node is at work."""

    def __init__(self, bucket: upkeep.TokenBucket, remote: Storage, pulse: Callable[[int], None]) -> None:
        """pulse: called with the bytes of this turn so far, every PULSE_S seconds while a file takes long."""
        self._bucket, self._remote, self._pulse = bucket, remote, pulse
        self.node = ""  # NODE of this node; "" before it sends anything
        self.sent = self._sent_before = 0  # bytes of this turn, and of all turns before it
        self.begin_turn()

    def name_node(self, node: str) -> str:
        """Send heartbeats from now on, by this name unless the node has one. Return its name."""
        self.node = self.node or node
        return self.node

    def begin_turn(self) -> None:
        self._sent_before, self.sent = self._sent_before + self.sent, 0
        self._pulse_at = self._beat_at = time.monotonic()

    def wait_to_send(self, size: int) -> None:
        """Wait until `size` more bytes may be sent. Raises OSError."""
        pause = self._bucket.take(size, time.monotonic())
        while pause > 0:  # waiting for the rate is not a stall
            time.sleep(min(pause, PULSE_S))
            pause -= PULSE_S
            self.report_alive()
        self.sent += size
        self.report_alive()

    def report_alive(self) -> None:
        """Report to the agent and the other nodes that this node is at work, if it is time to. Raises OSError."""
        now = time.monotonic()
        if now - self._pulse_at >= PULSE_S:
            self._pulse_at = now
            self._pulse(self.sent)
        if self.node and now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._remote.put(f"{HEARTBEATS}/{self.node}", f"{self._sent_before + self.sent} {now:.0f}".encode())


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
        self, local: Storage, remote: Storage, bucket: upkeep.TokenBucket, pulse: Callable[[int], None] = lambda sent: None
    ) -> None:
        """pulse: called with the bytes of this turn so far, at intervals while a file takes long."""
        self._local, self._remote = local, remote
        self.throttle = Throttle(bucket, remote, pulse)
        self._others = ""  # CopyState.others
        self._target: str | None = None  # only on the leader; None: it has not looked yet
        self._progress_at = 0.0  # when the target last made progress
        self._began: tuple[str, float] = ("", 0.0)  # the checkpoint that this node last began to copy, and when
        self._uploaded: set[str] = set()  # checkpoints whose part from this node is in the remote directory
        self._complete: set[str] = set()  # checkpoints that are complete there
        self._seen_at: dict[str, float] = {}  # when each pending checkpoint was first seen
        self._failures = 0

    def turn(self) -> CopyState:
        """Copy, commit and prune. Does not raise: storage errors go into the report."""
        self.throttle.begin_turn()
        reason, newest_remote, copy_s = "", None, None
        pending: list[LocalCheckpoint] = []
        try:
            mine = pending = self._saved_here()
            newest_remote = next((order_of(name) for name in own_checkpoints(self._remote) if self._is_complete(name)), None)
            pending = _newer(mine, newest_remote)
            target = self._choose(pending) if pending else None
            if target is not None:
                self._copy(target)
            if target is not None and target.name in self._complete:
                newest_remote, copy_s = target.manifest.order, time.monotonic() - self._began[1]
                pending = _newer(mine, newest_remote)
            self._prune({each.name for each in mine}, newest_remote)
        except (OSError, errors.ElasticExtError) as error:
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

    def _choose(self, pending: list[LocalCheckpoint]) -> LocalCheckpoint | None:
        """Return the checkpoint that all nodes copy now; None if this node does not have it."""
        if not pending[-1].leads:
            target = self._agreed_target()
            return next((each for each in pending if each.name == target), None)
        before = self._target if self._target is not None else self._agreed_target()
        stalled = time.monotonic() - self._progress_at > STALLED_S
        found = next_target(pending, before, own_files.quarantined_names(self._remote), stalled)
        if found is not None and found.name != before:
            self._remote.put(TARGET, found.name.encode())
        name = found.name if found is not None else ""
        if name != self._target:
            self._target, self._progress_at = name, time.monotonic()
        return found

    def _agreed_target(self) -> str:
        """Return the checkpoint that all nodes copy now; "": none yet."""
        return (self._remote.read_if_there(TARGET) or b"").decode(errors="replace")

    def _is_complete(self, name: str) -> bool:
        if name not in self._complete:
            try:
                read = manifest_of(self._remote, name)
            except ManifestError:
                return False
            if read is not None and not self._missing(name, read[0]):
                self._complete.add(name)
        return name in self._complete

    def _missing(self, name: str, manifest: Manifest) -> list[str]:
        """Return the files that are not in the remote directory with the right size. Costs one listing."""
        there = files_here(self._remote, name, manifest)
        return [file.name for file in manifest.files if file.name not in there]

    def _copy(self, checkpoint: LocalCheckpoint) -> None:
        name, manifest = checkpoint.name, checkpoint.manifest
        if self._began[0] != name:
            self._began = (name, time.monotonic())
        if name not in self._uploaded:
            self._upload(checkpoint)
            self._uploaded.add(name)
        if self._is_complete(name):
            return
        missing = len(self._missing(name, manifest))
        nodes = sorted(entry.name for entry in self._remote.listed(HEARTBEATS) if entry.name != self.throttle.node)
        others = f"{missing} {[self._remote.read_if_there(f'{HEARTBEATS}/{node}') for node in nodes]}"
        if others != self._others:
            self._others, self._progress_at = others, time.monotonic()
        if checkpoint.leads and not missing:
            self._commit(checkpoint)

    def _upload(self, checkpoint: LocalCheckpoint) -> None:
        """Send this node's part. Raises CopyError for a damaged file, which no later turn can fix; OSError."""
        name, leads = checkpoint.name, checkpoint.leads
        mine = {entry.name for entry in self._local.entries(name)}
        part = [file for file in checkpoint.manifest.files if file.name in mine and (leads or rank_of(file.name) is not None)]
        self.throttle.node = str(min((rank for file in part if (rank := rank_of(file.name)) is not None), default=0))
        try:
            upkeep.copy_files(
                self._local, self._remote, name, part, self.throttle.wait_to_send, lambda _: self.throttle.report_alive()
            )
        except upkeep.CopyError as error:  # the other nodes must not wait for it
            own_files.quarantine(self._remote, name, f"{platform.node()} cannot copy its part: {error}", "replicate")
            raise

    def _commit(self, checkpoint: LocalCheckpoint) -> None:
        self._remote.put(f"{checkpoint.name}/{MANIFEST}", checkpoint.data)
        if self._missing(checkpoint.name, checkpoint.manifest):  # another process removed files meanwhile
            self._remote.remove(f"{checkpoint.name}/{MANIFEST}")
            self._uploaded.discard(checkpoint.name)
        else:
            self._complete.add(checkpoint.name)

    def _prune(self, whole: set[str], newest_remote: Order | None) -> None:
        for name in upkeep.plan_local_prune(own_checkpoints(self._local), whole, self._complete, newest_remote):
            with unless_pinned(self._local, name) as free:
                if free:
                    upkeep.delete(self._local, name)
                    logger.info("removed %s: newer ones are complete", self._local.path(name))

    def _report(self, pending: Sequence[LocalCheckpoint], newest_remote: Order | None, reason: str) -> CopyState:
        now = time.monotonic()
        names = tuple(each.name for each in pending)
        self._seen_at = {name: self._seen_at.get(name, now) for name in names}
        lag: int | None = 0
        if pending:
            lag = max(0, pending[-1].manifest.step - newest_remote[1]) if newest_remote is not None else None
        return CopyState(
            sent=self.throttle.sent,
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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
FINISH_S = 60.0  # time without progress after which it no longer waits for the other nodes' files
NICE = 10  # training comes first


class _Orders:
    """The agent's orders, which a thread reads from standard input. finish: whether the agent has sent that order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._look = self.finish = False

    def read(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._look = True
                self.finish = self.finish or line.strip() == FINISH
                self._changed.notify()
        if not self.finish:
            os._exit(0)  # the agent is gone: end at once; the next process resumes from the directories

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for an order. Return whether one came."""
        with self._changed:
            ordered = self._changed.wait_for(lambda: self._look, timeout_s)
            self._look = False
            return ordered


@dataclass(frozen=True)
class Copies:
    """All that this node copies. script: None, where a local directory is not one to save in for scripts."""

    replicator: Replicator
    script: ScriptSaves | None = None

    def turn(self, finish: bool) -> CopyState:
        """Do all that can be done now; `finish`: everything, because no worker runs any more."""
        own = self.replicator.turn()
        if self.script is None:
            return own
        return replace(both(own, self.script.turn(finish)), sent=self.replicator.throttle.sent)


def run(copies: Copies, orders: _Orders, notify: Callable[[CopyState], None]) -> int:
    """Take turns until everything is copied after `finish`, or given up. Return the exit code."""
    pause, progress_at, last = FIRST_PAUSE_S, time.monotonic(), CopyState()
    while True:
        finish = orders.finish  # read before the turn, so that the turn sees what was saved before that order
        report = copies.turn(finish)
        notify(report)
        if made_progress(report, last) or not finish:
            progress_at = time.monotonic()
        if made_progress(report, last):
            pause = FIRST_PAUSE_S
        last = report
        if finish and not report.waiting and not report.failures:
            return 0
        nothing_left = set(report.waiting) <= set(report.given_up) and not report.failures
        if finish and (nothing_left or time.monotonic() - progress_at > FINISH_S):
            return UNFINISHED
        if orders.wait(pause if report.waiting or report.failures else None):
            pause = FIRST_PAUSE_S
        else:
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _send(message: CopyState | Pulse) -> None:
    print(encode(message), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-s", type=float, default=0.0, help="maximum megabytes to send per second; 0: no limit")
    parser.add_argument("--pattern", default="", help="the setting checkpoint_pattern")
    args = parser.parse_args()
    if absent := [name for name in (contracts.LOCAL_DIR, contracts.CHECKPOINT_DIR) if not os.environ.get(name)]:
        parser.error(f"{' and '.join(absent)} must be set: the directories to copy from and to")
    log_records.configure("WARNING")
    os.nice(NICE)
    orders = _Orders()
    threading.Thread(target=orders.read, name="orders", daemon=True).start()
    local, remote = (open_storage(os.environ[name]) for name in (contracts.LOCAL_DIR, contracts.CHECKPOINT_DIR))
    replicator = Replicator(local, remote, upkeep.TokenBucket(args.mb_s * 1e6), lambda sent: _send(Pulse(sent)))
    script = (
        ScriptSaves(local, remote, args.pattern, replicator.throttle.wait_to_send, replicator.throttle.name_node)
        if isinstance(local, LocalStorage)
        else None
    )
    return run(Copies(replicator, script), orders, _send)


if __name__ == "__main__":
    sys.exit(main())
