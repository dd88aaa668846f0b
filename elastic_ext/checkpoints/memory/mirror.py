"""Each rank's part of a copy, on one other node as well: so that a lost node costs a step or two, too.

A rank's keeper is a rank of another node, in another failure domain where there is one. Once every rank has written its part,
each sends it to its keeper over the group of the copies, from buffer to buffer; the copy is committed after that. So a
committed copy is as a rule on two nodes. A keeper without memory for a part does not take it, and a part that takes too long to
send is given up, and none is sent for a while: the copy is then on its own node only, and the log says so once.

Every rank knows from the reports of all ranks which parts are sent. What could fail on one rank alone comes before its report,
so that no rank waits for another in vain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from elastic_ext.checkpoints.directory.own_files import StoredFile, checksum_of
from elastic_ext.checkpoints.directory.tiers import memory_file, node_of, ranks_of
from elastic_ext.checkpoints.directory.upkeep import TokenBucket
from elastic_ext.checkpoints.memory.pace import Timing
from elastic_ext.checkpoints.memory.part import Buffer, Buffers
from elastic_ext.checkpoints.ranks import LocalTier, Ranks, SaveFailure
from elastic_ext.training.progress import this_worker

logger = logging.getLogger(__name__)

PIECE = 4 << 20  # bytes that are sent at once; the rate is limited from one to the next
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # after a part that took too long nothing is sent, ever longer


@dataclass(frozen=True)
class RankReport:
    """What one rank reports to the others of its part."""

    name: str  # of the copy
    # Rank 0's, encoded, complete but for the files and nodes; of others b"". Bytes: what cannot be pickled would fail on rank 0
    # alone, and leave the others waiting.
    manifest: bytes
    timing: Timing  # for the next interval
    file: StoredFile | None = None  # its part; None if it has written none this time
    common: str = ""  # checksum of what it holds to be common to the ranks of its node, see `part.Planned`
    failure: SaveFailure | None = None  # why, if that is a failure
    accumulation: int = 0  # micro-steps after the step of the copy
    capacity: int = 0  # bytes of the buffers that this rank has or makes now; 0: unknown
    sends: bool = False  # whether it sends its part to another node, if that takes it
    # Bytes of the buffers that it has for the parts of other ranks, by rank.
    takes: Mapping[int, int] = field(default_factory=dict)


def keepers(domains: Sequence[str]) -> tuple[int, ...]:
    """Return, for each node, the node that keeps its parts; nothing for less than two nodes. Pure.

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


def keeping_ranks(nodes: Sequence[int], domains: Sequence[str]) -> tuple[int, ...]:
    """Return, for each rank, the rank that keeps its part: the ranks of a node share those of another. Pure.

    nodes: number of ranks on each node, in order. domains: see `keepers`.
    """
    found = []
    for node, keeper in enumerate(keepers(domains)):
        theirs = ranks_of(nodes, keeper)
        found += [theirs[number % len(theirs)] for number in range(nodes[node])]
    return tuple(found)


def sent_parts(reports: Sequence[RankReport], keeping: Sequence[int]) -> list[int]:
    """Return the ranks whose parts are sent to their keepers, the same on all ranks. Pure."""
    return [
        rank
        for rank, each in enumerate(reports)
        if each.sends and each.file is not None and reports[keeping[rank]].takes.get(rank) == each.file.size
    ]


class Mirror:
    """One rank's keeper, and what it keeps for others. All but the constructor runs in the thread of the copies."""

    def __init__(self, tier: LocalTier, keeping: Sequence[int], limit: int, rate: float, ranks: Ranks) -> None:
        """
        Args:
            keeping: see `keeping_ranks`.
            limit: bytes for what this rank keeps, if each rank of its node has as much.
            rate: bytes per second that this rank sends at most; 0: no limit.
        """
        self._tier, self._keeping, self._ranks = tier, keeping, ranks
        kept = [rank for rank, keeper in enumerate(keeping) if keeper == ranks.rank]
        mine = tier.nodes[tier.node]
        self._buffers = {
            rank: Buffers(tier.storage, rank, limit * mine // tier.nodes[node_of(tier.nodes, rank)]) for rank in kept
        }
        self._bucket = TokenBucket(rate)
        self._kept: set[int] = set()  # the ranks whose parts of the last copy are here
        self._paused_until = self._pause_s = 0.0
        self._alone = False  # what the log has said of this rank's own part
        self._no_room = ""  # ... and of those of others

    @property
    def sends(self) -> bool:
        """Whether this rank sends its next part."""
        return time.monotonic() >= self._paused_until

    def send_s(self, size: int) -> float:
        """Return what a part of this size takes to send at the rate that is set, in seconds; 0 without one."""
        return size / self._bucket.rate if self._bucket.rate > 0 else 0.0

    def keep(self, name: str) -> None:
        """Take the buffers as earlier workers have left them; the next ones are made by `make_room`. Raises OSError.

        name: of the copy that was loaded, if these ranks have made it; else "".
        """
        for rank, buffers in self._buffers.items():
            there = name and self._tier.storage.stat(f"{name}/{memory_file(rank)}") is not None
            buffers.keep(name if there else "")

    def ready(self) -> dict[int, int]:
        """Move the buffers that are free out of older copies; return the size of the next one, by rank. Raises OSError."""
        for buffers in self._buffers.values():
            buffers.rest()
        return {rank: buffers.spare_size for rank, buffers in self._buffers.items() if buffers.spare_size}

    def exchange(self, name: str, own: Buffer, reports: Sequence[RankReport], limit_s: float) -> None:
        """Send this rank's part of a copy, and receive those of others. Collective.

        limit_s: a part that takes longer is given up, and a pause follows.

        Raises RuntimeError if the ranks cannot communicate.
        """
        sent, rank = sent_parts(reports, self._keeping), self._ranks.rank
        coming = {each: buffers for each, buffers in self._buffers.items() if each in sent}
        # All receive before they send: ranks may send to each other in a circle.
        waits = [self._ranks.receive(piece, each) for each, to in coming.items() for piece in to.spare.tensor.split(PIECE)]
        try:
            if rank in sent:
                self._send(own.tensor, limit_s)
            with self._ranks.communicating():
                for wait in waits:
                    wait.wait()
        finally:
            waits.clear()  # they would hold the group, and the other ranks in it, after an error
        self._kept = {each for each, buffers in coming.items() if _is_kept(buffers, name, reports[each].file)}
        found = self._ranks.all_gather(self._kept)  # and so no manifest says that a part is there before it is
        self._note(rank in found[self._keeping[rank]], own.size)

    def _send(self, part: Tensor, limit_s: float) -> None:
        """Send a part. After the limit only one byte of each piece goes: gloo takes that for the piece, the checksum does not."""
        began, slow = time.monotonic(), False
        for piece in part.split(PIECE):
            pause = 0.0 if slow else self._bucket.take(piece.nbytes, time.monotonic())
            slow = slow or time.monotonic() + pause - began > limit_s
            if pause > 0 and not slow:
                time.sleep(pause)
            self._ranks.send(piece[:1] if slow else piece, self._keeping[self._ranks.rank])
        slow = slow or time.monotonic() - began > limit_s
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S) if slow else 0.0
        self._paused_until = time.monotonic() + self._pause_s

    def _note(self, kept: bool, size: int) -> None:
        """Report whether the keeper has the part, and log when that changes."""
        before, self._alone = self._alone, not kept
        this_worker().row.report_part_sent(size if kept else None)
        if self._alone and not before:
            logger.warning(
                "the copies in memory of rank %s are on this node only, as rank %s %s; if this node is lost, the job resumes "
                "from an older checkpoint",
                self._ranks.rank,
                self._keeping[self._ranks.rank],
                "gets them too slowly" if self._pause_s else "does not take them",
            )
        elif before and kept:
            logger.warning("rank %s takes the copies in memory again", self._keeping[self._ranks.rank])

    def committed(self, name: str) -> None:
        """Note that the copy of the last `exchange` is committed. What has not come of it stays free."""
        for rank, buffers in self._buffers.items():
            if rank in self._kept:
                buffers.committed(name)
            else:
                buffers.free()

    def make_room(self, reports: Sequence[RankReport]) -> None:
        """Make the buffers that are missing or of another size. A failure is logged once: those parts are not taken."""
        failure = ""
        for rank, buffers in self._buffers.items():
            capacity = reports[rank].capacity
            if capacity and buffers.spare_size != capacity:
                try:
                    buffers.allocate(capacity)
                except OSError as error:
                    failure = error.strerror or str(error)
        if failure and failure != self._no_room:
            logger.warning("rank %s has no memory for the copies of another node: %s", self._ranks.rank, failure)
        self._no_room = failure


def _is_kept(buffers: Buffers, name: str, file: StoredFile | None) -> bool:
    """Put a part that has come into its place, if it is as it was sent; return whether it is there."""
    if file is None or checksum_of(buffers.spare.bytes) != file.checksum:
        return False
    try:
        buffers.begin(name)
    except OSError as error:
        logger.warning("%s of %s cannot be kept for another node: %s", file.name, name, error)
        return False
    return True
