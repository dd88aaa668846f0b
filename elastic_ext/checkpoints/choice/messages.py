"""The messages by which the nodes of a round agree on a checkpoint. `base.exchange.Exchange` carries them.

    every node -> node 0        Offers      the checkpoints in its local directory and its memory, newest first
    node 0 -> every other node  Agreement   the checkpoint that the round resumes from, or why node 0 has none

A message is one JSON object: `schema` (SCHEMA) and the fields of its class; an offer is the JSON object of a `tiers.Offer`. A
reader refuses any other schema and ignores unknown fields.

A message gives a checkpoint's name in a directory that each node knows from its own settings, never a path. So an intruder in the
exchange can make the nodes load another of the job's checkpoints, but never a file of the intruder's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from elastic_ext.base import records
from elastic_ext.base.errors import BadCheckpoints, StorageAway, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Count, Name, NameOrEmpty
from elastic_ext.checkpoints.choice.in_memory import Move, Saved
from elastic_ext.checkpoints.directory.tiers import Offer
from elastic_ext.checkpoints.formats.manifest import order_of

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

    usable: bool
    offers: tuple[Offer, ...] = ()
    memory: tuple[Offer, ...] = ()
    refused: tuple[Name, ...] = ()
    workers: Count = 0
    peer: NameOrEmpty = ""
    domain: str = ""
    has_memory: bool = False
    saved: Saved | None = None


@dataclass(frozen=True)
class Peers:
    """How the nodes of a round exchange parts of copies in memory.

    Attributes:
        key: by which their agents know each other; new in each round.
        addresses: of the agents; see `Offers.peer`.
        keepers: for each node, which one keeps its parts.
        digest: of the manifest of the copy that the round resumes from; "" if that is none in memory.
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
    peers: Peers | None = None
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


def _is_sound(peers: Peers) -> bool:
    """Return whether all nodes that it tells of exist."""
    count = len(peers.addresses)
    named = (*peers.keepers, *(node for move in peers.moves for node in (move.source, move.target)))
    return len(peers.keepers) == count and all(node < count for node in named)


def _is_name(name: str) -> bool:
    """Return whether this is the name of an entry directly in a directory, or "" for nothing."""
    return len(name) <= MAX_NAME and name not in (".", "..") and "/" not in name and "\0" not in name
