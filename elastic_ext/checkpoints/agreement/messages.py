"""What the nodes of a round say to each other about the checkpoint to resume from. Pure.

The messages between nodes, which `base.contracts.Exchange` carries:

    every node -> node 0        Offers      the checkpoints in its local directory and its memory, newest first
    node 0 -> every other node  Agreement   the checkpoint that the round resumes from, or why node 0 has none

A message is one JSON object: `schema` (SCHEMA) and the fields of its class; an offer is the JSON object of a `tiers.Offer`. A
reader refuses any other schema and ignores unknown fields.

A message gives a checkpoint's name in a directory that each node knows from its own settings, never a path. So an intruder in the
exchange can make the nodes load another of the job's checkpoints, but never a file of the intruder's. For files that nodes fetch
from each other that holds if the job has a secret: a server without it is refused (`sharing/part_server.py`).

A copy in memory is whole if each part is on some node. Its workers send each other the parts that they need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.base.contracts import SavePlace
from elastic_ext.base.errors import BadCheckpoints, StorageAway, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.checkpoints.directory.tiers import Offer, missing_ranks
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from elastic_ext.checkpoints.sharing.merging import SharedFile
from elastic_ext.checkpoints.sharing.part_requests import PartPlace

NEEDED = "each node needs a tmpfs at /dev/shm, and the same memory_every and memory_limit"


@dataclass(frozen=True)
class NewestSaved:
    """The newest checkpoint that a node knows of."""

    round: records.Count = 0  # the last round of the node; 0: it has been in none
    step: int = 0  # the greatest step that this round resumed from or that its workers have seen committed; 0: none


NONE_SAVED = NewestSaved()


class Tier(str, Enum):
    """Where a checkpoint is. Each node has a part of one in MEMORY or LOCAL."""

    MEMORY = "memory"
    LOCAL = "local_dir"
    SHARED = "checkpoint_dir"
    NAMED = "resume_from"  # in the directory that this setting names


SCHEMA = 2
NOWHERE_LOCAL = SavePlace()
MAX_TEXT = 2000  # characters of a reason or an error
MAX_OFFERS = 16  # per node, the newest
MAX_NAME = 1024  # characters of a checkpoint's name: the longest key in S3


@dataclass(frozen=True)
class Offers:
    """The checkpoints in one node's own tiers."""

    usable: bool = False  # the node has a local tier, and rounds may resume from it
    offers: tuple[Offer, ...] = ()  # in its local directory
    memory: tuple[Offer, ...] = ()  # copies in its memory
    refused: tuple[records.Name, ...] = ()  # names of copies in memory, on any node, that this node knows to be bad
    # The node has memory for copies, even if it holds none; without it, no round of it may resume from one.
    has_memory: bool = False
    saved: NewestSaved | None = None  # the newest checkpoint that the node knows of; None: it cannot know
    rounds: records.Count = 0  # the number of the last round in the record of saves in its local directory
    place: SavePlace = NOWHERE_LOCAL  # whether this node has room there for what a script saves
    server: PartPlace | None = None  # where other nodes can read its local directory; None: nowhere


@dataclass(frozen=True)
class RankFile:
    """The file that a rank wrote. name: in the nodes' local directories."""

    rank: records.Count
    name: records.Name


@dataclass(frozen=True)
class Agreement:
    """The checkpoint that a round resumes from."""

    name: str  # name of the checkpoint; "": begin from nothing
    step: int | None = None  # None if neither its content nor its name gives one
    reason: str = ""  # why this one, for people
    tier: Tier = Tier.SHARED  # where it is
    # There is no name, but some entries may be checkpoints: a script that knows them may resume from one.
    passed_over: bool = False
    error: str = ""  # why node 0 has no answer, for people; "" if it has one
    bad: bool = False  # the error is that checkpoints exist, but none may be used
    away: bool = False  # the error is that the storage does not answer
    save_number: int | None = None  # see `decisions.Resume`
    rounds: records.Count = 0  # the number of the last round in any record of saves
    place: SavePlace = NOWHERE_LOCAL  # where all nodes save in this round
    # Of what a script has saved in the nodes' local directories: which node has each file, and where each node can be asked.
    files: tuple[SharedFile, ...] = ()
    servers: tuple[PartPlace | None, ...] = ()
    number: Annotated[int, records.Within(0, (1 << 60) - 1)] = 0  # of what it holds, see `AllNodes.number_of`
    rank_files: tuple[RankFile, ...] = ()  # of these, where each rank wrote one


def encode(message: Offers | Agreement) -> str:
    return records.encode(message, SCHEMA)


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
    name = found.name
    is_ours = found.tier == Tier.MEMORY or (found.tier == Tier.LOCAL and not found.files)
    if not (order_of(name) is not None if is_ours else _is_name(name)):
        raise UsageError(
            f"group rank 0 sent {printable(name[:200])!r} as the checkpoint to resume from, expected a name: check whether "
            "another program writes to the rendezvous store"
        )
    return found


def _is_name(name: str) -> bool:
    """Return whether this is the name of an entry directly in a directory, or "" for nothing."""
    return len(name) <= MAX_NAME and name not in (".", "..") and "/" not in name and "\0" not in name


@dataclass(frozen=True)
class MemoryChoice:
    offer: Offer | None  # None: no copy is whole
    lost: tuple[tuple[str, str], ...] = ()  # the newer ones, which cannot be loaded, with the reason for each; newest first


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
            return MemoryChoice(copy, tuple(lost))
    return MemoryChoice(None, tuple(lost))


def needs_no_storage(copy: Offer | None, local: Offer | None, nodes: Sequence[Offers]) -> bool:
    """Return whether a whole copy is at least as new as any checkpoint that the nodes know of.

    If so, a round resumes from it although the storage of the checkpoints does not answer. Else the storage is waited for: to
    resume from an older copy would supersede what was saved later.

    A round resumes from the newest of all tiers. So only what its workers have saved can be newer than that, and their agents see
    each commit. Steps are enough to compare: within a round they only grow, and workers that load remove the copies of other
    groups. A node that was not in the last round may still have those. What a script saves and does not report
    (`elastic_ext.report_saved`), and what only nodes that are lost have seen, no node knows of.

    copy: the newest whole copy; None: no copy is whole. local: the newest checkpoint in the nodes' local directories.
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
