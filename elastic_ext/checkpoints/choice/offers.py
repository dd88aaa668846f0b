"""What the nodes of a round offer each other to resume from, and what node 0 answers. Pure. `base.contracts.Exchange` carries it.

    every node -> node 0        Offers      the checkpoints in its local directory and its memory, newest first
    node 0 -> every other node  Agreement   the checkpoint that the round resumes from, or why node 0 has none

A message is one JSON object: `schema` (SCHEMA) and the fields of its class; an offer is the JSON object of a `tiers.Offer`. A
reader refuses any other schema and ignores unknown fields.

A message gives a checkpoint's name in a directory that each node knows from its own settings, never a path. So an intruder in the
exchange can make the nodes load another of the job's checkpoints, but never a file of the intruder's.

A copy in memory is whole if each part is on some node. If as many ranks on as many nodes have made it, each node needs the parts
of its ranks, and the agents of other nodes send it what it lacks. Otherwise the workers send each other what they need.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from elastic_ext.base import records
from elastic_ext.base.errors import BadCheckpoints, StorageAway, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Count, Name, NameOrEmpty
from elastic_ext.checkpoints.directory.tiers import Offer, missing_ranks, ranks_of
from elastic_ext.checkpoints.formats.manifest import order_of, order_or_oldest

NEEDED = "each node needs a tmpfs at /dev/shm, and the same memory_every and memory_limit"


@dataclass(frozen=True)
class NewestSaved:
    """The newest checkpoint that a node knows of.

    Attributes:
        round: the last round of the node; 0: it has been in none.
        step: the greatest step that this round resumed from or that its workers have seen committed; 0: none.
    """

    round: Count = 0
    step: int = 0


NONE_SAVED = NewestSaved()


@dataclass(frozen=True)
class Move:
    """Rank `rank`'s part must go from node `source` to node `target`."""

    rank: Count
    source: Count
    target: Count


SCHEMA = 1
MAX_TEXT = 2000  # characters of a reason or an error
MAX_OFFERS = 16  # per node, the newest
MAX_NAME = 1024  # characters of a checkpoint's name: the longest key in S3


@dataclass(frozen=True)
class Offers:
    """The checkpoints in one node's own tiers.

    Attributes:
        usable: the node has a local tier, and rounds may resume from it.
        offers: in its local directory.
        memory: copies in its memory.
        saved: the newest checkpoint that the node knows of; None: it cannot know.
        has_memory: the node has memory for copies, even if it holds none; without it, no round of it may resume from one.
        refused: names of copies in memory, on whatever node, that this node knows to be bad.
        workers: how many ranks the node runs in this round.
        peer: host and port where its agent takes parts of copies in memory, as `10.0.0.1:4321`; "": it takes none.
        domain: its failure domain (the setting `topology`); "": not known.
    """

    usable: bool = False
    offers: tuple[Offer, ...] = ()
    memory: tuple[Offer, ...] = ()
    refused: tuple[Name, ...] = ()
    workers: Count = 0
    peer: NameOrEmpty = ""
    domain: str = ""
    has_memory: bool = False
    saved: NewestSaved | None = None


@dataclass(frozen=True)
class PeerExchange:
    """How the nodes of a round exchange parts of copies in memory.

    Attributes:
        key: by which their agents know each other; new in each round.
        addresses: of the agents; see `Offers.peer`.
        keepers: for each node, which one keeps its parts.
        digest: of the manifest of the copy that the round resumes from; "" if that is not in memory.
        moves: the parts of it that must go to another node first.
    """

    key: Name
    addresses: tuple[Name, ...]
    keepers: tuple[Count, ...]
    digest: NameOrEmpty = ""
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """The checkpoint that a round resumes from.

    Attributes:
        name: name of the checkpoint; "": begin from nothing.
        step: None if neither its content nor its name gives one.
        reason: why this one, for people.
        passed_over: there is no name, but there are entries that may be checkpoints.
        local: it is in the nodes' local directories, each of which has a part.
        memory: it is a copy in the nodes' memory, each of which has a part.
        asked_for: it is in the directory that the setting resume_from names, not in checkpoint_dir.
        peers: how the nodes exchange parts of copies in memory; None: they do not.
        error: why node 0 has no answer, for people; "" if it has one.
        bad: the error is that checkpoints exist, but none may be used.
        away: the error is that the storage does not answer.
    """

    name: str
    step: int | None = None
    reason: str = ""
    passed_over: bool = False
    local: bool = False
    memory: bool = False
    asked_for: bool = False
    peers: PeerExchange | None = None
    error: str = ""
    bad: bool = False
    away: bool = False


def encode(message: Offers | Agreement) -> str:
    """Return a message as JSON text."""
    return json.dumps({"schema": SCHEMA, **asdict(message)})


def failure(error: Exception) -> Agreement:
    """Return the message for an error that keeps node 0 from choosing a checkpoint."""
    bad, away = isinstance(error, BadCheckpoints), isinstance(error, StorageAway)
    return Agreement("", error=str(error)[:MAX_TEXT], bad=bad, away=away)


def read_offers(text: str) -> Offers:
    """Parse the message of a node to node 0. Raises RecordError."""
    return records.read(Offers, text, "what a node has in its local_dir", SCHEMA)


def read_agreement(text: str) -> Agreement:
    """Parse the message of node 0.

    Raises:
        BadCheckpoints: node 0 found that no checkpoint may be used.
        StorageAway: the storage does not answer node 0.
        UsageError: node 0 failed in another way, or this is not a message from node 0.
    """
    try:
        found = records.read(Agreement, text, "the message of group rank 0 about the checkpoint to resume from", SCHEMA)
    except records.RecordError as error:
        raise UsageError(printable(str(error))) from error
    if found.error:
        kind = BadCheckpoints if found.bad else StorageAway if found.away else UsageError
        raise kind(f"group rank 0 could not choose a checkpoint: {printable(found.error[:MAX_TEXT])}")
    if not (order_of(found.name) is not None if found.local or found.memory else _is_name(found.name)):
        raise UsageError(
            f"group rank 0 sent {printable(found.name[:200])!r} as the checkpoint to resume from, expected a name: check whether "
            "another program writes to the rendezvous store"
        )
    if found.peers is not None and not _is_sound(found.peers):
        raise UsageError(
            "group rank 0 sent numbers of nodes that do not exist: check whether another program writes to the store"
        )
    return found


def _is_sound(peers: PeerExchange) -> bool:
    """Return whether all nodes that it names exist."""
    count = len(peers.addresses)
    named = (*peers.keepers, *(node for move in peers.moves for node in (move.source, move.target)))
    return len(peers.keepers) == count and all(node < count for node in named)


def _is_name(name: str) -> bool:
    """Return whether this is the name of an entry directly in a directory, or "" for nothing."""
    return len(name) <= MAX_NAME and name not in (".", "..") and "/" not in name and "\0" not in name


@dataclass(frozen=True)
class MemoryChoice:
    """The newest whole copy.

    Attributes:
        offer: None: there is none.
        lost: the newer ones, which cannot be loaded, with the reason for each; newest first.
        moves: the parts that nodes lack of their own ranks, if as many ranks on as many nodes have made the copy.
    """

    offer: Offer | None
    lost: tuple[tuple[str, str], ...] = ()
    moves: tuple[Move, ...] = ()


def newest_whole(nodes: Sequence[Offers], refused: Collection[str] = ()) -> MemoryChoice:
    """Choose among the copies in memory of these nodes, which are in the order of their ranks. refused: names not to use."""
    without = next((number for number, node in enumerate(nodes) if not node.has_memory), None)
    lost: list[tuple[str, str]] = []
    copies = missing_ranks(node.memory for node in nodes)
    for copy in sorted(copies, key=lambda each: (order_or_oldest(each.name), each.digest), reverse=True):
        if copy.name in refused:
            continue
        if without is not None:
            lost.append((copy.name, f"node {without} has no memory for copies: {NEEDED}"))
        elif copies[copy]:
            lost.append((copy.name, f"no node has the part of rank {copies[copy][0]}"))
        else:
            return MemoryChoice(copy, tuple(lost), _moves(nodes, copy))
    return MemoryChoice(None, tuple(lost))


def needs_no_storage(copy: Offer | None, local: Offer | None, nodes: Sequence[Offers]) -> bool:
    """Return whether a whole copy is at least as new as any checkpoint that the nodes know of.

    If so, a round resumes from it although the storage of the checkpoints does not answer. Else the storage is waited for: to
    resume from an older copy would supersede what was saved later.

    A round resumes from the newest of all tiers. So only what its workers have saved can be newer than that, and their agents see
    each commit. Steps are enough to compare: within a round they only grow, and workers that load remove the copies of other
    groups. A node that was not in the last round may still have those. What a script saves and does not report
    (`elastic_ext.report_saved`), and what only nodes that are lost have seen, no node knows of.

    Args:
        copy: the newest whole copy; None: there is none.
        local: the newest checkpoint in the nodes' local directories.
    """
    known = [node.saved for node in nodes if node.saved is not None]
    if (
        copy is None
        or len(known) < len(nodes)
        or (local is not None and order_or_oldest(local.name) > order_or_oldest(copy.name))
    ):
        return False
    last = max(saved.round for saved in known)
    held_by = {saved.round for saved, node in zip(known, nodes, strict=True) if node.memory}
    return held_by == {last} and copy.step >= max(saved.step for saved in known if saved.round == last)


def _moves(nodes: Sequence[Offers], copy: Offer) -> tuple[Move, ...]:
    """Return what nodes must be sent of a whole copy so that each has the parts of its ranks; nothing if others have made it."""
    workers = [node.workers for node in nodes]
    if (copy.world, copy.nodes) != (sum(workers), len(workers)):
        return ()
    held = [{rank for offer in node.memory if replace(offer, ranks=()) == copy for rank in offer.ranks} for node in nodes]
    lacking = [(rank, node) for node in range(len(nodes)) for rank in ranks_of(workers, node) if rank not in held[node]]
    return tuple(Move(rank, next(other for other, ranks in enumerate(held) if rank in ranks), node) for rank, node in lacking)


def keepers(domains: Sequence[str]) -> tuple[int, ...]:
    """Return, for each node, the node that keeps its parts; nothing for less than two nodes.

    Each node keeps the parts of exactly one other. In the order of their domains, it is the node half a circle on: that is in
    another domain wherever such an assignment exists, and in as many cases as possible if one domain has more than half the
    nodes.

    domains: each node's failure domain (the setting `topology`); "": not known, taken for one of its own.
    """
    count = len(domains)
    if count < 2:
        return ()
    order = sorted(range(count), key=lambda node: (domains[node], node))
    after = {node: order[(place + count // 2) % count] for place, node in enumerate(order)}
    return tuple(after[node] for node in range(count))


@dataclass(frozen=True)
class PeerPlan:
    """One node's exchange with others.

    Attributes:
        key: of the round; see `Peers`.
        keeper: address of the agent that keeps this node's parts; see `Offers.peer`.
        digest: of the manifest of the copy that the round resumes from; "" if that is not in memory.
        fetch: (rank, address) of the parts of it that this node must get first.
    """

    key: str
    keeper: str
    digest: str = ""
    fetch: tuple[tuple[int, str], ...] = ()


def arrange(nodes: Sequence[Offers], resumed: MemoryChoice | None) -> PeerExchange | None:
    """Return what node 0 publishes to all; None if not all of them can be sent parts. resumed: what the round resumes from."""
    if len(nodes) < 2 or not all(each.peer for each in nodes):
        return None
    offer = resumed.offer if resumed is not None else None
    return PeerExchange(
        key=secrets.token_hex(32),
        addresses=tuple(each.peer for each in nodes),
        keepers=keepers([each.domain for each in nodes]),
        digest=offer.digest if offer is not None else "",
        moves=resumed.moves if resumed is not None else (),
    )


def plan_of(peers: PeerExchange | None, node: int) -> PeerPlan | None:
    """Return one node's part of it; None if nothing is sent."""
    if peers is None or node >= len(peers.addresses):
        return None
    fetch = tuple((move.rank, peers.addresses[move.source]) for move in peers.moves if move.target == node)
    return PeerPlan(peers.key, peers.addresses[peers.keepers[node]], peers.digest, fetch)
