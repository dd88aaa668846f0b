"""This node's copy of what another node has of the newest save: so a save outlives the loss of one node before it is copied.

Once all nodes were told to record a save, a thread of the agent asks the next node for its catalogue, fetches what that vouches
for, asks again, and lets it count if nothing has changed. `sharing.mirror_plan` decides, `sharing.mirrored` has the files.

Invariant: what other nodes may be about to fetch stays. So parts go only after a save of the round that runs was recorded: all
nodes have begun that round by then, and have what they resume from.

Nothing of this holds training up: a disk without room, or a node that does not answer, costs the copy, and is logged once.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from dataclasses import dataclass

from elastic_ext.agent.companion import Companion, LocalWorkers, RoundPlace
from elastic_ext.base import threads
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement.shared_dir import CATALOGUE_S, SharedDir
from elastic_ext.checkpoints.choice.listing import candidates_among
from elastic_ext.checkpoints.directory import save_place
from elastic_ext.checkpoints.directory.upkeep import TokenBucket
from elastic_ext.checkpoints.record.stored import KnownSave
from elastic_ext.checkpoints.sharing.catalogue import NodeEntry
from elastic_ext.checkpoints.sharing.mirror_plan import MirrorPlan, is_unchanged, mirrored_node, next_step
from elastic_ext.checkpoints.sharing.mirrored import commit_part, fetch_part, mirrored_parts, remove_leftovers, revoke
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import Entry, LocalStorage, open_storage
from elastic_ext.features.record.orders import Orders
from elastic_ext.features.record.pauses import LONGEST_S, Due

logger = logging.getLogger(__name__)

NOT_MIRRORED = "saves are not mirrored: %s"
CLOSE_S = 1.0  # for the thread to see that the agent ends


@dataclass(frozen=True)
class _Wish:
    """What the other node was told to record. round: a number of the round, here."""

    round: int
    peer: NodePeer
    saves: frozenset[KnownSave]


class PartMirror(Companion):
    """Keeps the part of another node, over all rounds of a job, on a thread of its own."""

    def __init__(self, local: LocalStorage, pattern: str = "", rate: float = 0.0) -> None:
        """pattern: of the names of checkpoints; "": of known formats. rate: bytes per second; 0: no limit."""
        self._local, self._pattern, self._bucket = local, pattern, TokenBucket(rate)
        self._source: int | None = None  # group rank of the node whose part is kept
        self._thread: threading.Thread | None = None
        self._fault = ""  # the last one; of a node that does not answer, its name
        self._changed = threading.Condition()  # held for what follows
        self._round = 0  # it is another one once the workers have ended
        self._peer: NodePeer | None = None
        self._wish: _Wish | None = None
        self._closed = False

    def begin(self, place: RoundPlace, shared: SharedDir | None) -> None:
        """A round begins. shared: how its nodes read each other's directories; None: they do not."""
        source = mirrored_node(place.node, place.nodes)
        peer = shared.peer(source) if shared is not None and source is not None else None
        with self._changed:
            self._source, self._peer, self._wish = source, peer, None
        if peer is not None and self._thread is None:
            self._thread = threads.started(self._run, "elastic_ext-mirror", logger.warning, NOT_MIRRORED)

    def recorded(self, orders: Orders) -> None:
        """All nodes were told to record their parts of these saves. Any thread may call this."""
        saves = frozenset(
            KnownSave(orders.attempt, write.order, write.name)
            for write in orders.writes
            if any(each.node == self._source and each.files for each in write.lists)
        )
        with self._changed:
            if saves and self._peer is not None:
                self._wish = _Wish(self._round, self._peer, saves)
                self._changed.notify_all()

    def workers_ended(self, workers: LocalWorkers) -> None:
        with self._changed:
            self._round += 1

    def close(self) -> None:
        """Stop. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # On the thread.

    def _run(self) -> None:
        try:
            self._tried(None)
            while (wish := self._next()) is not None:
                self._tried(wish)
        except Exception:  # the top of a thread
            logger.exception(NOT_MIRRORED, "a fault of elastic_ext")

    def _next(self) -> _Wish | None:
        """Wait for what is to be kept; return None once the agent ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._wish is not None or self._closed)
            wish, self._wish = self._wish, None
            return wish if not self._closed else None

    def _tried(self, wish: _Wish | None) -> None:
        """Keep what is wished for, and then free what does not count."""
        try:
            try:
                if wish is not None:
                    self._keep(wish)
            finally:
                remove_leftovers(self._local)
        except OSError as error:
            text = error.strerror or str(error)
            is_away = wish is not None and isinstance(error, (ConnectionError, TimeoutError))
            fault = wish.peer.name if wish is not None and is_away else text  # a dead node ends in many ways
            if fault != self._fault and not self._closed:
                logger.warning(NOT_MIRRORED, text)
            self._fault = fault

    def _keep(self, wish: _Wish) -> None:
        due = Due()
        while not self._closed:
            there = wish.peer.catalogue(time.monotonic() + CATALOGUE_S)
            plan = next_step(there, wish.saves, mirrored_parts(self._local), self._may_be)
            if plan.free and not self._may_free(plan, wish):
                return
            if not (plan.fetch or plan.waits):
                return
            if plan.fetch and self._fetch(plan, wish.peer):
                self._fault = ""
                continue
            due = due.later(time.monotonic())
            if due.pause >= LONGEST_S or self._has_newer(due.pause):
                logger.debug("what %s has is not mirrored: %s", wish.peer.name, plan.why)
                return

    def _has_newer(self, pause_s: float) -> bool:
        """Wait; return whether there is something else to do."""
        with self._changed:
            return self._changed.wait_for(lambda: self._wish is not None or self._closed, pause_s)

    def _may_free(self, plan: MirrorPlan, wish: _Wish) -> bool:
        """Let parts no longer count, if the round still runs; return whether they do not."""
        with self._changed:  # so the end of a round waits for this, and what is listed after it does not have them
            if wish.round != self._round:
                return False
            revoke(self._local, plan.free)
        logger.debug("no longer mirrored: %s", ", ".join(each.name for each in plan.free))
        remove_leftovers(self._local)
        return True

    def _fetch(self, plan: MirrorPlan, peer: NodePeer) -> bool:
        """Return whether all that was to be fetched counts now."""
        self._refuse_without_room(plan.size)
        for part in plan.fetch:
            fetch_part(self._local, part, lambda path, size, file: peer.copy(path, size, file, self._throttle))
        there = peer.catalogue(time.monotonic() + CATALOGUE_S)
        same = [each for each in plan.fetch if is_unchanged(each, there)]
        for part in same:
            commit_part(self._local, part)
            logger.debug("%s of %s is mirrored", part.name, peer.name)
        return len(same) == len(plan.fetch)

    def _throttle(self, size: int) -> None:
        pause = self._bucket.take(size, time.monotonic())
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, pause):
                raise OSError(errno.ECANCELED, "the agent ends")

    def _refuse_without_room(self, size: int) -> None:
        """Raise OSError if the script would lack room for its saves."""
        free = shutil.disk_usage(self._local.address).free
        place = save_place.decide(free - size, save_place.last_size(self._local))
        if not place.local:
            text = f"a part of another node has {size / 1e6:.0f} MB, {free / 1e6:.0f} MB are free, and your saves need the rest"
            raise OSError(errno.ENOSPC, text, self._local.address)

    def _may_be(self, entry: NodeEntry) -> bool:
        size = sum(file.size for file in entry.files)
        found = Entry(entry.name, self._local.path(entry.name), entry.is_dir, size, entry.mtime)
        return bool(candidates_among([found], self._pattern))


def of_settings(settings: Settings) -> PartMirror | None:
    """Return what keeps another node's part in `local_dir`; None: that is not a directory of this node."""
    local = open_storage(settings.local_dir or "")
    if not isinstance(local, LocalStorage):
        return None
    return PartMirror(local, settings.checkpoint_pattern, settings.copy_mb_s * 1e6)
