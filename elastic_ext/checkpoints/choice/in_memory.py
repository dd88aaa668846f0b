"""Choose the newest copy in memory that a round can load. Pure.

A copy is loaded where it is: each node needs the parts of the ranks that it will run, and the job the world size of the copy. So
another world size, other nodes, or ranks in another order mean a lower tier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.directory.tiers import Offer, node_of, ranks_of
from elastic_ext.checkpoints.formats.manifest import order_or_oldest


@dataclass(frozen=True)
class NodeMemory:
    """What one node of the round has in memory. workers: how many ranks it will run."""

    workers: int
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class MemoryChoice:
    """The newest whole copy, or None. lost: the newer ones, which cannot be loaded, with the reason for each; newest first."""

    offer: Offer | None
    lost: tuple[tuple[str, str], ...] = ()


def newest_whole(nodes: Sequence[NodeMemory], refused: Collection[str] = ()) -> MemoryChoice:
    """Choose among the copies of these nodes, which are in the order of their ranks. refused: names that must not be used."""
    held = [{replace(offer, ranks=()): frozenset(offer.ranks) for offer in node.offers} for node in nodes]
    copies = {copy for here in held for copy in here if copy.name not in refused}
    workers = tuple(node.workers for node in nodes)
    lost: list[tuple[str, str]] = []
    for copy in sorted(copies, key=lambda each: (order_or_oldest(each.name), each.digest), reverse=True):
        fault = _fault(copy, workers, [here.get(copy, frozenset()) for here in held])
        if not fault:
            return MemoryChoice(copy, tuple(lost))
        lost.append((copy.name, fault))
    return MemoryChoice(None, tuple(lost))


def _fault(copy: Offer, workers: tuple[int, ...], held: Sequence[Collection[int]]) -> str:
    """Return why these nodes cannot load a copy, or "". held: the ranks whose parts each node has."""
    world = sum(workers)
    if copy.world != world:
        return f"it was made by {copy.world} ranks, and the round has {world}"
    if copy.nodes != len(workers):
        return f"it was made on {copy.nodes} nodes, and the round has {len(workers)}"
    missing = [rank for node in range(len(workers)) for rank in ranks_of(workers, node) if rank not in held[node]]
    if missing:
        return f"node {node_of(workers, missing[0])} does not have the part of rank {missing[0]}"
    return ""
