"""Copies a node's part of each checkpoint from the local tier to the remote directory: a process of its own beside the agent.

    elastic_ext.checkpoints.copying.replicate [--mb-s N]      (run by workers/isolated.py)

Environment: ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR, as workers have them. Nobody else can read it.
Standard input: `look` (a checkpoint was saved), `finish` (copy what is left, then end); its end is the agent's, and ends this
process. Standard output: one JSON object a line, a `Told` after each turn and `{"pulse": BYTES}` while one file takes long. It
knows nothing that is not in the two directories: killed and started again it goes on with the file that was under way.

Saves may come faster than they can be copied, and all nodes must work on the same one. So the node that has rank 0's files, the
leader, takes the newest whenever it is done with the one before, and says so in the remote directory (TARGET); the others look
there. What is older than a complete one is left out. The leader puts the manifest last, once every file that it lists is there
with its size. Object stores have no event for any of this: who waits looks again after pauses that grow. While a node sends a
large file it says so there too (BEATS): the others wait for as long as that goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, field

from elastic_ext.base import log_records
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory import marks, pruning, transfer
from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.directory.pins import unless_pinned
from elastic_ext.checkpoints.directory.tiers import (
    LOCAL_ENV,
    REMOTE_ENV,
    manifest_of,
    own_checkpoints,
    rank_of,
)
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, directory_name, order_of
from elastic_ext.checkpoints.storage import Storage, open_storage

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
STALLED_S = 60.0
FINISH_S = 60.0  # without any progress, after which nobody waits for the other nodes' files any more
TARGET = f"{MARKERS}/copying"  # in the remote directory: the name of what all nodes copy now
BEATS = f"{MARKERS}/copying_from"  # there, too: a file for each node, with the bytes that it has sent so far
PULSE_S, BEAT_S = 5.0, 20.0  # how often the agent and the other nodes are told that one file is still on its way
NICE = 10  # training comes first
UNFINISHED = 3  # exit code


@dataclass(frozen=True)
class Told:
    """What the agent is told after each turn.

    Attributes:
        sent: bytes since the last time.
        lag_steps: that the newest checkpoint of the remote directory is behind the newest one here; None: there is none yet.
        lag_s: for how long the oldest one that is not there has been waiting.
        waiting: names of those here that are newer than what is complete there; complete: the newest there, "": none.
        failures: turns that failed one after the other; reason: of the last.
        others: changes while other nodes send what is still missing.
    """

    sent: int = 0
    lag_steps: int | None = 0
    lag_s: float = 0.0
    waiting: tuple[str, ...] = ()
    complete: str = ""
    failures: int = 0
    reason: str = ""
    others: str = ""


def moved(told: Told, before: Told) -> bool:
    """Has anything come nearer to being complete since, here or on another node? Pure."""
    return bool(told.sent) or (told.waiting, told.complete, told.others) != (before.waiting, before.complete, before.others)


@dataclass
class Bucket:
    """Token bucket: `take` says how long to wait before so many bytes are sent. rate: bytes a second, 0: no limit."""

    rate: float
    paid_until: float = field(default=float("-inf"))

    def take(self, size: int, now: float) -> float:
        """Over any time the bytes that were let through are at most rate x time, and one block more."""
        if self.rate <= 0:
            return 0.0
        begin = max(now, self.paid_until)
        self.paid_until = begin + size / self.rate
        return begin - now


@dataclass(frozen=True)
class Here:
    """A checkpoint in the local directory. leads: rank 0's files are here."""

    name: str
    manifest: Manifest
    data: bytes
    leads: bool


def next_target(pending: Sequence[Here], current: str, barred: Container[str], stalled: bool) -> Here | None:
    """What the leader copies. Pure.

    pending: the oldest first. current: what it was copying, "": nothing. barred: names that will never be complete.
    stalled: nothing has come of the current one for a while. Then one of another group of workers is taken instead: of its own
    group all nodes have their parts, and may be sending a large file.
    """
    usable = [here for here in pending if here.name not in barred]
    newest = usable[-1] if usable else None
    found = next((here for here in usable if here.name == current and here.leads), None)
    if found is None or newest is None or (stalled and found.manifest.generation != newest.manifest.generation):
        return newest
    return found


class Replicator:
    """One node's copies. `turn` does all that can be done now."""

    def __init__(
        self,
        local: Storage,
        remote: Storage,
        bucket: Bucket,
        wait: Callable[[float], object] = time.sleep,
        pulse: Callable[[int], None] = lambda sent: None,
    ) -> None:
        """pulse: gets the bytes of this turn so far, every PULSE_S seconds of a file that takes long."""
        self._local, self._remote, self._bucket, self._wait, self._pulse = local, remote, bucket, wait, pulse
        self._sent = self._sent_before = 0  # bytes of this turn; of all the turns before it
        self._pulse_at = self._beat_at = time.monotonic()
        self._node = ""  # this node's name among BEATS; "": it has sent nothing yet
        self._others = ""
        self._target: str | None = None  # of a leader; None: it has not looked yet
        self._progress_at = 0.0  # when the target last came nearer to being complete
        self._up: set[str] = set()  # this node's part is there
        self._complete: set[str] = set()  # as a whole
        self._seen: dict[str, float] = {}  # when it was first seen here
        self._failures = 0

    def turn(self) -> Told:
        """Raises nothing of the storages: it is told."""
        self._sent_before, self._sent = self._sent_before + self._sent, 0
        self._pulse_at = self._beat_at = time.monotonic()
        reason, newest_remote = "", None
        pending: list[Here] = []
        try:
            mine = pending = self._mine()
            newest_remote = self._newest_remote()
            pending = self._newer(mine, newest_remote)
            target = self._chosen(pending) if pending else None
            if target is not None:
                self._copy(target)
            if target is not None and target.name in self._complete:
                newest_remote = target.manifest.order
                pending = self._newer(mine, newest_remote)
            self._prune({here.name for here in mine}, newest_remote)
        except (OSError, ElasticExtError) as error:
            reason = f"{type(error).__name__}: {error}"
        self._failures = self._failures + 1 if reason else 0
        return self._told(pending, newest_remote, reason)

    def _mine(self) -> list[Here]:
        """What was saved here, the oldest first."""
        found = []
        for name in reversed(own_checkpoints(self._local)):
            try:
                read = manifest_of(self._local, name)
            except ManifestError as error:
                logger.warning("%s is not copied: %s", self._local.path(name), error)
                continue
            if read is not None:
                leads = any(rank_of(entry.name) == 0 for entry in self._local.entries(name))
                found.append(Here(name, *read, leads))
        return found

    @staticmethod
    def _newer(mine: list[Here], newest_remote: tuple[int, int] | None) -> list[Here]:
        return [here for here in mine if newest_remote is None or here.manifest.order > newest_remote]

    def _newest_remote(self) -> tuple[int, int] | None:
        for name in own_checkpoints(self._remote):
            if name in self._complete or self._is_complete(name):
                self._complete.add(name)
                return order_of(name)
        return None

    def _chosen(self, pending: list[Here]) -> Here | None:
        """What all nodes copy now; None: that is nothing that is here."""
        if not pending[-1].leads:
            said = self._said()
            return next((here for here in pending if here.name == said), None)
        before = self._target if self._target is not None else self._said()
        stalled = time.monotonic() - self._progress_at > STALLED_S
        found = next_target(pending, before, marks.quarantined_names(self._remote), stalled)
        if found is not None and found.name != before:
            self._remote.put(TARGET, found.name.encode())
        name = found.name if found is not None else ""
        if name != self._target:
            self._target, self._progress_at = name, time.monotonic()
        return found

    def _said(self) -> str:
        try:
            return self._remote.read(TARGET).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _is_complete(self, name: str) -> bool:
        try:
            read = manifest_of(self._remote, name)
        except ManifestError:
            return False
        return read is not None and not self._missing(name, read[0])

    def _missing(self, name: str, manifest: Manifest) -> list[str]:
        """One listing."""
        try:
            sizes = {entry.name: entry.size for entry in self._remote.entries(name)}
        except FileNotFoundError:
            sizes = {}
        return [file.name for file in manifest.files if sizes.get(file.name) != file.size]

    def _copy(self, here: Here) -> None:
        name, manifest = here.name, here.manifest
        if name not in self._up:
            mine = {entry.name for entry in self._local.entries(name)}
            part = [file for file in manifest.files if file.name in mine and (here.leads or rank_of(file.name) is not None)]
            self._node = str(min((rank for file in part if (rank := rank_of(file.name)) is not None), default=0))
            try:
                transfer.copy_files(self._local, self._remote, name, part, self._throttle, lambda _: self._alive())
            except transfer.CopyError as error:  # the others must not wait for it
                marks.quarantine(self._remote, name, f"{platform.node()} cannot copy its part: {error}", "replicate")
                raise
            self._up.add(name)
        if self._is_complete(name):
            self._complete.add(name)
            return
        missing = len(self._missing(name, manifest))
        others = f"{missing} {self._beats()}"
        if others != self._others:
            self._others, self._progress_at = others, time.monotonic()
        if here.leads and not missing:
            self._commit(here)

    def _beats(self) -> list[str]:
        """What the other nodes have said of how far they are."""
        try:
            names = sorted(entry.name for entry in self._remote.entries(BEATS) if entry.name != self._node)
            return [self._remote.read(f"{BEATS}/{name}").decode(errors="replace") for name in names]
        except FileNotFoundError:
            return []

    def _commit(self, here: Here) -> None:
        self._remote.put(f"{here.name}/{MANIFEST}", here.data)
        if self._missing(here.name, here.manifest):  # somebody was removing it meanwhile
            self._remote.remove(f"{here.name}/{MANIFEST}")
            self._up.discard(here.name)
        else:
            self._complete.add(here.name)

    def _throttle(self, size: int) -> None:
        pause = self._bucket.take(size, time.monotonic())
        while pause > 0:  # it waits as it was told to, which is no standstill
            self._wait(min(pause, PULSE_S))
            pause -= PULSE_S
            self._alive()
        self._sent += size
        self._alive()

    def _alive(self) -> None:
        """Called with each block."""
        now = time.monotonic()
        if now - self._pulse_at >= PULSE_S:
            self._pulse_at = now
            self._pulse(self._sent)
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._remote.put(f"{BEATS}/{self._node}", f"{self._sent_before + self._sent} {now:.0f}".encode())

    def _prune(self, whole: set[str], newest_remote: tuple[int, int] | None) -> None:
        held = [pruning.LocalCopy(name, name in whole, name in self._complete) for name in own_checkpoints(self._local)]
        for name in pruning.plan_local_prune(held, newest_remote):
            with unless_pinned(self._local, name) as free:
                if free:
                    pruning.delete(self._local, name)
                    logger.info("removed %s: newer ones are complete", self._local.path(name))

    def _told(self, pending: Sequence[Here], newest_remote: tuple[int, int] | None, reason: str) -> Told:
        now = time.monotonic()
        names = tuple(here.name for here in pending)
        self._seen = {name: self._seen.get(name, now) for name in names}
        lag: int | None = 0
        if pending:
            lag = max(0, pending[-1].manifest.step - newest_remote[1]) if newest_remote is not None else None
        waited = max((now - since for since in self._seen.values()), default=0.0)
        complete = directory_name(newest_remote[1], newest_remote[0]) if newest_remote is not None else ""
        return Told(self._sent, lag, waited, names, complete, self._failures, reason, self._others if names else "")


class _Orders:
    """What the agent says, from a thread that reads standard input."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._look = self.finish = False

    def read(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._look = True
                self.finish = self.finish or line.strip() == "finish"
                self._changed.notify()
        if not self.finish:
            os._exit(0)  # the agent is gone, whatever this process is doing; another one goes on from what is there

    def wait(self, timeout_s: float | None) -> bool:
        """Until somebody says something; False: nobody did."""
        with self._changed:
            said = self._changed.wait_for(lambda: self._look, timeout_s)
            self._look = False
            return said


def run(replicator: Replicator, orders: _Orders, tell: Callable[[Told], None]) -> int:
    """Until all is done that was to be finished; return the exit code."""
    pause, progress_at, last = FIRST_PAUSE_S, time.monotonic(), Told()
    while True:
        finish = orders.finish  # before the turn: what was saved before it was said is seen
        told = replicator.turn()
        tell(told)
        if moved(told, last) or not finish:
            progress_at = time.monotonic()
        if moved(told, last):
            pause = FIRST_PAUSE_S
        last = told
        if finish and not told.waiting and not told.failures:
            return 0
        if finish and time.monotonic() - progress_at > FINISH_S:
            return UNFINISHED
        if orders.wait(pause if told.waiting or told.failures else None):
            pause = FIRST_PAUSE_S
        else:
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _tell(told: Told) -> None:
    print(json.dumps(asdict(told)), flush=True)


def _pulse(sent: int) -> None:
    print(json.dumps({"pulse": sent}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-s", type=float, default=0.0, help="megabytes a second that may be sent; 0: no limit")
    args = parser.parse_args()
    if absent := [name for name in (LOCAL_ENV, REMOTE_ENV) if not os.environ.get(name)]:
        parser.error(f"{' and '.join(absent)} must be set: what is copied, and where to")
    log_records.install()
    logging.basicConfig(level=logging.WARNING, format="[%(levelname)s] %(name)s: %(message)s")
    os.nice(NICE)
    orders = _Orders()
    threading.Thread(target=orders.read, name="orders", daemon=True).start()
    local, remote = (open_storage(os.environ[name]) for name in (LOCAL_ENV, REMOTE_ENV))
    replicator = Replicator(local, remote, Bucket(args.mb_s * 1e6), pulse=_pulse)
    return run(replicator, orders, _tell)


if __name__ == "__main__":
    sys.exit(main())
