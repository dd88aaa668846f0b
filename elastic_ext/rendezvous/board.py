"""The board of a round: what each node posts there for all, by topic, and what the leader rules from it. Pure, no clock.

A feature whose nodes share something has a `Topic`: a name, a dataclass for the values, and perhaps a rule.
Posts are part of a node's own record, so that they need no key, no watch and no lease of their own. Only the leader rules. It may
end the round, or give all nodes a value: that is part of the header (`Header.agreed`), which every node watches. On one machine
there is the same board, over one node.

Invariants:
    of a topic, the last value of a node counts, and only in the round in which it was posted; so does the value for all;
    a value that cannot be read is no post: the feature goes without it, and the node stays in the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from elastic_ext.base import records
from elastic_ext.base.records import RecordError
from elastic_ext.rendezvous.round_records import Agreed, EndKind, Post, Posts

SCHEMA = 1  # of the values

V = TypeVar("V")


@dataclass(frozen=True)
class RoundMembers:
    """The nodes of the running round, for rules, and what holds for all of them."""

    ids: tuple[str, ...]  # of those that are there, by rank
    done: frozenset[str] = frozenset()  # those whose workers have finished without a failure
    finished_at: float | None = None  # when the leader heard of the last of them, on its monotonic clock; None: of none yet
    agreed: Agreed = field(default_factory=Agreed)


@dataclass(frozen=True)
class Ruling:
    """What a rule has found. reason: one line, for people.

    end: the round ends, in this way. until: nothing ends before this time on the leader's clock; then the rule is asked again.
    agreed: all nodes get this (`Topic.for_all`). With none of these, the leader warns of the reason, once in a round.
    """

    reason: str
    end: EndKind | None = None
    until: float | None = None
    agreed: Post | None = None

    @property
    def decides(self) -> bool:
        """Whether it is about the end of the round."""
        return self.end is not None or self.until is not None

    @property
    def warns(self) -> bool:
        return not self.decides and self.agreed is None


@dataclass(frozen=True)
class Topic(Generic[V]):
    """What one feature posts.

    Args:
        name: unique among the topics.
        kind: a frozen dataclass; `base.records` writes and reads it.
        rule: for the leader; None: it rules nothing. Pure: from the values by node id (at least one), the members, and now.
        must_be_heard: a node whose post does not reach the others takes no further part in the round, after a while.
    """

    name: str
    kind: type[V]
    rule: Callable[[Mapping[str, V], RoundMembers, float], Ruling | None] | None = None
    must_be_heard: bool = False

    def of(self, posts: Posts, round_: int) -> V | None:
        """Return what a node has posted in this round; None: nothing that can be read."""
        return self._read(posts.posts) if posts.round == round_ else None

    def agreed(self, agreed: Agreed) -> V | None:
        """Return the value for all nodes; None: there is none that can be read."""
        return self._read(agreed.posts)

    def for_all(self, value: V) -> Post:
        """Return the value as one for all nodes: for a rule, and for `agree`."""
        return Post(self.name, records.encode(value, SCHEMA))

    def _read(self, posts: Sequence[Post]) -> V | None:
        found = next((post.value for post in posts if post.topic == self.name), None)
        kind: Any = self.kind
        return None if found is None else cast("V | None", _read(kind, found))


@functools.lru_cache(maxsize=256)  # who looks at a few nodes, looks often at the same posts
def _read(kind: type, value: str) -> object:
    try:
        return records.read(kind, value, "a post", SCHEMA)
    except RecordError:
        return None


def posted(posts: Posts, round_: int, topic: Topic[V], value: V | None) -> Posts:
    """Return the posts of a node with this value in place of the topic's last one. None: it is withdrawn."""
    others = tuple(post for post in posts.posts if post.topic != topic.name) if posts.round == round_ else ()
    own = (topic.for_all(value),) if value is not None else ()
    return Posts(round_, (*others, *own))


def agree(agreed: Agreed, *new: Post) -> Agreed:
    """Return what holds for all nodes with these values in place of the last ones of their topics; the same one: no change."""
    if all(post in agreed.posts for post in new):
        return agreed
    kept = {post.topic: post for post in (*agreed.posts, *new)}
    return Agreed(agreed.made + 1, tuple(kept.values()))


@dataclass
class _Asked:
    """The last answer of a rule, and to what."""

    values: Mapping[str, object] = field(default_factory=dict)
    members: RoundMembers | None = None
    ruling: Ruling | None = None

    def holds(self, values: Mapping[str, object], members: RoundMembers, now: float) -> bool:
        """Return whether the answer is the same now."""
        until = self.ruling.until if self.ruling is not None else None
        return self.members == members and self.values == values and (until is None or now < until)


Topics = Sequence[Topic[Any]]


class Rules:
    """What the leader rules. It reads each value once, and asks a rule again only if values, members, or the time make it due."""

    def __init__(self, topics: Topics) -> None:
        """topics: with a rule each; those that end the round first stand first."""
        self._topics = topics
        # Each node's posts, the round that they were read for, and their values by topic.
        self._read: dict[str, tuple[Posts, int, dict[str, object]]] = {}
        self._asked = {topic.name: _Asked() for topic in self._topics}

    def rulings(self, boards: Mapping[str, Posts], round_: int, members: RoundMembers, now: float) -> tuple[Ruling, ...]:
        """Return what the rules have found. boards: the posts of the members, by node id. now: monotonic."""
        self._read = {id_: self._values(id_, posts, round_) for id_, posts in boards.items() if posts.posts}
        found = (self._of(topic, members, now) for topic in self._topics)
        return tuple(each for each in found if each is not None)

    def _values(self, id_: str, posts: Posts, round_: int) -> tuple[Posts, int, dict[str, object]]:
        known = self._read.get(id_)
        if known is not None and known[0] is posts and known[1] == round_:
            return known
        read = {topic.name: topic.of(posts, round_) for topic in self._topics}
        return posts, round_, {name: value for name, value in read.items() if value is not None}

    def _of(self, topic: Topic[Any], members: RoundMembers, now: float) -> Ruling | None:
        values = {id_: read[topic.name] for id_, (_, _, read) in self._read.items() if topic.name in read}
        asked = self._asked[topic.name]
        if not asked.holds(values, members, now):
            assert topic.rule is not None, "a topic without a rule"
            self._asked[topic.name] = asked = _Asked(values, members, topic.rule(values, members, now) if values else None)
        return asked.ruling


def ending(rulings: Sequence[Ruling]) -> Ruling | None:
    """Return the ruling that counts: the first that ends the round, or holds up its end; None: it goes on."""
    return next((each for each in rulings if each.decides), None)
