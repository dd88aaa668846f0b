"""What the other nodes of a round report to the agent of group rank 0, and how that one asks them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ext.agent.companion import RoundPlace
from elastic_ext.base import records, round_store
from elastic_ext.checkpoints.record.journal import JournalPart, SavePath
from elastic_ext.checkpoints.record.parts import LOCAL, KindFiles, RemovedPart
from elastic_ext.features.record.orders import Orders, PartList

logger = logging.getLogger(__name__)

SCHEMA = 1
SHARED = 0  # the number of `checkpoint_dir` in the journals, as in the workers' messages; that of `local_dir` is LOCAL


@dataclass(frozen=True)
class RankSteps:
    rank: records.Count
    steps: records.Count


@dataclass(frozen=True)
class SavePost:
    """What an agent reports to that of group rank 0.

    node: its group rank. answers: the number of the last question. counts: steps of its ranks, read before the journals were.
    broken: those whose journal is incomplete. open: in the first answer to that question, entries of which a file is open for
    writing here; open_apart: the same in its own `local_dir`. over: its workers have ended, and this is the last one of its own
    accord. before: what it knows of its `local_dir` from earlier rounds. lists: what it was asked to list. removed: of
    which saves its workers have removed its part.
    """

    node: records.Count
    answers: records.Count = 0
    counts: tuple[RankSteps, ...] = ()
    broken: tuple[records.Count, ...] = ()
    parts: tuple[JournalPart, ...] = ()
    open: tuple[str, ...] = ()
    over: bool = False
    open_apart: tuple[str, ...] = ()
    before: tuple[KindFiles, ...] = ()
    lists: tuple[PartList, ...] = ()
    removed: tuple[RemovedPart, ...] = ()

    @property
    def open_entries(self) -> frozenset[SavePath]:
        """The entries with open files, by the numbers of the round's proof."""
        apart = (SavePath(LOCAL + self.node, name) for name in self.open_apart)
        return frozenset((*(SavePath(SHARED, name) for name in self.open), *apart))


class PostsOfNodes:
    """What the other nodes of a round post, read on the node of rank 0."""

    def __init__(self, place: RoundPlace) -> None:
        self._others = range(1, place.nodes)
        self._store = round_store.connect(*place.store_at) if self._others else None
        self._read, self.asked, self._asked_at = 0, 0, -math.inf
        self._reported = 0  # the last question of which all know the orders
        self._answers: dict[int, int] = {}  # by node: the last question that it has answered
        self._over: set[int] = set()
        self.open: dict[int, frozenset[SavePath]] = {}  # by node, at its last answer: entries of which a file is open for writing
        self.lost = ""  # why a post could not be read: then something is missing, of whichever node

    @property
    def open_now(self) -> frozenset[SavePath]:
        return frozenset().union(*self.open.values())

    def ask(self, now: float, after_s: float = 0.0, orders: Orders | None = None) -> None:
        """Ask all nodes to read their journals again, unless they were asked less than `after_s` seconds ago.

        orders: what else they are to do; None: they do not save apart.
        """
        if now - self._asked_at < after_s:
            return
        self.asked, self._asked_at = self.asked + 1, now
        if self._store is None:
            return
        if orders is not None:
            self._store.set(round_store.saves_orders(self.asked), self._encoded(orders))
            while self._reported < self.answered_by_all:  # all have read those
                self._reported += 1
                self._store.delete_key(round_store.saves_orders(self._reported))
        self._store.add(round_store.SAVES_ASKED, 1)

    def _encoded(self, orders: Orders) -> str:
        text = records.encode(orders, SCHEMA)
        if len(text) <= records.MAX_BYTES:
            return text
        logger.warning(
            "saves with this many files cannot be recorded on several nodes: what they are told of them has %s bytes, %s at most",
            len(text),
            records.MAX_BYTES,
        )
        return records.encode(Orders(orders.attempt, end=orders.end), SCHEMA)

    @property
    def answered(self) -> int:
        """The last question that all nodes have answered, or have no more to say to."""
        return min((self._answers.get(each, 0) for each in self._others if each not in self._over), default=self.asked)

    @property
    def answered_by_all(self) -> int:
        """The last question that all nodes have answered, also those whose workers have ended."""
        return min((self._answers.get(each, 0) for each in self._others), default=self.asked)

    @property
    def missing(self) -> bool:
        """Whether a node may still report something."""
        return len(self._over) < len(self._others)

    def new(self) -> list[SavePost]:
        """Return what was posted since. What cannot be read is lost."""
        found: list[SavePost] = []
        if self._store is None:
            return found
        for number in range(self._read + 1, self._store.add(round_store.SAVES_POSTED, 0) + 1):
            key = round_store.saves_post(number)
            if not self._store.check([key]):
                break  # counted, but not there yet
            self._read = number
            data = self._store.get(key)
            self._store.delete_key(key)
            try:
                post = records.read(SavePost, data, key, SCHEMA)
            except records.RecordError as error:
                self.lost = str(error)
                continue
            if post.node not in self._others:
                self.lost = f"{key} is of node {post.node}, which is no other one of the round"
                continue
            if post.answers > self._answers.get(post.node, 0):
                self._answers[post.node] = post.answers
                self.open[post.node] = post.open_entries
            if post.over:
                self._over.add(post.node)
            found.append(post)
        return found


def read_orders(store: round_store.Store, questions: Iterable[int]) -> list[Orders]:
    """Return the orders that go with these questions. Raises RecordError, and what the store raises."""
    keys = [round_store.saves_orders(each) for each in questions]
    return [records.read(Orders, store.get(key), key, SCHEMA) for key in keys]
