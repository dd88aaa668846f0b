"""Choose the newest copy in memory that a round can load. Pure.

A copy is whole if each part is on some node. If as many ranks on as many nodes have made it, each node needs the parts of its
ranks, and the agents of other nodes send it what it lacks. Otherwise the workers send each other what they need.
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
        moves: the parts that nodes lack of their own ranks, if as many ranks on as many nodes have made the copy.
    """

    offer: Offer | None
    lost: tuple[tuple[str, str], ...] = ()
    moves: tuple[Move, ...] = ()


def newest_whole(nodes: Sequence[NodeMemory], refused: Collection[str] = ()) -> MemoryChoice:
    """Choose among the copies of these nodes, which are in the order of their ranks. refused: names that must not be used."""
    held = [{replace(offer, ranks=()): frozenset(offer.ranks) for offer in node.offers} for node in nodes]
    copies = {copy for here in held for copy in here if copy.name not in refused}
    workers = tuple(node.workers for node in nodes)
    lost: list[tuple[str, str]] = []
    for copy in sorted(copies, key=lambda each: (order_or_oldest(each.name), each.digest), reverse=True):
        holds = [here.get(copy, frozenset()) for here in held]
        if missing := set(range(copy.world)).difference(*holds):
            lost.append((copy.name, f"no node has the part of rank {min(missing)}"))
        else:
            made_here = (copy.world, copy.nodes) == (sum(workers), len(workers))
            return MemoryChoice(copy, tuple(lost), _moves(workers, holds) if made_here else ())
    return MemoryChoice(None, tuple(lost))


def _moves(workers: tuple[int, ...], held: Sequence[Collection[int]]) -> tuple[Move, ...]:
    """Return what nodes must be sent so that each has the parts of its ranks. Each part is on some node.

    held: the ranks whose parts each node has.
    """
    lacking = [(rank, node) for node in range(len(workers)) for rank in ranks_of(workers, node) if rank not in held[node]]
    return tuple(Move(rank, next(other for other, ranks in enumerate(held) if rank in ranks), node) for rank, node in lacking)
