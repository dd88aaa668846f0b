"""Agree on the checkpoint that a round resumes from: the same answer on every node.

The agent of node 0 looks once per round (`remote`) and sends its choice to the others (`messages`). They wait until they see the
checkpoint themselves, because a shared directory may be late to show what another host has written.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

from elastic_ext.base.checkpoint_variables import resume_variables
from elastic_ext.base.errors import ElasticExtError, RoundOver, StorageAway, UsageError
from elastic_ext.base.exchange import Exchange
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import in_memory, messages, peering
from elastic_ext.checkpoints.choice.in_memory import NONE_SAVED, NodeMemory, Saved
from elastic_ext.checkpoints.choice.messages import Agreement, Offers
from elastic_ext.checkpoints.choice.peering import PeerPlan, plan_of
from elastic_ext.checkpoints.choice.remote import RemoteTier, newer
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.tiers import Offer
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
        passed_over: it is none, but there are entries that may be checkpoints: a script that knows them may resume by itself.
        local: it is in the nodes' local directories; `path` is this node's part of it.
        lost: why a newer copy in the nodes' memory is not used; "" if there is none. Only node 0 knows.
        peers: how this node exchanges parts of copies in memory with others; None: it does not.
        files: by rank, the path of the file that this rank wrote, if each wrote its own; `path` then has a "*" for the rank.
    """

    path: str = ""
    step: int | None = None
    reason: str = ""
    passed_over: bool = False
    local: bool = False
    lost: str = ""
    peers: PeerPlan | None = None
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
class Place:
    """This node in the round.

    Attributes:
        node: its group rank.
        nodes: number of nodes.
        workers: number of its workers.
        base_rank: the rank of its first worker.
        memory: its directory for copies in memory; "" for none.
        refused: names of copies in memory that must not be used.
        peer: host and port where its agent takes parts of copies from others; "": it takes none.
        saved: the newest checkpoint that it knows of; None: it cannot know.
    """

    node: int = 0
    nodes: int = 1
    workers: int = 1
    base_rank: int = 0
    memory: str = ""
    refused: tuple[str, ...] = ()
    peer: str = ""
    saved: Saved | None = NONE_SAVED


def agree(settings: Settings, run_id: str, exchange: Exchange, place: Place) -> Resumption:
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
    resolution = _Resolution(settings, settings.checkpoint_dir, run_id, place)
    exchange.offer(messages.encode(resolution.offers()))
    if place.node != 0:
        agreement = messages.read_agreement(exchange.choice(ANSWER_S))
        return resolution.seen(agreement, time.monotonic() + VISIBLE_S)
    try:
        received = resolution.received(exchange)
        agreement = _once_there(lambda: resolution.decide(received))
    except RoundOver:
        raise
    except (ElasticExtError, OSError) as error:
        exchange.publish(messages.encode(messages.failure(error)))
        raise
    exchange.publish(messages.encode(agreement))
    return replace(resolution.resumption(agreement), lost=resolution.lost)


def _once_there(decide: Callable[[], Agreement]) -> Agreement:
    """Decide once the storage answers. The workers of all nodes wait: still better than to lose the nodes, or work."""

    def look() -> Agreement | OSError:
        try:
            return decide()
        except OSError as error:
            if not is_away(error):
                raise
            return error

    found = look()
    if isinstance(found, OSError):
        logger.warning("the storage of the checkpoints does not answer: %s; waiting for it, %g s at most", found, AWAY_S)
        found = poll(look, lambda seen: isinstance(seen, Agreement), time.monotonic() + AWAY_S)
    if isinstance(found, OSError):
        raise StorageAway(f"the storage of the checkpoints has not answered for {AWAY_S:g} s: {printable(str(found))}") from found
    return found


class _Resolution:
    """One node's part in one agreement. Opens checkpoint_dir and local_dir once, when first needed.

    Attributes:
        lost: see `Resumption`; set by `decide`.
    """

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str, place: Place) -> None:
        self._settings, self._place = settings, place
        self._memory = open_storage(place.memory) if place.memory else None
        self._remote = RemoteTier(settings, checkpoint_dir, run_id)
        self.lost = ""

    @cached_property
    def _local(self) -> Storage | None:
        """The local directory; None without a local tier, or if resume_from overrides it."""
        if self._settings.local_dir is None or self._settings.resume_from:
            return None
        return open_storage(self._settings.local_dir)

    @cached_property
    def _asked_for(self) -> Storage | None:
        """The directory of the checkpoint if resume_from is a path or URL; else None."""
        resume_from = self._settings.resume_from.rstrip("/")
        return open_parent(resume_from)[0] if "/" in resume_from else None

    def offers(self) -> Offers:
        """Return what this node has in its own tiers."""
        local, place = self._in_local_dir(), self._place
        return Offers(
            usable=local is not None,
            offers=tuple(local or ())[: messages.MAX_OFFERS],
            memory=tuple(self._in_memory())[: messages.MAX_OFFERS],
            refused=place.refused,
            workers=place.workers,
            peer=place.peer,
            domain=self._settings.topology or "",
            has_memory=self._memory is not None,
            saved=place.saved,
        )

    def _in_local_dir(self) -> list[Offer] | None:
        """Return the offers from this node's local directory; None if it has no usable local tier."""
        if self._local is None:
            return None
        try:
            return tiers.offers(self._local)
        except OSError as error:
            logger.warning("cannot list local_dir %s: %s", self._local.address, error)
            return None

    def _in_memory(self) -> list[Offer]:
        """Return the offers of this node's memory."""
        try:
            return tiers.offers(self._memory) if self._memory is not None else []
        except OSError as error:
            logger.warning("cannot list the copies in memory: %s", error)
            return []

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
            return [messages.read_offers(text) for text in texts]
        except RecordError as error:
            logger.warning("not resuming from %s: %s", where, printable(str(error)))
            return []

    def decide(self, received: Sequence[Offers]) -> Agreement:
        """Choose the newest of all tiers, on node 0. If the remote directory has nothing newer than the others, only list it.

        Raises as `agree` does, and OSError if the storage does not answer and must be waited for.
        """
        away = self._remote.look() if any(each.offers or each.memory for each in received) else None
        quarantined = self._remote.quarantined
        nodes = [NodeMemory(each.workers, each.memory, each.has_memory, each.saved) for each in received]
        memory = in_memory.newest_whole(nodes, quarantined.union(*(each.refused for each in received)))
        if away is None:
            upper = _of_memory(memory.offer), _of_local(self._newest_local(received, quarantined))
            found = [each for each in upper if each is not None]
            agreement = self._remote.newest(reduce(newer, found) if found else None)
        else:
            local = tiers.newest_loadable(each.offers for each in received)
            agreement = self._without_storage(away, memory.offer, in_memory.needs_no_storage(memory.offer, local, nodes))
        for name, reason in memory.lost[:1]:
            if order_or_oldest(name) > order_or_oldest(agreement.name):
                self.lost = printable(reason)
                logger.warning("not resuming from %s in memory, but from an older checkpoint: %s", printable(name), self.lost)
        return replace(agreement, peers=peering.arrange(received, memory if agreement.memory else None))

    def _without_storage(self, away: OSError, copy: Offer | None, enough: bool) -> Agreement:
        """Return a copy in memory to resume from while the storage is away. Raises `away` if the storage must be waited for.

        enough: the copy needs no storage. Yet what has answered before may have shown something newer.
        """
        agreement = _of_memory(copy)
        if agreement is None or not enough or self._remote.has_answered:
            raise away
        logger.warning(
            "the storage of the checkpoints does not answer: %s; resuming without it from %s in memory, which is as new as any "
            "checkpoint that the nodes know of",
            away,
            printable(agreement.name),
        )
        return agreement

    def _newest_local(self, received: Sequence[Offers], quarantined: Collection[str]) -> Offer | None:
        """Return the newest checkpoint whose parts are all in the nodes' local directories."""
        if self._local is None or not all(each.usable for each in received):
            return None
        found = tiers.newest_loadable([each.offers for each in received], quarantined)
        for offer, ranks in tiers.missing_ranks(each.offers for each in received).items():
            is_newer = found is None or order_or_oldest(offer.name) > order_or_oldest(found.name)
            if ranks and is_newer and offer.name not in quarantined:
                missing = ", ".join(map(str, ranks))
                logger.warning("not resuming from %s: the files of ranks %s are in no node's local_dir", offer.name, missing)
        return found

    def resumption(self, agreement: Agreement) -> Resumption:
        """Return what this node resumes from. Raises UsageError if this node lacks the agreed directory."""
        step, reason = agreement.step, printable(agreement.reason[: messages.MAX_TEXT])
        peers = plan_of(agreement.peers, self._place.node)
        if not agreement.name:
            return Resumption("", step, reason, agreement.passed_over, peers=peers)
        directory = self._directory(agreement)
        files = names.files_by_rank(directory, agreement.name)
        return Resumption(directory.path(agreement.name), step, reason, local=agreement.local, peers=peers, files=files)

    def seen(self, agreement: Agreement, deadline: float) -> Resumption:
        """Return the `resumption`, after waiting until this node sees a checkpoint that all nodes share.

        Also raises UsageError if it does not see it by the deadline (time.monotonic()).
        """
        found = self.resumption(agreement)
        if found.path and not (agreement.local or agreement.memory):
            await_visible(self._directory(agreement), agreement.name, deadline)
        return found

    def _directory(self, agreement: Agreement) -> Storage:
        shown = printable(agreement.name)
        if agreement.local and self._local is None:
            raise UsageError(
                f"group rank 0 resumes from {shown} in local_dir, but this node has none: set local_dir on all nodes"
            )
        if agreement.asked_for and self._asked_for is None:
            raise UsageError(
                f"group rank 0 resumes from {shown} in a directory other than checkpoint_dir, but resume_from on this node "
                "names none: set the same resume_from on all nodes"
            )
        if agreement.memory and self._memory is None:
            raise UsageError(
                f"group rank 0 resumes from {shown} in memory, but this node has no memory for copies: set memory_every and "
                "memory_limit alike on all nodes, and give each a tmpfs at /dev/shm"
            )
        own = self._memory if agreement.memory else self._local if agreement.local else None
        found = own or (self._asked_for if agreement.asked_for else self._remote.storage)
        assert found is not None, "checked above"
        return found


def _of_memory(offer: Offer | None) -> Agreement | None:
    if offer is None:
        return None
    return Agreement(offer.name, offer.step, "newest copy that is whole in the nodes' memory", memory=True)


def _of_local(offer: Offer | None) -> Agreement | None:
    if offer is None:
        return None
    saved_by = f"{offer.nodes} node{'s' * (offer.nodes != 1)}"
    reason = f"newest with all its parts in the nodes' local_dir, saved by {saved_by}"
    return Agreement(offer.name, offer.step, reason, local=True)


def await_visible(storage: Storage, name: str, deadline: float) -> None:
    """Wait until this node sees a complete checkpoint. Raises UsageError at the deadline (time.monotonic())."""

    def look() -> Inspection | None:
        entry = names.entry_of(storage, name)
        return detect.check(storage, entry, detect.plugins(), named=True) if entry is not None else None

    found = poll(look, lambda seen: seen is not None and seen.complete, deadline)
    if found is None or not found.complete:
        reason = found.reason if found is not None else "nothing is there"
        raise UsageError(
            f"{platform.node()} does not see the checkpoint {storage.path(name)} that the other nodes resume from ({reason}): "
            "put checkpoint_dir on storage that every node mounts"
        )
