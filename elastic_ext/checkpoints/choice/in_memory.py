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

NEEDED = "each node needs a tmpfs at /dev/shm, and the same memory_every and memory_limit"


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint that a node knows of.

    Attributes:
        round: the last round of the node; 0: it has been in none.
        step: the greatest step that this round resumed from or that its workers have seen committed; 0: none.
    """

    round: Count = 0
    step: int = 0


NONE_SAVED = Saved()


@dataclass(frozen=True)
class NodeMemory:
    """What one node of the round has in memory.

    Attributes:
        workers: how many ranks it will run.
        offers: parts of copies.
        usable: it has memory for copies, and so its workers can load one.
        saved: None: it cannot know.
    """

    workers: int
    offers: tuple[Offer, ...] = ()
    usable: bool = True
    saved: Saved | None = None


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
    without = next((number for number, node in enumerate(nodes) if not node.usable), None)
    lost: list[tuple[str, str]] = []
    for copy in sorted(copies, key=lambda each: (order_or_oldest(each.name), each.digest), reverse=True):
        holds = [here.get(copy, frozenset()) for here in held]
        if without is not None:
            lost.append((copy.name, f"node {without} has no memory for copies: {NEEDED}"))
        elif missing := set(range(copy.world)).difference(*holds):
            lost.append((copy.name, f"no node has the part of rank {min(missing)}"))
        else:
            made_here = (copy.world, copy.nodes) == (sum(workers), len(workers))
            return MemoryChoice(copy, tuple(lost), _moves(workers, holds) if made_here else ())
    return MemoryChoice(None, tuple(lost))


def needs_no_storage(copy: Offer | None, local: Offer | None, nodes: Sequence[NodeMemory]) -> bool:
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
    held_by = {saved.round for saved, node in zip(known, nodes, strict=True) if node.offers}
    return held_by == {last} and copy.step >= max(saved.step for saved in known if saved.round == last)


def _moves(workers: tuple[int, ...], held: Sequence[Collection[int]]) -> tuple[Move, ...]:
    """Return what nodes must be sent so that each has the parts of its ranks. Each part is on some node.

    held: the ranks whose parts each node has.
    """
    lacking = [(rank, node) for node in range(len(workers)) for rank in ranks_of(workers, node) if rank not in held[node]]
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
