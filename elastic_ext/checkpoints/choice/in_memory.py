"""Choose the newest copy in memory that a round can load. Pure.

A copy is loaded from memory: each node needs the parts of the ranks that it will run, or another node has them and sends them
first. The job needs the world size of the copy, and the number of nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.records import Count
from elastic_ext.checkpoints.directory.tiers import Offer, ranks_of
from elastic_ext.checkpoints.formats.manifest import order_or_oldest


@dataclass(frozen=True)
class NodeMemory:
    """What one node of the round has in memory. workers: how many ranks it will run."""

    workers: int
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Move:
    """Rank `rank`'s part must go from node `source` to node `target`."""

    rank: Count
    source: Count
    target: Count


@dataclass(frozen=True)
class MemoryChoice:
    """The newest whole copy.

    Attributes:
        offer: None: there is none.
        lost: the newer ones, which cannot be loaded, with the reason for each; newest first.
        moves: the parts that must be sent to another node before.
    """

    offer: Offer | None
    lost: tuple[tuple[str, str], ...] = ()
    moves: tuple[Move, ...] = ()


def newest_whole(nodes: Sequence[NodeMemory], refused: Collection[str] = (), may_move: bool = False) -> MemoryChoice:
    """Choose among the copies of these nodes, which are in the order of their ranks.

    refused: names that must not be used. may_move: the nodes can send each other parts.
    """
    held = [{replace(offer, ranks=()): frozenset(offer.ranks) for offer in node.offers} for node in nodes]
    copies = {copy for here in held for copy in here if copy.name not in refused}
    workers = tuple(node.workers for node in nodes)
    lost: list[tuple[str, str]] = []
    for copy in sorted(copies, key=lambda each: (order_or_oldest(each.name), each.digest), reverse=True):
        holds = [here.get(copy, frozenset()) for here in held]
        found = _misfit(copy, workers) or _moves(workers, holds, may_move)
        if not isinstance(found, str):
            return MemoryChoice(copy, tuple(lost), found)
        lost.append((copy.name, found))
    return MemoryChoice(None, tuple(lost))


def _misfit(copy: Offer, workers: tuple[int, ...]) -> str:
    """Return why a copy does not fit these nodes, or ""."""
    world = sum(workers)
    if copy.world != world:
        return f"it was made by {copy.world} ranks, and the round has {world}"
    if copy.nodes != len(workers):
        return f"it was made on {copy.nodes} nodes, and the round has {len(workers)}"
    return ""


def _moves(workers: tuple[int, ...], held: Sequence[Collection[int]], may_move: bool) -> tuple[Move, ...] | str:
    """Return what nodes must be sent so that each has the parts of its ranks, or why they cannot.

    held: the ranks whose parts each node has.
    """
    moves: list[Move] = []
    for node in range(len(workers)):
        for rank in ranks_of(workers, node):
            if rank in held[node]:
                continue
            sources = [other for other, ranks in enumerate(held) if rank in ranks]
            if not sources:
                return f"no node has the part of rank {rank}"
            if not may_move:
                return f"node {node} does not have the part of rank {rank}"
            moves.append(Move(rank, sources[0], node))
    return tuple(moves)
