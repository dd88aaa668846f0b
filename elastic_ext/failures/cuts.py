"""Which two nodes of a job cannot reach each other, from what each reports of itself. Pure functions, standard library only.

Only the node that sends learns that no answer comes, so a report of either one is enough. It names an address; whose address that
is, the other node's own report says. An address of no node of the job (an object store, say) makes no pair.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.base.records import Name, Rank, Seconds

NO_RANK = -1
# What NCCL says of a peer that no longer acknowledges, over InfiniBand or RoCE (12: IBV_WC_RETRY_EXC_ERR); after a first error it
# reports others, with other numbers. The address is that of the peer's socket, with its port.
_NO_ANSWER = re.compile(
    r"completion from peer \[?([\w.:-]{1,80})(?:%\w{1,16})?\]?<\d{1,5}> with (?:status=|error )(?:\w{1,40}\()?12\b"
)
MAX_PEERS = 8


@dataclass(frozen=True)
class Silent:
    """A worker, by its rank, has had no answer from this address for `for_s` seconds; NO_RANK and 0 if not known."""

    rank: Rank
    address: Name
    for_s: Seconds


@dataclass(frozen=True)
class Reach:
    """A node's account of its connections."""

    addresses: tuple[Name, ...] = ()  # its own that its workers use
    silent: tuple[Silent, ...] = ()  # the other hosts' addresses that do not answer its workers


NOTHING_KNOWN = Reach()


def unanswered(texts: Sequence[str], rank: int) -> tuple[Silent, ...]:
    """Return the peers that did not acknowledge what a worker sent, by NCCL's words in its message or on its stderr."""
    found = dict.fromkeys(match[1] for text in texts for match in _NO_ANSWER.finditer(text))
    return tuple(Silent(rank, address, 0.0) for address in list(found)[:MAX_PEERS])


def union(one: Reach, other: Reach) -> Reach:
    """Return what a node has reported at two times. `one` counts where both name an address."""
    known = {each.address for each in one.silent}
    silent = (*one.silent, *(each for each in other.silent if each.address not in known))
    return Reach(tuple(dict.fromkeys((*one.addresses, *other.addresses))), silent)


@dataclass(frozen=True)
class Cut:
    """Two nodes that cannot reach each other."""

    node: str  # id of the node that gets no answer
    other: str  # id of the node that has this address
    silent: Silent  # from whom

    @property
    def pair(self) -> frozenset[str]:
        """The ids of both nodes."""
        return frozenset((self.node, self.other))


def cuts(reaches: Mapping[str, Reach]) -> list[Cut]:
    """Return one cut for each pair of nodes, the longer of two. reaches: by node id."""
    longest: dict[frozenset[str], Cut] = {}
    for cut in _claimed(reaches):
        known = longest.get(cut.pair)
        if known is None or known.silent.for_s < cut.silent.for_s:
            longest[cut.pair] = cut
    return list(longest.values())


def _claimed(reaches: Mapping[str, Reach]) -> Iterator[Cut]:
    owners: dict[str, list[str]] = {}
    for node, reach in reaches.items():
        for address in reach.addresses:
            owners.setdefault(address, []).append(node)
    for node, reach in reaches.items():
        for silent in reach.silent:
            # An address that several nodes have for themselves names none of them.
            if len(owner := owners.get(silent.address, [])) == 1 and owner != [node]:
                yield Cut(node, owner[0], silent)


def named(
    found: Collection[Cut], order: Mapping[str, int], hosts: Mapping[str, str], earlier: Collection[Sequence[str]] = ()
) -> tuple[Cut, str]:
    """Return the cut that stands for all of them, and which of its two nodes the job can do without.

    That is the node with the most cuts, now and earlier: its own connection to the network is the likely cause. Among equals, it
    is the one with the higher rank: rank 0 serves the store of the round.

    Args:
        found: at least one.
        order: the rank of each node (or of one of its workers), by node id.
        hosts: the name of each node's host, by node id.
        earlier: the names of each two hosts that could not reach each other before, and may still not.
    """
    count = Counter(hosts[node] for cut in found for node in cut.pair) + Counter(host for pair in earlier for host in pair)

    def key(node: str) -> tuple[int, int]:
        return count[hosts[node]], order[node]

    cut = max(found, key=lambda one: sorted(map(key, one.pair), reverse=True))
    return cut, max(cut.pair, key=key)
