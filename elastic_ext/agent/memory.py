"""The agent's part in copies of the state in memory: it owns the directory, bounds it, and exchanges parts with other nodes.

The directory is in the agent's private directory on tmpfs, and goes with that: the agent removes it at its end, the reaper if the
agent is killed. If both are killed at once (a batch system ends a job), the next agent on the host removes it. A lock tells whose
agent lives: the agent holds it from before there are copies, and the kernel lets it go with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from elastic_ext.agent import launch
from elastic_ext.base import files
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice.offers import MAX_OFFERS, NONE_SAVED, PeerPlan, Saved
from elastic_ext.checkpoints.choice.resolution import Resumption
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.memory.contract import Room
from elastic_ext.checkpoints.memory.peers import Circle, PeerMetrics, PeerService
from elastic_ext.checkpoints.storage import open_storage, split_path
from elastic_ext.rendezvous.round_store import listen_at
from elastic_ext.workers.standby.memory import available

logger = logging.getLogger(__name__)

COPIES, LOCK = "memory", "memory.lock"  # in the agent's private directory
SHARE = 4  # a quarter of the memory that is free, and what the copies already have


class MemoryCopies:
    """The copies of this node's workers, over all rounds. The service for other nodes begins with the first round of several.

    Attributes:
        refused: names of copies that no round may resume from.
        saved: the newest checkpoint or copy that this agent knows of; None: it cannot know.
        checkpoint_step: step of the newest checkpoint that it knows of; 0: there is none, None: it does not know.
    """

    def __init__(self, settings: Settings, run_dir: str, address: Callable[[], str], metrics: PeerMetrics) -> None:
        """run_dir: the agent's private directory. address: returns the one by which other nodes reach this one."""
        self._settings, self._run_dir, self._address, self._metrics = settings, run_dir, address, metrics
        self._service: PeerService | None = None
        self._lock: int | None = None  # a descriptor
        self.refused: tuple[str, ...] = ()
        self.saved: Saved | None = NONE_SAVED
        self.checkpoint_step: int | None = None

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(self, *_: object) -> None:
        if self._service is not None:
            self._service.close()
        if self._lock is not None:
            with contextlib.suppress(OSError):  # first, or another agent would take these copies for orphans before they go
                os.unlink(os.path.join(self._run_dir, LOCK))
            os.close(self._lock)

    def open(self, nodes: int) -> Room | None:
        """Return the room for a round of so many nodes; None if there is none."""
        settings = self._settings
        if not settings.copies_to_memory or not self._run_dir.startswith(launch.IN_MEMORY):
            return None
        directory = self._directory
        try:
            if self._lock is None:
                remove_orphans()
                self._lock = files.own(self._run_dir, LOCK)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            limit = (available() + _used(directory)) // SHARE if settings.memory_limit is None else settings.memory_limit
        except (OSError, ValueError) as error:
            logger.warning("no copies of the state in memory: %s", error)
            return None
        if nodes > 1 and self._service is None:
            self._service = self._serve(directory)
        return Room(directory, limit, settings.memory_every)

    @property
    def _directory(self) -> str:
        return os.path.join(self._run_dir, COPIES)

    def has(self, path: str) -> bool:
        """Return whether this is the path of a copy in memory."""
        return os.path.dirname(path) == self._directory

    def newest_step(self) -> int | None:
        """Return the step of the newest copy of which this node has parts; None if there is none."""
        try:
            found = tiers.offers(open_storage(self._directory))
        except (OSError, ElasticExtError) as error:
            logger.warning("cannot list the copies in memory: %s", error)
            return None
        return next((each.step for each in found if each.name not in self.refused), None)

    def refuse_all(self) -> None:
        """Have no round resume from the copies that exist now, wherever their parts are. Raises OSError."""
        storage = open_storage(self._directory)
        names = tiers.own_checkpoints(storage)
        self.refused = tuple(dict.fromkeys([*names, *self.refused]))[:MAX_OFFERS]
        for name in names:
            storage.remove_tree(name)

    def _serve(self, directory: str) -> PeerService | None:
        path, rate = os.path.join(self._run_dir, "peers"), self._settings.memory_mb_s * 1e6
        try:
            return PeerService(listen_at(self._address()), path, open_storage(directory), rate, self._metrics)
        except (OSError, ElasticExtError) as error:
            logger.warning("copies in memory stay on the node that makes them: %s", error)
            return None

    @property
    def peer_address(self) -> str:
        """Where the agents of other nodes reach this one, as `host:port`; "" if they cannot."""
        return f"{_bracketed(self._address())}:{self._service.port}" if self._service is not None else ""

    def exchange(self, room: Room, resumed: Resumption, own: range, over: Callable[[], bool]) -> Room:
        """Begin a round's exchange; return the room that is left for this node's own copies.

        This gets the parts that this node lacks of the copy that the round resumes from. A failure is logged: the workers then
        send each other what they lack, or load an older checkpoint.

        own: the ranks of this node. over: returns whether the round is over.
        """
        plan, service = resumed.peers, self._service
        if service is None:
            return room
        half = room.limit // 2
        try:
            service.adopt(Circle(plan.key, split_address(plan.keeper), own, half) if plan is not None else None)
            if plan is None:
                return room
            if plan.fetch:
                _fetch(service, resumed, plan, over)
        except (ElasticExtError, OSError, ValueError) as error:
            logger.warning("copies in memory cannot be had from other nodes: %s", error)
        return replace(room, limit=half, peer=service.socket_path)


def remove_orphans() -> None:
    """Remove the private directories, with copies, of agents of this user that live no more."""

    def first(folder: str) -> None:
        logger.warning("removing the copies in memory of an agent that was killed with all its helpers: %s", folder)
        shutil.rmtree(os.path.join(folder, COPIES), ignore_errors=True)  # most of it; the lock goes with the rest

    files.remove_orphans(f"{launch.IN_MEMORY}/{launch.RUN_DIR}*", LOCK, first)


def _fetch(service: PeerService, resumed: Resumption, plan: PeerPlan, over: Callable[[], bool]) -> None:
    began = time.monotonic()
    service.fetch(split_path(resumed.path)[1], plan.digest, {rank: split_address(source) for rank, source in plan.fetch}, over)
    logger.info("%s parts of %s came from other nodes in %.3g s", len(plan.fetch), resumed.path, time.monotonic() - began)


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _used(directory: str) -> int:
    """Return the bytes that the copies have."""
    return sum(_size(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


def _size(path: str) -> int:
    """Return the bytes of a file; 0 if it has gone: parts of other nodes arrive, and replace older ones, at any moment."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
