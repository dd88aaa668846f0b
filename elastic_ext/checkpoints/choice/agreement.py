"""Agree on the checkpoint that a round resumes from: the same answer on every node.

It is the newest of all sources: copies in the nodes' memory, their local directories, and `checkpoint_dir`, which all nodes share
(`sources`). Each node offers what it has in its own; the agent of node 0 chooses, once per round, and sends its choice to the
others (`offers` has the messages). They wait until they see the checkpoint themselves, because a shared directory may be late to
show what another host has written.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TypeVar

from elastic_ext.base.checkpoint_variables import resume_variables
from elastic_ext.base.contracts import Exchange
from elastic_ext.base.errors import ElasticExtError, RoundOver, StorageAway, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import offers
from elastic_ext.checkpoints.choice.offers import NONE_SAVED, Agreement, MemoryChoice, NewestSaved, Offers
from elastic_ext.checkpoints.choice.sources import RemoteTier, from_local_dirs, from_memory, listed, newer
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats import detect, names
from elastic_ext.checkpoints.formats.inspection import Inspection
from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from elastic_ext.checkpoints.storage import Storage, is_away, open_parent, open_storage, poll

logger = logging.getLogger(__name__)

VISIBLE_S = 60.0  # limit for the other nodes to see a checkpoint (NFS caches attributes for up to 60 s: acregmax)
ANSWER_S = 30 * 60.0  # limit for node 0 to answer: verifying a terabyte at 1 GB/s takes 17 minutes
AWAY_S = 10 * 60.0  # limit for a storage that does not answer: most outages of object stores are shorter
OFFERS_S = 60.0  # limit for all nodes to list their local directories; a dead node never answers


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a round resumes from.

    Attributes:
        path: local path or URL of the checkpoint; "": the round begins from nothing.
        step: None if neither its content nor its name gives one.
        reason: why this one, for people.
        passed_over: none was selected, but some entries may be checkpoints: a script that knows them may resume from one.
        local: it is in the nodes' local directories; `path` is this node's part of it.
        lost: why a newer copy in the nodes' memory is not used; "" if there is none. Only node 0 knows.
        files: by rank, the path of the file that this rank wrote, if each wrote its own; `path` then has a "*" for the rank.
    """

    path: str = ""
    step: int | None = None
    reason: str = ""
    passed_over: bool = False
    local: bool = False
    lost: str = ""
    files: Mapping[int, str] = field(default_factory=dict)

    @property
    def at(self) -> int | None:
        """The step at which the round begins; None if unknown."""
        return self.step if self.path or self.passed_over else 0

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for the workers."""
        return resume_variables(self.path, self.step)

    def variables_of(self, rank: int) -> dict[str, str]:
        """The same for one rank, which gets the path of its own file; empty if it gets what all get."""
        return resume_variables(self.files[rank], self.step) if rank in self.files else {}


@dataclass(frozen=True)
class NodeInRound:
    """This node in the round.

    Attributes:
        node: its group rank.
        nodes: number of nodes.
        workers: number of its workers.
        memory: its directory for copies in memory; "" for none.
        refused: names of copies in memory that must not be used.
        saved: the newest checkpoint that it knows of; None: it cannot know.
    """

    node: int = 0
    nodes: int = 1
    workers: int = 1
    memory: str = ""
    refused: tuple[str, ...] = ()
    saved: NewestSaved | None = NONE_SAVED


def agree(settings: Settings, run_id: str, exchange: Exchange, place: NodeInRound) -> Resumption:
    """Return what the round resumes from. All nodes of the round call this; all return the same result or raise the same error.

    Only the path of a checkpoint in the nodes' own tiers differs: each node gets the path of its own part.

    Raises:
        BadCheckpoints: checkpoints exist, but none may be used.
        UsageError: a setting is wrong, or this node does not see the checkpoint that the others see.
        StorageAway: the storage has not answered for AWAY_S, and no copy in memory makes up for that.
        OSError: the storage refuses in another way (on node 0; a UsageError on the others).
        RoundOver: the round ended before all nodes knew the answer.
    """
    if settings.checkpoint_dir is None:
        return Resumption()
    side = _NodeSide(settings, settings.checkpoint_dir, run_id, place)
    exchange.offer(offers.encode(side.offers()))
    if place.node != 0:
        return side.seen(offers.read_agreement(exchange.choice(ANSWER_S)), time.monotonic() + VISIBLE_S)
    try:
        received = side.received(exchange)
        agreement = once_there(lambda: side.decide(received))
    except RoundOver:
        raise
    except (ElasticExtError, OSError) as error:
        exchange.publish(offers.encode(offers.failure(error)))
        raise
    exchange.publish(offers.encode(agreement))
    return replace(side.resumption(agreement), lost=side.lost)


T = TypeVar("T")


def once_there(act: Callable[[], T]) -> T:
    """Act once the storage answers. The workers of all nodes wait: still better than to lose the nodes, or work.

    Raises StorageAway, if it does not for AWAY_S, and what `act` raises.
    """

    def look() -> T | OSError:
        try:
            return act()
        except OSError as error:
            if not is_away(error):
                raise
            return error

    found = look()
    if isinstance(found, OSError):
        logger.warning("the storage of the checkpoints does not answer: %s; waiting for it, %g s at most", found, AWAY_S)
        found = poll(look, lambda seen: not isinstance(seen, OSError), time.monotonic() + AWAY_S)
    if isinstance(found, OSError):
        raise StorageAway(f"the storage of the checkpoints has not answered for {AWAY_S:g} s: {printable(str(found))}") from found
    return found


class _NodeSide:
    """One node's part in one agreement. Opens each directory once.

    Attributes:
        lost: see `Resumption`; set by `decide`.
    """

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str, place: NodeInRound) -> None:
        self._settings, self._place = settings, place
        local_dir = settings.local_dir if not settings.resume_from else None  # which overrides it
        self._local = open_storage(local_dir) if local_dir is not None else None
        self._memory = open_storage(place.memory) if place.memory else None
        self._remote = RemoteTier(settings, checkpoint_dir, run_id)
        self.lost = ""

    @cached_property
    def _asked_for(self) -> Storage | None:
        """The directory of the checkpoint if resume_from is a path or URL; else None."""
        resume_from = self._settings.resume_from.rstrip("/")
        return open_parent(resume_from)[0] if "/" in resume_from else None

    def offers(self) -> Offers:
        """Return what this node has in its own tiers."""
        local, place = listed(self._local, f"local_dir {self._settings.local_dir}"), self._place
        return Offers(
            usable=local is not None,
            offers=local or (),
            memory=listed(self._memory, "the copies in memory") or (),
            refused=place.refused,
            has_memory=self._memory is not None,
            saved=place.saved,
        )

    def received(self, exchange: Exchange) -> list[Offers]:
        """Return what the nodes have in their own tiers, by rank; nothing if that is not known of all of them."""
        if self._local is None and self._memory is None:
            return []
        where = "local_dir" if self._memory is None else "memory or local_dir"
        texts = exchange.offers(OFFERS_S)
        if texts is None:
            logger.warning("not resuming from %s: a node has none, or did not report its checkpoints in time", where)
            return []
        try:
            return [offers.read_offers(text) for text in texts]
        except RecordError as error:
            logger.warning("not resuming from %s: %s", where, printable(str(error)))
            return []

    def decide(self, received: Sequence[Offers]) -> Agreement:
        """Choose the newest of all sources, on node 0. If the remote directory has nothing newer than the others, only list it.

        Raises as `agree` does, and OSError if the storage does not answer and must be waited for.
        """
        away = self._remote.refresh() if any(each.offers or each.memory for each in received) else None
        memory = offers.newest_whole(received, self._remote.quarantined.union(*(each.refused for each in received)))
        if away is None:
            own = from_memory(memory), from_local_dirs(received, self._remote.quarantined)
            found = [each for each in own if each is not None]
            agreement = self._remote.newest(reduce(newer, found) if found else None)
        else:
            agreement = self._without_storage(away, memory, received)
        for name, reason in memory.lost[:1]:
            if order_or_oldest(name) > order_or_oldest(agreement.name):
                self.lost = printable(reason)
                logger.warning("not resuming from %s in memory, but from an older checkpoint: %s", printable(name), self.lost)
        return agreement

    def _without_storage(self, away: OSError, memory: MemoryChoice, received: Sequence[Offers]) -> Agreement:
        """Return a copy in memory to resume from while the storage is away. Raises `away` if the storage must be waited for."""
        agreement, local = from_memory(memory), tiers.newest_loadable(each.offers for each in received)
        # What has answered before may have shown something newer.
        if agreement is None or self._remote.has_answered or not offers.needs_no_storage(memory.offer, local, received):
            raise away
        logger.warning(
            "the storage of the checkpoints does not answer: %s; resuming without it from %s in memory, which is as new as any "
            "checkpoint that the nodes know of",
            away,
            printable(agreement.name),
        )
        return agreement

    def resumption(self, agreement: Agreement) -> Resumption:
        """Return what this node resumes from. Raises UsageError if this node lacks the agreed directory."""
        step, reason = agreement.step, printable(agreement.reason[: offers.MAX_TEXT])
        if not agreement.name:
            return Resumption("", step, reason, agreement.passed_over)
        directory = self._directory(agreement)
        files = names.files_by_rank(directory, agreement.name)
        return Resumption(directory.path(agreement.name), step, reason, local=agreement.local, files=files)

    def seen(self, agreement: Agreement, deadline: float) -> Resumption:
        """Return the `resumption`, after waiting until this node sees a checkpoint that all nodes share.

        Also raises UsageError if it does not see it by the deadline (time.monotonic()).
        """
        found = self.resumption(agreement)
        if found.path and not (agreement.local or agreement.memory):
            await_visible(self._directory(agreement), agreement.name, deadline)
        return found

    def _directory(self, agreement: Agreement) -> Storage:
        """Return where an agreed checkpoint is, as this node opens it. Raises UsageError if this node has no such directory."""
        if agreement.memory:
            found, lacks = (
                self._memory,
                "in memory, but this node has no memory for copies: set memory_every and memory_limit alike ",
            )
            lacks += "on all nodes, and give each a tmpfs at /dev/shm"
        elif agreement.local:
            found, lacks = self._local, "in local_dir, but this node has none: set local_dir on all nodes"
        elif agreement.asked_for:
            found, lacks = (
                self._asked_for,
                "in a directory other than checkpoint_dir, but resume_from on this node names none: set ",
            )
            lacks += "the same resume_from on all nodes"
        else:
            return self._remote.storage
        if found is None:
            raise UsageError(f"group rank 0 resumes from {printable(agreement.name)} {lacks}")
        return found


def await_visible(storage: Storage, name: str, deadline: float) -> None:
    """Wait until this node sees a complete checkpoint. Raises UsageError at the deadline (time.monotonic())."""

    def look() -> Inspection | None:
        entry = names.entry_of(storage, name)
        return detect.check(storage, entry, named=True) if entry is not None else None

    found = poll(look, lambda seen: seen is not None and seen.complete, deadline)
    if found is None or not found.complete:
        reason = found.reason if found is not None else "nothing is there"
        raise UsageError(
            f"{platform.node()} does not see the checkpoint {storage.path(name)} that the other nodes resume from ({reason}): "
            "put checkpoint_dir on storage that every node mounts"
        )
