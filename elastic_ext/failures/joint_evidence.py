"""Evidence that only the reports of several nodes give together. Pure functions, standard library only.

Which two nodes cannot reach each other: only the node that sends learns that no answer comes, so a report of either is enough.
It names an address; whose address that is, the other node's own report says. An address of no node of the job (an object store,
say) makes no pair.

Whether ranks that fail or hang wait for one that has ended with 0: each agent sees the ends of its own workers only.

Whether replicas of the training state are still equal: every `integrity_every` optimizer steps each worker hashes what other
ranks hold, too (features/integrity/worker.py). Each node reports the hashes of its workers. Only those of one set of replicas
after the same step are compared. A set belongs to one optimizer, and its steps are those of this optimizer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.base import printable, records
from elastic_ext.base.records import Count, Name, Rank, Seconds

NO_RANK = -1
# What NCCL says of a peer that no longer acknowledges, over InfiniBand or RoCE (12: IBV_WC_RETRY_EXC_ERR); after a first error it
# reports others, with other numbers. The address is that of the peer's socket, with its port.
_NO_ANSWER = re.compile(
    r"completion from peer \[?([\w.:-]{1,80})(?:%\w{1,16})?\]?<\d{1,5}> with (?:status=|error )(?:\w{1,40}\()?12\b"
)
MAX_PEERS = 8
MAX_AHEAD = 100  # steps; see `awaited`
LONGEST_WAIT_S = 3600.0  # in a collective: torch's own limits are 10 minutes with NCCL and 30 with gloo


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


def find_cuts(reaches: Mapping[str, Reach]) -> list[Cut]:
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


def choose_cut(
    found: Collection[Cut], order: Mapping[str, int], hosts: Mapping[str, str], earlier: Collection[Sequence[str]] = ()
) -> tuple[Cut, str]:
    """Return the cut that stands for all of them, and which of its two nodes the job can do without.

    That is the node with the most cuts, now and earlier: its own connection to the network is the likely cause. Among equals, it
    is the one with the higher rank: rank 0 serves the store of the round.

    Args:
        found: at least one.
        order: the rank of each node (or of one of its workers), by node id.
        hosts: the name of each node's host, by node id.
        earlier: the names of each two hosts that could not reach each other before.
    """
    count = Counter(hosts[node] for cut in found for node in cut.pair) + Counter(host for pair in earlier for host in pair)

    def key(node: str) -> tuple[int, int]:
        return count[hosts[node]], order[node]

    cut = max(found, key=lambda one: sorted(map(key, one.pair), reverse=True))
    return cut, max(cut.pair, key=key)


@dataclass(frozen=True)
class Ended:
    """A worker whose script had ended with 0 when the round ended."""

    rank: Rank
    step: Count | None = None  # optimizer steps since it started; None if unknown
    ago_s: Seconds = 0.0  # how long before the end of the round


def awaited(ended: Sequence[Ended], step: int | None) -> list[Ended]:
    """Return for which of them a rank waits that fails, or hangs, at this step: the first to end. step: None if unknown.

    A rank that has gone on without one does not wait for it; a GPU's queue lets it go on for some steps. Where steps are not
    counted, time decides: no rank waits for one that was not needed, and left hours ago.
    """
    near = [each for each in ended if _may_be_awaited(each, step)]
    first = min((each.step or 0 for each in near), default=0)
    return [each for each in near if (each.step or 0) == first]


def _may_be_awaited(ended: Ended, step: int | None) -> bool:
    if step is None or ended.step is None or step == ended.step == 0:
        return ended.ago_s <= LONGEST_WAIT_S
    return step - ended.step <= min(ended.step, MAX_AHEAD)


@dataclass(frozen=True)
class Hashed:
    """What ranks of one node have hashed of one set of replicas, with the same result."""

    of: Name  # name of the set, equal on all ranks that hold it
    replicas: Count  # number of ranks that hold it, on all nodes
    step: Count  # steps of the set's optimizer since the workers were started
    value: Name  # the hash
    ranks: tuple[Rank, ...] = ()  # of this node
    # steps of the optimizer that has made the fewest by then, which a checkpoint's step counts, if any; None: `step`
    counted: Count | None = None


SCHEMA = 1


@dataclass(frozen=True)
class WorkerHashes:
    """What one worker has written."""

    hashed: tuple[Hashed, ...] = ()  # without its rank
    off: str = ""  # why it hashes nothing any more in this round; ""
    note: str = ""  # what is not compared, or not as one may expect, and why; ""

    @property
    def uncompared(self) -> str:
        """Why nothing of this worker is compared; "" if something is, or will be."""
        return self.off or ("" if self.hashed else self.note)


def decode_hashes(data: bytes, what: str) -> WorkerHashes:
    """Read what a worker has written. what: its file, for error messages. Raises RecordError."""
    return records.read(WorkerHashes, data, what, SCHEMA)


@dataclass(frozen=True)
class Difference:
    """Replicas that were equal and are not any more, or never were."""

    step: int  # the first step after which they are known to differ, counted from the start of the workers
    agreed: int | None  # the last step before it after which all replicas were equal; None: there is none in this round
    counted: int  # the same, as checkpoints count steps; see `Hashed`
    odd: tuple[int, ...]  # ranks whose hash is not that of the majority; all ranks without a majority
    majority: int  # number of ranks whose hashes are equal; 0: they are not more than half

    @property
    def text(self) -> str:
        """One line, for people: what has happened, or the warning about replicas that were not equal in this round."""
        if self.agreed is None:
            return NEVER_EQUAL.format(ranks=printable.ranks_in_words(self.odd), step=self.step)
        if not self.majority:
            who = f"the replicas of {printable.ranks_in_words(self.odd)} differ"
        else:
            who = f"the replica of {printable.ranks_in_words(self.odd)} differs from {self.majority} others, which are equal,"
        return f"{who} after step {self.step} of this round; all were equal after step {self.agreed}"


NEVER_EQUAL = (
    "integrity_every: the replicas of {ranks} differ in the first comparison of this round, after step {step}: not the hardware "
    "is to blame but the script (seeds, a checkpoint that not all ranks load, an optimizer that is not replicated, unequal "
    "devices); they are not compared in this round"
)


def difference(hashed: Iterable[Hashed], over: bool = False) -> Difference | None:
    """Return the first difference; None if no replicas are known to differ.

    One set that was equal before counts more than one that never was.

    over: the round is over, so nothing is waited for; else all replicas of a set must have been hashed after a step.
    """
    sets: defaultdict[tuple[str, int], defaultdict[int, list[Hashed]]] = defaultdict(lambda: defaultdict(list))
    for each in hashed:
        sets[each.of, each.replicas][each.step].append(each)
    found = [one for (_, replicas), steps in sets.items() if (one := _in_set(replicas, steps, over)) is not None]
    return min(found, key=lambda one: (one.agreed is None, one.counted, one.step), default=None)


def _in_set(replicas: int, steps: Mapping[int, Sequence[Hashed]], over: bool) -> Difference | None:
    agreed, counted = None, 0
    for step in sorted(steps):
        ranks: defaultdict[str, set[int]] = defaultdict(set)
        for each in steps[step]:
            ranks[each.value].update(each.ranks)
        known = sum(map(len, ranks.values()))
        if len(ranks) == 1 and known >= replicas:
            agreed, counted = step, min(each.step if each.counted is None else each.counted for each in steps[step])
        elif len(ranks) > 1 and (over or known >= replicas):
            largest = max(ranks.values(), key=len)
            majority = len(largest) if 2 * len(largest) > known else 0
            odd = {rank for each in ranks.values() if not majority or each is not largest for rank in each}
            return Difference(step, agreed, counted, tuple(sorted(odd)), majority)
    return None
